"""Expressions of arrays, element by element, with any strides: activations, sums, broadcasts, copies, transposes.

Arrays may have different types. What is computed is computed in float32, and a copy is one of bytes.
"""

from __future__ import annotations

import math
from typing import Any

from autoconv.common.arrays import Strides
from autoconv.cpu.codegen.ir import VECTOR_BYTES, Function, Module, Value, f32, ptr
from autoconv.cpu.codegen.launch import RUN, TASK, launch
from autoconv.cpu.common.functions import value_of
from autoconv.cpu.operators import INPUTS, OUTPUT, TASK_ELEMENTS
from autoconv.cpu.operators.elements import ELEMENTS, each_vector, floats, stored


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
