"""Implicit GEMM on the tensor cores: `mma.sync` fed by `cp.async`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from autoconv.algorithm import Params
from autoconv.common import split_products
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import TF32, ceil_div, no_tile, tile_of
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, beyond_cache, demand
from autoconv.cuda.common.split import Parts, SplitProduct, split_constants, splits
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

LEAST_SLICES = 4  # of the depth, to a part: as many as are in flight
FRAGMENT_BYTES = 512  # 16 lines of 32 bytes
COPY_SLOTS, LOOP_SLOTS = 8, 28  # instructions of a copy to shared memory, and of a slice that belong to nothing else
PLACE_SLOTS = {"fwd": 0, "dgrad": 3, "wgrad": 5}  # more of them to a copy, to find its place


class TensorTile(NamedTuple):
    """What a block computes, its warps, slices in flight, and blocks a multiprocessor shall hold."""

    BM: int
    BN: int
    WARPS_M: int
    WARPS_N: int
    STAGES: int
    blocks: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.WARPS_M * self.WARPS_N


TILES = (
    TensorTile(128, 128, 2, 4, 3, blocks=1),
    TensorTile(128, 64, 4, 2, 3, blocks=2),
    TensorTile(64, 128, 2, 4, 3, blocks=2),
    TensorTile(64, 64, 2, 2, 4, blocks=3),
    TensorTile(128, 32, 4, 1, 4, blocks=3),
)


def extents(layer: ConvLayer) -> tuple[int, int, int]:
    """Rows, columns and depth of one group's matrix product."""
    C, K = layer.C // layer.groups, layer.K // layer.groups
    taps, places = layer.R * layer.S, layer.N * layer.P * layer.Q
    return {
        "fwd": (places, K, taps * C),
        "dgrad": (layer.N * layer.H * layer.W, C, taps * K),
        "wgrad": (K, taps * C, places),
    }[layer.direction]


