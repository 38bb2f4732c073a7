"""Depthwise convolution: every channel by itself, so that memory, not arithmetic, is what there is to save.

In NCHW the vector lanes are pixels: a block of BH output rows by NV vectors stays in registers while the rows
it sees are read once. No arithmetic is spent on rows of padding under large filters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoconv.algorithm import Algorithm, Kernel, Params, bound_for
from autoconv.cpu import compiler
from autoconv.cpu.depthwise_kernel import Shape, emit, workspace_elements
from autoconv.cpu.device import CPU
from autoconv.cpu.ir import DTYPES, VECTOR_BYTES, widened
from autoconv.cpu.pixel_pieces import no_streaming
from autoconv.cpu.pool import GeneratedKernel
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.device import Device

TILES = {"avx512": ((4, 2), (4, 3), (8, 2)), "avx2": ((4, 1), (3, 2)), "generic": ((4, 1), (2, 2))}


def _shape(layer: ConvLayer, device: Device, params: Params) -> Shape:
    assert isinstance(device, CPU)
    BH, NV, nt = (int(params[name]) for name in ("BH", "NV", "nt"))
    return Shape(BH, NV, bool(nt), device.threads, device.facts["l1_bytes"])


class Depthwise(Algorithm):
    """Blocks of BH output rows by NV vectors of pixels."""

    name = "depthwise"
    pool = "autoconv"

    @property
    def version(self) -> str:
        return compiler.version("depthwise", "depthwise_kernel", "pieces", "pixel_pieces")

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        assert isinstance(device, CPU)
        return [{"BH": BH, "NV": NV, "nt": nt} for BH, NV in TILES[device.instruction_set] for nt in (0, 1)]

    def why_not(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        assert isinstance(device, CPU)
        reasons = []
        if (unavailable := compiler.unavailable()) is not None:
            reasons.append(unavailable)
        if (params["BH"], params["NV"]) not in TILES[device.instruction_set]:
            allowed = ", ".join(f"BH={BH},NV={NV}" for BH, NV in TILES[device.instruction_set])
            reasons.append(f"BH={params['BH']},NV={params['NV']}: allowed are {allowed}")
        if layer.layout == "NHWC":
            reasons.append("NHWC: only NCHW")
        if layer.direction == "wgrad":
            reasons.append("wgrad: a sum over pixels; gemm has lanes for it")
        if layer.groups != layer.C:
            reasons.append(f"groups={layer.groups}: one for each of C={layer.C} channels is wanted")
        elif layer.K // layer.C > 8:
            reasons.append(
                f"K={layer.K}: at most 8 filters for each of C={layer.C} channels; pixel and direct take more"
            )
        if params["nt"]:
            reasons += no_streaming(layer, device)
            if layer.direction == "dgrad" and layer.stride != (1, 1):
                reasons.append("nt=1: the gradient of a strided layer is not written row by row")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        assert isinstance(device, CPU)
        wide = widened(DTYPES[layer.dtype])
        lanes = VECTOR_BYTES[device.instruction_set] // wide.bytes
        return device.threads * wide.bytes * workspace_elements(layer, lanes, wide.bytes, _shape(layer, device, params))

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        traffic = layer.bytes + (0 if params["nt"] else math.prod(layer.output_shape) * layer.itemsize)
        return max(layer.flops / (0.7 * device.peak_flops(layer.dtype)), traffic / device.bandwidth()) + 2e-6

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, 2e-6)

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        assert isinstance(device, CPU)
        program = compiler.build(emit, device.instruction_set, layer, _shape(layer, device, params))
        return GeneratedKernel(program, device.threads, self.workspace_bytes(layer, device, params))
