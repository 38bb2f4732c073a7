"""Functions of single elements: activations, sums and products of arrays, in any combination."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoconv.common.epilogue.expressions import (
    FUNCTIONS,
    Expression,
    constant_of,
    is_valid,
    value_of,
    with_constants,
)
from autoconv.common.types import INTEGERS, SUMS
from autoconv.errors import ConfigError
from autoconv.networks.operators.base import Operator, TensorType

NARROW = ("float16", "bfloat16")  # floats in which nobody computes
FLOATS = ("float32", "float64", *NARROW)
MIXED = ("float32", *INTEGERS, *NARROW)  # types of outputs where types meet


def in_float32(expression: Expression) -> Expression:
    """The expression with numbers beyond float32 as that type has them, which is infinite."""
    if (number := constant_of(expression)) is not None:
        with np.errstate(over="ignore"):
            found = float(np.float32(number))
        return expression if math.isfinite(found) else ("constant", found)
    return expression if isinstance(expression, int) else (expression[0], *map(in_float32, expression[1:]))


@dataclass(frozen=True)
class Elementwise(Operator):
    """An expression of arrays that broadcast against each other.

    `("relu", ("add", 0, 1))` is the sum of the first two inputs, made positive; `("mul", 0, 2.0)` twice the first. A
    float is written for `("constant", 2.0)`, which no comparison takes for the input of that number.

    Parameters
    ----------
    expression : Expression
    dtype : str, optional
        Of the output, where types meet: inputs of float32, int32, uint8, int8, float16 or bfloat16 are computed with
        in float32; what is stored as uint8 or int8 is held to its range and cut to a whole number. Without it all
        arrays have one type.
    """

    expression: Expression
    dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "expression", with_constants(self.expression))

    @property
    def kind(self) -> str:
        if self.dtype is not None and self.expression == 0:
            return "cast"
        if self.dtype is not None and self.dtype not in NARROW:
            return "quantize" if self.dtype in INTEGERS else "dequantize"
        return str(self.expression[0]) if isinstance(self.expression, tuple) else "copy"

    def channels_last(self) -> Elementwise:
        return self

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        found = {t.dtype for t in inputs}
        if self.dtype is None and len(found) != 1:
            raise ConfigError("expected arrays of one type")
        if self.dtype is not None and (not found <= {*MIXED, *SUMS} or self.dtype not in MIXED):
            raise ConfigError(f"expected arrays of {', '.join((*MIXED, *SUMS))}, and an output of one but the last")
        if "bool" in found and isinstance(self.expression, tuple):
            raise ConfigError("expected arrays of numbers")  # NumPy subtracts none of truth values, nor negates them
        if not is_valid(self.expression, len(inputs)):
            known = ", ".join(FUNCTIONS)
            raise ConfigError(f"{self.expression}: expected a function of {len(inputs)} inputs, made of {known}")
        try:
            shape = np.broadcast_shapes(*(t.shape for t in inputs))
        except ValueError:
            raise ConfigError("the shapes do not broadcast") from None
        return TensorType(tuple(map(int, shape)), self.dtype or inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        if self.dtype is None:
            y = np.asarray(value_of(self.expression, inputs))
        elif self.dtype not in INTEGERS:  # in whatever precision the floats have
            y = np.asarray(
                value_of(self.expression, [a.astype(np.float32) if a.dtype.kind in "iu" else a for a in inputs])
            )
        else:
            with np.errstate(over="ignore"):
                y = np.asarray(value_of(self.expression, [a.astype(np.float32) for a in inputs]), np.float32)
            limits = np.iinfo(self.dtype)
            y = np.where(y >= limits.min, np.minimum(y, limits.max), limits.min).astype(self.dtype)
        return np.broadcast_to(y, np.broadcast_shapes(*(a.shape for a in inputs)))
