"""Implicit GEMM in scalar arithmetic: any layer, as one matrix product to a group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, Launch, ceil_div, no_tile, tile_of
from autoconv.cuda.common.gemm_tile import Fetch, GemmTile, single
from autoconv.cuda.common.model import Demand, beyond_cache, streaming
from autoconv.cuda.common.split import PRODUCT, Parts, SplitProduct, split_constants, splits
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

LEAST_SLICES = 4  # of the depth, to a part
# Products to a float32 sum, at most: of 4608 positive ones, rounding additions lose 2.9e-6 of it, more than the cap.
LONGEST_SUM = 1024
EXTENTS = ("BM", "BN", "BK", "TM", "TN")
TILES = (
    GemmTile(128, 128, 16, 8, 8, blocks=2),
    GemmTile(256, 64, 16, 8, 8, blocks=1),
    GemmTile(128, 64, 16, 8, 8, blocks=3),
    GemmTile(96, 128, 16, 8, 8, blocks=2),
    GemmTile(64, 64, 16, 4, 8, blocks=4),
    GemmTile(32, 128, 16, 4, 8, blocks=3),
    GemmTile(32, 64, 16, 4, 4, blocks=5),
)


def extents(layer: ConvLayer) -> tuple[int, int, int]:
    """Rows, columns and depth of one group's matrix product."""
    C, K = layer.C // layer.groups, layer.K // layer.groups
    taps, places = layer.R * layer.S, layer.N * layer.P * layer.Q
    return {
        "fwd": (K, places, C * taps),
        "dgrad": (C, layer.N * layer.H * layer.W, K * taps),
        "wgrad": (K, C * taps, places),
    }[layer.direction]


class Gemm(SplitProduct):
    """Warp-tiled, double-buffered, with several tile shapes; split along the depth where tiles are few.

    The lowering of convolution to a matrix product that is never stored: Chetlur, Woolley, Vandermersch, Cohen, Tran,
    Catanzaro & Shelhamer, "cuDNN: Efficient Primitives for Deep Learning" (2014), arXiv:1410.0759.
    """

    name = "gemm"
    files = ("gemm/gemm.cu",)

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        rows, columns, depth = extents(layer)
        for tile in TILES:
            blocks = ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups
            wanted = int(device.facts["multiprocessors"]) * tile.blocks
            for split in splits(blocks, wanted, ceil_div(depth, tile.BK), LEAST_SLICES):
                yield {name: int(getattr(tile, name)) for name in EXTENTS} | {"SPLIT": split}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        missing = no_tile(TILES, params, *EXTENTS)
        if not missing and layer.dtype == "float64":
            missing = _tile(params).no_float64()
        return super().unfit(layer, params) + missing

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        tile, split = _tile(params), int(params["SPLIT"])
        rows, columns, _ = extents(layer)
        grid = ceil_div(columns, tile.BN), ceil_div(rows, tile.BM), layer.groups * split
        shared = tile.shared(layer.accumulator.itemsize)
        if layer.dtype == "float64":
            tile = tile.halved()
        constants = (*tile.constants, *split_constants(params), ("STRETCHES", _stretches(layer, params)))
        product = Unit("gemm", *self.files, layer, grid, tile.threads, tile.blocks, shared, constants=constants)
        if not _summed_apart(layer, params):
            return (product,)
        blocks = ceil_div(math.prod(layer.output_shape), 4 * product.threads)
        return product, replace(product, function="gemm_sum", grid=(blocks, 1, 1), shared=0)

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        if not _summed_apart(layer, params):
            return super().build(layer, device, params)
        product, total = self.load(device, self.units(layer, params))
        summing = ("workspace", "out", "bias", "residual")
        steps: list[tuple[Launch, tuple[str, ...]]] = [(product, PRODUCT), (total, summing)]
        return Chain(steps, self.workspace_bytes(layer, device, params))

    def parts(self, layer: ConvLayer, params: Params) -> Parts:
        tile, (rows, columns, _) = _tile(params), extents(layer)
        return Parts(
            ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups, tile.BM * tile.BN, tile.TM * tile.TN
        )

    def scratch_bytes(self, layer: ConvLayer, params: Params) -> int:
        if _stretches(layer, params) == 1:
            return super().scratch_bytes(layer, params)
        return int(params["SPLIT"]) * math.prod(layer.output_shape) * layer.accumulator.itemsize

    def slice_slots(self, layer: ConvLayer, params: Params) -> float:
        """Instructions of a warp to a slice of the depth, as its machine code has them."""
        return _tile(params).slice_slots(*_fetches(layer), layer.accumulator.itemsize)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, (unit, *total) = _tile(params), self.units(layer, params)
        slices = ceil_div(ceil_div(extents(layer)[2], tile.BK), int(params["SPLIT"]))
        cached = tile.BK * (tile.BM + tile.BN * fresh_share(layer, tile.BN)) * layer.itemsize
        divided = int(params["SPLIT"]) > 1
        memory = layer.bytes + beyond_cache(device, divided * self.scratch_bytes(layer, params))
        sums = _stretches(layer, params)
        product = tile.demand(unit, slices, _fetches(layer), layer.accumulator.itemsize, cached, memory, sums)
        if not total:
            return [product, *self.sum_demands(unit, layer, self.parts(layer, params), params)]
        moved = math.prod(layer.output_shape) * layer.itemsize + self.scratch_bytes(layer, params)
        return [product, replace(streaming(total[0], moved), memory=0.0)]  # counted with the product


