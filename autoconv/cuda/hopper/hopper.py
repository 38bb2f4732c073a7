"""Implicit GEMM by Hopper's own means: `wgmma` fed by the tensor copy engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.occupancy import WARP, register_cap
from autoconv.cuda.codegen.source import Constant, Unit
from autoconv.cuda.codegen.tensor_map import LINE, OFFSETS, STRIDE_UNIT, TensorMap
from autoconv.cuda.common.algorithm import TF32, Chain, ceil_div, no_tile, tile_of
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, beyond_cache, demand
from autoconv.cuda.common.split import MOST_PARTS, PRODUCT, Parts, SplitProduct, split_constants, splits, whole
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

CAPABILITY = 90  # the instructions are of sm_90a: neither older nor newer GPUs have them
LEAST_SLICES = 4  # of the depth, to a part
MOST_PASSES = 4
WARPGROUP = 128
PRODUCER_REGISTERS = 32
BARRIER = 8  # bytes
WIDTH = 64  # channels of one tap that come at once, in wgrad
SLICE_SLOTS, WRITE_SLOTS = 40, 8  # instructions of a warp to a slice, and to 32 elements on their way out


class HopperTile(NamedTuple):
    """What is computed at a time, the multiplying warpgroups, slices in flight, and blocks a multiprocessor shall hold.

    The warpgroups of a block share a tile, or ALTERNATE: each has tiles of its own.
    """

    BM: int
    BN: int
    CONSUMERS: int
    STAGES: int
    blocks: int
    ALTERNATE: int = 0

    @property
    def threads(self) -> int:
        """Of a block: the consumers, and the producer."""
        return (self.CONSUMERS + 1) * WARPGROUP

    @property
    def stage(self) -> int:
        """Bytes of a slice: a line to each row and column."""
        return (self.BM + self.BN) * LINE

    @property
    def shared(self) -> int:
        """Bytes of a block: stages, two barriers to each, one to a warpgroup, rounded up to the swizzle's alignment."""
        barriers = 2 * self.STAGES + self.CONSUMERS
        return ceil_div(self.STAGES * self.stage + barriers * BARRIER, 8 * LINE) * 8 * LINE

    @property
    def consumer_registers(self) -> int:
        """What the producer leaves of a block's registers, to a consumer's thread; given out in eights."""
        start = register_cap(self.threads, self.blocks)
        return min(240, (start + (start - PRODUCER_REGISTERS) // self.CONSUMERS) // 8 * 8)


TILES = (
    HopperTile(128, 256, 2, 4, blocks=1),
    HopperTile(256, 128, 2, 4, blocks=1),
    HopperTile(128, 128, 2, 5, blocks=1),
    HopperTile(128, 128, 2, 6, blocks=1, ALTERNATE=1),
    HopperTile(64, 256, 2, 5, blocks=1, ALTERNATE=1),
    HopperTile(128, 128, 1, 3, blocks=2),
    HopperTile(256, 64, 2, 5, blocks=1),
    HopperTile(128, 64, 2, 4, blocks=2),
    HopperTile(64, 128, 1, 4, blocks=2),
    HopperTile(64, 64, 1, 4, blocks=3),
)


class PassAxis(NamedTuple):
    """A pass along height or width: `pixels` of the output from `offset` on, a stride of the layer apart.

    The first filter tap of the pass meets the pixel `low` of the other array, the next pixel of the output one
    `pixel_stride` further; the next tap of the pass lies `tap_stride` further still, and is `next_tap` filter taps
    after the `first_tap`.
    """

    pixels: int
    low: int
    pixel_stride: int
    taps: int
    tap_stride: int
    first_tap: int
    next_tap: int
    offset: int


Pass = tuple[PassAxis, PassAxis]  # height, width


def pass_axes(layer: ConvLayer, i: int) -> list[PassAxis]:
    """The passes along one axis: one, but for dgrad one to each remainder of the stride (its polyphase components).

    There, dx[h] is the sum of dy[(h + padding - r dilation) / stride] w[r] over the taps r for which that
    is whole: every stride / gcd(stride, dilation)-th, from the last of them to the first.
    """
    stride, dilation, padding = layer.stride[i], layer.dilation[i], layer.padding[i][0]
    taps = (layer.R, layer.S)[i]
    if layer.direction != "dgrad":
        return [PassAxis((layer.P, layer.Q)[i], -padding, stride, taps, dilation, 0, 1, 0)]
    extent, common, found = (layer.H, layer.W)[i], math.gcd(stride, dilation), []
    for offset in range(min(stride, extent)):
        met = [r for r in range(taps) if (offset + padding - r * dilation) % stride == 0] or [0]
        whole = (offset + padding - met[0] * dilation) % stride == 0
        low = (offset + padding - met[-1] * dilation) // stride if whole else 0
        count = ceil_div(extent - offset, stride)
        found.append(PassAxis(count, low, 1, len(met) * whole, dilation // common, met[-1], -stride // common, offset))
    return found


def passes(layer: ConvLayer) -> list[Pass]:
    """Every pass."""
    return [(rows, columns) for rows in pass_axes(layer, 0) for columns in pass_axes(layer, 1)]


def extents(layer: ConvLayer, one: Pass) -> tuple[int, int, int]:
    """Rows, columns and depth of one group's matrix product in a pass."""
    C, K = layer.C // layer.groups, layer.K // layer.groups
    pixels, taps = layer.N * one[0].pixels * one[1].pixels, one[0].taps * one[1].taps
    return {"fwd": (pixels, K, taps * C), "dgrad": (pixels, C, taps * K), "wgrad": (K, taps * C, pixels)}[
        layer.direction
    ]


def pixel_map(layer: ConvLayer, one: Pass, pixels: int, dtype: str = "") -> TensorMap:
    """How the copy engine walks through x, or dy for dgrad, so many pixels at a time; the type may be another one."""
    gradient = layer.direction == "dgrad"
    C, H, W = (layer.K, layer.P, layer.Q) if gradient else (layer.C, layer.H, layer.W)
    pixel, line = C * layer.itemsize, LINE // layer.itemsize
    across = (one[1], W), (one[0], H)
    return TensorMap(
        dtype or layer.dtype,
        (C, W, H, layer.N),
        (pixel, W * pixel, H * W * pixel),
        (line, pixels),
        tuple(axis.pixel_stride for axis, _ in across),
        tuple(axis.low for axis, _ in across),
        tuple(axis.low + axis.pixels * axis.pixel_stride - extent for axis, extent in across),
    )


def other_map(layer: ConvLayer, BN: int, dtype: str = "") -> TensorMap:
    """How the copy engine takes boxes of w, or of dy for wgrad; likewise."""
    line, dtype = LINE // layer.itemsize, dtype or layer.dtype
    if layer.direction == "wgrad":
        pixels, pixel = layer.N * layer.P * layer.Q, layer.K * layer.itemsize
        return TensorMap(dtype, (layer.K, pixels, 1), (pixel, pixels * pixel), (line, line, 1))
    C, taps = layer.C // layer.groups, layer.R * layer.S
    tap = C * layer.itemsize
    box = (line, 1, BN if layer.direction == "fwd" else line)
    return TensorMap(dtype, (C, taps, layer.K), (tap, taps * tap), box)


class Hopper(SplitProduct):
    """float16 and bfloat16 with sums in float32, NHWC, channels a multiple of 8; compute capability 9.0 alone.

    The tensor copy engine (TMA) walks through pixels in its im2col mode, products of whole warpgroups (`wgmma`) read
    what it brings: NVIDIA's PTX ISA (8.0, 2022), "Tensors" and "Asynchronous Warpgroup Level Matrix Instructions".
    Warps that fetch and warps that multiply, and blocks that take one tile after the other, are as in CUTLASS 3.
    """

    name = "gemm.hopper"
    files = ("hopper/hopper.cu",)
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    layouts = ("NHWC",)
    groupings: ClassVar[tuple[str, ...]] = ("dense", "grouped")  # the copy engine wants 16 bytes of channels to a group
    tiles: ClassVar[tuple[HopperTile, ...]] = TILES
    function: ClassVar[str] = "hopper"  # of the text, which computes products
    products: ClassVar[int] = 1  # of tensor cores, to a product
    pointwise: ClassVar[bool] = False  # whether pixels are those of NCHW, met by filters of one tap

    def passes(self, layer: ConvLayer) -> list[Pass]:
        """Every pass: one, but for dgrad with a stride."""
        return passes(layer)

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        all_passes = self.passes(layer)
        rows, columns = _sides(layer, all_passes[0])
        for tile in self.tiles:
            # a tile of which half or more would be empty has a smaller sibling, down to 64 by 64
            if (tile.BM > 64 and rows <= tile.BM // 2) or (tile.BN > 64 and columns <= tile.BN // 2):
                continue
            params = {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES}
            slices = max(_slices(layer, one) for one in all_passes)
            most = min(MOST_PARTS, slices // LEAST_SLICES)
            parts = sorted({whole(split, slices) for split in range(1, max(most, 1) + 1)})
            best = min(parts, key=lambda split: self.estimate(layer, device, params | {"SPLIT": split}))
            blocks = max(_tiles(layer, one, tile) for one in all_passes)
            wanted = int(device.facts["multiprocessors"]) * tile.blocks
            for split in sorted({1, best, splits(blocks, wanted, slices, LEAST_SLICES)[-1]}):
                yield params | {"SPLIT": split}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        missing = no_tile(self.tiles, params, "BM", "BN", "STAGES")
        reasons = super().unfit(layer, params) + missing
        # where the depth is of channels, a line must not reach into the next group's
        lines = {"fwd": {"C": layer.C}, "dgrad": {"K": layer.K}, "wgrad": {}}[layer.direction]
        runs = {"fwd": {}, "dgrad": {"C": layer.C}, "wgrad": {"C": layer.C, "K": layer.K}}[layer.direction]
        for channels, unit in ((lines, _depth(layer)), (runs, STRIDE_UNIT // layer.itemsize)):
            for name, number in channels.items():
                if layer.groups > 1 and number // layer.groups % unit:
                    reasons.append(f"{name}/groups={number // layer.groups}: expected a multiple of {unit}")
        all_passes = self.passes(layer)
        if len(all_passes) > MOST_PASSES:
            stride = "x".join(map(str, layer.stride))
            expected = f"at most {MOST_PASSES} passes in dgrad, one to each component"
            return [*reasons, f"stride: expected {expected}, got {len(all_passes)} for {stride}"]
        pixels = max(extents(layer, all_passes[0])[0], layer.N * layer.P * layer.Q)
        if pixels >= 2**31 - 256:
            reasons.append(f"pixels: expected fewer than 2**31 - 256, got {pixels}")
        if not missing:
            maps = itertools.chain.from_iterable(self.maps(layer, one, self.tile(params)) for one in all_passes)
            reasons += [fault for one in maps for fault in one.faults()]
        far = max((axis.taps - 1) * axis.tap_stride for one in all_passes for axis in one)
        if far > OFFSETS[1]:
            reasons.append(f"filter taps: expected at most {OFFSETS[1]} pixels apart, got {far}")
        return list(dict.fromkeys(reasons))

    def tile(self, params: Params) -> HopperTile:
        """The one that parameters name."""
        return tile_of(self.tiles, params, "BM", "BN", "STAGES")

    def maps(self, layer: ConvLayer, one: Pass, tile: HopperTile) -> tuple[TensorMap, TensorMap]:
        """What the copy engine is given in a pass: of pixels, and of the other operand."""
        pixels = _depth(layer) if layer.direction == "wgrad" else tile.BM
        return pixel_map(layer, one, pixels), other_map(layer, tile.BN)

    def incapable(self, layer: ConvLayer, params: Params, capability: int) -> list[str]:
        reasons = super().incapable(layer, params, capability)
        if capability > CAPABILITY:
            reasons.append(f"compute capability: expected {CAPABILITY / 10}, got {capability / 10}")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        tile, split = self.tile(params), int(params["SPLIT"])
        shape: tuple[Constant, ...] = tuple(
            (name, int(getattr(tile, name))) for name in ("BM", "BN", "CONSUMERS", "STAGES", "ALTERNATE")
        )
        shape += (*split_constants(params), ("PRODUCER_REGISTERS", PRODUCER_REGISTERS))
        shape += (("CONSUMER_REGISTERS", tile.consumer_registers), ("POINTWISE", int(self.pointwise)))
        products = [
            Unit(
                self.function,
                *self.files,
                layer,
                (_tiles(layer, one, tile) * split, 1, 1),
                tile.threads,
                tile.blocks,
                tile.shared,
                tile.shared,
                shape + _constants(one),
                capability=CAPABILITY,
                persistent=True,
                maps=self.maps(layer, one, tile),
            )
            for one in self.passes(layer)
        ]
        beside = replace(products[0], shared=0, dynamic=0, persistent=False, maps=())
        return *products, *(
            replace(beside, function=function, grid=(ceil_div(threads, tile.threads), 1, 1))
            for function, threads in self.preparing(layer)
        )

    def parts(self, layer: ConvLayer, params: Params) -> Parts:
        tile = self.tile(params)
        most = max(_tiles(layer, one, tile) for one in self.passes(layer))  # one after the other
        sums, teams = tile.BM * tile.BN, 1 if tile.ALTERNATE else tile.CONSUMERS
        return Parts(most, sums, sums // teams // WARPGROUP, teams)

    def preparing(self, layer: ConvLayer) -> list[tuple[str, int]]:
        """A kernel of the text that puts filters, or wgrad's pixels, in the order wanted, and its threads; or none."""
        return []

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        launches = self.load(device, self.units(layer, params))
        packing = launches.pop() if self.preparing(layer) else None
        products = [(launch, PRODUCT) for launch in launches]
        workspace, packed = self.workspace_bytes(layer, device, params), self.packed_bytes(layer, device, params)
        return Chain(products, workspace, packing, packed, self.tickets(layer, device, params))

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, split, units = self.tile(params), int(params["SPLIT"]), self.units(layer, params)
        BK, sums, all_passes = _depth(layer), tile.BM * tile.BN, self.passes(layer)
        left = layer.itemsize if split == 1 else layer.accumulator.itemsize  # bytes of a sum, finished or not
        once = layer.bytes + beyond_cache(device, self.scratch_bytes(layer, params))
        found: list[Demand] = []
        for one, unit in zip(all_passes, units, strict=False):
            slices = ceil_div(_slices(layer, one), split)
            way_out = WRITE_SLOTS * sums / WARP
            found.append(
                demand(
                    unit,
                    slices * self.slice_slots(layer, tile) + way_out,
                    products=slices * sums * BK * self.products,
                    pipe="wgmma.tf32" if self.tf32 else "wgmma",
                    shared=slices * (tile.stage + self.read(tile)),
                    cached=slices * tile.stage + sums * left,
                    delay=2.0 * MEMORY_CLOCKS + (0 if tile.ALTERNATE else way_out / 4),
                    memory=once / len(all_passes),
                )
            )
            parts = self.parts(layer, params)._replace(tiles=_tiles(layer, one, tile))
            found += self.sum_demands(unit, layer, parts, params)
        return found

    def slice_slots(self, layer: ConvLayer, tile: HopperTile) -> float:
        """Instructions of a block to a slice of the depth."""
        return SLICE_SLOTS * tile.threads / WARP

    def read(self, tile: HopperTile) -> float:
        """Bytes of shared memory that products of a slice read: all columns to each 64 rows."""
        return (tile.BM + tile.BM / 64 * tile.BN) * LINE


class HopperTF32(TF32, Hopper):
    """The same on float32 arrays, rounded by the copy engine: the tensor cores take tf32 along a contiguous depth.

    That is of the filters' numbers for dgrad: they are turned when they are packed.
    """

    name = "gemm.hopper.tf32"
    directions = ("fwd", "dgrad")

    def maps(self, layer: ConvLayer, one: Pass, tile: HopperTile) -> tuple[TensorMap, TensorMap]:
        turned = layer.replace(direction="fwd", C=layer.K, K=layer.C) if layer.direction == "dgrad" else layer
        return pixel_map(layer, one, tile.BM, "tf32"), other_map(turned, tile.BN, "tf32")

    def preparing(self, layer: ConvLayer) -> list[tuple[str, int]]:
        return [("turn_filters", math.prod(layer.w_shape))] if layer.direction == "dgrad" else []

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return layer.itemsize * math.prod(layer.w_shape) if self.preparing(layer) else 0


def _depth(layer: ConvLayer) -> int:
    """BK: a line, of channels; as many pixels, for wgrad."""
    return LINE // layer.itemsize


def _tiles(layer: ConvLayer, one: Pass, tile: HopperTile) -> int:
    """To cover a pass."""
    rows, columns = _sides(layer, one)
    return ceil_div(rows, tile.BM) * ceil_div(columns, tile.BN) * layer.groups


def _sides(layer: ConvLayer, one: Pass) -> tuple[int, int]:
    """Rows and columns to cover; for wgrad whole runs of a tap's channels, several to a tile."""
    rows, columns, _ = extents(layer, one)
    if layer.direction == "wgrad":
        columns = layer.R * layer.S * ceil_div(layer.C // layer.groups, WIDTH) * WIDTH
    return rows, columns


def _slices(layer: ConvLayer, one: Pass) -> int:
    """Of the depth of a pass."""
    _, _, depth = extents(layer, one)
    taps = 1 if layer.direction == "wgrad" else one[0].taps * one[1].taps
    return taps * ceil_div(depth // taps, _depth(layer)) if taps else 0


def _constants(one: Pass) -> tuple[Constant, ...]:
    """A pass, under the names it has in tiles.cuh."""
    rows, columns = one
    return (
        ("PIXEL_ROWS", rows.pixels),
        ("PIXEL_COLUMNS", columns.pixels),
        ("PIXEL_LOW_H", rows.low),
        ("PIXEL_LOW_W", columns.low),
        ("PIXEL_STRIDE_H", rows.pixel_stride),
        ("PIXEL_STRIDE_W", columns.pixel_stride),
        ("TAPS_H", rows.taps),
        ("TAPS_W", columns.taps),
        ("TAP_STRIDE_H", rows.tap_stride),
        ("TAP_STRIDE_W", columns.tap_stride),
        ("FIRST_R", rows.first_tap),
        ("FIRST_S", columns.first_tap),
        ("NEXT_R", rows.next_tap),
        ("NEXT_S", columns.next_tap),
        ("OFFSET_H", rows.offset),
        ("OFFSET_W", columns.offset),
    )
