"""Functions of single elements: activations, sums and products of arrays, in any combination."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoconv.errors import ConfigError
from autoconv.networks.operators.base import Operator, TensorType

Expression = Any  # an input's number, or a tuple: ("constant", a float), or a function's name and its arguments


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
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.where(x < 0, 0, x),
    "prelu": lambda x, slope: np.where(x < 0, x * slope, x),
}

BINARY = ("add", "sub", "mul", "div", "max", "min", "pow", "prelu")


@dataclass(frozen=True)
class Elementwise(Operator):
    """An expression of arrays that broadcast against each other.

    `("relu", ("add", 0, 1))` is the sum of the first two inputs, made positive; `("mul", 0, 2.0)` twice the first. A
    float is written for `("constant", 2.0)`, which no comparison takes for the input of that number.
    """

    expression: Expression

    def __post_init__(self) -> None:
        object.__setattr__(self, "expression", _with_constants(self.expression))

    @property
    def kind(self) -> str:
        return str(self.expression[0]) if isinstance(self.expression, tuple) else "copy"

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        if len({t.dtype for t in inputs}) != 1:
            raise ConfigError("expected arrays of one type")
        if not _valid(self.expression, len(inputs)):
            known = ", ".join(FUNCTIONS)
            raise ConfigError(f"{self.expression}: expected a function of {len(inputs)} inputs, made of {known}")
        try:
            shape = np.broadcast_shapes(*(t.shape for t in inputs))
        except ValueError:
            raise ConfigError("the shapes do not broadcast") from None
        return TensorType(tuple(map(int, shape)), inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        y = np.asarray(_value(self.expression, inputs))
        return np.broadcast_to(y, np.broadcast_shapes(*(a.shape for a in inputs)))


def _valid(expression: Expression, inputs: int) -> bool:
    if type(expression) is int:
        return 0 <= expression < inputs
    if not isinstance(expression, tuple) or not expression:
        return False
    name, *parts = expression
    if name == "constant":
        return len(parts) == 1 and type(parts[0]) is float
    binary = name in BINARY
    return name in FUNCTIONS and len(parts) == 1 + binary and all(_valid(part, inputs) for part in parts)


def _with_constants(expression: Expression) -> Expression:
    if isinstance(expression, float):
        return "constant", expression
    if not isinstance(expression, tuple) or expression[0] == "constant":
        return expression
    return (expression[0], *map(_with_constants, expression[1:]))


def constant_of(expression: Expression) -> float | None:
    """The number that an expression is, or None."""
    return expression[1] if isinstance(expression, tuple) and expression[0] == "constant" else None


def _value(expression: Expression, inputs: Sequence[np.ndarray]) -> Any:
    if isinstance(expression, int):
        return inputs[expression]
    if (number := constant_of(expression)) is not None:
        return number
    return FUNCTIONS[expression[0]](*(_value(part, inputs) for part in expression[1:]))


def substituted(expression: Expression, inputs: Mapping[int, Expression]) -> Expression:
    """The expression with other expressions, or floats, in the place of its inputs."""
    if isinstance(expression, int):
        return inputs[expression]
    if constant_of(expression) is not None:
        return expression
    return (expression[0], *(substituted(part, inputs) for part in expression[1:]))


def size(expression: Expression) -> int:
    """How many functions it applies."""
    if isinstance(expression, int) or constant_of(expression) is not None:
        return 0
    return 1 + sum(map(size, expression[1:]))
