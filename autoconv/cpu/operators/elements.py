"""Elements of arrays as they lie in memory, and the floats that kernels compute with in their place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autoconv.common.types import INTEGERS
from autoconv.cpu.codegen.ir import Function, Type, Value, f32, i8, i32, vec

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
    """Floats as they are stored; whole numbers, as integers held to the range of their type (NaN as the least)."""
    if dtype not in INTEGERS:
        return v
    limits = np.iinfo(INTEGERS[dtype])
    lanes = v.type.lanes or 1
    low, high = (k.const(v.type, float(limit)) for limit in (limits.min, limits.max))
    v = k.select(v >= low, v, low)
    v = k.select(v <= high, v, high)
    return k.cast(k.cast(v, vec(i32, lanes)), vec(i8, lanes))