def fresh_share(layer: ConvLayer, columns: int) -> float:
    """Of the pixels that a block reads of a channel, those that it has not just read for another tap.

    In NCHW all taps of a channel follow each other, and the first cache holds what so many columns of the product see.
    """
    if layer.layout == "NHWC" or layer.direction == "wgrad":
        return 1.0
    dgrad = layer.direction == "dgrad"
    width, stride = (layer.W, 1) if dgrad else (layer.Q, layer.stride[0])
    rows = ceil_div(columns, width) * stride + layer.filter_extent[0] - stride
    seen = max(rows, 1) * min((layer.Q if dgrad else layer.W), columns + layer.filter_extent[1])
    return min(1.0, seen / (columns * layer.R * layer.S))


def _fetches(layer: ConvLayer) -> tuple[Fetch, Fetch]:
    """Of the flat operand and the pixels: runs as in `gemm.cu`, and instructions as counted in its machine code."""
    direction, last, wide = layer.direction, layer.layout == "NHWC", layer.itemsize
    C, K, places = layer.C // layer.groups, layer.K // layer.groups, layer.P * layer.Q
    same = layer.R * layer.S == 1 and layer.stride == (1, 1) and not any(map(any, layer.padding))
    if direction == "fwd":
        flat = Fetch(4, 4, 2.0) if C * layer.R * layer.S % 4 == 0 else single(wide, 2.0)
    elif last:
        flat = Fetch(4, 1, 4.0) if (C if direction == "dgrad" else K) % 4 == 0 else single(wide, 4.0)
    elif direction == "dgrad":
        flat = single(wide, 2.0)
    else:
        flat = Fetch(4, 4, 4.0) if places % 4 == 0 else single(wide, 4.0)
    if last:
        together = (K if direction == "dgrad" else C) % 4 == 0
        pixels = Fetch(4, 1 if direction == "wgrad" else 4, 8.0) if together else single(wide, 12.0)
    elif same and places % 4 == 0:
        pixels = Fetch(4, 4 if direction == "wgrad" else 1, 4.0)
    else:
        pixels = single(wide, 7.0 if direction == "wgrad" else 3.0)
    return flat, pixels


def _stretches(layer: ConvLayer, params: Params) -> int:
    """In how many stretches a block sums its share of the depth; only float32 needs more than one."""
    if layer.dtype != "float32":
        return 1
    BK = int(params["BK"])
    slices = ceil_div(ceil_div(extents(layer)[2], BK), int(params["SPLIT"]))
    return ceil_div(slices * BK, LONGEST_SUM)


def _summed_apart(layer: ConvLayer, params: Params) -> bool:
    """Whether the parts are in stretches, and a kernel of its own sums them."""
    return int(params["SPLIT"]) > 1 and _stretches(layer, params) > 1


def _tile(params: Params) -> GemmTile:
    return tile_of(TILES, params, *EXTENTS)
