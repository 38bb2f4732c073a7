"""The gradient of depthwise filters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoconv.algorithm import Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import ceil_div, roofline
from autoconv.cuda.common.split import SplitProduct, splits, summing
from autoconv.cuda.depthwise.depthwise import THREADS, too_many_taps
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

BLOCKS = 4  # to a multiprocessor
LEAST_SLICES = 16  # of places, to a part


class DepthwiseWgrad(SplitProduct):
    """One row of taps to a block, summed over a part of the places, and the parts in a kernel of their own.

    The kernels are those of the definition: every tap is the sum of dy times what it met of x, over all places. There
    are so few taps that without SPLIT most of a GPU would be idle.
    """

    name = "depthwise.wgrad"
    files = ("depthwise/wgrad.cu",)
    directions = ("wgrad",)
    groupings = ("depthwise",)

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        wanted = int(device.facts["multiprocessors"]) * BLOCKS
        return ({"SPLIT": split} for split in splits(_blocks(layer), wanted, _slices(layer), LEAST_SLICES))

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        return too_many_taps(layer) + super().unfit(layer, params)

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        split = int(params["SPLIT"])
        shared = THREADS * layer.S * layer.accumulator.itemsize
        grid, constants = (_blocks(layer) // layer.R, layer.R, split), (("SPLIT", split),)
        product = Unit("depthwise_wgrad", *self.files, layer, grid, THREADS, BLOCKS, shared, constants=constants)
        if split == 1:
            return (product,)
        return product, Unit(
            "depthwise_sum", *self.files, layer, summing(layer, THREADS), THREADS, BLOCKS, constants=constants
        )

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        split = int(params["SPLIT"])
        busy = min(1.0, _blocks(layer) * split / (int(device.facts["multiprocessors"]) * BLOCKS))
        reread = 1 + 0.5 * (layer.R - 1)  # by the blocks of other rows, mostly from the caches
        scratch = 2 * self.workspace_bytes(layer, device, params) / device.bandwidth()
        return roofline(layer, device, 0.3 * busy, reread / busy) + scratch + 3e-6 * (split > 1)


def _blocks(layer: ConvLayer) -> int:
    """Of one part: a row of taps of one filter, or of 32 that are neighbours in memory."""
    return (layer.K if layer.layout == "NCHW" else ceil_div(layer.K, 32)) * layer.R


def _slices(layer: ConvLayer) -> int:
    """Of the places, so many as a block takes at once: one to a thread, or to a warp."""
    at_once = THREADS if layer.layout == "NCHW" else THREADS // 32
    return ceil_div(layer.N * layer.P * layer.Q, at_once)
