"""Direct convolution with pixels and filters in shared memory and a tile of outputs to a thread."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Array, Kernel, Params
from autoconv.cuda.codegen.occupancy import WARP
from autoconv.cuda.codegen.source import Constant, Unit
from autoconv.cuda.codegen.tensor_map import TEXTURE_ALIGNMENT, Texture
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div, no_tile, tile_of
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, demand
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 128
DEPTHS = (8, 4, 2, 1)  # channels that may lie in shared memory at a time
SHARED = 96 << 10  # bytes of a multiprocessor's shared memory that the blocks meant for it should take together
MOST_SHARED = 99 << 10  # to a block whose filters are so large that fewer fit
MOST_SUMS_FLOAT64 = 40
SPOT_SLOTS, LOOP_SHARE = 12, 1.05  # instructions of a pixel on its way; what of the loop belongs to nothing else


class DirectTile(NamedTuple):
    """BM channels of the output to a block, TQ neighbours of TK of them to a thread, and blocks to a multiprocessor."""

    BM: int
    TQ: int
    TK: int
    runs: int  # of TQ outputs, to a block
    blocks: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.BM // self.TK * self.runs

    def meant(self, dtype: str) -> int:
        """Blocks to a multiprocessor: about half as many where sums take two registers."""
        return ceil_div(self.blocks, 2) if dtype == "float64" else self.blocks


TILES = (  # an odd TQ spreads a warp's reads over the banks
    DirectTile(32, 7, 8, runs=32, blocks=4),
    DirectTile(32, 5, 8, runs=32, blocks=4),
    DirectTile(64, 5, 16, runs=32, blocks=3),
    DirectTile(16, 5, 8, runs=64, blocks=4),
    DirectTile(8, 5, 8, runs=128, blocks=3),
)
TEXTURED = (TILES[1], TILES[4])  # those that may read the image as a texture


class PolyphaseAxis(NamedTuple):
    """How outputs along one axis meet pixels: taps a period apart the same ones, `shift` outputs away.

    `components` of the pixels, those a period apart, are met by some tap: the polyphase components of a strided sum.
    """

    period: int
    components: int
    shift: int
    reach: int

    @classmethod
    def of(cls, stride: int, dilation: int, taps: int) -> PolyphaseAxis:
        """Of a filter with so many taps.

        >>> PolyphaseAxis.of(stride=4, dilation=1, taps=11)  # taps 0, 4 and 8 meet neighbours
        PolyphaseAxis(period=4, components=4, shift=1, reach=2)
        """
        common = math.gcd(stride, dilation)
        period, shift = stride // common, dilation // common
        return cls(period, min(taps, period), shift, (taps - 1) // period * shift)


class Footprint(NamedTuple):
    """How a block's runs lie among the outputs, and what they see of one channel."""

    images: int
    rows: int
    runs: int
    span_h: int
    span_w: int
    pitch: int
    image: int


