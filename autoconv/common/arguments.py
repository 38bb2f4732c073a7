"""The arguments of a layer, checked at the edge: a bad one is refused by its name, with what is expected."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from autoconv.errors import LayerError

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


def pair(value: object, name: str, least: int) -> tuple[int, int]:
    """A pair (height, width) of integers; one that stands for both."""
    if isinstance(value, list | tuple | np.ndarray):
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