class Tensor(SplitProduct):
    """float16 and bfloat16 with sums in float32, NHWC, channels of a group a multiple of 8.

    The implicit GEMM of `gemm`, tiled as in CUTLASS (NVIDIA, its documentation's "Efficient GEMM in CUDA" and
    "Implicit GEMM Convolution"): blocks, warps and matrix instructions, with slices on their way in several stages.
    """

    name = "gemm.tensor"
    files = ("gemm/tensor.cu",)
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    layouts = ("NHWC",)
    groupings = ("dense", "grouped")  # a group of a single channel has no 16 bytes to copy
    products: ClassVar[int] = 1  # of tensor cores, to a product
    pipe: ClassVar[str] = "mma"  # what multiplies, as a `Demand` names it
    converting: ClassVar[float] = 0  # instructions that make a number what the tensor cores take
    tiles: ClassVar[tuple[TensorTile, ...]] = TILES

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        rows, columns, depth = extents(layer)
        for tile in self.tiles:
            blocks = ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups
            wanted = int(device.facts["multiprocessors"]) * tile.blocks
            for split in splits(blocks, wanted, ceil_div(depth, _depth(layer)), LEAST_SLICES):
                yield {"BM": tile.BM, "BN": tile.BN, "SPLIT": split}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = super().unfit(layer, params)
        run = 16 // layer.itemsize
        channels = {"C": layer.C} if layer.direction == "fwd" else {"C": layer.C, "K": layer.K}
        for name, number in channels.items():
            if number // layer.groups % run:
                reasons.append(f"{name}/groups={number // layer.groups}: expected a multiple of {run}")
        return reasons + no_tile(self.tiles, params, "BM", "BN")

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        tile, split, BK = tile_of(self.tiles, params, "BM", "BN"), int(params["SPLIT"]), _depth(layer)
        rows, columns, _ = extents(layer)
        names = ("BM", "BN", "WARPS_M", "WARPS_N", "STAGES")
        constants = (*((name, int(getattr(tile, name))) for name in names), ("BK", BK), *split_constants(params))
        constants += (("PRODUCTS", self.products),)
        shared = tile.STAGES * (
            _slice_bytes(layer, tile.BM, BK, layer.direction != "wgrad")
            + _slice_bytes(layer, tile.BN, BK, layer.direction == "fwd")
        )
        grid = (ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN), 1, layer.groups * split)
        return (
            Unit(
                "tensor", *self.files, layer, grid, tile.threads, tile.blocks, shared, shared, constants, capability=80
            ),
        )

    def parts(self, layer: ConvLayer, params: Params) -> Parts:
        tile, (rows, columns, _) = tile_of(self.tiles, params, "BM", "BN"), extents(layer)
        tiles, sums = ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups, tile.BM * tile.BN
        return Parts(tiles, sums, sums // tile.threads)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, BK, (unit,) = tile_of(self.tiles, params, "BM", "BN"), _depth(layer), self.units(layer, params)
        left = layer.itemsize if params["SPLIT"] == 1 else layer.accumulator.itemsize  # bytes of a sum, finished or not
        slices = ceil_div(ceil_div(extents(layer)[2], BK), int(params["SPLIT"]))
        warps, sums = tile.threads / 32, tile.BM * tile.BN
        fed = BK * (tile.BM + tile.BN) * layer.itemsize
        fragments = BK * layer.itemsize / 32 * (tile.BM / tile.WARPS_M + tile.BN / tile.WARPS_N) / 16
        product = demand(
            unit,
            warps * (slices * self.slice_slots(layer, params) + 4 * sums / tile.threads),
            products=slices * sums * BK * self.products,
            pipe=self.pipe,
            shared=slices * (fed + warps * fragments * FRAGMENT_BYTES),
            cached=slices * fed + sums * left,
            delay=2.0 * MEMORY_CLOCKS + sums / 32,
            memory=layer.bytes + beyond_cache(device, self.scratch_bytes(layer, params)),
        )
        return [product, *self.sum_demands(unit, layer, self.parts(layer, params), params)]

    def slice_slots(self, layer: ConvLayer, params: Params) -> float:
        """Instructions of a warp to a slice of the depth, as its machine code has them."""
        tile = tile_of(self.tiles, params, "BM", "BN")
        rows, columns, steps = tile.BM / tile.WARPS_M / 16, tile.BN / tile.WARPS_N / 16, 2  # fragments of 16 lines
        words, wgrad = layer.itemsize == 4, layer.direction == "wgrad"
        # values of 32 bits whose depth lies across are read one by one
        loads = rows * (4 if words and wgrad else 1) + columns * (4 if words and layer.direction != "fwd" else 1)
        converted = 4 * (rows + columns) * self.converting
        products = 2 * rows * columns * self.products * _depth(layer) / (8 if self.pipe == "mma.tf32" else 16)
        promoted = 8 * rows * columns if self.products > 1 else 0  # each slice's sums added to those before
        copies = 4 * (tile.BM + tile.BN) / tile.threads * (COPY_SLOTS + PLACE_SLOTS[layer.direction])
        return products + steps * (loads + converted) + promoted + copies + LOOP_SLOTS


class TensorTF32(TF32, Tensor):
    """The same on float32 arrays, rounded on the way to the registers."""

    name = "gemm.tensor.tf32"
    pipe, converting = "mma.tf32", 2


class TensorSplit(Tensor):
    """float32 in nearly full accuracy: each operand as a sum of narrower parts, a product as several of theirs.

    What tensor cores lose of long sums, and that they must not be left to them: Ootomo & Yokota, "Recovering single
    precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022),
    arXiv:2203.03341. `exact` leaves it out, and so does AUTOCONV_SPLIT_PRODUCTS=0.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    exact = False
    tiles = tuple(tile._replace(blocks=min(tile.blocks, 2)) for tile in TILES)  # parts take registers

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        return split_products.forbidden() or super().refusals(layer, device, params)


class TensorTF32x3(TensorSplit):
    """Two parts of tf32, and three products of them (3xTF32): NVIDIA, CUTLASS, example 27."""

    name = "gemm.tensor.tf32x3"
    products, pipe, converting = 3, "mma.tf32", 3


class TensorBF16x6(TensorSplit):
    """Three parts of bfloat16, which are all of a float32, and the six largest of their nine products.

    Henry, Tang & Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations"
    (2019), arXiv:1904.06376.
    """

    name = "gemm.tensor.bf16x6"
    products, converting = 6, 5.5


def _depth(layer: ConvLayer) -> int:
    """BK: 64 bytes."""
    return 64 // layer.itemsize


def _slice_bytes(layer: ConvLayer, extent: int, BK: int, by_rows: bool) -> int:
    """Of one operand's slice in shared memory, as `tensor.cu` pads it."""
    pad = 0 if by_rows else 8
    lines, length = (extent, BK) if by_rows else (BK, extent)
    return lines * (length + pad) * layer.itemsize
