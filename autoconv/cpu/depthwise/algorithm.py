"""Depthwise convolution: every channel by itself, so that memory, not arithmetic, is what there is to save.

In NCHW the vector lanes are pixels: a block of BH output rows by NV vectors stays in registers while the rows
it sees are read once. No arithmetic is spent on rows of padding under large filters. In NHWC the lanes are
channels, and everything is read in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import LINE, VECTOR_BYTES, VECTOR_REGISTERS
from autoconv.cpu.common.algorithm import CALL, GeneratedAlgorithm, traffic
from autoconv.cpu.common.rows import no_streaming
from autoconv.cpu.depthwise import kernels_nhwc as depthwise_channels
from autoconv.cpu.depthwise.kernels import Shape, emit, workspace_bytes
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

MOST_FILTERS = 8  # per channel, in NCHW
MOST_COLUMNS = 15
PIXEL_TILES = {"avx512": ((4, 2), (8, 2)), "avx2": ((4, 1), (3, 2)), "generic": ((4, 1), (2, 2))}
# Two pixels first: on Zen 3, stores past the caches to more of them at once took 3 to 5 times as long where they lie
# 2 KiB apart. A line is two vectors of AVX2.
CHANNEL_TILES = {
    "avx512": ((2, 2), (4, 2), (8, 2)),
    "avx2": ((2, 2), (4, 1), (4, 2)),
    "generic": ((2, 2), (4, 1), (8, 1)),
}


def _tiles(layer: ConvLayer, device: CPU) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Rows or columns of outputs, named B, by vectors NV; of a strided layer's gradient, with every phase's output."""
    isa = device.instruction_set
    if layer.layout == "NHWC":
        return tuple(("BQ", tile) for tile in CHANNEL_TILES[isa])
    if layer.direction != "dgrad" or layer.stride == (1, 1):
        return tuple(("BH", tile) for tile in PIXEL_TILES[isa])
    NV = max(1, VECTOR_REGISTERS[isa] // 2 // math.prod(layer.stride))
    return tuple(("BH", tile) for tile in ((1, NV), (2, NV // 2)) if all(tile))


def _shape(device: CPU, params: Params) -> Shape:
    return Shape(int(params["BH"]), int(params["NV"]), bool(params["nt"]), device.threads, device.facts["l1_bytes"])


def _in_lines(layer: ConvLayer, params: Params) -> bool:
    """Whether blocks of rows, and whole planes, are cache lines without a rest."""
    _, _, height, width = layer.output_shape
    rows = int(params["BH"]) * (layer.stride[0] if layer.direction == "dgrad" else 1)
    return all(n * width * layer.itemsize % LINE == 0 for n in (rows, height))


class Depthwise(GeneratedAlgorithm):
    """Blocks of BH rows (NCHW) or BQ columns (NHWC) of outputs by NV vectors; `nt` stores past the caches."""

    name = "depthwise"
    exact = True
    modules = "depthwise_channels", "depthwise_kernel", "pieces", "pixel_pieces"

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return [{name: B, "NV": NV, "nt": nt} for name, (B, NV) in _tiles(layer, device) for nt in (0, 1)]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        allowed = [f"{name}={B},NV={NV}" for name, (B, NV) in _tiles(layer, device)]
        given = ",".join(f"{name}={value}" for name, value in params.items() if name != "nt")
        if given not in allowed:
            reasons.append(f"{given}: allowed for {layer.layout} are {' '.join(allowed)}")
        if layer.direction == "wgrad":
            reasons.append("wgrad: a sum over pixels, not over taps; direct has lanes for it")
        if layer.groups != layer.C:
            reasons.append(f"groups={layer.groups}: one for each of C={layer.C} channels is wanted")
        elif layer.layout == "NHWC" and layer.K != layer.C:
            reasons.append(f"K={layer.K}: in NHWC as many filters as the C={layer.C} channels are wanted")
        elif layer.K // layer.C > MOST_FILTERS:
            reasons.append(f"K={layer.K}: at most {MOST_FILTERS} filters for each of C={layer.C} channels are held")
        if layer.layout == "NHWC" and layer.S > MOST_COLUMNS:
            reasons.append(f"S={layer.S}: in NHWC at most {MOST_COLUMNS} taps of a row are written out")
        if params["nt"]:
            reasons += no_streaming(layer, device)
            if layer.layout == "NHWC" and layer.C * layer.itemsize % VECTOR_BYTES[device.instruction_set]:
                reasons.append(f"nt=1: C={layer.C} channels are not whole vectors")
            elif layer.layout == "NCHW" and layer.direction != "wgrad" and not _in_lines(layer, params):
                reasons.append("nt=1: blocks of rows are not whole cache lines")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        if layer.layout == "NHWC":
            return 0
        return device.threads * workspace_bytes(device.instruction_set, layer, _shape(device, params))

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        if layer.layout == "NCHW":
            return 0
        return depthwise_channels.packed_elements(layer) * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        memory = traffic(layer, bool(params["nt"])) / device.bandwidth()
        return max(layer.flops / (0.7 * device.peak_flops(layer.dtype)), memory) + CALL

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        if layer.layout == "NCHW":
            return compiler.build(emit, device.instruction_set, layer, _shape(device, params))
        shape = depthwise_channels.Shape(int(params["BQ"]), int(params["NV"]), bool(params["nt"]), device.threads)
        return compiler.build(depthwise_channels.emit, device.instruction_set, layer, shape)
