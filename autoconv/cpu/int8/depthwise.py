"""Quantised depthwise convolution: a word is neighbouring rows of one channel, lanes are channels or columns."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.common.types import INTEGERS
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import LINE, VECTOR_BYTES, Module
from autoconv.cpu.codegen.words import CHANNELS, vector_products
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.estimate import busiest, operands_once, side_by_side
from autoconv.cpu.common.panel import strides_too_wide
from autoconv.cpu.device import CPU
from autoconv.cpu.int8.depthwise_geometry import DepthwisePanel
from autoconv.cpu.int8.depthwise_kernels import emit
from autoconv.cpu.int8.geometry import WORD
from autoconv.layer import ConvLayer

PANELS = (1, 2, 4, 8)  # vectors of channels
MOST = 64  # vectors that a parameter may name


class Int8Depthwise(GeneratedAlgorithm):
    """Words of neighbouring rows by words of the filters' rows, on vectors, exact.

    Parameters: `product`, the instruction that multiplies words; `TP` vectors of outputs of each row in registers; in
    NHWC, up to `NV` vectors of channels whose words are packed together.

    Sources: Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only
    inference" (2018), arXiv:1712.05877, for zero points left out of the sums; Zhang, Lo and Lu, "High performance
    depthwise and pointwise convolutions on mobile devices" (2020), arXiv:2001.02504, for a block of outputs in
    registers.
    """

    name = "int8.depthwise"
    directions = ("fwd",)
    dtypes = tuple(INTEGERS)
    groupings = ("depthwise",)
    exact = True
    skips_padding = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        if layer.layout == "NHWC" and layer.K != layer.C:
            reasons.append(f"K={layer.K}: in NHWC, expected as many filters as the C={layer.C} channels")
        return reasons + (strides_too_wide(layer) if layer.layout == "NCHW" else [])

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        product = vector_products(device.instruction_set)[0]
        shared = _panel(layer, device, {"product": product, "TP": 1, "NV": 1}).shared
        most = (Module(device.instruction_set).registers - 2 - shared) // shared  # beside a pixel, a product, the taps
        found: dict[DepthwisePanel, Params] = {}
        for NV in PANELS if layer.layout == "NHWC" else (1,):
            for TP in (most, max(most // 2, 1), 1):
                params: Params = {"product": product, "TP": TP, "NV": NV}
                panel = _panel(layer, device, params)
                same = {**params, "TP": panel.together, "NV": panel.unit_vectors}  # what it comes to in this layer
                found.setdefault(_panel(layer, device, same), params)
        return found.values()

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        if params["product"] not in (able := vector_products(device.instruction_set)):
            reasons.append(f"product={params['product']}: expected {' or '.join(able)}, as this process may use")
        given = {name: params[name] for name in ("TP", "NV")}
        wrong = [name for name, value in given.items() if not isinstance(value, int) or not 0 < value <= MOST]
        reasons += [f"{name}={given[name]}: expected an integer from 1 to {MOST}" for name in wrong]
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return device.threads * _panel(layer, device, params).own

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return _panel(layer, device, params).packed_bytes

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """The products of whole vectors of words, the packing of words, and what is read and written."""
        machine, panel, vector = device.machine, _panel(layer, device, params), VECTOR_BYTES[device.instruction_set]
        sets = layer.N * panel.sets
        tiles = sets * panel.vectors * math.ceil(layer.Q / panel.advance)
        products = tiles * panel.shared * panel.together * len(panel.skips)
        loads = tiles * (panel.together + panel.shared) * len(panel.skips)
        rate = machine.word_products(device.instruction_set, CHANNELS[panel.product], panel.lanes)
        seconds = max(products / rate, loads / machine.loads(vector)) / machine.threads
        packed = sets * panel.units * panel.words * panel.pitch / panel.lanes
        seconds += packed * panel.rows / machine.transforms(vector) / machine.threads
        moved = operands_once(layer, machine)
        if panel.channels_last:  # every panel has its own part of each pixel's lines
            again = max(LINE / panel.across, 1) - 1
            moved += machine.reading(again * math.prod(layer.x_shape), math.prod(layer.x_shape) / machine.threads)
        work = side_by_side(seconds, moved)
        return (machine.call or 0.0) + work * busiest(panel.tasks, device.threads)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, _panel(layer, device, params))


def _panel(layer: ConvLayer, device: CPU, params: Params) -> DepthwisePanel:
    lanes = VECTOR_BYTES[device.instruction_set] // WORD
    return DepthwisePanel(layer, str(params["product"]), int(params["TP"]), int(params["NV"]), lanes, device.threads)