class DirectTiled(CudaAlgorithm):
    """A block's pixels, with zeros for the border, and its filters in shared memory, BK channels of them at a time.

    It has fwd, and dgrad of unit stride as the same sum with filters rotated by 180 degrees. Pixels and filters in
    shared memory and a tile of outputs to a thread's registers are as in cuda-convnet: Krizhevsky, Sutskever & Hinton,
    "ImageNet Classification with Deep Convolutional Neural Networks" (2012). With INPUT=texture pixels come through the
    texture units, whose border mode does the padding. The array is seen where it lies, as one texture of all rows: no
    copy, but rows have to be whole units of a texture's pitch and few enough, and an array that begins off a texture's
    boundary goes the other way.
    """

    name = "direct.tiled"
    files = ("direct/tiled_filter.cu", "direct/tiled.cu", "direct/tiled_textured.cu")
    directions = ("fwd", "dgrad")
    exact = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        rows, depth = _channels(layer)
        for tile in TILES:
            if 4 * rows <= tile.BM and tile != TILES[-1]:
                continue  # the last, of the fewest channels, takes what the others would mostly waste
            room = SHARED // tile.meant(layer.dtype)
            fitting = (BK for BK in DEPTHS if 2 * depth > BK and _shared(layer, tile, BK) <= room)
            params = {"BM": tile.BM, "TQ": tile.TQ, "TK": tile.TK, "BK": next(fitting, 1)}
            yield params
            if tile in TEXTURED:
                yield params | {"INPUT": "texture"}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = []
        if layer.direction == "dgrad" and layer.stride != (1, 1):
            reasons.append("stride: expected 1x1 in dgrad, where other taps meet each pixel of a larger one")
        if params["BK"] not in DEPTHS:
            reasons.append(f"BK={params['BK']}: expected {' or '.join(map(str, DEPTHS))}")
        if "INPUT" in params:
            reasons += _texture(layer).faults()
            if params["INPUT"] != "texture":
                reasons.append(f"INPUT={params['INPUT']}: expected texture, or no INPUT")
        if missing := no_tile(TILES, params, "BM", "TQ", "TK"):
            return reasons + missing
        tile = _tile(params)
        if layer.dtype == "float64" and tile.TQ * tile.TK > MOST_SUMS_FLOAT64:
            reasons.append(f"float64: expected at most {MOST_SUMS_FLOAT64} sums to a thread, got {tile.TQ}x{tile.TK}")
        if not reasons and (shared := _shared(layer, tile, int(params["BK"]))) > MOST_SHARED:
            reasons.append(f"shared memory: expected at most {MOST_SHARED} bytes to a block, got {shared}")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """What packs the filters, and the rest; with a texture, also what does without."""
        tile, BK = _tile(params), int(params["BK"])
        blocks = tile.meant(layer.dtype)
        shared = _shared(layer, tile, BK)
        constants = (
            *((name, int(params[name])) for name in ("BM", "TQ", "TK", "BK")),
            *_geometry(layer, tile),
            *(("TILE_THREADS", tile.threads), ("TILE_BLOCKS", blocks), ("THREADS", THREADS), ("BLOCKS", 4)),
        )
        filters = ceil_div(_filters(layer, tile, BK), THREADS)
        grid = (_row_blocks(layer, tile) * _tiles(layer, tile), 1, layer.groups)
        filters_of, plain_of, textured_of = self.files
        packing = Unit("tiled_filter", filters_of, layer, (filters, 1, 1), THREADS, 4, 0, 0, constants)
        plain = Unit("direct_tiled", plain_of, layer, grid, tile.threads, blocks, shared, shared, constants)
        if "INPUT" not in params:
            return packing, plain
        return packing, plain, replace(plain, function="direct_textured", file=textured_of, maps=(_texture(layer),))

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        tile = _tile(params)
        return _filters(layer, tile, int(params["BK"])) * layer.accumulator.itemsize

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, unit = _tile(params), self.units(layer, params)[-1]
        depth, taps, wide = _channels(layer)[1], layer.R * layer.S, layer.accumulator.itemsize
        products = tile.threads * tile.TQ * tile.TK * taps  # of a block, to each channel
        spots, filters = _spots(layer, tile), tile.BM * taps
        reads = tile.threads * (taps * tile.TK + layer.R * (tile.TQ + layer.S))
        moves = spots * SPOT_SLOTS * (0.8 if "INPUT" in params else 1.0) + filters * 2
        way_out = 4 * tile.TQ * tile.TK * tile.threads / WARP
        return [
            demand(
                unit,
                depth * (products + reads / 4 + moves) / WARP * LOOP_SHARE + way_out,
                products=float(depth * products),
                pipe=layer.accumulator.name,
                shared=depth * (reads / 2 + spots + filters) * wide,
                cached=float(depth * (spots * layer.itemsize + filters * wide)),
                delay=2.0 * MEMORY_CLOCKS + way_out / 4,
                memory=layer.bytes + self.packed_bytes(layer, device, params),
            )
        ]

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        filters, *launches = self.load(device, self.units(layer, params))
        packed, arguments = self.packed_bytes(layer, device, params), ("a", "b", "out", "bias", "residual")
        plain, *textured = (Chain([(launch, arguments)], 0, filters, packed) for launch in launches)
        return Textured(device, plain, *textured) if textured else plain


class Textured(Kernel):
    """Through the texture units, where the input begins on their boundary, as the pool's arrays do."""

    def __init__(self, device: CUDA, plain: Kernel, textured: Kernel) -> None:
        self._address, self._plain, self._textured = device.address, plain, textured
        self.packed_bytes = plain.packed_bytes

    def pack(self, w: Array, packed: Array) -> None:
        self._plain.pack(w, packed)

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        kernel = self._plain if self._address(a) % TEXTURE_ALIGNMENT else self._textured
        kernel.run(a, b, out, bias, residual, workspace)


