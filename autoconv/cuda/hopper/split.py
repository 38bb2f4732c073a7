"""float32 in nearly full accuracy by Hopper's own means: products of parts in bfloat16."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from autoconv.algorithm import Kernel, Params
from autoconv.common import split_products
from autoconv.cuda.codegen.source import wide
from autoconv.cuda.codegen.tensor_map import LINE, STRIDE_UNIT, TensorMap
from autoconv.cuda.common.algorithm import Chain, Launch, aligned, ceil_div
from autoconv.cuda.common.model import Demand, streaming
from autoconv.cuda.common.split import PRODUCT
from autoconv.cuda.hopper.hopper import Hopper, HopperTile, Pass, other_map, pixel_map
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

PARTS, PART_BYTES = 3, 2
BK = LINE // 4  # of the depth, in float32
# Instructions of a warp, as its machine code has them: for 64 rows of its warpgroup to a step of the depth, and to each
# 64 columns of a step; to a slice besides.
STEP_SLOTS, COLUMN_SLOTS, SLICE_SLOTS = {"fwd": 54, "dgrad": 54, "wgrad": 93}, 32, 55
STEPS = 2  # to a slice
FILTER_RUN = STRIDE_UNIT // PART_BYTES  # of a part's depth, that a thread packs


class PartsTile(HopperTile):
    """A tile whose columns come in three parts of bfloat16, and whose warpgroups have two sums to each element."""

    @property
    def stage(self) -> int:
        """Bytes of a slice: a line to each row, and three halves to each column."""
        return self.BM * LINE + self.BN * PARTS * LINE // 2


TILES = (
    PartsTile(256, 128, 2, 4, blocks=1),
    PartsTile(128, 128, 2, 5, blocks=1),
    PartsTile(256, 64, 2, 5, blocks=1),
    PartsTile(128, 64, 2, 4, blocks=2),
    PartsTile(64, 128, 1, 3, blocks=2),
    PartsTile(64, 64, 1, 3, blocks=3),
)


class HopperBF16x6(Hopper):
    """float32, NHWC, channels a multiple of 4, by the six largest of nine products of parts in bfloat16.

    The parts: Henry, Tang & Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
    computations" (2019), arXiv:1904.06376. What tensor cores lose of long sums: Ootomo & Yokota, "Recovering single
    precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022),
    arXiv:2203.03341. Filters are packed in parts; for wgrad, x is taken apart into the workspace. `exact` leaves it
    out, and so does AUTOCONV_SPLIT_PRODUCTS=0.
    """

    name = "gemm.hopper.bf16x6"
    files = ("hopper/split.cu",)
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    exact = False
    tiles = TILES
    function = "split"
    products = 6

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        return split_products.forbidden() or super().refusals(layer, device, params)

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = super().unfit(layer, params)
        pixels = PARTS * layer.N * layer.P * layer.Q
        if layer.direction == "wgrad" and pixels >= 2**31:
            reasons.append(f"pixels: expected fewer than 2**31 in {PARTS} parts, got {pixels}")
        furthest = _furthest(layer)
        if furthest >= 2**31 and not wide(layer):
            reasons.append(f"elements of {PARTS} parts, filled up: expected places below 2**31, got {furthest}")
        # where a group's parts begin, the copy engine has to be able to
        run, channels = STRIDE_UNIT // PART_BYTES, layer.C // layer.groups
        if layer.direction == "wgrad" and layer.groups > 1 and channels % run:
            reasons.append(f"C/groups={channels}: expected a multiple of {run}")
        return reasons

    def maps(self, layer: ConvLayer, one: Pass, tile: HopperTile) -> tuple[TensorMap, TensorMap]:
        if layer.direction == "wgrad":
            return pixel_map(_in_parts(layer), one, BK, "bfloat16"), other_map(layer, tile.BN)
        columns, blocks = _filters(layer)
        lines = TensorMap("bfloat16", (BK, columns, blocks), (LINE // 2, columns * LINE // 2), (BK, tile.BN, PARTS))
        return pixel_map(layer, one, tile.BM), lines

    def preparing(self, layer: ConvLayer) -> list[tuple[str, int]]:
        if layer.direction == "wgrad":
            return [("split_pixels", _pixels_bytes(layer) // 2 // PARTS // 4)]
        columns, blocks = _filters(layer)
        return [("split_filters", columns * BK * blocks // PARTS // FILTER_RUN)]

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        columns, blocks = _filters(layer)
        return 0 if layer.direction == "wgrad" else columns * blocks * LINE // 2

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return self._pixels_start(layer, params) + _pixels_bytes(layer)

    def slice_slots(self, layer: ConvLayer, tile: HopperTile) -> float:
        rows = STEP_SLOTS["wgrad" if self.pointwise else layer.direction]  # which are read one by one
        steps = STEPS * tile.BM / 64 * (rows + COLUMN_SLOTS * tile.BN / 64)
        return 4 * (steps + SLICE_SLOTS * tile.CONSUMERS)  # of the four warps of a warpgroup

    def read(self, tile: HopperTile) -> float:
        return tile.BM * LINE + tile.BM / 64 * tile.BN * self.products * LINE / 2

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        found = super().demands(layer, device, params)
        if layer.direction == "wgrad":
            moved = math.prod(layer.x_shape) * layer.itemsize + _pixels_bytes(layer)
            found.insert(0, streaming(self.units(layer, params)[-1], moved))
        return found

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        if layer.direction != "wgrad":
            return super().build(layer, device, params)
        product, split = self.load(device, self.units(layer, params))
        start = self._pixels_start(layer, params)

        def take_apart(x: Any, workspace: Any) -> None:
            split(x, workspace[start:])

        def multiply(workspace: Any, *others: Any) -> None:
            product(workspace[start:], *others)

        steps: list[tuple[Launch, tuple[str, ...]]] = [(take_apart, ("a", "workspace"))]
        steps += [(multiply, ("workspace", *PRODUCT[1:]))]
        tickets = self.tickets(layer, device, params)
        return Chain(steps, self.workspace_bytes(layer, device, params), tickets=tickets)

    def _pixels_start(self, layer: ConvLayer, params: Params) -> int:
        """Where the pixels' parts begin in the workspace: behind those of the sums."""
        return aligned(self.scratch_bytes(layer, params))


def _filters(layer: ConvLayer) -> tuple[int, int]:
    """Columns to a group, and blocks of BK of their depth, which are a tap's and have a part each."""
    C, K = layer.C // layer.groups, layer.K // layer.groups
    columns, depth = (K, C) if layer.direction == "fwd" else (C, K)
    return columns, layer.groups * layer.R * layer.S * ceil_div(depth, BK) * PARTS


def _furthest(layer: ConvLayer) -> int:
    """The largest number that kernels reckon with where they put parts: from one of the pixels' to the last, or all."""
    if layer.direction == "wgrad":
        return _pixels_bytes(layer) // PART_BYTES // PARTS * (PARTS - 1)
    columns, blocks = _filters(layer)
    return columns * BK * blocks


def _in_parts(layer: ConvLayer) -> ConvLayer:
    """The layer whose images are the parts of another one's, channels in whole runs of sixteen bytes."""
    run = STRIDE_UNIT // PART_BYTES
    C = ceil_div(layer.C, run) * run
    return layer.replace(N=PARTS * layer.N, C=C, dtype="bfloat16", groups=1)


def _pixels_bytes(layer: ConvLayer) -> int:
    return 2 * math.prod(_in_parts(layer).x_shape) if layer.direction == "wgrad" else 0
