"""Implicit GEMM by Hopper's own means: `wgmma` fed by the tensor copy engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from autoconv.algorithm import Params
from autoconv.cuda.codegen.occupancy import WARP, register_cap
from autoconv.cuda.codegen.source import Constant, Unit
from autoconv.cuda.codegen.tensor_map import LINE, OFFSETS, STRIDE_UNIT, TensorMap
from autoconv.cuda.common.algorithm import TF32, ceil_div, no_tile, tile_of
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, beyond_cache, demand
from autoconv.cuda.common.split import MOST_PARTS, SplitProduct, splits, sum_demand, whole
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

CAPABILITY = 90  # the instructions are of sm_90a: neither older nor newer GPUs have them
LEAST_SLICES = 4  # of the depth, to a part
MOST_PASSES = 4
WARPGROUP = 128
PRODUCER_REGISTERS = 40
BARRIER = 8  # bytes
SLICE_SLOTS, WRITE_SLOTS = 40, 8  # instructions of a warp to a slice, and to 32 elements on their way out


class HopperTile(NamedTuple):
    """What a block computes, its multiplying warpgroups, slices in flight, and blocks a multiprocessor shall hold."""

    BM: int
    BN: int
    CONSUMERS: int
    STAGES: int
    blocks: int

    @property
    def threads(self) -> int:
        """Of a block: the consumers, and the producer."""
        return (self.CONSUMERS + 1) * WARPGROUP

    @property
    def shared(self) -> int:
        """Bytes of a block: the stages, and two barriers to each, rounded up to the swizzle's alignment."""
        return ceil_div(self.STAGES * ((self.BM + self.BN) * LINE + 2 * BARRIER), 8 * LINE) * 8 * LINE

    @property
    def consumer_registers(self) -> int:
        """What the producer leaves of a block's registers, to a consumer's thread; given out in eights."""
        start = register_cap(self.threads, self.blocks)
        return min(240, (start + (start - PRODUCER_REGISTERS) // self.CONSUMERS) // 8 * 8)


TILES = (
    HopperTile(128, 256, 2, 4, blocks=1),
    HopperTile(256, 128, 2, 4, blocks=1),
    HopperTile(128, 128, 2, 5, blocks=1),
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


def pixel_map(layer: ConvLayer, one: Pass, BM: int) -> TensorMap:
    """How the copy engine walks through x, or dy for dgrad."""
    gradient = layer.direction == "dgrad"
    C, H, W = (layer.K, layer.P, layer.Q) if gradient else (layer.C, layer.H, layer.W)
    pixel, line = C * layer.itemsize, LINE // layer.itemsize
    across = (one[1], W), (one[0], H)
    return TensorMap(
        layer.dtype,
        (C, W, H, layer.N),
        (pixel, W * pixel, H * W * pixel),
        (line, line if layer.direction == "wgrad" else BM),
        tuple(axis.pixel_stride for axis, _ in across),
        tuple(axis.low for axis, _ in across),
        tuple(axis.low + axis.pixels * axis.pixel_stride - extent for axis, extent in across),
    )


def other_map(layer: ConvLayer, BN: int) -> TensorMap:
    """How the copy engine takes boxes of w, or of dy for wgrad."""
    line = LINE // layer.itemsize
    if layer.direction == "wgrad":
        pixels, pixel = layer.N * layer.P * layer.Q, layer.K * layer.itemsize
        return TensorMap(layer.dtype, (layer.K, pixels, 1), (pixel, pixels * pixel), (line, line, 1))
    C, taps = layer.C // layer.groups, layer.R * layer.S
    tap = C * layer.itemsize
    box = (line, 1, BN if layer.direction == "fwd" else line)
    return TensorMap(layer.dtype, (C, taps, layer.K), (tap, taps * tap), box)


class Hopper(SplitProduct):
    """float16 and bfloat16 with sums in float32, NHWC, channels a multiple of 8; compute capability 9.0 alone.

    The tensor copy engine (TMA) walks through pixels in its im2col mode, products of whole warpgroups (`wgmma`) read
    what it brings: NVIDIA's PTX ISA (8.0, 2022), "Tensors" and "Asynchronous Warpgroup Level Matrix Instructions".
    Warps that fetch and warps that multiply, and blocks that take one tile after the other, are as in CUTLASS 3.
    """

    name = "gemm.hopper"
    files = ("gemm/hopper.cu",)
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    layouts = ("NHWC",)
    groupings = ("dense", "grouped")  # the copy engine wants 16 bytes of channels to a group

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        all_passes = passes(layer)
        rows, columns, _ = extents(layer, all_passes[0])
        if layer.direction == "wgrad":
            columns = layer.C // layer.groups  # a tile has a single tap
        for tile in TILES:
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
        missing = no_tile(TILES, params, "BM", "BN", "STAGES")
        reasons = super().unfit(layer, params) + missing
        # where the depth is of channels, a line must not reach into the next group's
        lines = {"fwd": {"C": layer.C}, "dgrad": {"K": layer.K}, "wgrad": {}}[layer.direction]
        runs = {"fwd": {}, "dgrad": {"C": layer.C}, "wgrad": {"C": layer.C, "K": layer.K}}[layer.direction]
        for channels, unit in ((lines, _depth(layer)), (runs, STRIDE_UNIT // layer.itemsize)):
            for name, number in channels.items():
                if layer.groups > 1 and number // layer.groups % unit:
                    reasons.append(f"{name}/groups={number // layer.groups}: expected a multiple of {unit}")
        all_passes = passes(layer)
        if len(all_passes) > MOST_PASSES:
            stride = "x".join(map(str, layer.stride))
            expected = f"at most {MOST_PASSES} passes in dgrad, one to each component"
            return [*reasons, f"stride: expected {expected}, got {len(all_passes)} for {stride}"]
        pixels = max(extents(layer, all_passes[0])[0], layer.N * layer.P * layer.Q)
        if pixels >= 2**31 - 256:
            reasons.append(f"pixels: expected fewer than 2**31 - 256, got {pixels}")
        maps = [] if missing else _maps(layer, _tile(params))
        reasons += [fault for one in maps for fault in one.faults()]
        far = max((axis.taps - 1) * axis.tap_stride for one in all_passes for axis in one)
        if far > OFFSETS[1]:
            reasons.append(f"filter taps: expected at most {OFFSETS[1]} pixels apart, got {far}")
        return list(dict.fromkeys(reasons))

    def incapable(self, layer: ConvLayer, params: Params, capability: int) -> list[str]:
        reasons = super().incapable(layer, params, capability)
        if capability > CAPABILITY:
            reasons.append(f"compute capability: expected {CAPABILITY / 10}, got {capability / 10}")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        tile, split = _tile(params), int(params["SPLIT"])
        shape: tuple[Constant, ...] = tuple(
            (name, int(getattr(tile, name))) for name in ("BM", "BN", "CONSUMERS", "STAGES")
        )
        shape += (("SPLIT", split), ("PRODUCER_REGISTERS", PRODUCER_REGISTERS))
        shape += (("CONSUMER_REGISTERS", tile.consumer_registers),)
        products = [
            Unit(
                "hopper",
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
                maps=(pixel_map(layer, one, tile.BM), other_map(layer, tile.BN)),
            )
            for one in passes(layer)
        ]
        if split == 1:
            return tuple(products)
        product = products[0]
        blocks = (ceil_div(math.prod(layer.output_shape), tile.threads), 1, 1)
        return *products, replace(
            product, function="hopper_sum", grid=blocks, shared=0, dynamic=0, persistent=False, maps=()
        )

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, split, units = _tile(params), int(params["SPLIT"]), self.units(layer, params)
        scratch, BK = self.workspace_bytes(layer, device, params), _depth(layer)
        sums, fed = tile.BM * tile.BN, (tile.BM + tile.BN) * LINE
        once = layer.bytes + beyond_cache(device, scratch)
        found = []
        for one, unit in zip(passes(layer), units, strict=False):
            slices = ceil_div(_slices(layer, one), split)
            way_out = WRITE_SLOTS * sums / WARP
            found.append(
                demand(
                    unit,
                    slices * SLICE_SLOTS * tile.threads / WARP + way_out,
                    products=slices * sums * BK,
                    pipe="wgmma.tf32" if layer.itemsize == 4 else "wgmma",
                    shared=slices * (fed + (tile.BM + tile.CONSUMERS * tile.BN) * LINE),
                    cached=slices * fed + sums * layer.itemsize,
                    delay=2.0 * MEMORY_CLOCKS + way_out / 4,
                    memory=once / len(passes(layer)),
                )
            )
        return [*found, *(sum_demand(unit, layer, scratch) for unit in units[len(found) :])]


class HopperTF32(TF32, Hopper):
    """The same on float32 arrays, rounded by the copy engine: the tensor cores take tf32 along a contiguous depth."""

    name = "gemm.hopper.tf32"
    directions = ("fwd",)


def _tile(params: Params) -> HopperTile:
    return tile_of(TILES, params, "BM", "BN", "STAGES")


def _maps(layer: ConvLayer, tile: HopperTile) -> list[TensorMap]:
    """What the copy engine is given, of all passes."""
    return [*(pixel_map(layer, one, tile.BM) for one in passes(layer)), other_map(layer, tile.BN)]


def _depth(layer: ConvLayer) -> int:
    """BK: a line, of channels; as many pixels, for wgrad."""
    return LINE // layer.itemsize


def _tiles(layer: ConvLayer, one: Pass, tile: HopperTile) -> int:
    """To cover a pass; a tile of wgrad has a single tap."""
    rows, columns, _ = extents(layer, one)
    taps = layer.R * layer.S if layer.direction == "wgrad" else 1
    return ceil_div(rows, tile.BM) * ceil_div(columns // taps, tile.BN) * taps * layer.groups


def _slices(layer: ConvLayer, one: Pass) -> int:
    """Of the depth of a pass."""
    _, _, depth = extents(layer, one)
    taps = 1 if layer.direction == "wgrad" else one[0].taps * one[1].taps
    return taps * ceil_div(depth // taps, _depth(layer)) if taps else 0


def _constants(one: Pass) -> tuple[Constant, ...]:
    """A pass, under the names it has in hopper.cu."""
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