def _texture(layer: ConvLayer) -> Texture:
    """The input as rows of one channel, or of all where they come last."""
    shape = layer.input_shapes[0]
    last = shape[3] if layer.layout == "NCHW" else shape[2] * shape[3]
    return Texture(layer.itemsize, last, math.prod(shape) // last)


def _tile(params: Params) -> DirectTile:
    return tile_of(TILES, params, "BM", "TQ", "TK")


def _channels(layer: ConvLayer) -> tuple[int, int]:
    """Out and in, of a group."""
    C, K = layer.C // layer.groups, layer.K // layer.groups
    return (C, K) if layer.direction == "dgrad" else (K, C)


def _extents(layer: ConvLayer) -> tuple[int, int]:
    """Rows and columns of the output."""
    return (layer.H, layer.W) if layer.direction == "dgrad" else (layer.P, layer.Q)


def _axes(layer: ConvLayer) -> tuple[PolyphaseAxis, PolyphaseAxis]:
    stride = (1, 1) if layer.direction == "dgrad" else layer.stride
    return (
        PolyphaseAxis.of(stride[0], layer.dilation[0], layer.R),
        PolyphaseAxis.of(stride[1], layer.dilation[1], layer.S),
    )


def _footprint(layer: ConvLayer, tile: DirectTile) -> Footprint:
    return _best_footprint(_axes(layer), layer.N, _extents(layer), layer.R * layer.S, tile)


@functools.lru_cache(maxsize=4096)
def _best_footprint(
    axes: tuple[PolyphaseAxis, PolyphaseAxis], N: int, extents: tuple[int, int], taps: int, tile: DirectTile
) -> Footprint:
    """The one that costs least: blocks that are not full, and pixels that several blocks see, count."""
    (down, across), (height, width) = axes, extents

    def shape(rows: int, runs: int) -> Footprint:
        images = min(N, tile.runs // (rows * runs))
        span_h, span_w = rows + down.reach, runs * tile.TQ + across.reach
        pitch = across.components * span_w
        return Footprint(images, rows, runs, span_h, span_w, pitch, down.components * span_h * pitch)

    def cost(shape: Footprint) -> tuple[int, int]:
        blocks = ceil_div(N, shape.images) * ceil_div(height, shape.rows) * ceil_div(width, shape.runs * tile.TQ)
        spots = shape.images * shape.image
        # a pixel on its way takes a thread as long as some products do
        return blocks * (tile.TQ * tile.TK * taps + 8 * ceil_div(spots, tile.threads)), spots

    most = min(tile.runs, ceil_div(width, tile.TQ))
    sizes = ((rows, runs) for runs in range(1, most + 1) for rows in range(1, min(height, tile.runs // runs) + 1))
    best = min(itertools.starmap(shape, sizes), key=cost)
    line = [run * tile.TQ for run in range(best.runs)]
    pitch = _spread(best.pitch, best.rows, line)
    image = best.image // best.pitch * pitch
    return best._replace(
        pitch=pitch, image=_spread(image, best.images, [row * pitch + at for row in range(best.rows) for at in line])
    )


def _spread(least: int, copies: int, places: list[int]) -> int:
    """How far apart copies of these places should lie, so that few of a warp's lanes read from one bank."""

    def conflicts(distance: int) -> int:
        lanes = [copy * distance + place for copy in range(copies) for place in places][:32]
        banks = [place % 32 for place in lanes]
        return max(map(banks.count, banks))

    return min(range(least, least + 32), key=conflicts)


def _geometry(layer: ConvLayer, tile: DirectTile) -> tuple[Constant, ...]:
    """What the kernel has to know of it."""
    shape, constants = _footprint(layer, tile), []
    for side, axis in zip("HW", _axes(layer), strict=True):
        constants += [
            (f"PERIOD_{side}", axis.period),
            (f"COMPONENTS_{side}", axis.components),
            (f"SHIFT_{side}", axis.shift),
        ]
    names = ("LANES_N", "LANES_P", "LANES_Q", "SPAN_H", "SPAN_W", "PITCH", "IMAGE")
    return (*constants, *zip(names, shape, strict=True))


def _tiles(layer: ConvLayer, tile: DirectTile) -> int:
    shape, (height, width) = _footprint(layer, tile), _extents(layer)
    return ceil_div(layer.N, shape.images) * ceil_div(height, shape.rows) * ceil_div(width, shape.runs * tile.TQ)


def _row_blocks(layer: ConvLayer, tile: DirectTile) -> int:
    return ceil_div(_channels(layer)[0], tile.BM)


def _spots(layer: ConvLayer, tile: DirectTile) -> int:
    """Numbers of one channel in shared memory."""
    shape = _footprint(layer, tile)
    return shape.images * shape.image


def _filters(layer: ConvLayer, tile: DirectTile, BK: int) -> int:
    """Numbers of the packed ones, filled up to whole blocks and slices."""
    depth = ceil_div(_channels(layer)[1], BK) * BK
    return layer.groups * _row_blocks(layer, tile) * tile.BM * depth * layer.R * layer.S


def _shared(layer: ConvLayer, tile: DirectTile, BK: int) -> int:
    """Bytes of shared memory: filters and pixels twice, or four channels of sums."""
    slices = 2 * BK * (layer.R * layer.S * tile.BM + _spots(layer, tile))
    sums = tile.threads * 4 * tile.TQ
    return ceil_div(max(slices, sums) * layer.accumulator.itemsize, 16) * 16
