"""Resizing along one axis: weighted sums of a few elements, whose places and weights are given."""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Module, f32, i64
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.operators import TASK_ELEMENTS
from autoconv.cpu.operators.elements import each_vector


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
            total = k.zero(f32, count)
            for tap in range(taps):
                at = source + k.load(places + place + tap) * inner
                total = k.fma(k.load(at + i, count), k.splat(k.load(weights + place + tap), count), total)
            k.store(total, out + row * inner + i)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-outer * new // together))
    return m
