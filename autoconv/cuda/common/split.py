"""Split-K: products whose depth may be divided, their parts summed by a kernel of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div
from autoconv.cuda.common.model import Demand, streaming
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

# A single tile, as of a first layer's wgrad, still reaches nearly all multiprocessors of a large GPU (132 of an H200);
# beyond, the sum over the parts, which one thread does one after the other, takes longer than they save.
MOST_PARTS = 128


class SplitProduct(CudaAlgorithm):
    """A product in SPLIT parts of its depth (split-K): the parts go to the workspace, and the last unit sums them."""

    exact = True

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        split = params["SPLIT"]
        return [] if split in range(1, MOST_PARTS + 1) else [f"SPLIT={split}: expected 1 to {MOST_PARTS}"]

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        split = int(params["SPLIT"])
        return split * math.prod(layer.output_shape) * layer.accumulator.itemsize if split > 1 else 0

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        launches = self.load(device, self.units(layer, params))
        products, total = (launches, []) if params["SPLIT"] == 1 else (launches[:-1], launches[-1:])
        return Chain(
            [
                *((launch, ("a", "b", "out", "bias", "residual", "workspace")) for launch in products),
                *((launch, ("workspace", "out", "bias", "residual")) for launch in total),
            ],
            self.workspace_bytes(layer, device, params),
        )


def splits(blocks: int, wanted: int, slices: int, least: int) -> list[int]:
    """Parts of the depth to try: 1; and what fills the device once, or half of it, or as nearly as the depth allows.

    Parameters
    ----------
    blocks, wanted : int
        Those of the undivided product, and as many as the device holds.
    slices, least : int
        Slices of the depth, and how many of them make a part worth its share of the sum.
    """
    most = min(MOST_PARTS, slices // least)
    return sorted({1, *(whole(min(most, wanted // blocks // waves), slices) for waves in (1, 2))})


def whole(parts: int, slices: int) -> int:
    """The parts that have work when so many share the slices, each as many but the last; 1 at least."""
    return ceil_div(slices, ceil_div(slices, parts)) if parts > 1 else 1


def sum_demand(unit: Unit, layer: ConvLayer, scratch: float) -> Demand:
    """Of the kernel that sums the parts; what it moves from and to memory is counted with the product."""
    return replace(streaming(unit, math.prod(layer.output_shape) * layer.itemsize + scratch), memory=0.0)


def summing(layer: ConvLayer, threads: int) -> tuple[int, int, int]:
    """The grid that sums the parts: four elements to a thread, as in `implicit.cuh`."""
    return ceil_div(math.prod(layer.output_shape), 4 * threads), 1, 1
