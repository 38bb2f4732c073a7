"""The gradient of the filters of layers with few input channels, on tensor cores: paced by reading dy once."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autoconv.algorithm import Params
from autoconv.common import split_products
from autoconv.cuda.codegen.occupancy import WARP, limits_of
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import ceil_div, no_tile, tile_of
from autoconv.cuda.common.model import MEMORY_CLOCKS, SHARED_BYTES, Demand, beyond_cache, demand
from autoconv.cuda.common.split import Parts, SplitProduct, split_constants, splits
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

MOST_CHANNELS = 4  # of the input: with more, what is read of dy is no longer most of what is read
DEEP = 16  # pixels of a slice, the depth of a matrix instruction
PARTS, PRODUCTS = 3, 6
ROWS = (8, 4, 2, 1)  # of a tile, to a warp
MOST_SLICES = 8  # of a tile, to a warp: more would bring little, as the border of the patch is small by then
LEAST_TILES = 2  # to a part
BANKS = 32
# Instructions of a warp, as its machine code has them: to two numbers that are split, to a word of the patch on its way
# (borders, place, both numbers, parts), to a slice.
PAIR_SLOTS, WORD_SLOTS, SLICE_SLOTS = 11, 42, 50


class WgradTile(NamedTuple):
    """BM filters and BN columns to a block, WM filters to a warp, and blocks a multiprocessor shall hold.

    Of the warps WARPS_N have other columns, and WARPS_P other rows of pixels. AHEAD words of a patch are on their way to
    a thread that multiplies, as its registers allow.
    """

    BM: int
    BN: int
    WM: int
    WARPS_N: int
    WARPS_P: int
    AHEAD: int
    blocks: int

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.BM // self.WM * self.WARPS_N * self.WARPS_P

    @property
    def fragments(self) -> tuple[int, int]:
        """Of 16 filters and of 8 columns, to a warp."""
        return self.WM // 16, self.BN // self.WARPS_N // 8


TILES = (
    WgradTile(64, 32, 32, WARPS_N=1, WARPS_P=8, AHEAD=4, blocks=1),
    WgradTile(64, 32, 64, WARPS_N=1, WARPS_P=8, AHEAD=4, blocks=1),
    WgradTile(32, 32, 32, WARPS_N=1, WARPS_P=8, AHEAD=4, blocks=2),
    WgradTile(64, 80, 32, WARPS_N=2, WARPS_P=4, AHEAD=1, blocks=1),
    WgradTile(64, 160, 32, WARPS_N=4, WARPS_P=2, AHEAD=1, blocks=1),
    WgradTile(64, 160, 64, WARPS_N=4, WARPS_P=2, AHEAD=2, blocks=1),
    WgradTile(64, 192, 32, WARPS_N=4, WARPS_P=1, AHEAD=8, blocks=1),
    WgradTile(96, 192, 48, WARPS_N=4, WARPS_P=1, AHEAD=4, blocks=1),
)


class Patch(NamedTuple):
    """What a tile of outputs meets of each channel: rows and columns, and how they lie in shared memory.

    `words` are pairs of what two neighbouring outputs see. `conflicts` is how long a read of a fragment takes, by one
    without conflicts.
    """

    rows: int
    width: int
    pitch: int
    plane: int
    conflicts: float


class DirectTensorWgrad(SplitProduct):
    """float32 in NCHW of at most four channels, by six products of three bfloat16 parts, as `gemm.tensor.bf16x6` has them.

    The sum over all pixels of dy times what each tap sees of x, as Chetlur et al., "cuDNN: Efficient Primitives for Deep
    Learning" (2014), compute it: an implicit product whose columns are taps of channels. Here they are few, so a
    block holds all sums, or many, in registers, and reads dy from memory without a way through shared memory. `exact`
    leaves it out, and so does AUTOCONV_SPLIT_PRODUCTS=0.
    """

    name = "direct.tensor.bf16x6.wgrad"
    files = ("direct/tensor_wgrad.cu",)
    directions = ("wgrad",)
    dtypes = ("float32",)
    layouts = ("NCHW",)
    groupings = ("dense",)
    exact = False

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        limits = limits_of(int(device.facts["compute_capability"]))
        columns = _columns(layer)
        for tile in TILES:
            if not _suits(layer, tile):
                continue
            room = min(limits.shared // tile.blocks - limits.reserved, limits.shared_per_block)
            wanted = int(device.facts["multiprocessors"]) * tile.blocks
            blocks = ceil_div(layer.K, tile.BM) * ceil_div(columns, tile.BN)
            for TP in [TP for TP in _heights(layer, tile) if _shared(layer, tile, TP) <= room][:2]:
                for split in splits(blocks, wanted, _tiles(layer, TP), LEAST_TILES):
                    yield {"BM": tile.BM, "BN": tile.BN, "WM": tile.WM, "TP": TP, "SPLIT": split}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = super().unfit(layer, params)
        if layer.C > MOST_CHANNELS:
            reasons.append(f"C={layer.C}: expected at most {MOST_CHANNELS}")
        if missing := no_tile(TILES, params, "BM", "BN", "WM"):
            return reasons + missing
        heights = [_tile(params).WARPS_P * rows for rows in ROWS]
        if params["TP"] not in heights:
            reasons.append(f"TP={params['TP']}: expected {' or '.join(map(str, heights))}")
        return reasons

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        return split_products.forbidden() or super().refusals(layer, device, params)

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        tile, TP = _tile(params), int(params["TP"])
        patch, shared = _patch(layer, TP), _shared(layer, tile, TP)
        constants = (
            ("BM", tile.BM), ("BN", tile.BN), ("WARPS_M", tile.BM // tile.WM), ("WARPS_N", tile.WARPS_N),
            ("WARPS_P", tile.WARPS_P), ("AHEAD", tile.AHEAD), ("TP", TP), ("TQ", _width(layer)), ("PITCH", patch.pitch),
            ("PLANE", patch.plane), *split_constants(params),
        )  # fmt: skip
        grid = (ceil_div(layer.K, tile.BM) * ceil_div(_columns(layer), tile.BN), 1, int(params["SPLIT"]))
        return (
            Unit(
                "tensor_wgrad", *self.files, layer, grid, WARP * tile.warps, tile.blocks, shared, shared, constants,
                capability=80,
            ),
        )  # fmt: skip

    def parts(self, layer: ConvLayer, params: Params) -> Parts:
        tile, (unit,) = _tile(params), self.units(layer, params)
        return Parts(unit.grid[0], tile.BM * tile.BN, tile.BM * tile.BN // unit.threads)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, TP, split, (unit,) = _tile(params), int(params["TP"]), int(params["SPLIT"]), self.units(layer, params)
        patch, sums = _patch(layer, TP), tile.BM * tile.BN
        # of a part: tiles, what there is of slices, to a warp, and words of patches, to the block
        tiles = ceil_div(_tiles(layer, TP), split)
        slices = layer.N * layer.P * ceil_div(layer.Q, DEEP) / split / tile.WARPS_P
        words = tiles * layer.C * patch.rows * patch.width
        rows, columns = tile.fragments
        reads = 2 * PARTS * columns  # of shared memory, to a slice
        product = demand(
            unit,
            tile.warps * (slices * _slice_slots(layer, tile) + 8 * rows * columns) + words * WORD_SLOTS / WARP,
            products=float(PRODUCTS * slices * tile.WARPS_P * DEEP * sums),
            pipe="mma",
            shared=tile.warps * slices * reads * patch.conflicts * SHARED_BYTES + 4.0 * PARTS * words,
            cached=slices * tile.WARPS_P * DEEP * tile.BM * layer.itemsize + 8.0 * words + 4.0 * sums,
            delay=3.0 * MEMORY_CLOCKS,
            memory=layer.bytes + beyond_cache(device, self.scratch_bytes(layer, params)),
        )
        return [product, *self.sum_demands(unit, layer, self.parts(layer, params), params)]


def _tile(params: Params) -> WgradTile:
    return tile_of(TILES, params, "BM", "BN", "WM")


def _suits(layer: ConvLayer, tile: WgradTile) -> bool:
    """Whether few products would be of nothing, and few blocks split the same numbers."""
    blocks, rows = ceil_div(_columns(layer), tile.BN), ceil_div(layer.K, tile.BM) * tile.BM
    least = min(ceil_div(layer.K, other.BM) * other.BM for other in TILES if other.BN == tile.BN)
    wide = max(other.BN for other in TILES)
    return tile.BN <= max(32, 2 * _columns(layer)) and (blocks <= 2 or tile.BN == wide) and rows <= 1.4 * least


def _columns(layer: ConvLayer) -> int:
    return layer.C * layer.R * layer.S


def _width(layer: ConvLayer) -> int:
    """TQ, of a tile of pixels: two slices where they overlap most in what they meet."""
    return 2 * DEEP if layer.stride[1] == 1 and layer.Q > DEEP else DEEP


def _heights(layer: ConvLayer, tile: WgradTile) -> list[int]:
    """TP, the largest first, of tiles that are not mostly beyond the image."""
    few = [rows for rows in ROWS if rows * _width(layer) <= MOST_SLICES * DEEP]
    return [tile.WARPS_P * rows for rows in few if rows == 1 or tile.WARPS_P * rows < 2 * layer.P]


def _tiles(layer: ConvLayer, TP: int) -> int:
    """Of pixels, in all images."""
    return layer.N * ceil_div(layer.P, TP) * ceil_div(layer.Q, _width(layer))


def _run(layer: ConvLayer) -> int:
    """Neighbours of dy that travel at once, as `tensor_wgrad.cu` says."""
    return 4 if layer.Q % 4 == 0 and layer.stride[1] % 4 else 2 if layer.Q % 2 == 0 else 1


def _slice_slots(layer: ConvLayer, tile: WgradTile) -> float:
    """Instructions of a warp to a slice, but for the patch."""
    rows, columns = tile.fragments
    ragged = 2 * PARTS * columns if layer.Q % DEEP else 0  # pixels beyond the image left out
    loads = rows * 8 / _run(layer) * (3 if layer.Q % DEEP else 1)
    products = PRODUCTS * rows * columns + 4 * rows * columns  # and the additions of their sums
    return products + 4 * rows * PAIR_SLOTS + columns * (2 * PARTS + 1) + ragged + loads + SLICE_SLOTS


def _shared(layer: ConvLayer, tile: WgradTile, TP: int) -> int:
    """Bytes: two patches, or the sums of some rows."""
    words = 2 * PARTS * layer.C * _patch(layer, TP).plane
    return 4 * max(words, tile.WARPS_P * tile.BM // tile.WM * 16 * (tile.BN + 8))


def _patch(layer: ConvLayer, TP: int) -> Patch:
    (STRIDE_H, STRIDE_W), (DILATION_H, DILATION_W) = layer.stride, layer.dilation
    rows = (TP - 1) * STRIDE_H + (layer.R - 1) * DILATION_H + 1
    width = (_width(layer) - 2) * STRIDE_W + (layer.S - 1) * DILATION_W + 1
    lane = STRIDE_W * (4 if _run(layer) == 4 else 2)  # words from what one lane reads to what its neighbour does
    pitch, plane, conflicts = _places(rows, width, layer.C, (layer.R, layer.S), layer.dilation, lane)
    return Patch(rows, width, pitch, plane, conflicts)


@functools.lru_cache(256)
def _places(
    rows: int, width: int, channels: int, taps: tuple[int, int], dilation: tuple[int, int], lane: int
) -> tuple[int, int, float]:
    """From a row to the next and from a channel to the next, so that a fragment's lanes meet few banks twice.

    Such a pitch is found first, for one channel; and then, with it, such a plane.
    """
    along = np.arange(4) * lane

    def conflicts(channels: int, pitch: int, plane: int) -> float:
        c, r, s = np.ogrid[:channels, : taps[0], : taps[1]]
        at = (c * plane + r * dilation[0] * pitch + s * dilation[1]).ravel()
        at = np.resize(at, -(-at.size // 8) * 8).reshape(-1, 8, 1) + along  # beyond the last column the first again
        places = np.sort(at.reshape(-1, BANKS), axis=1)
        new = np.diff(places, axis=1, prepend=-1) != 0  # a word that several lanes read is read once
        counts = np.zeros((len(places), BANKS), int)
        np.add.at(counts, (np.arange(len(places))[:, None], places % BANKS), new)
        return float(counts.max(axis=1).mean())

    pitch = min(range(width, width + BANKS), key=lambda pitch: (conflicts(1, pitch, 0), pitch))
    if channels == 1:
        return pitch, rows * pitch, conflicts(1, pitch, 0)
    planes = range(rows * pitch, rows * pitch + BANKS)
    least, plane = min((conflicts(channels, pitch, plane), plane) for plane in planes)
    return pitch, plane, least
