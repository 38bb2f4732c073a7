"""The gradient of the filters of layers with few input channels, on tensor cores: paced by reading dy once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autoconv.algorithm import Params
from autoconv.common import split_products
from autoconv.cuda.codegen.occupancy import WARP, limits_of
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import ceil_div, no_tile, tile_of
from autoconv.cuda.common.model import MEMORY_CLOCKS, SHARED_BYTES, Demand, beyond_cache, demand
from autoconv.cuda.common.split import MOST_PARTS, Parts, SplitProduct, split_constants, splits
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

MOST_CHANNELS = 4  # of the input: with more, what is read of dy is no longer most of what is read
DEEP = 16  # pixels of a slice, the depth of a matrix instruction
PARTS, PRODUCTS = 3, 6
MOST_SLICES = 8  # of a tile, to a warp: more would bring little, as the border of the patch is small by then
NARROW, WIDE = 32, 128  # pixels of a tile's row, at most: with many, what is read of dy lies together
LEAST_TILES = 1  # to a part
BANKS = 32
# Instructions of a warp, as its machine code has them: to two numbers that are split, to a word of the patch on its way
# (borders, place, both numbers, parts), to a slice.
PAIR_SLOTS, WORD_SLOTS, SLICE_SLOTS = 11, 66, 52


class WgradTile(NamedTuple):
    """BM filters and BN columns to a block, WM filters to a warp, and blocks a multiprocessor shall hold.

    Of the warps WARPS_N have other columns, and WARPS_P other pixels. AHEAD words of a patch are on their way to
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
    WgradTile(64, 80, 64, WARPS_N=2, WARPS_P=4, AHEAD=2, blocks=1),
    WgradTile(64, 160, 32, WARPS_N=4, WARPS_P=2, AHEAD=1, blocks=1),
    WgradTile(64, 160, 64, WARPS_N=4, WARPS_P=2, AHEAD=2, blocks=1),
    WgradTile(64, 192, 32, WARPS_N=4, WARPS_P=1, AHEAD=8, blocks=1),
    WgradTile(96, 192, 48, WARPS_N=4, WARPS_P=1, AHEAD=4, blocks=1),
)


