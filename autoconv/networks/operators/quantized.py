"""Integers that stand for real numbers: products of them, and the way from floats to them and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoconv.common.epilogue.quantization import finished, meanings
from autoconv.common.types import INTEGERS
from autoconv.errors import ConfigError
from autoconv.layer import ConvLayer, Pair, Sides
from autoconv.networks.operators.base import Operator, TensorType, checked_images
from autoconv.networks.operators.convolution import Conv
from autoconv.networks.operators.elementwise import Elementwise

DEQUANTIZE = Elementwise(("mul", ("sub", 0, 2), 1), "float32")  # of an array, scales, and zero points in float32


def quantize(dtype: str) -> Elementwise:
    """From floats to integers, of an array, scales, and zero points in float32."""
    return Elementwise(("add", ("round", ("div", 0, 1)), 2), dtype)


@dataclass(frozen=True, kw_only=True)
class QuantizedProduct(Operator):
    """Sums of products of integers, with what `Quantization.operand` says of them as the last of three inputs.

    Parameters
    ----------
    activation : "relu" or None
    output_dtype : str
        As for `ConvLayer`.
    """

    activation: Literal["relu"] | None = None
    output_dtype: str = "int32"

    def layer(self, inputs: Sequence[TensorType]) -> ConvLayer:
        """The layer that computes it, of an input and filters."""
        raise NotImplementedError

    def checked(self, inputs: Sequence[TensorType], layer: ConvLayer, shape: tuple[int, ...]) -> TensorType:
        """The type of the output, where the third input is an operand of the layer."""
        expected = TensorType((2 * layer.K + 2,), "int32")
        if list(inputs[2:]) != [expected]:
            raise ConfigError(f"expected the words of a Quantization, {expected}, got {[*map(str, inputs[2:])]}")
        return TensorType(shape, self.output_dtype)


def _is_integer(inputs: Sequence[TensorType]) -> None:
    if inputs[0].dtype not in INTEGERS or inputs[1].dtype != "int8":
        raise ConfigError(f"expected uint8 or int8 and filters of int8, got {inputs[0]} and {inputs[1]}")


@dataclass(frozen=True, kw_only=True)
class QuantizedConv(QuantizedProduct):
    """2-D convolution of `x` (N, C, H, W) with filters of int8 (K, C/groups, R, S); the arguments are `ConvLayer`'s."""

    stride: Pair = (1, 1)
    padding: Sides = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1

    def layer(self, inputs: Sequence[TensorType]) -> ConvLayer:
        checked_images(inputs)
        _is_integer(inputs)
        (N, C, H, W), w = inputs[0].shape, inputs[1].shape
        if len(w) != 4 or w[1] * self.groups != C:
            raise ConfigError(f"expected filters (K, {C}/{self.groups}, R, S), got {w}")
        return ConvLayer(
            N=N, C=C, H=H, W=W, K=w[0], R=w[2], S=w[3], stride=self.stride, padding=self.padding,
            dilation=self.dilation, groups=self.groups, dtype=inputs[0].dtype, activation=self.activation,
            output_dtype=self.output_dtype,
        )  # fmt: skip

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        layer = self.layer(inputs)
        return self.checked(inputs, layer, layer.y_shape)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        x, w, words = inputs
        layer = self.layer([TensorType(a.shape, a.dtype.name) for a in inputs])
        conv = Conv(stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)
        sums = conv.evaluate(x - np.float64(meanings(layer, words)[2]), w.astype(np.float64))
        return np.asarray(finished(layer, np.rint(sums), words, 1))


@dataclass(frozen=True, kw_only=True)
class QuantizedMatMul(QuantizedProduct):
    """Products of the rows of `a` (..., M, K) and those of `b` (N, K), which is of int8."""

    def layer(self, inputs: Sequence[TensorType]) -> ConvLayer:
        """The 1x1 convolution that computes it, of rows as pixels with channels last."""
        _is_integer(inputs)
        a, b = inputs[0].shape, inputs[1].shape
        if len(a) < 2 or len(b) != 2 or a[-1] != b[1]:
            raise ConfigError(f"expected (..., M, K) and (N, K), got {a} and {b}")
        return ConvLayer(
            N=1, C=a[-1], H=1, W=int(np.prod(a[:-1])), K=b[0], R=1, S=1, dtype=inputs[0].dtype, layout="NHWC",
            activation=self.activation, output_dtype=self.output_dtype,
        )  # fmt: skip

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        layer = self.layer(inputs)
        return self.checked(inputs, layer, (*inputs[0].shape[:-1], layer.K))

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        a, b, words = inputs
        layer = self.layer([TensorType(array.shape, array.dtype.name) for array in inputs])
        sums = (a - np.float64(meanings(layer, words)[2])) @ b.T.astype(np.float64)
        return np.asarray(finished(layer, np.rint(sums), words, a.ndim - 1))
