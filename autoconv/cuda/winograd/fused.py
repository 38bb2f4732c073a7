"""Fused Winograd convolution: transforms and products in one kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Kernel, Params, bound_for
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div, roofline, scalar
from autoconv.cuda.winograd.winograd import CAPS, THREADS, extents, transforms_text
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA


class Block(NamedTuple):
    """What a block computes: BM channels of BN tiles of `side` by `side` points, BC channels deep at a time."""

    side: int
    BM: int
    BN: int
    BC: int
    warps: int
    blocks: int  # to a multiprocessor, by design

    def shared(self, last: bool) -> int:
        """Bytes of shared memory: two slices of both operands, or eight channels of sums, as the kernel pads them."""
        points = self.side * self.side
        slices = 2 * points * self.BC * (self.BM + self.BN + (32 // self.BC if last else 0))
        sums = points * 8 * (self.BN + (4 if last else 0 if self.BN % 32 else 16))
        return 4 * max(slices, sums)


BLOCKS = (  # sums to a thread: 128, 128, 64, 96
    Block(4, 64, 32, 4, warps=8, blocks=1),
    Block(4, 64, 32, 8, warps=8, blocks=1),
    Block(4, 32, 32, 8, warps=8, blocks=2),
    Block(6, 64, 16, 4, warps=12, blocks=1),
)


class WinogradFused(CudaAlgorithm):
    """F(M x M, R x R) on tiles of 4 x 4 or 6 x 6 points: F(2,3), F(4,3) and F(2,5), for any groups, stride 1.

    Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks" (2016), section 5, fuse the three
    stages likewise; warps by points as in Yan, Wang & Chu, "Optimizing Batched Winograd Convolution on
    GPUs" (2020).
    """

    name = "winograd.fused"
    files = ("winograd/fused.cu",)
    dtypes = ("float32",)
    spreads_nonfinite = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        taps = layer.R if layer.R in (3, 5) else 3  # others are refused with the reason
        for block in BLOCKS:
            if block.side > taps:
                yield {"M": block.side - taps + 1, "BM": block.BM, "BN": block.BN, "BC": block.BC}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = []
        if layer.direction == "wgrad":
            reasons.append("wgrad: this kernel has fwd and dgrad")
        if layer.stride != (1, 1) or layer.dilation != (1, 1):
            reasons.append("stride or dilation is not 1: tiles of neighbouring outputs do not share their inputs")
        if layer.R != layer.S or layer.R == 1:
            reasons.append(f"filters of {layer.R}x{layer.S}: square ones of more than one tap are transformed here")
        if _block(layer, params) is None:
            known = ", ".join(f"{b.BM}x{b.BN}x{b.BC} of {b.side}x{b.side} points" for b in BLOCKS)
            reasons.append(f"no such block for filters of {layer.R} taps: there are {known}")
        if layer.N * ceil_div(layer.H + layer.R, 2) * ceil_div(layer.W + layer.S, 2) >= 2**30:
            reasons.append("2**30 tiles or more")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """The transform of the filters, and the rest."""
        block = _block(layer, params)
        assert block is not None
        M = int(params["M"])
        row_blocks, depth, tiles = _counts(layer, params, block)
        constants = (
            *(("MH", M), ("MW", M), ("BM", block.BM), ("BN", block.BN), ("BC", block.BC)),
            *(("FUSED_THREADS", 32 * block.warps), ("FUSED_BLOCKS", block.blocks)),
            *(("THREADS", THREADS), ("BLOCKS", 4)),
        )
        text = transforms_text(layer, M, M)
        filters = ceil_div(layer.groups * row_blocks * block.BM * depth, THREADS)
        shared = block.shared(layer.layout == "NHWC")
        grid = row_blocks * tiles, 1, layer.groups
        return (
            Unit("fused_filter", *self.files, layer, (filters, 1, 1), THREADS, 4, 0, 0, constants, text),
            Unit(
                "winograd_fused",
                *self.files,
                layer,
                grid,
                32 * block.warps,
                block.blocks,
                shared,
                shared,
                constants,
                text,
            ),
        )

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        block = _block(layer, params)
        assert block is not None
        row_blocks, depth, _ = _counts(layer, params, block)
        return 4 * layer.groups * row_blocks * block.BM * depth * block.side**2

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        block = _block(layer, params)
        assert block is not None
        row_blocks, depth, tiles = _counts(layer, params, block)
        together = int(device.facts["multiprocessors"]) * block.blocks
        waves = ceil_div(row_blocks * tiles * layer.groups, together)
        # a slice's transforms and barriers take a fixed part of its time, the sums' way out some slices more
        slices = depth + 4 * block.BC
        products = 2.0 * waves * together * block.side**2 * block.BM * block.BN * slices
        efficiency = 0.55 if block.BM == 64 and block.BN == 32 else 0.5
        computed = products / (efficiency * device.peak_flops(scalar(layer)))
        filters = self.packed_bytes(layer, device, params) / device.bandwidth()
        return max(computed, roofline(layer, device, 1e3) + filters)

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, CAPS[int(params["M"])])

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        filters, fused = self.load(device, self.units(layer, params))
        return Chain(
            [(fused, ("a", "b", "out", "bias", "residual"))],
            packing=filters,
            packed_bytes=self.packed_bytes(layer, device, params),
        )


def _block(layer: ConvLayer, params: Params) -> Block | None:
    wanted = int(params["M"]) + layer.R - 1, params["BM"], params["BN"], params["BC"]
    if params["M"] not in CAPS:
        return None
    return next((block for block in BLOCKS if wanted == (block.side, block.BM, block.BN, block.BC)), None)


def _counts(layer: ConvLayer, params: Params, block: Block) -> tuple[int, int, int]:
    """Blocks of rows, channels filled up to whole slices, and blocks of tiles."""
    rows, depth, tiles = extents(layer, params)
    return ceil_div(rows, block.BM), ceil_div(depth, block.BC) * block.BC, ceil_div(tiles, block.BN)
