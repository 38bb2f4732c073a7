"""Expressions of `common.epilogue.expressions` as C++, on floats; `operators/functions.cuh` has the functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoconv.common.epilogue.expressions import Expression, constant_of

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
NAMES = {
    "max": "larger",
    "min": "smaller",
    "pow": "powf",
    "abs": "fabsf",
    "round": "rintf",
    "sqrt": "sqrtf",
    "exp": "expf",
    "log": "logf",
    "log1p": "log1pf",
    "erf": "erff",
    "tanh": "tanhf",
    "sigmoid": "sigmoid",
    "relu": "relu",
    "prelu": "prelu",
}


def number(value: float) -> str:
    """A number as float32 has it, bit by bit.

    >>> number(0.5)
    'bits_float(0x3f000000u)'
    """
    with np.errstate(over="ignore"):  # what is larger than any number of float32 is infinite
        return f"bits_float(0x{np.float32(value).view(np.uint32):08x}u)"


def text_of(expression: Expression, inputs: Sequence[str]) -> str:
    """An expression of inputs of which the texts are given.

    >>> text_of(("relu", ("add", 0, 1)), ["x", "y"])
    'relu((x + y))'
    """
    if isinstance(expression, int):
        return inputs[expression]
    if (value := constant_of(expression)) is not None:
        return number(value)
    name, *parts = expression
    texts = [text_of(part, inputs) for part in parts]
    if name in INFIX:
        return f"({texts[0]} {INFIX[name]} {texts[1]})"
    return f"(-{texts[0]})" if name == "neg" else f"{NAMES[name]}({', '.join(texts)})"
