"""Convolution as one matrix product: im2col, whole or in blocks.

Chellapilla, Puri and Simard, "High Performance Convolutional Neural Networks for Document Processing" (2006).

With a column of C/groups R S input pixels for every output pixel, per group, `fwd: y = W cols(x)`,
`wgrad: dw = dy cols(x)^T`, and `dgrad: dx = col2im(W^T dy)`, col2im being the adjoint of the gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from autoconv.algorithm import Array, Params
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.common import (
    NumpyAlgorithm,
    NumpyKernel,
    Scratch,
    Span,
    at,
    call_seconds,
    filters,
    finish,
    gather,
    images,
    spans,
    spread,
)
from autoconv.layer import ConvLayer

TILES = ("image", "batch", "rows")


def _pointwise(layer: ConvLayer) -> bool:
    """Whether the input already is its own matrix of columns."""
    return layer.R == layer.S == 1 and layer.stride == (1, 1) and layer.padding == ((0, 0), (0, 0))


def _cached_rows(layer: ConvLayer, device: Any) -> int:
    """How many output rows have columns that stay in cache while BLAS runs over them."""
    row = layer.C * layer.R * layer.S * layer.Q * layer.accumulator.itemsize
    return max(1, int(device.machine.caches[2]) // (8 * row))


class NumpyGemmKernel(NumpyKernel):
    """One product per tile: an image, all images together, or output rows whose columns stay in cache."""

    def __init__(self, layer: ConvLayer, device: CPU, tile: str) -> None:
        super().__init__(layer, device)
        self._images = layer.N if tile == "batch" else 1
        self._rows = min(layer.P, _cached_rows(layer, device)) if tile == "rows" else layer.P
        wide = layer.accumulator
        self._narrow = layer.numpy_dtype != wide
        # Images of an NCHW batch lie apart: to make one matrix of several, they are copied together.
        self._copied = self._narrow or (layer.layout == "NCHW" and self._images > 1)
        tiles = -(-layer.N // self._images) * -(-layer.P // self._rows)
        pixels, weights = self._images * self._rows * layer.Q, math.prod(layer.w_shape)
        arrays: dict[str, Any] = {}
        if self._copied or not _pointwise(layer):
            arrays["columns"] = (layer.C * layer.R * layer.S * pixels,), wide
        if self._copied:
            arrays["pixels"] = (layer.K * pixels,), wide
        if layer.direction == "wgrad" and tiles > 1:
            arrays["product"] = (weights,), wide
        if self._narrow and layer.direction == "wgrad":
            arrays["sums"] = (weights,), wide
        if self._narrow and layer.direction == "dgrad":
            arrays["sums"] = (self._images, *layer.x_shape[1:]), wide
        self.scratch = Scratch(**arrays)
        if self._narrow and layer.direction != "wgrad":
            self.packed_bytes = weights * wide.itemsize

    def transform(self, w: Array, packed: Array) -> None:
        """Widen the filters to the type of the sums."""
        self._widened(packed)[...] = w

    def _widened(self, packed: Array) -> Array:
        return filters(packed.view(self.layer.accumulator).reshape(self.layer.w_shape), self.layer)

    def compute(
        self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, scratch: dict[str, Array]
    ) -> None:
        layer = self.layer
        if self.packed_bytes:
            b = self._widened(b)
        if layer.direction == "fwd":
            self._fwd(a, self._weights(b), out, bias, residual, scratch)
        elif layer.direction == "dgrad":
            self._dgrad(a, self._weights(b).swapaxes(1, 2), out, bias, residual, scratch)
        else:
            self._wgrad(a, b, self._weights(out), scratch)

    def _weights(self, w: Array) -> Array:
        """Filters as one matrix per group, rows of columns in the order `_cut` has them."""
        ordered = w if self.layer.layout == "NCHW" else w.transpose(0, 1, 3, 4, 2)
        return ordered.reshape(*w.shape[:2], -1)

    def _cut(self, flat: Array, channels: int, taps: Span, images: int, rows: int) -> tuple[Array, Array]:
        """A tile of scratch memory, as one matrix per group and as `R, S, N, groups, channels, rows, columns`."""
        groups, (R, S), Q = self.layer.groups, taps, self.layer.Q
        height, width = channels // groups * R * S, images * rows * Q
        flat = flat[: groups * height * width]
        if self.layer.layout == "NCHW":
            pixels = flat.reshape(groups, channels // groups, R, S, images, rows, Q)
            return flat.reshape(groups, height, width), pixels.transpose(2, 3, 4, 0, 1, 5, 6)
        pixels = flat.reshape(groups, images, rows, Q, R, S, channels // groups)
        return flat.reshape(groups, width, height).swapaxes(1, 2), pixels.transpose(4, 5, 1, 0, 6, 2, 3)

    def _tiles(self) -> Iterator[tuple[Span, Span]]:
        return itertools.product(spans(self.layer.N, self._images), spans(self.layer.P, self._rows))

    def _taps(self, first_row: int) -> Iterator[tuple[int, int, Span]]:
        """Every tap, with the input pixel that the tile's first output pixel meets through it."""
        layer = self.layer
        for r, s in itertools.product(range(layer.R), range(layer.S)):
            top = first_row * layer.stride[0] + r * layer.dilation[0] - layer.padding[0][0]
            yield r, s, (top, s * layer.dilation[1] - layer.padding[1][0])

    def _columns(self, x: Array, n: Span, p: Span, scratch: dict[str, Array]) -> Array:
        """The columns of a tile, one matrix per group; those of a pointwise layer are the input itself."""
        layer = self.layer
        if "columns" not in scratch:
            return _flat(x[at(n)][..., slice(*p), :])
        taps = layer.R, layer.S
        matrix, columns = self._cut(scratch["columns"], layer.C, taps, n[1] - n[0], p[1] - p[0])
        for r, s, start in self._taps(p[0]):
            gather(columns[r, s], x[at(n)], layer.stride, start)
        return matrix

    def _gradients(self, dy: Array, n: Span, p: Span, scratch: dict[str, Array]) -> Array:
        """A tile of the output's gradient, one matrix per group."""
        tile = dy[at(n)][..., slice(*p), :]
        if not self._copied:
            return _flat(tile)
        matrix, pixels = self._cut(scratch["pixels"], self.layer.K, (1, 1), n[1] - n[0], p[1] - p[0])
        pixels[0, 0] = tile
        return matrix

    def _fwd(
        self, x: Array, w: Array, y: Array, bias: Array | None, residual: Array | None, scratch: dict[str, Array]
    ) -> None:
        for n, p in self._tiles():
            rows = (*at(n), slice(None), slice(None), slice(*p))
            sums = target = y[rows]
            matrix = _flat(target)
            if self._copied:
                matrix, pixels = self._cut(scratch["pixels"], self.layer.K, (1, 1), n[1] - n[0], p[1] - p[0])
                sums = pixels[0, 0]
            np.matmul(w, self._columns(x, n, p, scratch), out=matrix)
            finish(sums, target, bias, None if residual is None else residual[rows], self.layer.activation)

    def _dgrad(
        self, dy: Array, w: Array, dx: Array, bias: Array | None, residual: Array | None, scratch: dict[str, Array]
    ) -> None:
        layer = self.layer
        for n, p in self._tiles():
            gradients = self._gradients(dy, n, p, scratch)
            added = None if residual is None else residual[at(n)]
            if "columns" not in scratch:  # whose tiles are whole images
                np.matmul(w, gradients, out=_flat(dx[at(n)]))
                finish(dx[at(n)], dx[at(n)], bias, added, layer.activation)
                continue
            sums = target = dx[at(n)]
            if self._narrow:
                sums = images(scratch["sums"], layer)[: n[1] - n[0]]
            if p[0] == 0:
                sums[...] = 0
            matrix, columns = self._cut(scratch["columns"], layer.C, (layer.R, layer.S), n[1] - n[0], p[1] - p[0])
            np.matmul(w, gradients, out=matrix)
            for r, s, start in self._taps(p[0]):
                spread(sums, columns[r, s], layer.stride, start)
            if p[1] == layer.P:
                finish(sums, target, bias, added, layer.activation)

    def _wgrad(self, x: Array, dy: Array, dw: Array, scratch: dict[str, Array]) -> None:
        sums = scratch["sums"].reshape(dw.shape) if self._narrow else dw
        for tile, (n, p) in enumerate(self._tiles()):
            gradients, columns = self._gradients(dy, n, p, scratch), self._columns(x, n, p, scratch)
            into = scratch["product"].reshape(dw.shape) if tile else sums
            np.matmul(gradients, columns.swapaxes(1, 2), out=into)
            if tile:
                sums += into
        if self._narrow:
            dw[...] = sums


