"""The definition of convolution, one output element to a thread."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div, roofline
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 128


class Direct(CudaAlgorithm):
    """Takes every valid layer, in every direction, without workspace: so that a plan always exists."""

    name = "direct"
    takes_all = True
    exact = True
    files = ("direct/direct.cu",)
    skips_padding = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        return ({},)

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        blocks = ceil_div(math.prod(layer.output_shape), THREADS)
        return (Unit("direct", *self.files, layer, (blocks, 1, 1), THREADS, blocks=6),)

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        # every product loads both its factors, from the first cache at best; few outputs fill few multiprocessors
        filled = min(1.0, math.prod(layer.output_shape) / (1024 * int(device.facts["multiprocessors"])))
        return roofline(layer, device, efficiency=0.05 * filled, traffic=4)

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        (launch,) = self.load(device, self.units(layer, params))
        return Chain([(launch, ("a", "b", "out", "bias", "residual"))])
