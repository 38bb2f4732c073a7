"""Resizing along one axis: weighted sums of a few elements, whose places and weights are given."""

from __future__ import annotations

from collections.abc import Iterator

from autoconv.cpu.codegen.ir import Function, Module, Value, f32, i64
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.operators import TASK_ELEMENTS
from autoconv.cpu.operators.elements import each_vector

WRITTEN_OUT = 32  # terms of an output; more are a loop


def emit(instruction_set: str, outer: int, old: int, new: int, inner: int, taps: int) -> Module:
    """`run` of a, seen as (outer, old, inner), to out (outer, new, inner).

    b has the places of `new` x `taps` elements along the axis (int64), bias their weights.
    """
    m = Module(instruction_set)
    lanes = m.lanes(f32) if inner >= m.lanes(f32) else 1
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, places, out, weights = operands(k, context, f32, i64, f32, f32, f32)[:4]
    together = max(1, TASK_ELEMENTS // inner)
    with k.loop(index * together, k.min((index + 1) * together, outer * new)) as row:
        source, place = x + row // new * (old * inner), row % new * taps
        for i, count in each_vector(k, 0, inner, lanes):
            total = k.var(k.zero(f32, count))
            for tap in _each(k, taps):
                at = source + k.load(places + place + tap) * inner
                total.fma(k.load(at + i, count), k.splat(k.load(weights + place + tap), count))
            k.store(total.get(), out + row * inner + i)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-outer * new // together))
    return m


def _each(k: Function, taps: int) -> Iterator[int | Value]:
    """The terms of an output, by their numbers."""
    if taps <= WRITTEN_OUT:
        yield from range(taps)
    else:
        with k.loop(0, taps) as tap:
            yield tap
