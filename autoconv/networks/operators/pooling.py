"""What gathers neighbours: pooling, reductions, normalisation, softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.errors import ConfigError
from autoconv.layer import Layout, Pair, Sides
from autoconv.networks.operators.base import (
    Operator,
    TensorType,
    checked_images,
    checked_pairs,
    in_layout,
    in_nchw,
    moved_axis,
    normalised_axis,
)
from autoconv.networks.operators.elementwise import FLOATS

Affine = Literal["elements", "rows"]  # what a scale and a shift of normalised rows have numbers for


@dataclass(frozen=True, kw_only=True)
class Pool(Operator):
    """The largest or the average element of windows of (N, C, H, W), or in NHWC of (N, H, W, C).

    The average is that of the elements inside the image; with `include_padding`, padding counts as zeros. Rows and
    columns in `overhang`, at the bottom and the right, are reached by windows, too, and never counted.
    """

    reduction: Literal["max", "mean"]
    window: Pair
    stride: Pair = (1, 1)
    padding: Sides = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    overhang: Pair = (0, 0)
    include_padding: bool = False
    layout: Layout = "NCHW"

    def channels_last(self) -> Pool:
        return replace(self, layout="NHWC")

    @property
    def kind(self) -> str:
        return f"{self.reduction}_pool"

    def spans(self) -> Pair:
        """Rows and columns that a window spans."""
        rows, columns = ((count - 1) * d + 1 for count, d in zip(self.window, self.dilation, strict=True))
        return rows, columns

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        checked_images(inputs)
        checked_pairs(window=self.window, stride=self.stride, dilation=self.dilation)
        N, C, H, W = in_nchw(self.layout, inputs[0].shape)
        sizes = []
        for extent, span, step, sides, over in zip(
            (H, W), self.spans(), self.stride, self.padding, self.overhang, strict=True
        ):
            before, after = sides
            padded = before + extent + after + over
            if span > padded:
                raise ConfigError(f"a window of {span} is larger than the padded extent {padded}")
            if max(sides) >= span or min(*sides, over) < 0:
                raise ConfigError(f"padding={sides}: expected 0 to {span - 1}, less than the window's extent")
            sizes.append((padded - span) // step + 1)
        return TensorType(in_layout(self.layout, (N, C, *sizes)), inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        (x,) = inputs
        if self.layout == "NHWC":
            return replace(self, layout="NCHW").evaluate(x.transpose(CHANNELS_FIRST)).transpose(CHANNELS_LAST)
        P, Q = self.infer([TensorType(x.shape)]).shape[2:]
        if self.reduction == "max":
            least = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
            return np.asarray(np.maximum.reduce(list(self._taps(x, least, least, P, Q))))
        return np.asarray(sum(self._taps(x, 0.0, 0.0, P, Q)) / self.counts(x.shape))

    def counts(self, shape: Sequence[int]) -> np.ndarray:
        """Of how many elements every average is, for images of a shape: an array of (P, Q)."""
        P, Q = self.infer([TensorType(tuple(shape))]).shape[2:]
        return np.asarray(sum(self._taps(np.ones(shape[2:]), 1.0 if self.include_padding else 0.0, 0.0, P, Q)))

    def _taps(self, x: np.ndarray, padding: float, overhang: float, P: int, Q: int) -> Iterator[np.ndarray]:
        """For every place in a window, what all windows see there."""
        rest = [(0, 0)] * (x.ndim - 2)
        x = np.pad(x, [*rest, *self.padding], constant_values=padding)
        x = np.pad(x, [*rest, *((0, over) for over in self.overhang)], constant_values=overhang)
        for r in range(self.window[0]):
            for s in range(self.window[1]):
                rows, columns = (
                    slice(tap * d, tap * d + (count - 1) * step + 1, step)
                    for tap, d, count, step in zip((r, s), self.dilation, (P, Q), self.stride, strict=True)
                )
                yield x[..., rows, columns]


def overhang_of(extent: int, span: int, step: int, sides: Pair) -> int:
    """The overhang that a last window needs which begins inside the image or the padding before it (`ceil_mode`)."""
    count = -(-(extent + sum(sides) - span) // step) + 1
    if (count - 1) * step >= extent + sides[0]:
        count -= 1  # it would begin in the padding behind the image
    return max((count - 1) * step + span - extent - sum(sides), 0)


def pool_of(
    reduction: Literal["max", "mean"],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Pair],
    dilation: Sequence[int],
    overhang: Sequence[int],
    include_padding: bool,
    *axes: int | None,
) -> Pool:
    """Pooling along two of any number of dimensions, or along one and what is not pooled."""
    values = {"window": window, "stride": stride, "padding": padding, "dilation": dilation, "overhang": overhang}
    none = {"window": 1, "stride": 1, "padding": (0, 0), "dilation": 1, "overhang": 0}
    pairs: dict[str, Any] = {
        name: tuple(none[name] if axis is None else given[axis] for axis in axes) for name, given in values.items()
    }
    return Pool(reduction=reduction, include_padding=include_padding, **pairs)


@dataclass(frozen=True)
class Reduce(Operator):
    """The mean, sum or largest element along axes, which stay with extent 1."""

    reduction: Literal["mean", "sum", "max"]
    axes: tuple[int, ...]

    @property
    def kind(self) -> str:
        return f"{self.reduction}_of_axes"

    def channels_last(self) -> Reduce | None:
        if self.axes != (2, 3) or self.reduction == "sum":
            return None  # no kernel
        return replace(self, axes=tuple(map(moved_axis, self.axes)))

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        shape = inputs[0].shape
        for axis in self.axes:
            if normalised_axis(axis, len(shape), "axes") != axis:
                raise ConfigError(f"axes={self.axes}: expected them counted from the front")
        if len({*self.axes}) != len(self.axes):
            raise ConfigError(f"axes={self.axes}: expected different ones")
        if 0 in shape:
            raise ConfigError("expected at least one element")
        return TensorType(tuple(1 if n in self.axes else e for n, e in enumerate(shape)), inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        (x,) = inputs
        if self.reduction == "max":
            return np.asarray(x.max(axis=self.axes, keepdims=True))
        if self.reduction == "sum":
            return np.asarray(x.sum(axis=self.axes, keepdims=True))
        return np.asarray(x.mean(axis=self.axes, keepdims=True, dtype=np.float64)).astype(x.dtype)  # rounded once


@dataclass(frozen=True, kw_only=True)
class LRN(Operator):
    """Local response normalisation across channels: `x / (bias + alpha / size * sum of squares) ** beta`.

    The sum is over `size` channels around each (Krizhevsky, Sutskever and Hinton, 2012, section 3.3).
    """

    size: int
    alpha: float
    beta: float
    bias: float

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        if len(inputs[0].shape) < 2:
            raise ConfigError(f"expected channels as the second dimension, got {inputs[0].shape}")
        if self.size < 1:
            raise ConfigError(f"size={self.size}: expected at least 1")
        for name in ("alpha", "beta", "bias"):
            if not abs(getattr(self, name)) <= float(np.finfo(np.float32).max):
                raise ConfigError(f"{name}={getattr(self, name)}: expected a number within the range of float32")
        return inputs[0]

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        (x,) = inputs
        before, after = (self.size - 1) // 2, self.size // 2
        sums = np.zeros_like(x)
        for c in range(x.shape[1]):
            sums[:, c] = np.square(x[:, max(0, c - before) : c + after + 1]).sum(axis=1)
        return x / (self.bias + self.alpha / self.size * sums) ** self.beta


@dataclass(frozen=True)
class Softmax(Operator):
    """`exp(x) / sum(exp(x))` along an axis."""

    axis: int

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        if normalised_axis(self.axis, len(inputs[0].shape)) != self.axis or not math.prod(inputs[0].shape):
            raise ConfigError(f"axis={self.axis}: expected it counted from the front, of an array with elements")
        if inputs[0].dtype not in FLOATS:
            raise ConfigError("expected an array of floats")
        return inputs[0]

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        e = np.exp(inputs[0] - inputs[0].max(axis=self.axis, keepdims=True))
        return np.asarray(e / e.sum(axis=self.axis, keepdims=True))


@dataclass(frozen=True, kw_only=True)
class Normalization(Operator):
    """Rows over the root of their mean square and `epsilon`, less their mean before that where they are `centred`.

    A row is what lies along the axes from `axis` on. So layers are normalised (Ba, Kiros and Hinton, 2016, equation
    4), single channels of images (Ulyanov, Vedaldi and Lempitsky, 2016, equation 3) and, not centred, layers by the
    root of their mean square (Zhang and Sennrich, 2019, equation 4). Where a scale and a shift follow as inputs of one
    dimension, they have a number for each of the `elements` of a row; or for each of so many `rows`, and for the next
    ones the same again.
    """

    axis: int
    epsilon: float
    centred: bool = True
    affine: Affine | None = None

    def rows(self, shape: Sequence[int]) -> Pair:
        """How many rows an array of a shape has, and of how many elements."""
        return math.prod(shape[: self.axis]), math.prod(shape[self.axis :])

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        given, *affine = inputs
        if normalised_axis(self.axis, len(given.shape)) != self.axis or 0 in given.shape:
            raise ConfigError(f"axis={self.axis}: expected it counted from the front, of an array with elements")
        if len(affine) != (2 if self.affine else 0) or any(t != affine[0] for t in affine):
            raise ConfigError(f"affine={self.affine}: expected a scale and a shift of one shape, or neither")
        if affine and affine[0].dtype != given.dtype:
            raise ConfigError("expected arrays of one type")
        rows, length = self.rows(given.shape)
        for shape in (t.shape for t in affine):
            if len(shape) != 1 or (shape[0] != length if self.affine == "elements" else rows % max(1, shape[0])):
                raise ConfigError(
                    f"scale and shift: expected numbers for {self.affine} of {rows}x{length}, got {shape}"
                )
        return given

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        x, *affine = inputs
        y = x.reshape(self.rows(x.shape))
        if self.centred:
            y = y - y.mean(axis=1, keepdims=True, dtype=np.float64).astype(x.dtype)  # rounded once
        y = y / np.sqrt(np.square(y).mean(axis=1, keepdims=True) + self.epsilon)
        if affine:
            scale, shift = affine
            if self.affine == "rows":
                scale, shift = (np.tile(values, len(y) // len(values))[:, np.newaxis] for values in affine)
            y = y * scale + shift
        return np.asarray(y.reshape(x.shape))
