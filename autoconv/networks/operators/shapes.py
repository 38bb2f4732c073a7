"""What moves elements and computes nothing: concatenation, slices, padding, transposes, new shapes, resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoconv.common.arrays import CHANNELS_LAST
from autoconv.common.types import DTYPES
from autoconv.errors import ConfigError
from autoconv.networks.operators.base import Operator, TensorType, moved_axis, normalised_axis


@dataclass(frozen=True)
class Reshape(Operator):
    """The same elements in another shape."""

    shape: tuple[int, ...]

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        if math.prod(self.shape) != math.prod(inputs[0].shape) or min(self.shape, default=0) < 0:
            raise ConfigError(f"shape={self.shape}: expected as many elements as {inputs[0].shape} has")
        return TensorType(self.shape, inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        return inputs[0].reshape(self.shape)


@dataclass(frozen=True)
class Transpose(Operator):
    """Dimensions in another order."""

    order: tuple[int, ...]

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        shape = inputs[0].shape
        if sorted(self.order) != list(range(len(shape))):
            raise ConfigError(f"order={self.order}: expected every dimension of {shape} once")
        return TensorType(tuple(shape[n] for n in self.order), inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        return inputs[0].transpose(self.order)


@dataclass(frozen=True)
class Concat(Operator):
    """Arrays one after the other along an axis."""

    axis: int

    def channels_last(self) -> Concat:
        return replace(self, axis=moved_axis(self.axis))

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        shapes = [t.shape for t in inputs]
        axis = normalised_axis(self.axis, len(shapes[0]))
        if axis != self.axis:
            raise ConfigError(f"axis={self.axis}: expected it counted from the front")
        if len({t.dtype for t in inputs}) != 1 or len({(*s[:axis], *s[axis + 1 :]) for s in shapes}) != 1:
            raise ConfigError(f"expected arrays of one type that differ in dimension {axis} alone")
        whole = sum(shape[axis] for shape in shapes)
        return TensorType((*shapes[0][:axis], whole, *shapes[0][axis + 1 :]), inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        return np.concatenate(inputs, axis=self.axis)


@dataclass(frozen=True)
class Slice(Operator):
    """Of every dimension so many elements, from a first one on, in steps that may be negative."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        shape = inputs[0].shape
        for extent, start, count, step in zip(shape, self.starts, self.counts, self.steps, strict=True):
            last = start + (count - 1) * step
            if count < 1 or not 0 <= start < extent or not 0 <= last < extent:
                raise ConfigError(f"{count} elements from {start} in steps of {step} do not lie within {extent}")
        return TensorType(self.counts, inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        places = zip(self.starts, self.counts, self.steps, strict=True)
        stops = [(start, start + count * step, step) for start, count, step in places]
        return inputs[0][tuple(slice(a, b if b >= 0 else None, step) for a, b, step in stops)]


@dataclass(frozen=True)
class Pad(Operator):
    """Elements added around an array."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    value: float = 0.0

    def channels_last(self) -> Pad:
        before, after = (tuple(sides[n] for n in CHANNELS_LAST) for sides in (self.before, self.after))
        return replace(self, before=before, after=after)

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        shape = inputs[0].shape
        if len(self.before) != len(shape) or min((*self.before, *self.after), default=0) < 0:
            raise ConfigError(f"pads={self.before}, {self.after}: expected {len(shape)} of at least 0 on each side")
        return TensorType(
            tuple(a + e + b for a, e, b in zip(self.before, shape, self.after, strict=True)), inputs[0].dtype
        )

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        return np.pad(inputs[0], list(zip(self.before, self.after, strict=True)), constant_values=self.value)


@dataclass(frozen=True)
class Resize(Operator):
    """Along one axis, weighted sums of elements: output i is the sum over t of `weights[i][t] * x[indices[i][t]]`.

    Interpolation in several dimensions is one after the other, as its weights are products. Integers are only copied:
    how often their sums are rounded, and which way, differs from one library to the next.
    """

    axis: int
    indices: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    def channels_last(self) -> Resize:
        return replace(self, axis=moved_axis(self.axis))

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        shape = inputs[0].shape
        axis = normalised_axis(self.axis, len(shape))
        if axis != self.axis:
            raise ConfigError(f"axis={self.axis}: expected it counted from the front")
        if not all(0 <= i < shape[axis] for row in self.indices for i in row):
            raise ConfigError(f"indices: expected 0 to {shape[axis] - 1}")
        terms = {len(row) for row in (*self.indices, *self.weights)}
        if len(terms) != 1 or 0 in terms or len(self.indices) != len(self.weights):
            raise ConfigError("expected as many indices and weights for every output, and at least one")
        if inputs[0].dtype not in DTYPES and any(row != (1.0,) for row in self.weights):
            raise ConfigError(f"expected floats to interpolate, got {inputs[0].dtype}")
        return TensorType((*shape[:axis], len(self.indices), *shape[axis + 1 :]), inputs[0].dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        (x,) = inputs
        weights = np.asarray(self.weights, x.dtype)
        shape = [1] * x.ndim
        shape[self.axis] = len(self.indices)
        terms = (
            np.take(x, [row[t] for row in self.indices], axis=self.axis) * weights[:, t].reshape(shape)
            for t in range(weights.shape[1])
        )
        return np.asarray(sum(terms))