class Area(NamedTuple):
    """Rows and columns of a tile of pixels."""

    TP: int
    TQ: int


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
    """float32 in NCHW of at most four channels, by six products of three bfloat16 parts as of `gemm.tensor.bf16x6`.

    The sum over all pixels of dy times what each tap sees of x, an implicit product whose columns are taps of channels:
    Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning" (2014), section 3. Here they are few, so a block
    holds all sums, or many, in registers, and reads dy from memory without a way through shared memory. `exact` leaves
    it out, and so does AUTOCONV_SPLIT_PRODUCTS=0.
    """

    name = "direct.tensor.bf16x6.wgrad"
    files = ("stem/tensor_wgrad.cu",)
    directions = ("wgrad",)
    dtypes = ("float32",)
    layouts = ("NCHW",)
    groupings = ("dense",)
    exact = False

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        limits = limits_of(int(device.facts["compute_capability"]))
        columns = _columns(layer)
        if layer.C > MOST_CHANNELS:  # to be refused, with a reason
            yield {**_named(TILES[0]), **_least(TILES[0])._asdict(), "SPLIT": 1}
            return
        for tile in filter(functools.partial(_suits, layer), TILES):
            room = min(limits.shared // tile.blocks - limits.reserved, limits.shared_per_block)
            wanted = int(device.facts["multiprocessors"]) * tile.blocks
            blocks = ceil_div(layer.K, tile.BM) * ceil_div(columns, tile.BN)
            for area in _areas(layer, tile, room, min(MOST_PARTS, wanted // blocks)):
                for split in splits(blocks, wanted, _tiles(layer, area), LEAST_TILES):
                    yield {**_named(tile), **area._asdict(), "SPLIT": split}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = super().unfit(layer, params)
        if layer.C > MOST_CHANNELS:
            reasons.append(f"C={layer.C}: expected at most {MOST_CHANNELS}")
        if missing := no_tile(TILES, params, "BM", "BN", "WM"):
            return reasons + missing
        tile, area = _tile(params), _area(params)
        if area not in _all_areas(tile):
            expected = f"1 to {MOST_SLICES} times {tile.WARPS_P} slices of {DEEP}"
            reasons.append(f"TPxTQ: expected {expected}, got {area.TP}x{area.TQ}")
        return reasons

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        return split_products.forbidden() or super().refusals(layer, device, params)

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        tile, area = _tile(params), _area(params)
        patch, shared = _patch(layer, area), _shared(layer, tile, area)
        constants = (
            ("BM", tile.BM), ("BN", tile.BN), ("WARPS_M", tile.BM // tile.WM), ("WARPS_N", tile.WARPS_N),
            ("WARPS_P", tile.WARPS_P), ("AHEAD", tile.AHEAD), ("TP", area.TP), ("TQ", area.TQ), ("PITCH", patch.pitch),
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
        tile, area, split, (unit,) = _tile(params), _area(params), int(params["SPLIT"]), self.units(layer, params)
        patch, sums = _patch(layer, area), tile.BM * tile.BN
        # of a part: tiles, their slices, to a warp, and words of patches, to the block
        tiles = ceil_div(_tiles(layer, area), split)
        slices = tiles * _slices(tile, area)
        words = tiles * layer.C * patch.rows * patch.width
        rows, columns = tile.fragments
        reads = 2 * PARTS * columns  # of shared memory, to a slice
        product = demand(
            unit,
            tile.warps * (slices * slice_slots(layer, params) + 8 * rows * columns),
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
    widest = not any(other.BN > tile.BN for other in TILES)
    return max(32, 2 * _columns(layer)) >= tile.BN and (blocks <= 2 or widest) and rows <= 1.4 * least


def _columns(layer: ConvLayer) -> int:
    return layer.C * layer.R * layer.S


def _named(tile: WgradTile) -> dict[str, int]:
    return {"BM": tile.BM, "BN": tile.BN, "WM": tile.WM}


def _area(params: Params) -> Area:
    return Area(int(params["TP"]), int(params["TQ"]))


def _all_areas(tile: WgradTile) -> list[Area]:
    """Those of which each warp has as many slices."""
    return [
        Area(slices * tile.WARPS_P // across, across * DEEP)
        for across in range(1, WIDE // DEEP + 1)
        for slices in range(MOST_SLICES, 0, -1)
        if slices * tile.WARPS_P % across == 0
    ]


def _least(tile: WgradTile) -> Area:
    """That of the fewest rows, and then columns."""
    return min(_all_areas(tile))


def _areas(layer: ConvLayer, tile: WgradTile, room: int, wanted: int) -> list[Area]:
    """Of narrow ones, and of wide ones, that for which the fewest words are filled in and which fits so many bytes.

    Where that leaves fewer than the wanted parts, one more, of which there are as many; the least, where none fits.
    """
    across = ceil_div(layer.Q, DEEP)
    wide = ceil_div(across, ceil_div(across, WIDE // DEEP)) * DEEP  # as wide as possible, and all about as wide
    narrow = {DEEP} if across == 1 else {NARROW} if layer.stride[1] == 1 else {DEEP, NARROW}

    def work(area: Area) -> float:
        return _tiles(layer, area) * _slices(tile, area) * _words(layer, tile, area)

    def best(widths: set[int], least: int) -> list[Area]:
        able = (one for one in _all_areas(tile) if one.TQ in widths and _tiles(layer, one) >= least)
        return [*itertools.islice((one for one in sorted(able, key=work) if _shared(layer, tile, one) <= room), 1)]

    found = best(narrow, 1) or [_least(tile)]
    found += [one for one in best({wide} - {DEEP, NARROW}, 1) if work(one) < 1.5 * work(found[0])]
    few = all(_tiles(layer, one) < wanted for one in found)
    return found + [one for one in best({DEEP, NARROW}, wanted) if few]


def _tiles(layer: ConvLayer, area: Area) -> int:
    """Of pixels, in all images."""
    return layer.N * ceil_div(layer.P, area.TP) * ceil_div(layer.Q, area.TQ)


def _slices(tile: WgradTile, area: Area) -> int:
    """Of a tile of pixels, to a warp."""
    return area.TP * area.TQ // DEEP // tile.WARPS_P


def _words(layer: ConvLayer, tile: WgradTile, area: Area) -> int:
    """Of a patch, to a thread and slice: in whole rounds of so many as are on their way together."""
    rows, width = _met(layer, area)
    each = ceil_div(layer.C * rows * width, WARP * tile.warps * _slices(tile, area))
    return ceil_div(each, tile.AHEAD) * tile.AHEAD if each > tile.AHEAD else each


def _run(layer: ConvLayer) -> int:
    """Neighbours of dy that travel at once, as `tensor_wgrad.cu` says."""
    return 4 if layer.Q % 4 == 0 and layer.stride[1] % 4 else 2 if layer.Q % 2 == 0 else 1


def slice_slots(layer: ConvLayer, params: Params) -> float:
    """Instructions of a warp to a slice, with what it fills in of the next patch, as its machine code has them."""
    tile = _tile(params)
    rows, columns = tile.fragments
    ragged = 2 * PARTS * columns if layer.Q % DEEP else 0  # pixels beyond the image left out
    loads = rows * 8 / _run(layer) * (3 if layer.Q % DEEP else 1)
    products = PRODUCTS * rows * columns + 4 * rows * columns  # and the additions of their sums
    reads = columns * (2 * PARTS + 1)
    words = _words(layer, tile, _area(params)) * WORD_SLOTS
    return products + 4 * rows * PAIR_SLOTS + reads + ragged + loads + words + SLICE_SLOTS


def _shared(layer: ConvLayer, tile: WgradTile, area: Area) -> int:
    """Bytes: two patches, or the sums of some rows."""
    words = 2 * PARTS * layer.C * _patch(layer, area).plane
    return 4 * max(words, tile.WARPS_P * tile.BM // tile.WM * 16 * (tile.BN + 8))


def _met(layer: ConvLayer, area: Area) -> tuple[int, int]:
    """Rows of a channel that a tile of pixels meets, and columns of which a pair begins."""
    rows = (area.TP - 1) * layer.stride[0] + (layer.R - 1) * layer.dilation[0] + 1
    return rows, (area.TQ - 2) * layer.stride[1] + (layer.S - 1) * layer.dilation[1] + 1


def _patch(layer: ConvLayer, area: Area) -> Patch:
    rows, width = _met(layer, area)
    lane = layer.stride[1] * (4 if _run(layer) == 4 else 2)  # words from what one lane reads to what its neighbour does
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
