"""Expressions of arrays, element by element, with any strides: activations, sums, broadcasts, copies, transposes.

Arrays may have different types. What is computed is computed in float32, and a copy is one of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoconv.cpu.codegen.ir import VECTOR_BYTES, Function, Module, Value, f32, ptr
from autoconv.cpu.codegen.launch import RUN, TASK, launch
from autoconv.cpu.common.functions import value_of
from autoconv.cpu.operators import INPUTS, OUTPUT, TASK_ELEMENTS
from autoconv.cpu.operators.elements import ELEMENTS, each_vector, floats, stored

Strides = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Strides:
    """Strides of an array of a shape, in elements."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def broadcast(shape: Sequence[int], to: Sequence[int], strides: Strides | None = None) -> Strides:
    """Strides of an array that is repeated to another shape; its own have no gaps unless they are given."""
    own = zip(shape, strides or contiguous(shape), strict=True)
    return (*[0] * (len(to) - len(shape)), *(0 if extent == 1 else step for extent, step in own))


def collapsed(shape: Sequence[int], strides: Sequence[Strides]) -> tuple[tuple[int, ...], tuple[Strides, ...]]:
    """The shape and every array's strides with as few dimensions as will do.

    >>> collapsed((2, 3, 4, 5), [(60, 20, 5, 1), (0, 1, 0, 0)])
    ((2, 3, 20), ((60, 20, 1), (0, 1, 0)))
    """
    extents: list[int] = []
    kept: list[list[int]] = []  # the strides of every array, for each dimension
    for extent, *steps in zip(shape, *strides, strict=True):
        if extent == 1:
            continue
        if extents and all(outer == extent * inner for outer, inner in zip(kept[-1], steps, strict=True)):
            extents[-1] *= extent
            kept[-1] = steps
        else:
            extents.append(extent)
            kept.append(steps)
    if not extents:
        return (1,), tuple((1,) for _ in strides)
    return tuple(extents), tuple(zip(*kept, strict=True))


def emit(
    instruction_set: str,
    expression: Any,
    shape: tuple[int, ...],
    strides: tuple[Strides, ...],
    types: tuple[str, ...],
) -> Module:
    """`run` that stores an expression of inputs.

    Shape and strides are collapsed; strides and types are those of the output first.
    """
    m = Module(instruction_set)
    *outer, inner = shape
    step = strides[0][-1]
    elements = [ELEMENTS[dtype] for dtype in types]
    copied = expression == 0 and len(set(types)) == 1
    widest = VECTOR_BYTES[instruction_set] // (elements[0] if copied else f32).bytes
    lanes = min(widest, 1 << inner.bit_length() - 1) if step == 1 else 1
    rows = math.prod(outer)
    together = max(1, TASK_ELEMENTS // inner)
    part = inner if inner <= 2 * TASK_ELEMENTS else TASK_ELEMENTS
    parts = -(-inner // part)
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    slots = (OUTPUT, *INPUTS[: len(strides) - 1])
    arrays = [k.bits(k.load(context + slot), ptr(e)) for slot, e in zip(slots, elements, strict=True)]
    group, first = index // parts, index % parts * part
    last = k.min(first + part, inner)
    with k.loop(group * together, k.min((group + 1) * together, rows)) as row:
        places, left = [k.i64(0) for _ in strides], row
        for axis in range(len(outer) - 1, -1, -1):
            place = left % outer[axis] if axis else left
            places = [at + place * steps[axis] for at, steps in zip(places, strides, strict=True)]
            left = left // outer[axis]
        out, *sources = [p + at for p, at in zip(arrays, places, strict=True)]
        same = {n: k.load(p) for n, p in enumerate(sources) if strides[n + 1][-1] == 0}
        for i, count in each_vector(k, first, last, lanes):
            values = []
            for n, p in enumerate(sources):
                v = k.splat(same[n], count) if n in same else _gathered(k, p, i, count, strides[n + 1][-1])
                values.append(v if copied else floats(k, v, types[n + 1]))
            y = values[0] if copied else stored(k, value_of(k, expression, values, k.zero(f32, count)), types[0])
            k.store(y, out + i * step)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-rows // together) * parts)
    return m


def _gathered(k: Function, p: Value, i: Value, lanes: int, stride: int) -> Value:
    """Elements i, i + 1, ... of a row."""
    if stride == 1 or lanes == 1:
        return k.load(p + i * stride, lanes)
    element = p.type.to
    assert element is not None
    v = k.zero(element, lanes)
    for lane in range(lanes):
        v = k.insert(v, k.load(p + (i + lane) * stride), lane)
    return v
