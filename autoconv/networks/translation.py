"""`Translation`: one operation of a foreign network while it becomes nodes of a graph; what readers have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NoReturn

import numpy as np

from autoconv.common.epilogue.expressions import Expression
from autoconv.errors import ConfigError
from autoconv.networks.graph import Graph
from autoconv.networks.operators import activations
from autoconv.networks.operators.base import Operator, TensorType
from autoconv.networks.operators.convolution import Conv, ConvTranspose
from autoconv.networks.operators.elementwise import NARROW, Elementwise
from autoconv.networks.operators.pooling import Pool, Reduce
from autoconv.networks.operators.sampling import Sampler
from autoconv.networks.operators.shapes import Concat, Pad, Reshape, Resize, Slice, Transpose
from autoconv.networks.reference import constant_of

Triple = Sequence[int]  # for frames, height and width
Edges = Sequence[tuple[int, int]]  # what is added on both sides of each of the three

FRAMES = Transpose((0, 2, 1, 3, 4))  # channels behind frames, or before them again
LARGEST_CONSTANTS = (1 << 31) - 1  # bytes of all constants of a network
MOST_PLACES = 1 << 24  # of an axis that is padded by what it has: they are listed
LARGEST_EXTENT = 1 << 16  # of an axis that is resized, or repeated: each of its places is a number of its own


class Translation:
    """An operation of a network that is read.

    Parameters
    ----------
    graph : Graph
        What is being made.
    name : str
        What nodes and constants that come from it are called.
    operator : str
        What messages call the operation.
    """

    def __init__(self, graph: Graph, name: str, operator: str) -> None:
        self.graph, self.name, self.operator = graph, name, operator

    def fail(self, message: str) -> NoReturn:
        """Refuse the operation."""
        raise ConfigError(f"{self.graph.name}: node {self.name!r} ({self.operator}): {message}")

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an array of the graph."""
        return self.graph.types[name].shape

    def add(self, operator: Operator, *inputs: str) -> str:
        """A node of the graph; where all its inputs are constants, what it gives, rounded once from float64."""
        graph = self.graph
        if not all(name in graph.constants for name in inputs):
            return graph.add(self.name, operator, *inputs)
        checked = graph.add(self.name, operator, *inputs)
        found = graph.types[checked]
        del graph.nodes[checked], graph.types[checked]
        self.check_room(found)
        value = constant_of(operator, [graph.constants[name] for name in inputs], found)
        return graph.add_constant(self.name, value)

    def apply(self, expression: Expression, *inputs: str) -> str:
        """A function of single elements."""
        return self.add(Elementwise(expression), *inputs)

    def add_constant(self, value: np.ndarray) -> str:
        """A constant of the graph."""
        self.check_room(TensorType(value.shape, value.dtype.name))
        return self.graph.add_constant(self.name, value)

    def check_room(self, found: TensorType) -> None:
        """Refuse constants that do not fit into what a network may have."""
        there = sum(value.nbytes for value in self.graph.constants.values() if value.nbytes > 1 << 16)
        if there + found.nbytes > LARGEST_CONSTANTS:
            self.fail(f"expected at most {LARGEST_CONSTANTS >> 20} MiB of constants in all, got one more of {found}")

    def reshape(self, name: str, shape: Sequence[int]) -> str:
        """An array in another shape; itself, where it has that."""
        shape = tuple(map(int, shape))
        return name if self.shape_of(name) == shape else self.add(Reshape(shape), name)

    def axes(self, given: Sequence[int] | None, rank: int) -> tuple[int, ...]:
        """Axes counted from the front, in order; all of them where none are given."""
        axes = tuple(range(rank)) if given is None else tuple(given)
        if not all(-rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
            self.fail(f"axes={axes}: expected different ones from {-rank} to {rank - 1}")
        return tuple(sorted(axis % rank for axis in axes))

    def slice_axis(self, name: str, axis: int, start: int, count: int, step: int = 1) -> str:
        """So many elements along one axis, and all of the others."""
        shape = self.shape_of(name)
        starts, counts, steps = [0] * len(shape), list(shape), [1] * len(shape)
        starts[axis], counts[axis], steps[axis] = start, count, step
        return self.add(Slice(tuple(starts), tuple(counts), tuple(steps)), name)

    def taken(self, name: str, axis: int, places: Iterable[int]) -> str:
        """What lies at such places of an axis."""
        extent = self.shape_of(name)[axis]
        seen = [int(place) % extent for place in places]
        if seen == [*range(extent)]:
            return name
        if len(seen) > LARGEST_EXTENT:
            self.fail(f"expected at most {LARGEST_EXTENT} places of an axis, got {len(seen)}")
        return self.add(Resize(axis, tuple((place,) for place in seen), ((1.0,),) * len(seen)), name)

    def pad(
        self,
        name: str,
        before: Sequence[int],
        after: Sequence[int],
        mode: Literal["constant", "reflect", "edge", "wrap"] = "constant",
        value: float = 0.0,
    ) -> str:
        """Elements added on each side of each axis, a constant or what NumPy's modes of these names repeat.

        Where the number is negative, so many are cut off.
        """
        shape = self.shape_of(name)
        if min((*before, *after), default=0) < 0:
            starts = tuple(max(-b, 0) for b in before)
            counts = tuple(e - s - max(-a, 0) for e, s, a in zip(shape, starts, after, strict=True))
            name = self.add(Slice(starts, counts, (1,) * len(shape)), name)
            before, after = ([max(n, 0) for n in sides] for sides in (before, after))
        if mode == "constant":
            return self.add(Pad(tuple(before), tuple(after), value), name)
        for axis, sides in enumerate(zip(before, after, strict=True)):
            if sides == (0, 0):
                continue
            extent = self.shape_of(name)[axis]
            if (longest := extent + sum(sides)) > MOST_PLACES:
                self.fail(f"pads: expected at most {MOST_PLACES} places of axis {axis} in mode {mode!r}, got {longest}")
            places = np.pad(np.arange(extent), sides, mode).tolist()
            if self.graph.types[name].dtype == "float32" and len(places) <= LARGEST_EXTENT:
                name = self.taken(name, axis, places)
            elif len(places) > extent:  # kernels copy other types, and more places, as they lie
                ends = places[: sides[0]], places[sides[0] + extent :]
                first, last = (self._slices(name, axis, end) for end in ends)
                name = self.add(Concat(axis), *first, name, *last)
        return name

    def _slices(self, name: str, axis: int, places: Sequence[int]) -> list[str]:
        """What lies at such places of an axis, neighbours that follow each other in one piece, in either direction."""
        found, first = [], 0
        while first < len(places):
            step = -1 if places[first + 1 : first + 2] == [places[first] - 1] else 1
            last = first + 1
            while last < len(places) and places[last] - places[last - 1] == step:
                last += 1
            found.append(self.slice_axis(name, axis, places[first], last - first, step))
            first = last
        return found

    def clip(self, x: str, low: float | None, high: float | None) -> str:
        """An array held within bounds, of which either may be missing; integers within integers exactly."""
        dtype, bounds = np.dtype(self.graph.types[x].dtype), (low, high)
        if dtype.kind not in "iu" or any(isinstance(bound, float) for bound in bounds):
            expression = activations.clip(*(None if bound is None else float(bound) for bound in bounds))
            return x if expression == 0 else self.apply(expression, x)
        limits = np.iinfo(dtype)
        for function, bound in zip(("max", "min"), bounds, strict=True):
            if bound is not None:
                held = np.array(min(max(bound, limits.min), limits.max), dtype)
                x = self.apply((function, 0, 1), x, self.add_constant(held))
        return x

    def conv_transpose(self, operator: ConvTranspose, x: str, w: str) -> str:
        """A transposed convolution; what it adds to the output beyond a layer's sums are rows and columns of zeros."""
        if all(extra < step for extra, step in zip(operator.extra_size, operator.stride, strict=True)):
            return self.add(operator, x, w)
        cut = [min(extra, last) for extra, (_, last) in zip(operator.extra_size, operator.padding, strict=True)]
        (top, bottom), (left, right) = operator.padding
        extra = [n - less for n, less in zip(operator.extra_size, cut, strict=True)]
        down, across = (min(n, step - 1) for n, step in zip(extra, operator.stride, strict=True))
        padding = ((top, bottom - cut[0]), (left, right - cut[1]))
        y = self.add(replace(operator, padding=padding, extra_size=(down, across)), x, w)
        return self.pad(y, (0, 0, 0, 0), (0, 0, extra[0] - down, extra[1] - across))

    def conv_volumes(
        self, x: str, w: str, bias: str | None, stride: Triple, padding: Edges, dilation: Triple, groups: int
    ) -> str:
        """A convolution of (N, C, D, H, W) with filters (K, C/groups, T, R, S), as one of two dimensions.

        The frames that a filter spans are channels of one image.
        """
        (K, channels, T, R, S), N = self.shape_of(w), self.shape_of(x)[0]
        x = self.add(FRAMES, x)
        if any(padding[0]):
            x = self.pad(x, (0, padding[0][0], 0, 0, 0), (0, padding[0][1], 0, 0, 0))
        D, _, H, W = self.shape_of(x)[1:]
        count = (D - (T - 1) * dilation[0] - 1) // stride[0] + 1
        if channels * groups != self.shape_of(x)[2] or count < 1:
            types = self.graph.types
            self.fail(f"expected filters of C/{groups} channels and at most {D} frames, got {types[w]} for {types[x]}")
        x = self.reshape(x, (N, D, groups, channels, H, W))
        taps = [self.slice_axis(x, 1, t * dilation[0], count, stride[0]) for t in range(T)]
        x = self.add(Concat(3), *taps) if T > 1 else taps[0]
        w = self.reshape(self.add(FRAMES, w), (K, T * channels, R, S))
        conv = Conv(
            stride=(stride[1], stride[2]), padding=(padding[1], padding[2]), dilation=(dilation[1], dilation[2]),
            groups=groups,
        )  # fmt: skip
        y = self.add(conv, self.reshape(x, (N * count, groups * T * channels, H, W)), w)
        y = y if bias is None else self.with_bias(y, bias)
        return self.add(FRAMES, self.reshape(y, (N, count, *self.shape_of(y)[1:])))

    def pool_volumes(self, x: str, frames: Pool, images: Pool) -> str:
        """Windows of (N, C, D, H, W): of the pixels of each frame, and then of frames, as the rows of another pool."""
        N, C, D, H, W = self.shape_of(x)
        y = self.add(FRAMES, x)
        if images.window != (1, 1) or images.stride != (1, 1):
            y = self.add(images, self.reshape(y, (N * D, C, H, W)))
            y = self.reshape(y, (N, D, *self.shape_of(y)[1:]))
        if frames.window != (1, 1) or frames.stride != (1, 1):
            y = self._pool_frames(y, frames)
        return self.add(FRAMES, y)

    def _pool_frames(self, x: str, pool: Pool) -> str:
        """Windows along the second axis: a function of single elements of arrays that begin at different frames."""
        shape = self.shape_of(x)
        counts = pool.counts((1, 1, shape[1], 1))
        (before, after), step = pool.padding[0], pool.stride[0]
        if pool.window[0] == shape[1] and not before and len(counts) == 1:
            return self.add(Reduce(pool.reduction, (1,)), x)
        dtype = np.dtype(self.graph.types[x].dtype)
        least = np.iinfo(dtype).min if dtype.kind in "iu" else -math.inf
        after += pool.overhang[0]
        if before or after:
            x = self.pad(x, (0, before, 0, 0, 0), (0, after, 0, 0, 0), value=least if pool.reduction == "max" else 0.0)
        starts = (tap * pool.dilation[0] for tap in range(pool.window[0]))
        y, *taps = (self.slice_axis(x, 1, start, len(counts), step) for start in starts)
        for tap in taps:
            y = self.apply(("max" if pool.reduction == "max" else "add", 0, 1), y, tap)
        if pool.reduction == "max":
            return y
        shares = (1 / counts).astype(dtype).reshape(-1, 1, 1, 1)
        return self.apply(("mul", 0, 1), y, self.add_constant(shares))

    def resize(self, name: str, sampler: Sampler, sizes: Sequence[int], scales: Sequence[float]) -> str:
        """An array of other extents, axis after axis."""
        for axis, (old, new, scale) in enumerate(zip(self.shape_of(name), sizes, scales, strict=True)):
            if (old, scale) == (new, 1.0):
                continue
            if new < 1 or new > LARGEST_EXTENT:
                self.fail(f"sizes={sizes}: expected extents from 1 to {LARGEST_EXTENT}")
            name = self.add(sampler.resize(axis, old, new, scale), name)
        return name

    def check_spread(self, what: str, name: str, over: str) -> None:
        """Refuse an operand that does not become as large as an array by repeating itself along axes."""
        shape = self.shape_of(over)
        try:
            fits = np.broadcast_shapes(self.shape_of(name), shape) == shape
        except ValueError:
            fits = False
        if not fits:
            self.fail(f"{what}: expected a shape that broadcasts to {shape}, got {self.graph.types[name]}")

    def check_channels(self, what: str, name: str, images: str) -> None:
        """Refuse what is not a number for each channel of images."""
        shape = self.shape_of(images)
        if len(shape) < 2 or self.shape_of(name) != (shape[1],):
            self.fail(f"expected a {what} for each of the channels of {shape}, got {self.graph.types[name]}")

    def with_bias(self, y: str, bias: str) -> str:
        """Images with a number for each channel added."""
        self.check_channels("bias", bias, y)
        return self.apply(("add", 0, 1), y, self.reshape(bias, (*self.shape_of(bias), 1, 1)))

    def batch_norm(self, x: str, scale: str, bias: str, mean: str, variance: str, epsilon: float) -> str:
        """`(x - mean) / sqrt(variance + epsilon) * scale + bias`, of numbers for each channel."""
        shape = self.shape_of(x)
        for what, name in (("scale", scale), ("bias", bias), ("mean", mean), ("variance", variance)):
            self.check_channels(what, name, x)
        factor = self.apply(("div", 0, ("sqrt", ("add", 1, epsilon))), scale, variance)
        if self.graph.types[x].dtype in NARROW:
            # The product of mean and factor, rounded to 16 bits, would take from large numbers what makes them differ.
            steps = [("sub", mean), ("mul", factor), ("add", bias)]
        else:
            steps = [("mul", factor), ("add", self.apply(("sub", 0, ("mul", 1, 2)), bias, mean, factor))]
        for function, values in steps:
            x = self.apply((function, 0, 1), x, self.reshape(values, (shape[1], *[1] * (len(shape) - 2))))
        return x


def flattened(shape: Sequence[int], axis: int) -> tuple[int, int]:
    """The extents before an axis as one, and the others as one."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])
