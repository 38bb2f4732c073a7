"""Activations: the functions of single elements that a layer may end with.

Each has a canonical text, such as "relu", "clip:0:6" or "leaky_relu:0.01", which layers, keys and files name it by.
That of PReLU says nothing of its slopes, one for each channel: they are an operand, like the bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoconv.common.epilogue.expressions import Expression, value_of, with_constants
from autoconv.errors import LayerError

_HARD_SIGMOID: Expression = ("min", ("max", ("add", ("mul", 0, 1 / 6), 0.5), 0.0), 1.0)
_GELU: Expression = ("mul", ("mul", 0.5, 0), ("add", 1.0, ("erf", ("mul", 0, math.sqrt(0.5)))))
_CUBIC: Expression = ("mul", 0, ("add", 1.0, ("mul", 0.044715, ("mul", 0, 0))))
_GELU_TANH: Expression = ("mul", ("mul", 0.5, 0), ("add", 1.0, ("tanh", ("mul", math.sqrt(2 / math.pi), _CUBIC))))

PLAIN: Mapping[str, Expression] = {
    "relu": ("relu", 0),
    "sigmoid": ("sigmoid", 0),
    "silu": ("mul", 0, ("sigmoid", 0)),
    "hardsigmoid": _HARD_SIGMOID,
    "hardswish": ("mul", 0, _HARD_SIGMOID),
    "gelu": _GELU,
    "gelu_tanh": _GELU_TANH,
    "prelu": ("prelu", 0, 1),  # input 1 is the channel's slope
}
WITH_NUMBERS: Mapping[str, tuple[tuple[str, ...], Callable[..., Expression]]] = {  # the numbers' names, and of them
    "clip": (("LOW", "HIGH"), lambda low, high: ("min", ("max", 0, low), high)),
    "leaky_relu": (("SLOPE",), lambda slope: ("prelu", 0, slope)),
}
SHORT = {"relu6": "clip:0:6", "leaky_relu": "leaky_relu:0.01"}  # what else people write
NAMES = (*PLAIN, *WITH_NUMBERS)
PATTERN = "|".join((*sorted(PLAIN, key=len, reverse=True), r"clip:[^:]+:[^:]+", r"leaky_relu:[^:]+"))


def canonical(value: Any) -> str | None:
    """The text of an activation, in the one spelling it has.

    Parameters
    ----------
    value : str or None
        A text as people write it.

    Returns
    -------
    str or None

    Raises
    ------
    LayerError
        When it is none.

    Examples
    --------
    >>> canonical("relu6"), canonical("clip:0.0:6")
    ('clip:0:6', 'clip:0:6')
    """
    if value is None:
        return None
    text = SHORT.get(value, value) if isinstance(value, str) else ""
    name, *numbers = text.split(":")
    if name in PLAIN and not numbers:
        return str(text)
    if name not in WITH_NUMBERS or len(numbers) != len(WITH_NUMBERS[name][0]):
        numbered = (":".join((name, *words)) for name, (words, _) in WITH_NUMBERS.items())
        allowed = ", ".join(map(repr, (*PLAIN, *SHORT, *numbered)))
        raise LayerError(f"activation={value!r}: expected one of None, {allowed}")
    values = [_number(value, number) for number in numbers]
    if name == "clip" and values[0] >= values[1]:
        raise LayerError(f"activation={value!r}: expected LOW less than HIGH")
    return ":".join((name, *(np.format_float_positional(number, trim="-") for number in values)))


def _number(value: str, text: str) -> np.float32:
    """A number of an activation, as float32 has it."""
    try:
        with np.errstate(over="ignore"):
            number = np.float32(text)
    except ValueError:
        number = np.float32(math.nan)
    if not np.isfinite(number):
        raise LayerError(f"activation={value!r}: expected finite numbers, got {text!r}")
    return number + np.float32(0)  # no -0


def has_slopes(activation: str | None) -> bool:
    """Whether an activation takes an operand: a slope for each channel."""
    return activation == "prelu"


def parted(values: Any, bias: bool, activation: str | None) -> tuple[Any, Any]:
    """The biases and the slopes of an epilogue, which takes them as one operand, one after the other.

    Parameters
    ----------
    values : array or None
        As many values for each of them as there are channels; None where it has neither.
    bias : bool
        Whether it adds a bias.
    activation : str or None

    Returns
    -------
    bias, slopes : array of one dimension, or None
    """
    slopes = has_slopes(activation)
    if values is None or not bias + slopes:
        return None, None
    rows = values.reshape(bias + slopes, -1)
    return rows[0] if bias else None, rows[-1] if slopes else None


def expression(activation: str) -> Expression:
    """An activation by its text, as an expression of input 0, and of the slope as input 1 where it has one."""
    name, *numbers = activation.split(":")
    found = WITH_NUMBERS[name][1](*(float(np.float32(number)) for number in numbers)) if numbers else PLAIN[name]
    return with_constants(found)


def applied(activation: str | None, x: Any, slopes: Any = None) -> Any:
    """What an activation makes of an array, in its precision; slopes, where it has them, broadcast to the array."""
    with np.errstate(all="ignore"):  # infinities are the caller's
        return x if activation is None else value_of(expression(activation), [x, slopes]).astype(x.dtype, copy=False)
