"""Implicit GEMM in scalar arithmetic: any layer, as one matrix product to a group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.source import Constant, Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, Launch, ceil_div, roofline, scalar, summing
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

MOST_PARTS = 32


class Tile(NamedTuple):
    """What a block computes, what a thread computes of it, and how many blocks a multiprocessor shall hold."""

    BM: int
    BN: int
    BK: int
    TM: int
    TN: int
    blocks: int

    @property
    def threads(self) -> int:
        """Of a block: its warps compute 4 TM x 8 TN each."""
        return self.BM // (4 * self.TM) * (self.BN // (8 * self.TN)) * 32

    def shared(self, accumulator: int) -> int:
        """Bytes of shared memory: both slices twice, rows padded by four."""
        return 2 * self.BK * (self.BM + 4 + self.BN + 4) * accumulator

    def halved(self) -> Tile:
        """The same for float64, whose sums and slices take twice the room."""
        return self._replace(blocks=max(self.blocks // 2, 1))

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The names by which kernels know the tile."""
        names = [(name, int(getattr(self, name))) for name in ("BM", "BN", "BK", "TM", "TN")]
        return (*names, ("PRODUCT_THREADS", self.threads), ("PRODUCT_BLOCKS", self.blocks))


TILES = (
    Tile(128, 128, 8, 8, 8, blocks=2),
    Tile(256, 64, 8, 8, 8, blocks=1),
    Tile(128, 64, 8, 8, 8, blocks=3),
    Tile(96, 128, 8, 8, 8, blocks=2),
    Tile(64, 64, 16, 4, 8, blocks=4),
    Tile(32, 128, 16, 4, 8, blocks=3),
    Tile(32, 64, 16, 4, 4, blocks=5),
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


class Gemm(CudaAlgorithm):
    """Warp-tiled, double-buffered, with several tile shapes; split along the depth where tiles are few.

    The lowering of convolution to a matrix product that is never stored: Chetlur et al., "cuDNN:
    Efficient Primitives for Deep Learning" (2014).
    """

    name = "gemm"
    exact = True
    files = ("gemm/gemm.cu",)

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        rows, columns, depth = extents(layer)
        for tile in TILES:
            blocks = ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups
            wanted = device.facts["multiprocessors"] * tile.blocks
            parts = {1}
            if blocks < wanted:  # fill the device once, or half of it, if the depth is worth dividing
                most = min(MOST_PARTS, depth // (4 * tile.BK))
                parts |= {split for split in (wanted // blocks, wanted // blocks // 2) if 1 < split <= most}
            for split in sorted(parts):
                yield {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "TM": tile.TM, "TN": tile.TN, "SPLIT": split}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        tile, reasons = _tile(params), []
        split = int(params["SPLIT"])
        if not 1 <= split <= MOST_PARTS:
            reasons.append(f"SPLIT={split}: allowed are 1 to {MOST_PARTS}")
        if tile is None:
            return [*reasons, f"no such tile: {', '.join(f'{t.BM}x{t.BN}x{t.BK}' for t in TILES)} exist"]
        if layer.dtype == "float64" and tile.TM * tile.TN > 32:
            reasons.append(f"float64: {tile.TM}x{tile.TN} sums do not fit a thread's registers")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        tile, split = _tile(params), int(params["SPLIT"])
        assert tile is not None
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

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        split = int(params["SPLIT"])
        return split * math.prod(layer.output_shape) * layer.accumulator.itemsize if split > 1 else 0

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        rows, columns, depth = extents(layer)
        tile, split = _tile(params), int(params["SPLIT"])
        assert tile is not None
        blocks = ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups * split
        multiprocessors = int(device.facts["multiprocessors"])
        # whole waves of whole tiles are computed, whatever part of them is wanted
        waves = ceil_div(blocks, multiprocessors * tile.blocks)
        computed = 2.0 * waves * multiprocessors * tile.blocks * tile.BM * tile.BN * depth / split
        intensity = 2 * tile.BM * tile.BN / (tile.BM + tile.BN)
        efficiency = 0.8 * min(1.0, intensity / 64) * (1.0 if tile.TM == tile.TN == 8 else 0.85)
        seconds = computed / (efficiency * device.peak_flops(scalar(layer)))
        scratch = 2 * self.workspace_bytes(layer, device, params) / device.bandwidth()
        return max(seconds, roofline(layer, device, 1.0)) + scratch + 3e-6 * (split > 1)

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        product, *rest = self.load(device, self.units(layer, params))
        steps: list[tuple[Launch, tuple[str, ...]]] = [(product, ("a", "b", "out", "bias", "residual", "workspace"))]
        if rest:
            steps.append((rest[0], ("workspace", "out", "bias", "residual")))
        return Chain(steps, self.workspace_bytes(layer, device, params))


def _tile(params: Params) -> Tile | None:
    return next(
        (tile for tile in TILES if all(params[n] == getattr(tile, n) for n in ("BM", "BN", "BK", "TM", "TN"))), None
    )
