"""Sums of products: convolution, its transpose, and products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.common.types import DTYPES
from autoconv.errors import ConfigError
from autoconv.layer import ConvLayer, Layout, Pair, Sides
from autoconv.networks.operators.base import (
    Product,
    TensorType,
    checked_images,
    in_nchw,
)


@dataclass(frozen=True, kw_only=True)
class Conv(Product):
    """2-D convolution of `x` (N, C, H, W) with filters `w` (K, C/groups, R, S); the arguments are `ConvLayer`'s.

    In NHWC, of `x` (N, H, W, C) with filters (K, R, S, C/groups).
    """

    stride: Pair = (1, 1)
    padding: Sides = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    layout: Layout = "NCHW"

    def channels_last(self) -> Conv:
        return replace(self, layout="NHWC")

    def images(self, count: int) -> tuple[int, ...]:
        return (0, count - 1) if self.residual else (0,)

    def layer(self, inputs: Sequence[TensorType]) -> ConvLayer:
        """The layer that computes it."""
        checked_images(inputs)
        (N, C, H, W), w = in_nchw(self.layout, inputs[0].shape), inputs[1]
        if inputs[0].dtype not in DTYPES:  # of bytes a layer would be another operator
            raise ConfigError(f"expected images of {', '.join(DTYPES)}, got {inputs[0]}")
        if len(w.shape) != 4 or w.dtype != inputs[0].dtype:
            expected = "K, C/groups, R, S" if self.layout == "NCHW" else "K, R, S, C/groups"
            raise ConfigError(f"expected filters {inputs[0].dtype} ({expected}), got {w}")
        K, channels, R, S = in_nchw(self.layout, w.shape)
        if channels * self.groups != C:
            raise ConfigError(f"expected filters of C/groups = {C}/{self.groups} channels, got {w}")
        return ConvLayer(
            N=N, C=C, H=H, W=W, K=K, R=R, S=S, stride=self.stride, padding=self.padding, dilation=self.dilation,
            groups=self.groups, dtype=inputs[0].dtype, layout=self.layout, bias=self.bias, residual=self.residual,
            activation=self.activation,
        )  # fmt: skip

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        layer = self.layer(inputs)
        return self.check_epilogue(inputs, layer.K, TensorType(layer.y_shape, layer.dtype))

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        if self.layout == "NHWC":
            first = (array.transpose(CHANNELS_FIRST) if array.ndim == 4 else array for array in inputs)
            return replace(self, layout="NCHW").evaluate(*first).transpose(CHANNELS_LAST)
        x, w, *rest = inputs
        (top, bottom), (left, right) = self.padding
        x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
        N, _, H, W = x.shape
        K, channels, R, S = w.shape
        span = (R - 1) * self.dilation[0] + 1, (S - 1) * self.dilation[1] + 1
        P, Q = (H - span[0]) // self.stride[0] + 1, (W - span[1]) // self.stride[1] + 1
        x = x.reshape(N, self.groups, channels, H, W)
        y = np.zeros((N, self.groups, K // self.groups, P * Q), np.result_type(x, w))
        for r in range(R):
            for s in range(S):
                rows, columns = (
                    slice(tap * d, tap * d + (count - 1) * step + 1, step)
                    for tap, d, count, step in zip((r, s), self.dilation, (P, Q), self.stride, strict=True)
                )
                y += w[:, :, r, s].reshape(self.groups, -1, channels) @ x[:, :, :, rows, columns].reshape(
                    N, self.groups, channels, P * Q
                )
        return self.finish(y.reshape(N, K, P, Q), rest, (K, 1, 1))


@dataclass(frozen=True, kw_only=True)
class ConvTranspose(Product):
    """The transpose of a 2-D convolution, of `x` (N, K, P, Q) with filters `w` (K, C/groups, R, S).

    Stride, padding, dilation and groups are those of the convolution, whose input has the output's shape.
    `extra_size` are rows and columns by which the output is larger than it has to be.
    """

    stride: Pair = (1, 1)
    padding: Sides = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    extra_size: Pair = (0, 0)

    def layer(self, inputs: Sequence[TensorType]) -> ConvLayer:
        """The layer, in direction dgrad, that computes it."""
        checked_images(inputs)
        (N, K, P, Q), w = inputs[0].shape, inputs[1]
        if len(w.shape) != 4 or w.shape[0] != K or w.dtype != inputs[0].dtype:
            raise ConfigError(f"expected filters {inputs[0].dtype} ({K}, C/groups, R, S), got {w}")
        _, channels, R, S = w.shape
        H, W = (
            (count - 1) * step + (taps - 1) * d + 1 - sum(sides) + extra
            for count, step, taps, d, sides, extra in zip(
                (P, Q), self.stride, (R, S), self.dilation, self.padding, self.extra_size, strict=True
            )
        )
        layer = ConvLayer(
            N=N, C=channels * self.groups, H=H, W=W, K=K, R=R, S=S, stride=self.stride, padding=self.padding,
            dilation=self.dilation, groups=self.groups, dtype=inputs[0].dtype, direction="dgrad", bias=self.bias,
            residual=self.residual, activation=self.activation,
        )  # fmt: skip
        if (layer.P, layer.Q) != (P, Q):
            raise ConfigError(f"extra_size={self.extra_size}: expected less than the stride {self.stride}")
        return layer

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        layer = self.layer(inputs)
        return self.check_epilogue(inputs, layer.C, TensorType(layer.x_shape, layer.dtype))

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        x, w, *rest = inputs
        layer = self.layer([TensorType(x.shape), TensorType(w.shape)])
        (top, bottom), (left, right) = self.padding
        H, W, groups = layer.H + top + bottom, layer.W + left + right, self.groups
        y = np.zeros((layer.N, groups, layer.C // groups, H, W), np.result_type(x, w))
        x = x.reshape(layer.N, groups, layer.K // groups, -1)
        for r in range(layer.R):
            for s in range(layer.S):
                taps = w[:, :, r, s].reshape(groups, layer.K // groups, -1)
                part = np.swapaxes(taps, 1, 2) @ x
                rows, columns = (
                    slice(tap * d, tap * d + (count - 1) * step + 1, step)
                    for tap, d, count, step in zip((r, s), self.dilation, (layer.P, layer.Q), self.stride, strict=True)
                )
                y[..., rows, columns] += part.reshape(*part.shape[:3], layer.P, layer.Q)
        y = y.reshape(layer.N, layer.C, H, W)[:, :, top : H - bottom, left : W - right]
        return self.finish(y, rest, (layer.C, 1, 1))


@dataclass(frozen=True, kw_only=True)
class MatMul(Product):
    """Products of matrices: `a` (..., M, K) and `b` (..., K, N), or (..., N, K) where it is transposed."""

    transposed: bool = False

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        a, b = inputs[0].shape, inputs[1].shape
        if len(a) < 2 or len(b) < 2:
            raise ConfigError(f"expected matrices, got {a} and {b}")
        if inputs[0].dtype != inputs[1].dtype:
            raise ConfigError(f"expected matrices of one type, got {inputs[0].dtype} and {inputs[1].dtype}")
        depth, columns = (b[-1], b[-2]) if self.transposed else (b[-2], b[-1])
        if a[-1] != depth:
            raise ConfigError(f"expected b of {a[-1]} rows, got {depth}")
        try:
            batch = np.broadcast_shapes(a[:-2], b[:-2])
        except ValueError:
            raise ConfigError(f"{a[:-2]} and {b[:-2]} do not broadcast") from None
        return self.check_epilogue(inputs, columns, TensorType((*batch, a[-2], columns), inputs[0].dtype))

    def layer(self, inputs: Sequence[TensorType]) -> ConvLayer | None:
        """The 1x1 convolution that computes it, of rows as pixels with channels last; None where there is none."""
        a, b = inputs[0], inputs[1]
        if len(b.shape) != 2 or not self.transposed or a.dtype not in DTYPES or 0 in (*a.shape, *b.shape):
            return None
        return ConvLayer(
            N=1, C=a.shape[-1], H=1, W=int(np.prod(a.shape[:-1])), K=b.shape[0], R=1, S=1, dtype=a.dtype,
            layout="NHWC", bias=self.bias, residual=self.residual, activation=self.activation,
        )  # fmt: skip

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        a, b, *rest = inputs
        return self.finish(a @ (np.swapaxes(b, -1, -2) if self.transposed else b), rest, (-1,))
