"""The arguments of a layer, checked at the edge: a bad one is refused by its name, with what is expected."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from autoconv.errors import LayerError

Pair = tuple[int, int]

LARGEST = 2**31 - 1  # of any one extent; arrays may be larger


def integer(value: object, name: str, least: int) -> int:
    """An integer from `least` to `LARGEST`; whatever stands for one, but no truth value."""
    if isinstance(value, bool | np.bool_):
        raise LayerError(f"{name}={value!r}: expected an integer, got a truth value")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LayerError(f"{name}={value!r}: expected an integer, got {type(value).__name__}") from None
    if not least <= number <= LARGEST:
        raise LayerError(f"{name}={number}: expected {least} to {LARGEST}")
    return number


def truth(value: object, name: str) -> bool:
    """A truth value, be it NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise LayerError(f"{name}={value!r}: expected True or False")
    return bool(value)


def pair(value: object, name: str, least: int) -> Pair:
    """A pair (height, width) of integers; one that stands for both."""
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        if len(value) != 2:
            raise LayerError(
                f"{name}={value!r}: expected one integer or a pair (height, width), got {len(value)} values"
            )
        return integer(value[0], f"{name}[0]", least), integer(value[1], f"{name}[1]", least)
    number = integer(value, name, least)
    return number, number


def choice(value: object, name: str, allowed: tuple[object, ...]) -> Any:
    """One of the allowed values."""
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        raise LayerError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
    return value


def sides(padding: Any, extents: Pair, spans: Pair, strides: Pair) -> tuple[Pair, Pair]:
    """Rows above and below, columns left and right; "same" follows from extents, what filters span, and strides."""
    if isinstance(padding, str):
        choice(padding, "padding", ("same", "valid"))
        if padding == "valid":
            return (0, 0), (0, 0)
        found = []
        for extent, span, stride in zip(extents, spans, strides, strict=True):
            total = max((math.ceil(extent / stride) - 1) * stride + span - extent, 0)
            found.append((total // 2, integer(total - total // 2, "padding", 0)))
        return found[0], found[1]
    if isinstance(padding, list | tuple):
        if len(padding) != 2:
            raise LayerError(
                f"padding={padding!r}: expected an integer, a pair (height, width), "
                f"((top, bottom), (left, right)), 'same' or 'valid', got {len(padding)} values"
            )
        if any(isinstance(side, list | tuple) for side in padding):
            top_bottom, left_right = padding
            return pair(top_bottom, "padding[0]", 0), pair(left_right, "padding[1]", 0)
    height, width = pair(padding, "padding", 0)
    return (height, height), (width, width)
