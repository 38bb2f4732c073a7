"""Depthwise convolution: one channel to a filter, paced by memory; forward, and the gradient of the input."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.occupancy import WARP
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, demand
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 128
LOAD_SLOTS = 5  # instructions of an input on its way to a register, border checks and all
RUNS = (2, 4, 8)  # outputs of a thread
MOST_TAPS = 33  # of a filter row, which a thread holds in registers
MOST_PRODUCTS_FLOAT64 = 64  # of a thread and a filter row


class Depthwise(CudaAlgorithm):
    """A window of inputs in registers, shared by the TQ neighbouring outputs of a thread.

    Each filter sees one channel (Chollet, "Xception", 2017, and Howard et al., "MobileNets", 2017, made such layers
    common): a product would have a depth of its taps alone. The kernels are those of the definition.
    """

    name = "depthwise"
    exact = True
    files = ("depthwise/depthwise.cu",)
    directions = ("fwd", "dgrad")
    groupings = ("depthwise",)

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        return [{"TQ": TQ} for TQ in RUNS]

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons, TQ = too_many_taps(layer), params["TQ"]
        if TQ not in RUNS:
            return [*reasons, f"TQ={TQ}: expected {' or '.join(map(str, RUNS))}"]
        if layer.dtype == "float64" and layer.S * int(TQ) > MOST_PRODUCTS_FLOAT64:
            reasons.append(f"float64: expected at most {MOST_PRODUCTS_FLOAT64} products to a row, got {TQ}x{layer.S}")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        constants = (("TQ", int(params["TQ"])),)
        columns = layer.Q if layer.direction == "fwd" else layer.W
        runs = math.prod(layer.output_shape) // columns * ceil_div(columns, int(params["TQ"]))
        return (Unit("depthwise", *self.files, layer, (ceil_div(runs, THREADS), 1, 1), THREADS, 4, 0, 0, constants),)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        (unit,), TQ = self.units(layer, params), int(params["TQ"])
        filter_row = layer.S * TQ + LOAD_SLOTS * (TQ * layer.stride[1] + layer.S)
        read = layer.R * (TQ * layer.stride[1] + layer.S) * layer.itemsize / 2  # rows come again from the first cache
        return [
            demand(
                unit,
                THREADS / WARP * (layer.R * filter_row + 20 * TQ),
                products=float(THREADS * layer.R * layer.S * TQ),
                pipe=layer.accumulator.name,
                cached=THREADS * (read + TQ * layer.itemsize),
                delay=MEMORY_CLOCKS * (1 + layer.R / 4),
                memory=layer.bytes,
            )
        ]

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        (launch,) = self.load(device, self.units(layer, params))
        return Chain([(launch, ("a", "b", "out", "bias", "residual"))])


def too_many_taps(layer: ConvLayer) -> list[str]:
    """The reason against a layer whose filter rows a thread cannot hold."""
    if layer.S <= MOST_TAPS:
        return []
    return [f"S={layer.S}: expected at most {MOST_TAPS} taps of a filter row, which a thread holds"]
