"""What several engines share: every direction as correlations, packed filters, the store with its tail."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoconv.cpu.codegen.ir import Function, Module, Type, Value, i64, ptr, widened
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a correlation: output position `i` sees inputs `step*i + first + gap*t`, tap `t`.

    Outputs lie at `start + stride*i` for `i < count`; tap `t` is the filter's row or column `taps[t]`. What
    lies outside `0 .. size - 1` is padding.
    """

    size: int
    count: int
    step: int
    first: int
    gap: int
    taps: tuple[int, ...]
    start: int = 0
    stride: int = 1

    def sees(self, position: int, tap: int) -> bool:
        """Whether the tap falls inside the input."""
        return 0 <= self.step * position + self.first + self.gap * tap < self.size

    def pattern(self, position: int, length: int) -> tuple[tuple[bool, ...], ...]:
        """For every tap, which of `length` outputs see it."""
        corners = ((p, t) for p in (position, position + length - 1) for t in (0, len(self.taps) - 1))
        if all(self.sees(p, t) for p, t in corners):  # as on all of a long axis but its ends
            return _everywhere(len(self.taps), length)
        starts = (self.step * position + self.first + self.gap * t for t in range(len(self.taps)))
        bounds = ((-(at // self.step), -((at - self.size) // self.step)) for at in starts)
        return tuple(_between(length, min(max(a, 0), length), min(max(b, 0), length)) for a, b in bounds)


@functools.lru_cache(64)
def _everywhere(taps: int, length: int) -> tuple[tuple[bool, ...], ...]:
    """One pattern for all tiles inside: with long filters each is large."""
    return ((True,) * length,) * taps


@functools.lru_cache(1024)
def _between(length: int, first: int, end: int) -> tuple[bool, ...]:
    return tuple(first <= i < end for i in range(length))


class Strides(NamedTuple):
    """Elements between neighbours in an image tensor, and from group to group."""

    image: int
    channel: int
    row: int
    column: int
    group: int


class FilterStrides(NamedTuple):
    """Elements between neighbours in the filters as one correlation sees them."""

    k: int
    c: int
    r: int
    s: int
    group: int


@dataclass(frozen=True)
class Correlation:
    """`out[n,k] = sum over c of in[n,c] * w[k,c]`, on two axes; `C` and `K` count one group's channels.

    The forward pass is one. The gradient of the input is one with input and output channels exchanged and
    taps in reverse; with strides it is one for each residue of the output's position modulo the stride, since
    those see different taps (Dumoulin and Visin, arXiv:1603.07285).
    """

    N: int
    C: int
    K: int
    groups: int
    rows: Axis
    columns: Axis
    input: Strides
    output: Strides
    filters: FilterStrides

    @property
    def macs(self) -> int:
        """Multiply-adds, padding included."""
        taps = len(self.rows.taps) * len(self.columns.taps)
        return self.N * self.groups * self.K * self.C * taps * self.rows.count * self.columns.count


def _image_strides(layer: ConvLayer, channels: int, height: int, width: int) -> Strides:
    group = channels // layer.groups
    if layer.layout == "NCHW":
        return Strides(channels * height * width, height * width, width, 1, group * height * width)
    return Strides(height * width * channels, 1, width * channels, channels, group)


def _filter_strides(layer: ConvLayer) -> FilterStrides:
    C, R, S = layer.C // layer.groups, layer.R, layer.S
    k, c, r, s = (C * R * S, R * S, S, 1) if layer.layout == "NCHW" else (R * S * C, 1, S * C, C)
    return FilterStrides(k, c, r, s, layer.K // layer.groups * k)


def correlations(layer: ConvLayer) -> tuple[Correlation, ...]:
    """The correlations that together compute a layer's `fwd` or `dgrad`."""
    x = _image_strides(layer, layer.C, layer.H, layer.W)
    y = _image_strides(layer, layer.K, layer.P, layer.Q)
    w = _filter_strides(layer)
    inputs, outputs = (layer.H, layer.W), (layer.P, layer.Q)
    extents = (layer.R, layer.S)
    if layer.direction == "fwd":
        rows, columns = (
            Axis(
                inputs[a],
                outputs[a],
                layer.stride[a],
                -layer.padding[a][0],
                layer.dilation[a],
                tuple(range(extents[a])),
            )
            for a in (0, 1)
        )
        C, K = layer.C // layer.groups, layer.K // layer.groups
        return (Correlation(layer.N, C, K, layer.groups, rows, columns, x, y, w),)
    axes = [
        [
            _gradient_axis(
                outputs[a], inputs[a], layer.stride[a], layer.padding[a][0], layer.dilation[a], extents[a], start
            )
            for start in range(min(layer.stride[a], inputs[a]))
        ]
        for a in (0, 1)
    ]
    back = FilterStrides(w.c, w.k, w.r, w.s, w.group)
    return tuple(
        Correlation(layer.N, layer.K // layer.groups, layer.C // layer.groups, layer.groups, r, s, y, x, back)
        for r in axes[0]
        for s in axes[1]
    )


def _gradient_axis(size: int, total: int, stride: int, padding: int, dilation: int, extent: int, start: int) -> Axis:
    """Inputs `start + stride*i` were seen, through tap `r`, by output `i + (start + padding - r*dilation) / stride`."""
    taps = [r for r in reversed(range(extent)) if (start + padding - r * dilation) % stride == 0]
    places = [(start + padding - r * dilation) // stride for r in taps]
    gap = places[1] - places[0] if len(taps) > 1 else 1
    count = (total - start + stride - 1) // stride
    return Axis(size, count, 1, places[0] if taps else 0, gap, tuple(taps), start, stride)


def load_range(k: Function, p: Value, lanes: int, low: int, high: int) -> Value:
    """Lanes low .. high - 1 of the vector at `p`; the others are not touched and hold anything."""
    if (low, high) == (0, lanes):
        return k.load(p, lanes)
    if k.module.instruction_set == "avx512":
        return k.load(p, lanes, mask=k.mask(high, lanes, low))
    element = p.type.to
    assert element is not None
    v = k.zero(widened(element), lanes)
    for lane in range(low, high):
        v = k.insert(v, k.load(p + lane), lane)
    return v


def store_range(k: Function, v: Value, p: Value, low: int, high: int) -> None:
    """Store lanes low .. high - 1 of a vector whose lane 0 belongs at `p`.

    Without AVX-512 in pieces of 2**n lanes: AVX2's masked stores are slow on some processors.
    """
    lanes = v.type.lanes
    if (low, high) == (0, lanes):
        k.store(v, p)
    elif k.module.instruction_set == "avx512":
        k.store(v, p, mask=k.mask(high, lanes, low))
    else:
        while low < high:
            n = 1 << (high - low).bit_length() - 1
            piece = k.extract(v, low) if n == 1 else k.shuffle(v, v, range(low, low + n))
            k.store(piece, p + low)
            low += n


@dataclass(frozen=True)
class Tail:
    """What is fused into the store: `act(v + bias + residual)`."""

    bias: bool
    residual: bool
    relu: bool

    @classmethod
    def of(cls, layer: ConvLayer) -> Tail:
        """A layer's."""
        return cls(layer.bias, layer.residual, layer.activation == "relu")

    def added(self, k: Function, v: Value, bias: Value | None, residual: Value | None) -> Value:
        """What is stored in place of sums; bias and residual are given where there are any."""
        if bias is not None:
            v = v + bias
        if residual is not None:
            v = v + residual
        return k.relu(v) if self.relu else v


def emit_store(
    m: Module,
    c: Correlation,
    tail: Tail,
    BK: int,
    element: Type,
    shape: tuple[int, int],
    strides: tuple[int, int, int],
) -> Function:
    """`function(sums, out, residual, bias, channels left)`: store a tile of sums with its tail.

    Sums lie `[BK/lanes][pixels][lanes]` in memory, pixels row by row of `shape`; `strides` are the elements between
    channels, rows and columns of the output; `out` and `residual` point at the tile's first element, `bias` at its
    first channel. One text serves all microkernels of a shape.
    """
    sums, lanes = widened(element), m.lanes(element)
    data = ptr(element)
    k = m.function(f"store_{len(m.functions)}", ptr(sums), data, data, data, i64, internal=True)
    tile, out, residual, bias, left = k.args
    pixels = shape[0] * shape[1]
    with k.loop(0, BK // lanes) as v:
        here = tile + v * (pixels * lanes)
        values = [k.load(here + n * lanes, lanes) for n in range(pixels)]
        place = v * (lanes * strides[0])
        some = lanes if c.K % BK == 0 else left - v * lanes
        _Store(k, tail, shape, strides, out + place, residual + place, bias + v * lanes).write(values, some)
    return k


@dataclass(frozen=True)
class _Store:
    """Writes the store of a vector of channels of a tile, whose pixels lie row by row of `shape`.

    `strides` are the elements between channels, rows and columns of the output; `out` and `residual` point at the
    first channel of the first pixel, `bias` at the first channel.
    """

    k: Function
    tail: Tail
    shape: tuple[int, int]
    strides: tuple[int, int, int]
    out: Value
    residual: Value
    bias: Value

    def write(self, values: Sequence[Value], left: int | Value) -> None:
        """Store a vector for every pixel, of whose channels only `left` exist (a number where that is known)."""
        if self.strides[0] == 1:
            self._channels_last(values, left)
            return
        k, lanes, pixels = self.k, values[0].type.lanes, len(values)
        for first in range(0, pixels, lanes):
            block = [values[n] if n < pixels else values[0] for n in range(first, first + lanes)]
            for channel, column in enumerate(k.transpose(block)):
                if isinstance(left, Value):
                    with k.if_(left > channel):
                        self._plane(column, first, channel)
                elif channel < left:
                    self._plane(column, first, channel)

    def _channels_last(self, values: Sequence[Value], left: int | Value) -> None:
        k, lanes, tail = self.k, values[0].type.lanes, self.tail
        mask = k.mask(left, lanes)
        b = k.load(self.bias, lanes, mask=mask) if tail.bias else None
        for n, v in enumerate(values):
            place = n // self.shape[1] * self.strides[1] + n % self.shape[1] * self.strides[2]
            r = k.load(self.residual + place, lanes, mask=mask) if tail.residual else None
            k.store(tail.added(k, v, b, r), self.out + place, mask=mask)

    def _plane(self, v: Value, first: int, channel: int) -> None:
        """Pixels first .. of one channel, lanes as pixels."""
        k, tail, (height, width), lanes = self.k, self.tail, self.shape, v.type.lanes
        last = min(first + lanes, height * width)
        b = k.broadcast(self.bias + channel, lanes) if tail.bias else None
        between, down, across = self.strides
        whole = down == width * across  # rows follow one another: the tile is one run of pixels
        length = height * width if whole else width
        low = first
        while low < last:
            row, column = divmod(low, length)
            high = min(last, low - column + length)
            if across == 1:
                place = channel * between + row * down + column - (low - first)
                r = load_range(k, self.residual + place, lanes, low - first, high - first) if tail.residual else None
                store_range(k, tail.added(k, v, b, r), self.out + place, low - first, high - first)
            else:  # only a strided gradient's, which has no tail
                for n in range(low, high):
                    place = channel * between + n // width * down + n % width * across
                    k.store(k.extract(v, n - first), self.out + place)
            low = high
