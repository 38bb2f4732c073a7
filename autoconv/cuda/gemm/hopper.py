"""Implicit GEMM by Hopper's own means: `wgmma` fed by the tensor copy engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.occupancy import register_cap
from autoconv.cuda.codegen.source import Constant, Unit
from autoconv.cuda.codegen.tensor_map import LINE, OFFSETS, STRIDE_UNIT, TensorMap
from autoconv.cuda.common.algorithm import TF32, Chain, CudaAlgorithm, Launch, ceil_div
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

CAPABILITY = 90  # the instructions are of sm_90a: neither older nor newer GPUs have them
MOST_PARTS = 32
LEAST_SLICES = 4  # of the depth, to a part
MOST_PASSES = 4
WARPGROUP = 128
PRODUCER_REGISTERS = 40
BARRIER = 8  # bytes
# of the estimate: to fill a block's pipeline, to write an element of its tile, to launch; seconds
FILL_SECONDS, WRITE_SECONDS, LAUNCH_SECONDS = 1e-6, 5e-11, 3e-6


class Tile(NamedTuple):
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
    Tile(128, 256, 2, 4, blocks=1),
    Tile(256, 128, 2, 4, blocks=1),
    Tile(128, 128, 2, 5, blocks=1),
    Tile(128, 128, 1, 3, blocks=2),
    Tile(256, 64, 2, 5, blocks=1),
    Tile(128, 64, 2, 4, blocks=2),
    Tile(64, 128, 1, 4, blocks=2),
    Tile(64, 64, 1, 4, blocks=3),
)


class Axis(NamedTuple):
    """A pass along height or width: `pixels` of the output from `spot` on, a stride apart.

    The first filter tap of the pass meets the pixel `low` of the other array, the next pixel of the output
    one `step` further; the next tap lies `reach` further still, and is `next` filter taps after the `first`.
    """

    pixels: int
    low: int
    step: int
    taps: int
    reach: int
    first: int
    next: int
    spot: int


def axis(layer: ConvLayer, i: int) -> list[Axis]:
    """The passes along one axis: one, but for dgrad one to each remainder of the stride.

    There, dx[h] is the sum of dy[(h + padding - r dilation) / stride] w[r] over the taps r for which that
    is whole: every stride / gcd(stride, dilation)-th, from the last of them to the first.
    """
    stride, dilation, padding = layer.stride[i], layer.dilation[i], layer.padding[i][0]
    taps = (layer.R, layer.S)[i]
    if layer.direction != "dgrad":
        return [Axis((layer.P, layer.Q)[i], -padding, stride, taps, dilation, 0, 1, 0)]
    extent, common, passes = (layer.H, layer.W)[i], math.gcd(stride, dilation), []
    for spot in range(min(stride, extent)):
        met = [r for r in range(taps) if (spot + padding - r * dilation) % stride == 0] or [0]
        whole = (spot + padding - met[0] * dilation) % stride == 0
        low = (spot + padding - met[-1] * dilation) // stride if whole else 0
        count = ceil_div(extent - spot, stride)
        passes.append(Axis(count, low, 1, len(met) * whole, dilation // common, met[-1], -stride // common, spot))
    return passes


def passes(layer: ConvLayer) -> list[tuple[Axis, Axis]]:
    """Every pass, as (height, width)."""
    return [(rows, columns) for rows in axis(layer, 0) for columns in axis(layer, 1)]


def extents(layer: ConvLayer, of: tuple[Axis, Axis]) -> tuple[int, int, int]:
    """Rows, columns and depth of one group's matrix product in a pass."""
    C, K = layer.C // layer.groups, layer.K // layer.groups
    pixels, taps = layer.N * of[0].pixels * of[1].pixels, of[0].taps * of[1].taps
    return {"fwd": (pixels, K, taps * C), "dgrad": (pixels, C, taps * K), "wgrad": (K, taps * C, pixels)}[
        layer.direction
    ]


