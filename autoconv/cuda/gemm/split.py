"""What implicit GEMMs share: a matrix product whose depth may be divided, its parts summed by a kernel of their own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

MOST_PARTS = 32


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


def summing(layer: ConvLayer, threads: int) -> tuple[int, int, int]:
    """The grid that sums the parts: four elements to a thread, as in `implicit.cuh`."""
    return ceil_div(math.prod(layer.output_shape), 4 * threads), 1, 1
