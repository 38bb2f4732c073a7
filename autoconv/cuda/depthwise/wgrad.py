"""The gradient of depthwise filters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoconv.algorithm import Params
from autoconv.cuda.codegen.occupancy import WARP
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import ceil_div
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, beyond_cache, demand
from autoconv.cuda.common.split import Parts, SplitProduct, split_constants, splits
from autoconv.cuda.depthwise.depthwise import LOAD_SLOTS, THREADS, too_many_taps
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

BLOCKS = 4  # to a multiprocessor
LEAST_SLICES = 16  # of places, to a part


class DepthwiseWgrad(SplitProduct):
    """One row of taps to a block, summed over a part of the places, and the parts by the last block to come.

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
        grid, constants = (_blocks(layer) // layer.R, layer.R, split), split_constants(params)
        return (Unit("depthwise_wgrad", *self.files, layer, grid, THREADS, BLOCKS, shared, constants=constants),)

    def parts(self, layer: ConvLayer, params: Params) -> Parts:
        sums = layer.S * (1 if layer.layout == "NCHW" else WARP)
        each = ceil_div(sums, THREADS)
        return Parts(_blocks(layer), each * THREADS, each)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        (unit,) = self.units(layer, params)
        slices = ceil_div(_slices(layer), int(params["SPLIT"]))
        read = THREADS * (layer.S + 1) * layer.itemsize  # of a slice, by all threads
        product = demand(
            unit,
            THREADS / WARP * (slices * (layer.S * (1 + LOAD_SLOTS) + 20) + 100),
            products=float(slices * THREADS * layer.S),
            pipe=layer.accumulator.name,
            cached=slices * read / 2.0,
            delay=MEMORY_CLOCKS * (2.0 + slices / 4),
            memory=layer.bytes + beyond_cache(device, self.scratch_bytes(layer, params)),
        )
        return [product, *self.sum_demands(unit, layer, self.parts(layer, params), params)]


def _blocks(layer: ConvLayer) -> int:
    """Of one part: a row of taps of one filter, or of 32 that are neighbours in memory."""
    return (layer.K if layer.layout == "NCHW" else ceil_div(layer.K, 32)) * layer.R


def _slices(layer: ConvLayer) -> int:
    """Of the places, so many as a block takes at once: one to a thread, or to a warp."""
    at_once = THREADS if layer.layout == "NCHW" else THREADS // 32
    return ceil_div(layer.N * layer.P * layer.Q, at_once)