def _flat(block: Array) -> Array:
    """`N, groups, channels, rows, columns` as one matrix per group; a view, as the layouts are chosen."""
    return block.transpose(1, 2, 0, 3, 4).reshape(*block.shape[1:3], -1)


class NumpyGemm(NumpyAlgorithm):
    """im2col and BLAS; `tile` is what one product covers."""

    name = "numpy.gemm"
    exact = True
    kernel = NumpyGemmKernel

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return ({"tile": tile} for tile in TILES)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        if params["tile"] not in TILES:
            reasons.append(f"tile: expected {' or '.join(TILES)}, got {params['tile']}")
        if params["tile"] == "batch" and layer.N == 1:
            reasons.append("tile=batch: expected several images, got one, for which it is the same as tile=image")
        if params["tile"] == "rows" and _pointwise(layer):
            reasons.append("tile=rows: expected columns to gather, got a 1x1 filter without stride and padding")
        elif params["tile"] == "rows" and _cached_rows(layer, device) >= layer.P:
            reasons.append("tile=rows: expected columns of an image that exceed the cache; else it is tile=image")
        return reasons

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        moved = 0.0
        if not _pointwise(layer):
            columns = layer.N * layer.P * layer.Q * layer.C * layer.R * layer.S * layer.accumulator.itemsize
            moved = columns * (1.0 if params["tile"] == "rows" else 2.0)
        tiles = {
            "image": layer.N,
            "batch": 1,
            "rows": layer.N * math.ceil(layer.P / _cached_rows(layer, device)),
        }[str(params["tile"])]
        calls = tiles * (2 * layer.R * layer.S + 8) * call_seconds(device)
        return layer.flops / (0.7 * device.peak_flops(layer.dtype)) + (layer.bytes + moved) / device.bandwidth() + calls
