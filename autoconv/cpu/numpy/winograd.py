"""Winograd's minimal filtering in NumPy: F(m x m, r x r) for unit stride.

Winograd, "Arithmetic Complexity of Computations" (1980); Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks" (2016).

Per tile, `y = AT ((G w GT) * (BT x B)) A`, where the elementwise product, summed over channels, is one matrix product
per point of the tile. dgrad is the same with the filters rotated by 180 degrees and transposed. wgrad is
F(r x r, m x m): the gradient of y takes the filter's place, and tiles are summed before the last transform.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from autoconv.accuracy import bound_for
from autoconv.algorithm import Array, Params
from autoconv.common.winograd_math import transforms
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.common import (
    NumpyAlgorithm,
    NumpyKernel,
    Scratch,
    Span,
    at,
    blocks,
    call_seconds,
    finish,
    gather,
    multiply,
    spans,
)
from autoconv.layer import ConvLayer

CAPS = {(2, 3): 4e-6, (4, 3): 1e-5, (6, 3): 3e-5, (4, 5): 2e-5}  # float32 error by (m, r)
PACK_BYTES = 256 << 10  # of each temporary while filters are transformed


def _sandwich(matrix: Array, tiles: Array, half: Array, out: Array) -> Array:
    """`matrix @ tile @ matrix.T` for `tiles` of shape rows, columns, anything; through the flat array `half`."""
    rows, columns = matrix.shape
    rest = math.prod(tiles.shape[2:])
    half = half[: rows * columns * rest]
    np.matmul(matrix, tiles.reshape(columns, -1), out=half.reshape(rows, -1))
    result = out[: rows * rows * rest]
    np.matmul(matrix, half.reshape(rows, columns, rest), out=result.reshape(rows, rows, rest))
    return result.reshape(rows, rows, *tiles.shape[2:])


class NumpyWinogradKernel(NumpyKernel):
    """Blocks of tiles small enough for the cache, all channels at once."""

    def __init__(self, layer: ConvLayer, device: CPU, m: int, r: int) -> None:
        super().__init__(layer, device)
        weights = layer.direction == "wgrad"
        self.m, self.r, self.tile = m, r, m + r - 1
        exact = transforms(r, m) if weights else transforms(m, r)
        self.AT, self.G, self.BT = exact.arrays(layer.accumulator)
        forward = layer.direction != "dgrad"
        # Where the first tile starts in the source; the rotated filter reaches back from the other side.
        (top, _), (left, _) = layer.padding
        self.starts = (-top, -left) if forward else (top - r + 1, left - r + 1)
        rows, columns = (layer.P, layer.Q) if forward else (layer.H, layer.W)
        self.rows, self.columns = -(-rows // m), -(-columns // m)
        planes = self.tile**2 * max(layer.C, layer.K) * layer.accumulator.itemsize
        self.at_once = blocks(layer.N, self.rows, max(1, device.machine.caches[2] // (4 * planes * self.columns)))
        tiles = self.at_once[0] * self.at_once[1] * self.columns
        block = (self.tile**2 * max(layer.C, layer.K) * tiles,), layer.accumulator
        products = self.tile**2 * layer.K * (layer.C // layer.groups)
        if weights:
            matrices = (products,), layer.accumulator
            self.scratch = Scratch(a=block, b=block, c=block, sums=matrices, product=matrices)
        else:
            self.scratch = Scratch(a=block, b=block)
            self.packed_bytes = products * layer.accumulator.itemsize

    def transform(self, w: Array, packed: Array) -> None:
        """Transform the filters: `G w GT`, as tile, tile, groups, outputs, inputs."""
        layer = self.layer
        w = self._rotated(w)
        into = packed.view(layer.accumulator).reshape(self.tile, self.tile, *w.shape[:3])
        groups, outputs, inputs = w.shape[:3]
        most = max(1, PACK_BYTES // (self.tile**2 * layer.accumulator.itemsize * inputs))
        for g, k in itertools.product(spans(groups, max(1, most // outputs)), spans(outputs, most)):
            part = np.ascontiguousarray(w[at(g, k)].transpose(3, 4, 0, 1, 2), layer.accumulator)
            half, out = (np.empty(self.tile**2 * math.prod(part.shape[2:]), layer.accumulator) for _ in range(2))
            into[(slice(None), slice(None), *at(g, k))] = _sandwich(self.G, part, half, out)

    def compute(
        self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, scratch: dict[str, Array]
    ) -> None:
        if self.layer.direction == "wgrad":
            self._wgrad(a, b, out, scratch)
        else:
            self._images(a, b, out, bias, residual, scratch)

    def _rotated(self, w: Array) -> Array:
        """The filters that correlate with this direction's source: for dgrad, rotated by 180 degrees and transposed."""
        return w if self.layer.direction == "fwd" else w.swapaxes(1, 2)[..., ::-1, ::-1]

    def _blocks(self) -> Iterator[tuple[Span, Span]]:
        return itertools.product(spans(self.layer.N, self.at_once[0]), spans(self.rows, self.at_once[1]))

    def _cut(self, flat: Array, size: int, channels: int, images: int, rows: int) -> Array:
        """Scratch memory for size x size points of a block's tiles, in the layer's order of axes."""
        groups = self.layer.groups
        shape = size, size, groups, channels // groups, images, rows, self.columns
        if self.layer.layout == "NHWC":
            shape = size, size, groups, images, rows, self.columns, channels // groups
        return flat[: math.prod(shape)].reshape(shape)

    def _planes(self, block: Array) -> Array:
        """A block seen as points by points, then `N, groups, channels, rows, columns` of tiles."""
        order = (0, 1, 4, 2, 3, 5, 6) if self.layer.layout == "NCHW" else (0, 1, 3, 2, 6, 4, 5)
        return block.transpose(order)

    def _matrices(self, block: Array) -> Array:
        """A block seen as one matrix of channels by tiles for every point and group."""
        groups = block.shape[:3]
        if self.layer.layout == "NCHW":
            return block.reshape(*groups, block.shape[3], -1)
        return block.reshape(*groups, -1, block.shape[-1]).swapaxes(3, 4)

    def _load(self, flat: Array, source: Array, size: int, n: Span, t: Span, starts: Span) -> Array:
        """Tiles of size x size pixels of the source, m apart."""
        channels = source.shape[1] * source.shape[2]
        block = self._cut(flat, size, channels, n[1] - n[0], t[1] - t[0])
        planes = self._planes(block)
        for i, j in itertools.product(range(size), repeat=2):
            start = starts[0] + t[0] * self.m + i, starts[1] + j
            gather(planes[i, j], source[at(n)], (self.m, self.m), start)
        return block

    def _images(
        self, source: Array, packed: Array, out: Array, bias: Array | None, residual: Array | None, scratch: Any
    ) -> None:
        a, b = scratch["a"], scratch["b"]
        groups, outputs, inputs = out.shape[1], out.shape[2], source.shape[2]
        transformed = packed.view(self.layer.accumulator).reshape(self.tile, self.tile, groups, outputs, inputs)
        for n, t in self._blocks():
            tiles = self._load(a, source, self.tile, n, t, self.starts)
            tiles = _sandwich(self.BT, tiles, half=b, out=a)
            products = self._cut(b, self.tile, groups * outputs, n[1] - n[0], t[1] - t[0])
            multiply(transformed, self._matrices(tiles), out=self._matrices(products))
            planes = self._planes(_sandwich(self.AT, products, half=a, out=b))
            for i, j in itertools.product(range(self.m), repeat=2):
                rows = slice(t[0] * self.m + i, t[1] * self.m, self.m)
                where = (*at(n), slice(None), slice(None), rows, slice(j, None, self.m))
                target = out[where]
                sums = planes[i, j][..., : target.shape[-2], : target.shape[-1]]
                part = None if residual is None else residual[where]
                finish(sums, target, bias, part, self.layer.activation)

    def _wgrad(self, x: Array, dy: Array, dw: Array, scratch: dict[str, Array]) -> None:
        a, b, c = scratch["a"], scratch["b"], scratch["c"]
        shape = self.tile, self.tile, *dw.shape[:3]
        sums, product = scratch["sums"].reshape(shape), scratch["product"].reshape(shape)
        for block, (n, t) in enumerate(self._blocks()):
            tiles = self._load(a, x, self.tile, n, t, self.starts)
            tiles = _sandwich(self.BT, tiles, half=b, out=a)
            gradients = self._load(c, dy, self.m, n, t, (0, 0))
            gradients = _sandwich(self.G, gradients, half=b, out=c)
            into = product if block else sums
            np.matmul(self._matrices(gradients), self._matrices(tiles).swapaxes(3, 4), out=into)
            if block:
                sums += product
        filters = _sandwich(self.AT, sums, half=scratch["product"], out=scratch["sums"])
        dw[...] = filters.transpose(2, 3, 4, 0, 1)


