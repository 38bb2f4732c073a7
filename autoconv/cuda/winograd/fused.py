"""Fused Winograd convolution: transforms and products in one kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from autoconv.accuracy import bound_for
from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.occupancy import WARP
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, demand
from autoconv.cuda.winograd.winograd import ERROR_CAPS, THREADS, extents, transforms_text, unit_stride
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

PRODUCT_SHARES = {4: 0.62, 6: 0.55}  # of the loop's instructions, by `side`, as counted in its machine code


class FusedTile(NamedTuple):
    """What a block computes: BM channels of BN tiles of `side` by `side` points, BC channels deep at a time."""

    side: int
    BM: int
    BN: int
    BC: int
    warps: int
    blocks: int  # to a multiprocessor, by design

    def shared(self, last: bool) -> int:
        """Bytes of shared memory: two slices of both operands, or eight channels of sums, as the kernel pads them."""
        points = self.side * self.side
        slices = 2 * points * self.BC * (self.BM + self.BN + (32 // self.BC if last else 0))
        sums = points * 8 * (self.BN + (4 if last else 0 if self.BN % 32 else 16))
        return 4 * max(slices, sums)


TILES = (  # sums to a thread: 128, 128, 64, 96
    FusedTile(4, 64, 32, 4, warps=8, blocks=1),
    FusedTile(4, 64, 32, 8, warps=8, blocks=1),
    FusedTile(4, 32, 32, 8, warps=8, blocks=2),
    FusedTile(6, 64, 16, 4, warps=12, blocks=1),
)


class WinogradFused(CudaAlgorithm):
    """F(m x m, R x R) on tiles of 4 x 4 or 6 x 6 points: F(2,3), F(4,3) and F(2,5), for any groups, stride 1.

    Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks" (2016), section 5, fuse the three
    stages likewise; warps by points as in Yan, Wang & Chu, "Optimizing Batched Winograd Convolution on
    GPUs" (2020).
    """

    name = "winograd.fused"
    files = ("winograd/fused.cu",)
    directions = ("fwd", "dgrad")
    dtypes = ("float32",)
    dilated = False
    spreads_nonfinite = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        taps = layer.R if layer.R in (3, 5) else 3  # others are refused with the reason
        for tile in TILES:
            if tile.side > taps:
                yield {"m": tile.side - taps + 1, "BM": tile.BM, "BN": tile.BN, "BC": tile.BC}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = unit_stride(layer)
        if layer.R != layer.S or layer.R == 1:
            reasons.append(f"filter: expected a square one of more than one tap, got {layer.R}x{layer.S}")
        if _key(layer, params) not in _TILES:
            known = " or ".join(f"{t.BM}x{t.BN}x{t.BC} of {t.side}x{t.side} points" for t in TILES)
            given = f"{params['BM']}x{params['BN']}x{params['BC']} of F({params['m']}, {layer.R})"
            reasons.append(f"BMxBNxBC: expected {known}, got {given}")
        if layer.N * ceil_div(layer.H + layer.R, 2) * ceil_div(layer.W + layer.S, 2) >= 2**30:
            reasons.append("tiles: expected fewer than 2**30")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """The transform of the filters, and the rest."""
        tile = _tile(layer, params)
        m = int(params["m"])
        row_blocks, depth, tiles = _counts(layer, params, tile)
        constants = (
            *(("MH", m), ("MW", m), ("BM", tile.BM), ("BN", tile.BN), ("BC", tile.BC)),
            *(("FUSED_THREADS", 32 * tile.warps), ("FUSED_BLOCKS", tile.blocks)),
            *(("THREADS", THREADS), ("BLOCKS", 4)),
        )
        text = transforms_text(layer, m, m)
        filters = ceil_div(layer.groups * row_blocks * tile.BM * depth, THREADS)
        shared = tile.shared(layer.layout == "NHWC")
        grid = row_blocks * tiles, 1, layer.groups
        return (
            Unit("fused_filter", *self.files, layer, (filters, 1, 1), THREADS, 4, 0, 0, constants, text),
            Unit(
                "winograd_fused",
                *self.files,
                layer,
                grid,
                32 * tile.warps,
                tile.blocks,
                shared,
                shared,
                constants,
                text,
            ),
        )

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        tile = _tile(layer, params)
        row_blocks, depth, _ = _counts(layer, params, tile)
        return 4 * layer.groups * row_blocks * tile.BM * depth * tile.side**2

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, (_, unit) = _tile(layer, params), self.units(layer, params)
        _, depth, _ = _counts(layer, params, tile)
        points, sums = tile.side**2, tile.side**2 * tile.BM * tile.BN
        fed = points * (tile.BM + tile.BN) * 4.0  # of one channel: transformed filters and pixels
        way_out = 4 * sums / WARP
        return [
            demand(
                unit,
                depth * sums / WARP / PRODUCT_SHARES[tile.side] + way_out,
                products=float(depth * sums),
                shared=depth * (2 * fed + sums / 16 * 8.0),
                cached=depth * fed,
                delay=2.0 * MEMORY_CLOCKS + way_out / 4,
                memory=layer.bytes + self.packed_bytes(layer, device, params),
            )
        ]

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, ERROR_CAPS[int(params["m"])])

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        filters, fused = self.load(device, self.units(layer, params))
        return Chain(
            [(fused, ("a", "b", "out", "bias", "residual"))],
            packing=filters,
            packed_bytes=self.packed_bytes(layer, device, params),
        )


_TILES: dict[tuple[int | str, ...], FusedTile] = {(tile.side, tile.BM, tile.BN, tile.BC): tile for tile in TILES}


def _key(layer: ConvLayer, params: Params) -> tuple[int | str, ...]:
    m = params["m"]
    return int(m) + layer.R - 1 if m in ERROR_CAPS else 0, params["BM"], params["BN"], params["BC"]


def _tile(layer: ConvLayer, params: Params) -> FusedTile:
    return _TILES[_key(layer, params)]


def _counts(layer: ConvLayer, params: Params, tile: FusedTile) -> tuple[int, int, int]:
    """Blocks of rows, channels filled up to whole slices, and blocks of tiles."""
    rows, depth, tiles = extents(layer, params)
    return ceil_div(rows, tile.BM), ceil_div(depth, tile.BC) * tile.BC, ceil_div(tiles, tile.BN)
