"""What goes over rows of contiguous elements: reductions, softmax; and normalisation across channels."""

from __future__ import annotations

import itertools

from autoconv.cpu.codegen.ir import Function, Module, Value, f32
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.functions import FUNCTIONS, divide, exp, sqrt
from autoconv.cpu.operators import TASK_ELEMENTS

CHAINS = 4  # sums that do not wait for each other


def _each_row(m: Module, rows: int, length: int) -> tuple[Function, Value, Value, Value]:
    """A task that will go over some rows; it, operands a and out, and its number."""
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, _, out = operands(k, context, f32)[:3]
    together = max(1, TASK_ELEMENTS // length)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-rows // together))
    return k, x, out, index


def _folded(k: Function, x: Value, length: int, reduction: str) -> Value:
    """The sum, or the largest, of a row's elements."""
    full = k.module.lanes(f32)
    lanes = full if length >= full else 1
    join = FUNCTIONS["max" if reduction == "max" else "add"]
    start = float("-inf") if reduction == "max" else 0.0
    step = lanes * (CHAINS if length >= CHAINS * lanes else 1)
    totals = [k.var(k.const(k.zero(f32, lanes).type, start)) for _ in range(step // lanes)]
    whole = length // step * step
    with k.loop(0, whole, step) as i:
        for n, total in enumerate(totals):
            total.set(join(k, total.get(), k.load(x + i + n * lanes, lanes)))
    v = totals[0].get()
    for total in totals[1:]:
        v = join(k, v, total.get())
    while v.type.lanes > 2:
        half = v.type.lanes // 2
        v = join(k, k.shuffle(v, v, range(half)), k.shuffle(v, v, range(half, 2 * half)))
    last = k.var(join(k, k.extract(v, 0), k.extract(v, 1)) if v.type.lanes else v)
    if whole < length:
        with k.loop(whole, length) as i:
            last.set(join(k, last.get(), k.load(x + i)))
    return last.get()


def emit_reduction(instruction_set: str, reduction: str, rows: int, length: int) -> Module:
    """`run` that makes one element of every row of a: its mean, sum or largest."""
    m = Module(instruction_set)
    k, x, out, index = _each_row(m, rows, length)
    together = max(1, TASK_ELEMENTS // length)
    with k.loop(index * together, k.min((index + 1) * together, rows)) as row:
        total = _folded(k, x + row * length, length, reduction)
        k.store(total * (1 / length) if reduction == "mean" else total, out + row)
    return m


def emit_softmax(instruction_set: str, rows: int, length: int) -> Module:
    """`run` that stores `exp(x - largest) / sum` of every row."""
    m = Module(instruction_set)
    k, x, out, index = _each_row(m, rows, length)
    together = max(1, TASK_ELEMENTS // length)
    with k.loop(index * together, k.min((index + 1) * together, rows)) as row:
        source, target = x + row * length, out + row * length
        largest = _folded(k, source, length, "max")
        _stored(k, length, lambda i, n: exp(k, k.load(source + i, n) - k.splat(largest, n)), target)
        factor = divide(k, k.const(f32, 1.0), _folded(k, target, length, "sum"))
        _stored(k, length, lambda i, n: k.load(target + i, n) * k.splat(factor, n), target)
    return m


def _stored(k: Function, length: int, value: object, target: Value) -> None:
    lanes = k.module.lanes(f32)
    whole = length // lanes * lanes
    assert callable(value)
    if whole:
        with k.loop(0, whole, lanes) as i:
            k.store(value(i, lanes), target + i)
    if whole < length:
        with k.loop(whole, length) as i:
            k.store(value(i, 1), target + i)


def emit_lrn(
    instruction_set: str, images: int, channels: int, pixels: int, size: int, alpha: float, beta: float, bias: float
) -> Module:
    """`run` of local response normalisation, as `networks.operators.LRN` tells, with pixels as lanes."""
    m = Module(instruction_set)
    lanes = m.lanes(f32)
    before, after = (size - 1) // 2, size // 2
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, _, out = operands(k, context, f32)[:3]
    chunk = max(lanes, TASK_ELEMENTS // channels // lanes * lanes)
    chunks = -(-pixels // chunk)
    image, first = index // chunks, index % chunks * chunk
    last = k.min(first + chunk, pixels)

    def pixel(i: Value, count: int) -> None:
        source, target = x + image * (channels * pixels) + i, out + image * (channels * pixels) + i
        squares = [k.var(k.zero(f32, count)) for _ in range(size)]  # of the channels around one

        def squared(c: Value | int) -> Value:
            v = k.load(source + c * pixels, count)
            return v * v

        def channel(c: Value, enters: bool) -> None:
            for old, new in itertools.pairwise(squares):
                old.set(new.get())
            squares[-1].set(squared(c + after) if enters else k.zero(f32, count))
            total = squares[0].get()
            for square in squares[1:]:
                total = total + square.get()
            base = k.fma(total, k.const(total.type, alpha / size), k.const(total.type, bias))
            if beta == 0.75:
                root = sqrt(k, base)
                power = root * sqrt(k, root)
            else:
                power = FUNCTIONS["pow"](k, base, k.const(total.type, beta))
            k.store(divide(k, k.load(source + c * pixels, count), power), target + c * pixels)

        for n in range(min(after, channels)):
            squares[before + 1 + n].set(squared(n))
        whole_windows = max(0, channels - after)
        if whole_windows:
            with k.loop(0, whole_windows) as c:
                channel(c, enters=True)
        if whole_windows < channels:
            with k.loop(whole_windows, channels) as c:
                channel(c, enters=False)

    whole = (last - first) // lanes * lanes + first
    with k.loop(first, whole, lanes) as i:
        pixel(i, lanes)
    with k.loop(whole, last) as i:
        pixel(i, 1)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, images * chunks)
    return m
