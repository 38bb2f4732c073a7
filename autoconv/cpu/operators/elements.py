"""Elements of arrays: as they lie in memory, the floats computed with in their place, vector by vector, and joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from autoconv.common.types import INTEGERS
from autoconv.cpu.codegen.ir import Function, Type, Value, f32, i8, i32, vec
from autoconv.cpu.common.functions import FUNCTIONS

ELEMENTS: Mapping[str, Type] = {"float32": f32, "int32": i32, "uint8": i8, "int8": i8}


def floats(k: Function, v: Value, dtype: str) -> Value:
    """What was loaded, by value."""
    if dtype == "float32":
        return v
    lanes = v.type.lanes or 1
    if dtype == "uint8":
        v = k.zext(v, vec(i32, lanes))
    return k.cast(v, vec(f32, lanes))


def stored(k: Function, v: Value, dtype: str) -> Value:
    """Floats as they are stored; whole numbers, as bytes held to the range of their type (NaN as the least)."""
    lanes = v.type.lanes or 1
    if dtype == "int32":
        return k.cast(v, vec(i32, lanes))
    if dtype not in INTEGERS:
        return v
    limits = np.iinfo(INTEGERS[dtype])
    low, high = (k.const(v.type, float(limit)) for limit in (limits.min, limits.max))
    v = k.select(v >= low, v, low)
    v = k.select(v <= high, v, high)
    return k.cast(k.cast(v, vec(i32, lanes)), vec(i8, lanes))


def each_vector(k: Function, first: int | Value, last: int | Value, lanes: int) -> Iterator[tuple[Value, int]]:
    """Elements first .. last - 1, by vectors and the rest one by one: where each begins, and its lanes."""
    whole = (last - first) // lanes * lanes + first
    for start, stop, width in ((first, whole, lanes), (whole, last, 1))[: min(lanes, 2)]:
        if not isinstance(start, int) or not isinstance(stop, int) or start < stop:
            with k.loop(start, stop, width) as i:
                yield i, width


def neutral(reduction: str) -> float:
    """What changes nothing when it is joined."""
    return float("-inf") if reduction == "max" else 0.0


def joined(k: Function, reduction: str, a: Value, b: Value) -> Value:
    """The larger of two values, or their sum; what is no number stays."""
    return FUNCTIONS["max" if reduction == "max" else "add"](k, a, b)
