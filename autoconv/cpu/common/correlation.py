"""The geometry of correlations: every forward pass and gradient of the input is one, or several side by side."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class CorrelationAxis:
    """One spatial axis of a correlation: output `i` sees, through tap `t`, input `stride*i + offset + dilation*t`.

    There are `count` outputs, which lie at `output_start + output_stride*i` of the result; tap `t` is the filter's row
    or column `taps[t]`. Inputs outside `0 .. size - 1` are padding.
    """

    size: int
    count: int
    stride: int
    offset: int
    dilation: int
    taps: tuple[int, ...]
    output_start: int = 0
    output_stride: int = 1

    @property
    def tap_step(self) -> int:
        """Rows or columns of the filter from one tap to the next."""
        return self.taps[1] - self.taps[0] if len(self.taps) > 1 else 0

    @functools.cached_property
    def seen(self) -> float:
        """The part of all pairs of outputs and taps in which the tap falls inside the input."""
        starts = (self.offset + self.dilation * t for t in range(len(self.taps)))
        bounds = ((max(-(at // self.stride), 0), min(-((at - self.size) // self.stride), self.count)) for at in starts)
        return sum(max(end - first, 0) for first, end in bounds) / max(1, self.count * len(self.taps))

    def sees(self, position: int, tap: int) -> bool:
        """Whether the tap falls inside the input."""
        return 0 <= self.stride * position + self.offset + self.dilation * tap < self.size

    def pattern(self, position: int, length: int) -> tuple[tuple[bool, ...], ...]:
        """For every tap, which of `length` outputs see it."""
        corners = ((p, t) for p in (position, position + length - 1) for t in (0, len(self.taps) - 1))
        if all(self.sees(p, t) for p, t in corners):  # as on all of a long axis but its ends
            return _everywhere(len(self.taps), length)
        starts = (self.stride * position + self.offset + self.dilation * t for t in range(len(self.taps)))
        bounds = ((-(at // self.stride), -((at - self.size) // self.stride)) for at in starts)
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
    taps in reverse; with strides it is one for each residue of the output's position modulo the stride (a
    polyphase component), since those see different taps (Dumoulin and Visin, 2016, arXiv:1603.07285).
    """

    N: int
    C: int
    K: int
    groups: int
    rows: CorrelationAxis
    columns: CorrelationAxis
    input: Strides
    output: Strides
    filters: FilterStrides

    @property
    def macs(self) -> int:
        """Multiply-adds, padding included."""
        taps = len(self.rows.taps) * len(self.columns.taps)
        return self.N * self.groups * self.K * self.C * taps * self.rows.count * self.columns.count


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class PitchedLayer(ConvLayer):
    """A layer whose input and output lie in larger arrays: so many elements are from one of their images to the next.

    Its residual lies as its output does.
    """

    input_pitch: int
    output_pitch: int

    def __init__(self, *, input_pitch: int, output_pitch: int, **layer: Any) -> None:
        super().__init__(**layer)
        object.__setattr__(self, "input_pitch", input_pitch)
        object.__setattr__(self, "output_pitch", output_pitch)

    def __repr__(self) -> str:  # tells kernels apart
        return f"PitchedLayer({self.key()!r}, {self.input_pitch}, {self.output_pitch})"


def pitched(layer: ConvLayer, input_pitch: int | None = None, output_pitch: int | None = None) -> ConvLayer:
    """The same layer with that many elements from image to image; images without a gap where none are given."""
    kept = {f.name: getattr(layer, f.name) for f in fields(ConvLayer)}
    whole = ConvLayer(**kept)
    given = (input_pitch, output_pitch)
    found = [own if pitch is None else pitch for pitch, own in zip(given, pitches(whole), strict=True)]
    if tuple(found) == pitches(whole):
        return whole
    return PitchedLayer(**kept, input_pitch=found[0], output_pitch=found[1])