def pixel_map(layer: ConvLayer, of: tuple[Axis, Axis], BM: int) -> TensorMap:
    """How the copy engine walks through x, or dy for dgrad."""
    gradient = layer.direction == "dgrad"
    C, H, W = (layer.K, layer.P, layer.Q) if gradient else (layer.C, layer.H, layer.W)
    pixel, line = C * layer.itemsize, LINE // layer.itemsize
    across = (of[1], W), (of[0], H)
    return TensorMap(
        layer.dtype,
        (C, W, H, layer.N),
        (pixel, W * pixel, H * W * pixel),
        (line, line if layer.direction == "wgrad" else BM),
        tuple(axis.step for axis, _ in across),
        tuple(axis.low for axis, _ in across),
        tuple(axis.low + axis.pixels * axis.step - extent for axis, extent in across),
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


class Hopper(CudaAlgorithm):
    """float16 and bfloat16 with sums in float32, NHWC, channels a multiple of 8; compute capability 9.0 alone."""

    name = "gemm.hopper"
    exact = True
    files = ("gemm/hopper.cu",)
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        rows, columns, _ = extents(layer, passes(layer)[0])
        if layer.direction == "wgrad":
            columns = layer.C // layer.groups  # a tile has a single tap
        for tile in TILES:
            # a tile of which half or more would be empty has a smaller sibling, down to 64 by 64
            if (tile.BM > 64 and rows <= tile.BM // 2) or (tile.BN > 64 and columns <= tile.BN // 2):
                continue
            params = {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES}
            most = min(MOST_PARTS, max(_slices(layer, one) for one in passes(layer)) // LEAST_SLICES)
            parts = range(1, max(most, 1) + 1)
            best = min(parts, key=lambda split: self.estimate(layer, device, params | {"SPLIT": split}))
            for split in sorted({1, best}):
                yield params | {"SPLIT": split}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons, tile = [], _tile(params)
        if layer.layout != "NHWC":
            reasons.append(f"{layer.layout}: channels must be neighbours, as in NHWC")
        if tile is None:
            reasons.append(f"no such tile: {', '.join(f'{t.BM}x{t.BN} in {t.STAGES} stages' for t in TILES)} exist")
        if not 1 <= int(params["SPLIT"]) <= MOST_PARTS:
            reasons.append(f"SPLIT={params['SPLIT']}: allowed are 1 to {MOST_PARTS}")
        if layer.dtype not in self.dtypes or tile is None:
            return reasons  # nothing can be said of its lines
        # where the depth is of channels, a line must not reach into the next group's
        lines = {"fwd": {"C": layer.C}, "dgrad": {"K": layer.K}, "wgrad": {}}[layer.direction]
        runs = {"fwd": {}, "dgrad": {"C": layer.C}, "wgrad": {"C": layer.C, "K": layer.K}}[layer.direction]
        for channels, unit in ((lines, _depth(layer)), (runs, STRIDE_UNIT // layer.itemsize)):
            for name, value in channels.items():
                if layer.groups > 1 and value // layer.groups % unit:
                    reasons.append(f"{name}/groups={value // layer.groups}: a multiple of {unit} is wanted")
        all_passes = passes(layer)
        if len(all_passes) > MOST_PASSES:
            reasons.append(
                f"stride {layer.stride}: dgrad would take {len(all_passes)} passes, {MOST_PASSES} are the most"
            )
            return reasons
        if max(extents(layer, all_passes[0])[0], layer.N * layer.P * layer.Q) >= 2**31 - 256:
            reasons.append("more than 2**31 pixels")
        maps = [pixel_map(layer, one, tile.BM) for one in all_passes] + [other_map(layer, tile.BN)]
        reasons += [fault for one in maps for fault in one.faults()]
        reaches = {(a.taps - 1) * a.reach for one in all_passes for a in one}
        reasons += [
            f"filter taps {far} apart: the copy engine takes {OFFSETS[1]}" for far in reaches if far > OFFSETS[1]
        ]
        return list(dict.fromkeys(reasons))

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        capability = device.facts["compute_capability"]
        if capability > CAPABILITY:
            reasons.append(f"compute capability {capability / 10}: the instructions are of {CAPABILITY / 10} alone")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        tile, split = _tile(params), int(params["SPLIT"])
        assert tile is not None
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

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        split = int(params["SPLIT"])
        return 4 * split * math.prod(layer.output_shape) if split > 1 else 0

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        """Rounds of tiles: a multiprocessor's blocks share its tensor cores, and hide each other's ends."""
        tile, split = _tile(params), int(params["SPLIT"])
        assert tile is not None
        multiprocessors = int(device.facts["multiprocessors"])
        rate = device.peak_flops("float16") / (2 if layer.itemsize == 4 else 1) / multiprocessors
        seconds = 0.0
        for one in passes(layer):
            slices = ceil_div(_slices(layer, one), split)
            product = 2.0 * tile.BM * tile.BN * _depth(layer) / (_efficiency(tile) * rate)
            alone = FILL_SECONDS + tile.BM * tile.BN * WRITE_SECONDS
            rounds = ceil_div(_tiles(layer, one, tile) * split, multiprocessors * tile.blocks)
            seconds += rounds * max(slices * product * tile.blocks, slices * product + alone) + alone
        scratch = 2 * self.workspace_bytes(layer, device, params) / device.bandwidth()
        more = len(passes(layer)) - 1 + (split > 1)  # launches
        return max(seconds, layer.bytes / device.bandwidth()) + scratch + LAUNCH_SECONDS * more

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        units = self.units(layer, params)
        product = ("a", "b", "out", "bias", "residual", "workspace")
        total = ("workspace", "out", "bias", "residual")
        steps: list[tuple[Launch, tuple[str, ...]]] = [
            (launch, product if unit.maps else total)
            for unit, launch in zip(units, self.load(device, units), strict=True)
        ]
        return Chain(steps, self.workspace_bytes(layer, device, params))


class HopperTF32(TF32, Hopper):
    """The same on float32 arrays, rounded by the copy engine: fwd alone."""

    name = "gemm.hopper.tf32"

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = super().unfit(layer, params)
        if layer.direction != "fwd":
            reasons.append(f"{layer.direction}: the tensor cores take tf32 only where the depth is contiguous")
        return reasons


def _tile(params: Params) -> Tile | None:
    wanted = (params["BM"], params["BN"], params["STAGES"])
    return next((tile for tile in TILES if wanted == (tile.BM, tile.BN, tile.STAGES)), None)


def _depth(layer: ConvLayer) -> int:
    """BK: a line, of channels; as many pixels, for wgrad."""
    return LINE // layer.itemsize


def _tiles(layer: ConvLayer, of: tuple[Axis, Axis], tile: Tile) -> int:
    """To cover a pass; a tile of wgrad has a single tap."""
    rows, columns, _ = extents(layer, of)
    taps = layer.R * layer.S if layer.direction == "wgrad" else 1
    return ceil_div(rows, tile.BM) * ceil_div(columns // taps, tile.BN) * taps * layer.groups


def _slices(layer: ConvLayer, of: tuple[Axis, Axis]) -> int:
    """Of the depth of a pass."""
    _, _, depth = extents(layer, of)
    taps = 1 if layer.direction == "wgrad" else of[0].taps * of[1].taps
    return taps * ceil_div(depth // taps, _depth(layer)) if taps else 0


def _efficiency(tile: Tile) -> float:
    """Share of the tensor cores' peak in the steady state.

    A product of 64 rows and BN columns reads both operands from shared memory, in no less time than its own
    from 64 columns on; and a tile is read from the L2 at a rate that falls with BM BN / (BM + BN).
    """
    reuse = tile.BM * tile.BN / (tile.BM + tile.BN)
    return float(0.85 * min(1.0, (reuse / 64) ** 0.5))


def _constants(of: tuple[Axis, Axis]) -> tuple[Constant, ...]:
    """A pass, under the names it has in hopper.cu."""
    rows, columns = of
    return (
        ("PIXEL_ROWS", rows.pixels),
        ("PIXEL_COLUMNS", columns.pixels),
        ("PIXEL_LOW_H", rows.low),
        ("PIXEL_LOW_W", columns.low),
        ("PIXEL_STEP_H", rows.step),
        ("PIXEL_STEP_W", columns.step),
        ("TAPS_H", rows.taps),
        ("TAPS_W", columns.taps),
        ("TAP_STEP_H", rows.reach),
        ("TAP_STEP_W", columns.reach),
        ("FIRST_R", rows.first),
        ("FIRST_S", columns.first),
        ("NEXT_R", rows.next),
        ("NEXT_S", columns.next),
        ("SPOT_H", rows.spot),
        ("SPOT_W", columns.spot),
    )
