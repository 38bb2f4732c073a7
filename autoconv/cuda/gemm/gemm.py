"""Implicit GEMM in scalar arithmetic: any layer, as one matrix product to a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoconv.algorithm import Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import ceil_div, no_tile, roofline, scalar, tile_of
from autoconv.cuda.common.gemm_tile import GemmTile
from autoconv.cuda.common.split import SplitProduct, splits, summing
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

LEAST_SLICES = 4  # of the depth, to a part
EXTENTS = ("BM", "BN", "BK", "TM", "TN")
TILES = (
    GemmTile(128, 128, 8, 8, 8, blocks=2),
    GemmTile(256, 64, 8, 8, 8, blocks=1),
    GemmTile(128, 64, 8, 8, 8, blocks=3),
    GemmTile(96, 128, 8, 8, 8, blocks=2),
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
        constants = (*tile.constants, ("SPLIT", split))
        product = Unit("gemm", *self.files, layer, grid, tile.threads, tile.blocks, shared, constants=constants)
        if split == 1:
            return (product,)
        return product, Unit(
            "gemm_sum", *self.files, layer, summing(layer, tile.threads), tile.threads, tile.blocks, constants=constants
        )

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        rows, columns, depth = extents(layer)
        tile, split = _tile(params), int(params["SPLIT"])
        blocks = ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups * split
        multiprocessors = int(device.facts["multiprocessors"])
        # whole waves of whole tiles are computed, whatever part of them is used
        waves = ceil_div(blocks, multiprocessors * tile.blocks)
        computed = 2.0 * waves * multiprocessors * tile.blocks * tile.BM * tile.BN * depth / split
        intensity = 2 * tile.BM * tile.BN / (tile.BM + tile.BN)
        efficiency = 0.8 * min(1.0, intensity / 64) * (1.0 if tile.TM == tile.TN == 8 else 0.85)
        seconds = computed / (efficiency * device.peak_flops(scalar(layer)))
        scratch = 2 * self.workspace_bytes(layer, device, params) / device.bandwidth()
        return max(seconds, roofline(layer, device, 1.0)) + scratch + 3e-6 * (split > 1)


def _tile(params: Params) -> GemmTile:
    return tile_of(TILES, params, *EXTENTS)