class NumpyWinograd(NumpyAlgorithm):
    """F(m x m, r x r) on BLAS."""

    name = "numpy.winograd"
    dilated = False
    stands_in_for = "winograd"
    spreads_nonfinite = True
    kernel = NumpyWinogradKernel

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return ({"m": m, "r": r} for m, r in CAPS)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        m, r = params["m"], params["r"]
        reasons = []
        if (m, r) not in CAPS:
            reasons.append(f"m, r: expected {' or '.join(f'{m}, {r}' for m, r in CAPS)}, got {m}, {r}")
        if (r, r) != (layer.R, layer.S):
            reasons.append(f"filter: expected {r}x{r}, got {layer.R}x{layer.S}")
        if layer.stride != (1, 1):
            reasons.append(f"stride: expected 1x1, got {layer.stride[0]}x{layer.stride[1]}")
        return reasons

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        m, tile = int(params["m"]), int(params["m"]) + int(params["r"]) - 1
        rows, columns = (layer.H, layer.W) if layer.direction == "dgrad" else (layer.P, layer.Q)
        points = layer.N * -(-rows // m) * -(-columns // m) * tile**2
        flops = 2.0 * points * layer.K * (layer.C // layer.groups)
        # Either side is loaded, half transformed and transformed: six passes, half of them in cache.
        passes = 3.0 * points * (layer.C + layer.K) * layer.accumulator.itemsize
        filters = tile**2 * layer.K * (layer.C // layer.groups) * layer.accumulator.itemsize
        traffic = layer.bytes + passes + filters
        # Every point of a tile is loaded by itself, and small products cost BLAS a call each.
        products = tile**2 * (layer.groups if layer.groups < layer.C else 1)
        calls = (3 * tile**2 + 4 * m**2 + products / 10) * call_seconds(device)
        return flops / (0.6 * device.peak_flops(layer.dtype)) + traffic / device.bandwidth() + calls

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, CAPS[int(params["m"]), int(params["r"])])
