"""Orders of an array's dimensions, their strides, and arrays of other libraries."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

# Dimensions of NCHW in the order of NHWC, and those of NHWC in the order of NCHW; of images and filters alike.
CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
Strides = tuple[int, ...]  # in elements


def contiguous(shape: Sequence[int]) -> Strides:
    """Strides of an array of a shape."""
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


def host(array: Any) -> Any:
    """An array as one of NumPy's: itself, or a copy of what lies on a GPU."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def like(source: Any, array: Any) -> Any:
    """`array` as the same kind of array as `source`, sharing memory, through DLPack."""
    if isinstance(source, type(array)):
        return array
    if hasattr(source, "__array_namespace__"):
        return source.__array_namespace__().from_dlpack(array)
    module = sys.modules.get(type(source).__module__.partition(".")[0])
    if hasattr(module, "from_dlpack"):
        return module.from_dlpack(array)  # type: ignore[union-attr]
    return array
