"""What goes over rows of contiguous elements: reductions, softmax; and normalisation across channels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from autoconv.cpu.codegen.ir import Function, Module, Type, Value, f32, f64, vec
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.functions import FUNCTIONS, divide, exp, sqrt
from autoconv.cpu.operators import TASK_ELEMENTS
from autoconv.cpu.operators.elements import each_vector, joined, neutral

CHAINS = 4  # sums that do not wait for each other
MOST_SQUARES = 32  # that are kept from one channel to the next; of more every one is computed anew


Elements = Callable[[Value, int], Value]  # of a row: from one on, so many


@contextmanager
def _each_row(m: Module, rows: int, length: int) -> Iterator[tuple[Function, Sequence[Value], Value]]:
    """A task that goes over some rows; it, all operands, and the row's number."""
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    found = operands(k, context, f32)
    together = max(1, TASK_ELEMENTS // length)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-rows // together))
    with k.loop(index * together, k.min((index + 1) * together, rows)) as row:
        yield k, found, row


def _loaded(k: Function, x: Value) -> Elements:
    """Those in memory."""
    return lambda i, count: k.load(x + i, count)


def _folded(k: Function, elements: Elements, length: int, reduction: str, element: Type = f32) -> Value:
    """The sum, or the largest, of a row's elements, computed in such a type."""

    def loaded(i: Value, count: int) -> Value:
        return k.cast(elements(i, count), vec(element, count))

    full = k.module.lanes(f32)
    lanes = full if length >= full else 1
    step = lanes * (CHAINS if length >= CHAINS * lanes else 1)
    totals = [k.var(k.const(vec(element, lanes), neutral(reduction))) for _ in range(step // lanes)]
    whole, vectors = length // step * step, length // lanes * lanes
    with k.loop(0, whole, step) as i:
        for n, total in enumerate(totals):
            total.set(joined(k, reduction, total.get(), loaded(i + n * lanes, lanes)))
    if whole < vectors:
        with k.loop(whole, vectors, lanes) as i:
            totals[0].set(joined(k, reduction, totals[0].get(), loaded(i, lanes)))
    v = totals[0].get()
    for total in totals[1:]:
        v = joined(k, reduction, v, total.get())
    while v.type.lanes > 2:
        half = v.type.lanes // 2
        v = joined(k, reduction, k.shuffle(v, v, range(half)), k.shuffle(v, v, range(half, 2 * half)))
    last = k.var(joined(k, reduction, k.extract(v, 0), k.extract(v, 1)) if v.type.lanes else v)
    if vectors < length:
        with k.loop(vectors, length) as i:
            last.set(joined(k, reduction, last.get(), loaded(i, 1)))
    return last.get()


def emit_reduction(instruction_set: str, reduction: str, rows: int, length: int) -> Module:
    """`run` that makes one element of every row of a: its mean, sum or largest."""
    m = Module(instruction_set)
    with _each_row(m, rows, length) as (k, (x, _, out, *_), row):
        total = _folded(k, _loaded(k, x + row * length), length, reduction, _summed_in(reduction))
        k.store(_reduced(k, total, reduction, length), out + row)
    return m


def _summed_in(reduction: str) -> Type:
    """Means are rounded once: what is left of equal numbers less their mean would grow where it is normalised."""
    return f64 if reduction == "mean" else f32


def _reduced(k: Function, total: Value, reduction: str, length: int) -> Value:
    """What is stored of a total of so many elements."""
    return k.cast(total * (1 / length), vec(f32, total.type.lanes)) if reduction == "mean" else total


def _each_column(m: Module, matrices: int, rows: int, columns: int, write: Callable[..., None]) -> None:
    """`run` of tasks that go over some columns of the matrices of a, as vectors side by side.

    `write(k, x, out, matrix, first, vectors, count)` writes code for columns of a matrix from `first` on, so many
    vectors of `count`; `x` and `out` point at all of a and of the output.
    """
    lanes = m.lanes(f32)
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, _, out = operands(k, context, f32)[:3]
    wide = CHAINS * lanes
    strip = max(wide, TASK_ELEMENTS // rows // wide * wide)
    strips = -(-columns // strip)
    together = max(1, TASK_ELEMENTS // (rows * min(strip, columns)))
    with k.loop(index * together, k.min((index + 1) * together, matrices * strips)) as unit:
        matrix, first = unit // strips, unit % strips * strip
        last = k.min(first + strip, columns)
        whole = (last - first) // wide * wide + first
        with k.loop(first, whole, wide) as i:
            write(k, x, out, matrix, i, CHAINS, lanes)
        for i, count in each_vector(k, whole, last, lanes):
            write(k, x, out, matrix, i, 1, count)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-matrices * strips // together))


def emit_columns(instruction_set: str, reduction: str, matrices: int, rows: int, columns: int) -> Module:
    """`run` that makes one element of every column of the matrices of a: its mean, sum or largest."""
    m = Module(instruction_set)
    element = _summed_in(reduction)

    def reduce(k: Function, x: Value, out: Value, matrix: Value, first: Value, vectors: int, count: int) -> None:
        source, target = x + matrix * (rows * columns) + first, out + matrix * columns + first
        totals = [k.var(k.const(vec(element, count), neutral(reduction))) for _ in range(vectors)]
        with k.loop(0, rows) as row:
            for n, total in enumerate(totals):
                v = k.cast(k.load(source + row * columns + n * count, count), vec(element, count))
                total.set(joined(k, reduction, total.get(), v))
        for n, total in enumerate(totals):
            k.store(_reduced(k, total.get(), reduction, rows), target + n * count)

    _each_column(m, matrices, rows, columns, reduce)
    return m


def emit_softmax_of_columns(instruction_set: str, matrices: int, rows: int, columns: int) -> Module:
    """`run` that stores `exp(x - largest) / sum` of every column of the matrices of a."""
    m = Module(instruction_set)

    def softmax(k: Function, x: Value, out: Value, matrix: Value, first: Value, vectors: int, count: int) -> None:
        place = matrix * (rows * columns) + first
        source, target = x + place, out + place
        largest = [k.var(k.const(vec(f32, count), neutral("max"))) for _ in range(vectors)]
        sums = [k.var(k.zero(f32, count)) for _ in range(vectors)]
        with k.loop(0, rows) as row:
            for n, most in enumerate(largest):
                most.set(joined(k, "max", most.get(), k.load(source + row * columns + n * count, count)))
        with k.loop(0, rows) as row:
            for n, (most, total) in enumerate(zip(largest, sums, strict=True)):
                at = row * columns + n * count
                v = exp(k, k.load(source + at, count) - most.get())
                total.add(v)
                k.store(v, target + at)
        factors = [divide(k, k.const(vec(f32, count), 1.0), total.get()) for total in sums]
        with k.loop(0, rows) as row:
            for n, factor in enumerate(factors):
                at = row * columns + n * count
                k.store(k.load(target + at, count) * factor, target + at)

    _each_column(m, matrices, rows, columns, softmax)
    return m


def emit_softmax(instruction_set: str, rows: int, length: int) -> Module:
    """`run` that stores `exp(x - largest) / sum` of every row."""
    m = Module(instruction_set)
    lanes = m.lanes(f32)
    with _each_row(m, rows, length) as (k, (x, _, out, *_), row):
        x, target = x + row * length, out + row * length
        largest = _folded(k, _loaded(k, x), length, "max")
        for i, n in each_vector(k, 0, length, lanes):
            k.store(exp(k, k.load(x + i, n) - k.splat(largest, n)), target + i)
        factor = divide(k, k.const(f32, 1.0), _folded(k, _loaded(k, target), length, "sum"))
        for i, n in each_vector(k, 0, length, lanes):
            k.store(k.load(target + i, n) * k.splat(factor, n), target + i)
    return m


def emit_normalization(
    instruction_set: str, rows: int, length: int, epsilon: float, centred: bool, affine: str | None, period: int
) -> Module:
    """`run` that normalises every row, as `networks.operators.Normalization` tells; scale and shift are b and bias.

    For `affine` "rows" there are `period` numbers of each.
    """
    m = Module(instruction_set)
    lanes = m.lanes(f32)
    with _each_row(m, rows, length) as (k, (x, scale, out, shift, *_), row):
        x, out = x + row * length, out + row * length
        elements = _loaded(k, x)
        if centred:
            mean = _reduced(k, _folded(k, elements, length, "sum", f64), "mean", length)

            def elements(i: Value, count: int) -> Value:
                return k.load(x + i, count) - k.splat(mean, count)

        def squares(i: Value, count: int) -> Value:
            v = k.cast(elements(i, count), vec(f64, count))
            return v * v

        mean_square = _reduced(k, _folded(k, squares, length, "sum", f64), "mean", length)
        factor, term = divide(k, k.const(f32, 1.0), sqrt(k, mean_square + k.const(f32, epsilon))), k.const(f32, 0.0)
        if affine == "rows":
            place = row % period
            factor, term = factor * k.load(scale + place), k.load(shift + place)
        for i, n in each_vector(k, 0, length, lanes):
            v = elements(i, n) * k.splat(factor, n)
            if affine == "elements":
                v = k.fma(v, k.load(scale + i, n), k.load(shift + i, n))
            elif affine == "rows":
                v = v + k.splat(term, n)
            k.store(v, out + i)
    return m


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

        def squared(c: Value | int) -> Value:
            v = k.load(source + c * pixels, count)
            return v * v

        def normalise(c: Value, total: Value) -> None:
            base = k.fma(total, k.const(total.type, alpha / size), k.const(total.type, bias))
            if beta == 0.75:
                root = sqrt(k, base)
                power = root * sqrt(k, root)
            else:
                power = FUNCTIONS["pow"](k, base, k.const(total.type, beta))
            k.store(divide(k, k.load(source + c * pixels, count), power), target + c * pixels)

        if size > MOST_SQUARES:
            with k.loop(0, channels) as c:
                total = k.var(k.zero(f32, count))
                with k.loop(k.max(c - before, 0), k.min(c + (after + 1), channels)) as near:
                    total.add(squared(near))
                normalise(c, total.get())
            return
        squares = [k.var(k.zero(f32, count)) for _ in range(size)]  # of the channels around one

        def channel(c: Value, enters: bool) -> None:
            for old, new in itertools.pairwise(squares):
                old.set(new.get())
            squares[-1].set(squared(c + after) if enters else k.zero(f32, count))
            total = squares[0].get()
            for square in squares[1:]:
                total = total + square.get()
            normalise(c, total)

        for n in range(min(after, channels)):
            squares[before + 1 + n].set(squared(n))
        whole_windows = max(0, channels - after)
        if whole_windows:
            with k.loop(0, whole_windows) as c:
                channel(c, enters=True)
        if whole_windows < channels:
            with k.loop(whole_windows, channels) as c:
                channel(c, enters=False)

    for i, count in each_vector(k, first, last, lanes):
        pixel(i, count)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, images * chunks)
    return m
