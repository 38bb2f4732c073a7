"""Functions of single elements as expressions, and what NumPy makes of them.

An expression is an input's number, or a tuple: `("constant", a float)`, or a function's name and its arguments:
`("relu", ("add", 0, 1))` is the sum of the first two inputs, made positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Expression = Any


def _divide(a: Any, b: Any) -> Any:
    if np.result_type(a, b).kind in "iu":
        return np.trunc(np.true_divide(a, b)).astype(np.result_type(a, b))
    return np.divide(a, b)


def _sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "neg": np.negative,
    "abs": np.abs,
    "round": np.rint,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.where(x < 0, 0, x),
    "prelu": lambda x, slope: np.where(x < 0, x * slope, x),
}

BINARY = ("add", "sub", "mul", "div", "max", "min", "pow", "prelu")


def is_valid(expression: Expression, inputs: int) -> bool:
    """Whether it is an expression of so many inputs."""
    if type(expression) is int:
        return 0 <= expression < inputs
    if not isinstance(expression, tuple) or not expression:
        return False
    name, *parts = expression
    if name == "constant":
        return len(parts) == 1 and type(parts[0]) is float
    binary = name in BINARY
    return name in FUNCTIONS and len(parts) == 1 + binary and all(is_valid(part, inputs) for part in parts)


def with_constants(expression: Expression) -> Expression:
    """An expression in which floats are written as `("constant", a float)`.

    No comparison takes those for the input of that number.
    """
    if isinstance(expression, float):
        return "constant", expression
    if not isinstance(expression, tuple) or expression[0] == "constant":
        return expression
    return (expression[0], *map(with_constants, expression[1:]))


def constant_of(expression: Expression) -> float | None:
    """The number that an expression is, or None."""
    return expression[1] if isinstance(expression, tuple) and expression[0] == "constant" else None


def value_of(expression: Expression, inputs: Sequence[np.ndarray]) -> Any:
    """What NumPy makes of it, in whatever precision the inputs have."""
    if isinstance(expression, int):
        return inputs[expression]
    if (number := constant_of(expression)) is not None:
        return number
    return FUNCTIONS[expression[0]](*(value_of(part, inputs) for part in expression[1:]))


def substituted(expression: Expression, inputs: Mapping[int, Expression]) -> Expression:
    """The expression with other expressions, or floats, in the place of its inputs."""
    if isinstance(expression, int):
        return inputs[expression]
    if constant_of(expression) is not None:
        return expression
    return (expression[0], *(substituted(part, inputs) for part in expression[1:]))


def functions(expression: Expression) -> Iterator[str]:
    """The names of the functions it applies, each as often as it does."""
    if isinstance(expression, tuple) and expression[0] != "constant":
        yield expression[0]
        for part in expression[1:]:
            yield from functions(part)


def constants(expression: Expression) -> Iterator[float]:
    """The numbers in it."""
    if (number := constant_of(expression)) is not None:
        yield number
    elif isinstance(expression, tuple):
        for part in expression[1:]:
            yield from constants(part)