def pitches(layer: ConvLayer) -> tuple[int, int]:
    """Elements from one image of the input, and of the output, to the next."""
    if isinstance(layer, PitchedLayer):
        return layer.input_pitch, layer.output_pitch
    return math.prod(layer.input_shapes[0][1:]), math.prod(layer.output_shape[1:])


def _image_strides(layer: ConvLayer, channels: int, height: int, width: int) -> Strides:
    group = channels // layer.groups
    if layer.layout == "NCHW":
        return Strides(channels * height * width, height * width, width, 1, group * height * width)
    return Strides(height * width * channels, 1, width * channels, channels, group)


def _filter_strides(layer: ConvLayer) -> FilterStrides:
    C, R, S = layer.C // layer.groups, layer.R, layer.S
    k, c, r, s = (C * R * S, R * S, S, 1) if layer.layout == "NCHW" else (R * S * C, 1, S * C, C)
    return FilterStrides(k, c, r, s, layer.K // layer.groups * k)


@functools.lru_cache(16)  # every candidate of a grid asks for those of its layer
def correlations(layer: ConvLayer) -> tuple[Correlation, ...]:
    """The correlations that together compute a layer's `fwd` or `dgrad`."""
    x = _image_strides(layer, layer.C, layer.H, layer.W)
    y = _image_strides(layer, layer.K, layer.P, layer.Q)
    w = _filter_strides(layer)
    given, made = pitches(layer)
    x, y = (
        strides._replace(image=pitch)
        for strides, pitch in zip((x, y), (given, made) if layer.direction == "fwd" else (made, given), strict=True)
    )
    inputs, outputs = (layer.H, layer.W), (layer.P, layer.Q)
    extents = (layer.R, layer.S)
    if layer.direction == "fwd":
        rows, columns = (
            CorrelationAxis(
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
                outputs[a], inputs[a], layer.stride[a], layer.padding[a][0], layer.dilation[a], extents[a], residue
            )
            for residue in range(min(layer.stride[a], inputs[a]))
        ]
        for a in (0, 1)
    ]
    back = FilterStrides(w.c, w.k, w.r, w.s, w.group)
    return tuple(
        Correlation(layer.N, layer.K // layer.groups, layer.C // layer.groups, layer.groups, r, s, y, x, back)
        for r in axes[0]
        for s in axes[1]
    )


def correlation_count(layer: ConvLayer) -> int:
    """How many those are, counted without making them."""
    return math.prod(map(min, layer.stride, (layer.H, layer.W))) if layer.direction == "dgrad" else 1


@functools.lru_cache(256)
def flat_correlations(layer: ConvLayer) -> tuple[Correlation, ...]:
    """The correlations of a layer; of those that see each pixel once, in place, all rows are a single long one."""
    return tuple(map(_flattened, correlations(layer)))


def _flattened(c: Correlation) -> Correlation:
    h, w = c.rows, c.columns
    plain = all(a.taps == (0,) and (a.size, a.stride, a.offset, a.output_stride) == (a.count, 1, 0, 1) for a in (h, w))
    if not plain or any(t.row != w.size * t.column for t in (c.input, c.output)):
        return c
    return replace(c, rows=replace(h, size=1, count=1), columns=replace(w, size=h.size * w.size, count=h.size * w.size))


def _gradient_axis(
    size: int, total: int, stride: int, padding: int, dilation: int, extent: int, residue: int
) -> CorrelationAxis:
    """Output `i + (residue + padding - r*dilation) / stride` saw input `residue + stride*i` through tap `r`."""
    taps = [r for r in reversed(range(extent)) if (residue + padding - r * dilation) % stride == 0]
    places = [(residue + padding - r * dilation) // stride for r in taps]
    apart = places[1] - places[0] if len(taps) > 1 else 1
    count = (total - residue + stride - 1) // stride
    return CorrelationAxis(size, count, 1, places[0] if taps else 0, apart, tuple(taps), residue, stride)
