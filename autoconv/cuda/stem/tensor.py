"""Direct convolution of few channels on tensor cores: a network's first layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from autoconv.algorithm import Kernel, Params
from autoconv.common import split_products
from autoconv.cuda.codegen.occupancy import WARP
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div, no_tile, tile_of
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, demand
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

QUAD = 4  # channels that are filled up with zeros
MOST_CHANNELS = 8  # of more, a multiple of eight is what `gemm.tensor` takes without a copy
WARP_PIXELS = 32  # outputs of a warp, of one row or two
STEP = 16  # depth of a matrix instruction: a quad to each of four lanes
FRAGMENT_BYTES = 16  # of a lane, of sixteen filters
PACKING_THREADS = 128
PLACE_SLOTS = 40  # instructions of a thread that bring a quad of pixels


class TensorTile(NamedTuple):
    """Of a block: filters, columns of outputs, warps; and blocks to a multiprocessor, of 16 bits and of parts."""

    BM: int
    BQ: int
    WARPS: int
    blocks: int
    blocks_of_parts: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARP * self.WARPS

    @property
    def rows(self) -> int:
        """Of outputs."""
        return self.WARPS * WARP_PIXELS // self.BQ


TILE_NAMES = ("BM", "BQ", "WARPS")
TILES = (
    TensorTile(64, 16, 4, blocks=4, blocks_of_parts=3),
    TensorTile(64, 32, 4, blocks=4, blocks_of_parts=3),
    TensorTile(32, 16, 4, blocks=5, blocks_of_parts=4),
    TensorTile(32, 32, 4, blocks=5, blocks_of_parts=4),
    TensorTile(64, 16, 8, blocks=2, blocks_of_parts=1),
    TensorTile(32, 16, 8, blocks=2, blocks_of_parts=2),
)


class DirectTensor(CudaAlgorithm):
    """float16 and bfloat16 with sums in float32, of up to eight channels, in NCHW and NHWC.

    A matrix instruction's depth is four taps of four channels, read from shared memory where they lie. That few
    channels want taps and channels taken together is in CUTLASS, too ("few channels", NVIDIA, its documentation's
    "Implicit GEMM Convolution"); there each tap is fetched from memory.
    """

    name = "direct.tensor"
    files = ("stem/tensor_filter.cu", "stem/tensor.cu")
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    directions = ("fwd",)
    groupings = ("dense",)
    exact = True
    parts: ClassVar[int] = 1  # of a number
    products: ClassVar[int] = 1  # of tensor cores, to a product

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        return ({name: getattr(tile, name) for name in TILE_NAMES} for tile in TILES)

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = [f"C={layer.C}: expected at most {MOST_CHANNELS}"] if layer.C > MOST_CHANNELS else []
        return reasons + no_tile(TILES, params, *TILE_NAMES)

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """What packs the filters, and the rest."""
        tile = tile_of(TILES, params, *TILE_NAMES)
        filter_blocks, steps = ceil_div(layer.K, tile.BM), _steps(layer)
        shared = self._filter_bytes(layer, tile) + 4 * 4 * steps + 2 * QUAD * self.parts * _places(layer, tile)
        constants = (*((name, int(params[name])) for name in TILE_NAMES), ("FILTER_BLOCKS", filter_blocks))
        filters = ceil_div(filter_blocks * steps * tile.BM // 16 * WARP, PACKING_THREADS)
        filters_of, tiles_of = self.files
        blocks = tile.blocks if self.parts == 1 else tile.blocks_of_parts
        shared = ceil_div(shared, FRAGMENT_BYTES) * FRAGMENT_BYTES  # as the compiler rounds it up
        packing = Unit(
            "direct_tensor_filter", filters_of, layer, (filters, 1, 1), PACKING_THREADS, 4, 0, 0, constants,
            capability=80,
        )  # fmt: skip
        grid = (_tiles(layer, tile), filter_blocks, 1)
        return packing, Unit(
            "direct_tensor", tiles_of, layer, grid, tile.threads, blocks, shared, shared, constants,
            capability=80, persistent=True,
        )  # fmt: skip

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        tile = tile_of(TILES, params, *TILE_NAMES)
        return ceil_div(layer.K, tile.BM) * self._filter_bytes(layer, tile)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, unit, steps = tile_of(TILES, params, *TILE_NAMES), self.units(layer, params)[-1], _steps(layer)
        pairs, places, sums = tile.BM / 16, _places(layer, tile), tile.BM * WARP_PIXELS  # the sums are a warp's
        brought = ceil_div(places, tile.threads) * (PLACE_SLOTS + 8 * (self.parts - 1))
        multiplied = pairs * (self.parts + 4 * self.products + (16 if self.parts > 1 else 0)) + 4 * self.parts + 4
        out = 2.0 * layer.itemsize * sums
        return [
            demand(
                unit,
                tile.WARPS * (brought + steps * multiplied + 4 * sums / WARP),
                products=float(tile.WARPS * sums * steps * STEP * self.products),
                pipe="mma",
                shared=self.parts * (8.0 * places + tile.WARPS * steps * WARP * (16 * pairs + 32)),
                cached=places * QUAD * layer.itemsize + tile.WARPS * out / 2,
                delay=2.0 * MEMORY_CLOCKS + 4 * sums / WARP,
                memory=layer.bytes,
            )
        ]

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        filters, launch = self.load(device, self.units(layer, params))
        packed = self.packed_bytes(layer, device, params)
        return Chain([(launch, ("a", "b", "out", "bias", "residual"))], 0, filters, packed)

    def _filter_bytes(self, layer: ConvLayer, tile: TensorTile) -> int:
        """Of a block's packed filters."""
        return self.parts * _steps(layer) * tile.BM // 16 * WARP * FRAGMENT_BYTES


class DirectTensorBF16x6(DirectTensor):
    """float32: three parts of bfloat16, and the six largest of their nine products, as in `gemm.tensor.bf16x6`."""

    name = "direct.tensor.bf16x6"
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    exact = False
    parts, products = 3, 6

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        return split_products.forbidden() or super().refusals(layer, device, params)


def _steps(layer: ConvLayer) -> int:
    """Matrix instructions that all taps take, one after the other."""
    return ceil_div(layer.R * layer.S * ceil_div(layer.C, QUAD), STEP // QUAD)


def _spans(layer: ConvLayer, tile: TensorTile) -> tuple[int, int]:
    """Rows and columns of pixels that a tile of outputs meets."""
    counts, taps = (tile.rows, tile.BQ), (layer.R, layer.S)
    down, across = (
        (count - 1) * stride + (reach - 1) * dilation + 1
        for count, stride, reach, dilation in zip(counts, layer.stride, taps, layer.dilation, strict=True)
    )
    return down, across


def _places(layer: ConvLayer, tile: TensorTile) -> int:
    """Quads of channels that a tile of outputs meets."""
    down, across = _spans(layer, tile)
    return ceil_div(layer.C, QUAD) * down * across


def _tiles(layer: ConvLayer, tile: TensorTile) -> int:
    return layer.N * ceil_div(layer.P, tile.rows) * ceil_div(layer.Q, tile.BQ)
