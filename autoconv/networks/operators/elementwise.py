"""Functions of single elements: activations, sums and products of arrays, in any combination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoconv.common.epilogue.expressions import FUNCTIONS, Expression, is_valid, value_of, with_constants
from autoconv.errors import ConfigError
from autoconv.networks.operators.base import Operator, TensorType


@dataclass(frozen=True)
class Elementwise(Operator):
    """An expression of arrays that broadcast against each other.

    `("relu", ("add", 0, 1))` is the sum of the first two inputs, made positive; `("mul", 0, 2.0)` twice the first. A
    float is written for `("constant", 2.0)`, which no comparison takes for the input of that number.
    """

    expression: Expression

    def __post_init__(self) -> None:
        object.__setattr__(self, "expression", with_constants(self.expression))

    @property
    def kind(self) -> str:
        return str(self.expression[0]) if isinstance(self.expression, tuple) else "copy"

    def channels_last(self) -> Elementwise:
        return self

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        if len({t.dtype for t in inputs}) != 1:
            raise ConfigError("expected arrays of one type")
        if not is_valid(self.expression, len(inputs)):
            known = ", ".join(FUNCTIONS)
            raise ConfigError(f"{self.expression}: expected a function of {len(inputs)} inputs, made of {known}")
        try:
            shape = np.broadcast_shapes(*(t.shape for t in inputs))
        except ValueError:
            raise ConfigError("the shapes do not broadcast") from None
        return TensorType(tuple(map(int, shape)), inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        y = np.asarray(value_of(self.expression, inputs))
        return np.broadcast_to(y, np.broadcast_shapes(*(a.shape for a in inputs)))
