"""Orders of an array's dimensions, and arrays of other libraries."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

# Dimensions of NCHW in the order of NHWC, and those of NHWC in the order of NCHW; of images and filters alike.
CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


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
