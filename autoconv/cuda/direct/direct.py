"""The definition of convolution, one output element to a thread."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.occupancy import WARP
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div
from autoconv.cuda.common.model import SHARED_BYTES, Demand, demand
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 128
TERM_SLOTS, OUTPUT_SLOTS = 6, 100  # instructions of a term, and of an output
TERM_CLOCKS = 10  # of a term whose factors many loads ahead are waited for


class Direct(CudaAlgorithm):
    """Takes every valid layer, in every direction, without workspace: so that a plan always exists."""

    name = "direct"
    epilogue = ("fwd", "dgrad")
    takes_all = True
    exact = True
    files = ("direct/direct.cu",)
    skips_padding = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        return ({},)

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        blocks = ceil_div(math.prod(layer.output_shape), THREADS)
        return (Unit("direct", *self.files, layer, (blocks, 1, 1), THREADS, blocks=6),)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        (unit,) = self.units(layer, params)
        outputs = math.prod(layer.output_shape)
        terms = layer.flops / 2 / outputs
        return [
            demand(
                unit,
                (TERM_SLOTS * terms + OUTPUT_SLOTS) * THREADS / WARP,
                products=terms * THREADS,
                pipe=layer.accumulator.name,
                shared=2 * terms * THREADS / WARP * SHARED_BYTES,  # each factor is a load, and the first cache as fast
                cached=terms * THREADS / 8 * layer.itemsize,  # the first cache has most of what neighbours read
                delay=terms * TERM_CLOCKS,
                memory=layer.bytes,
            )
        ]

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        (launch,) = self.load(device, self.units(layer, params))
        return Chain([(launch, ("a", "b", "out", "bias", "residual"))])
