"""Implicit GEMM on the tensor cores: `mma.sync` fed by `cp.async`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from autoconv.algorithm import Params
from autoconv.common import split_products
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import TF32, ceil_div, no_tile, roofline, tile_of
from autoconv.cuda.common.split import SplitProduct, splits, summing
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

LEAST_SLICES = 4  # of the depth, to a part: as many as are in flight


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
        constants = (*((name, int(getattr(tile, name))) for name in names), ("BK", BK), ("SPLIT", split))
        constants += (("PRODUCTS", self.products),)
        shared = tile.STAGES * (
            _slice_bytes(layer, tile.BM, BK, layer.direction != "wgrad")
            + _slice_bytes(layer, tile.BN, BK, layer.direction == "fwd")
        )
        product = Unit(
            "tensor",
            *self.files,
            layer,
            (ceil_div(rows, tile.BM), ceil_div(columns, tile.BN), layer.groups * split),
            tile.threads,
            tile.blocks,
            shared,
            shared,
            constants,
            capability=80,
        )
        if split == 1:
            return (product,)
        blocks = summing(layer, tile.threads)
        total = Unit(
            "tensor_sum", *self.files, layer, blocks, tile.threads, tile.blocks, constants=constants, capability=80
        )
        return product, total

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        tile, split = tile_of(self.tiles, params, "BM", "BN"), int(params["SPLIT"])
        rows, columns, depth = extents(layer)
        blocks = ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups * split
        together = int(device.facts["multiprocessors"]) * tile.blocks
        computed = 2.0 * ceil_div(blocks, together) * together * tile.BM * tile.BN * depth / split
        efficiency = 0.6 * min(1.0, tile.BM * tile.BN / (tile.BM + tile.BN) / 64)
        peak = device.peak_flops("float16") / (2 if layer.itemsize == 4 else 1) / self.products
        scratch = 2 * self.workspace_bytes(layer, device, params) / device.bandwidth()
        return max(computed / (efficiency * peak), roofline(layer, device, 1e3)) + scratch + 3e-6 * (split > 1)


class TensorTF32(TF32, Tensor):
    """The same on float32 arrays, rounded on the way to the registers."""

    name = "gemm.tensor.tf32"


class TensorTF32x3(Tensor):
    """float32 in nearly full accuracy: each operand in two parts of tf32, a product as three of them (3xTF32).

    NVIDIA, CUTLASS, example 27; what tensor cores lose of long sums, and that they must not be left to them: Ootomo &
    Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
    performance" (2022), arXiv:2203.03341. `exact` leaves it out, and so does AUTOCONV_SPLIT_PRODUCTS=0.
    """

    name = "gemm.tensor.tf32x3"
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    exact = False
    products = 3
    tiles = tuple(tile._replace(blocks=min(tile.blocks, 2)) for tile in TILES)  # parts take registers

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        return split_products.forbidden() or super().refusals(layer, device, params)


def _depth(layer: ConvLayer) -> int:
    """BK: 64 bytes."""
    return 64 // layer.itemsize


def _slice_bytes(layer: ConvLayer, extent: int, BK: int, by_rows: bool) -> int:
    """Of one operand's slice in shared memory, as `tensor.cu` pads it."""
    pad = 0 if by_rows else 8
    lines, length = (extent, BK) if by_rows else (BK, extent)
    return lines * (length + pad) * layer.itemsize
