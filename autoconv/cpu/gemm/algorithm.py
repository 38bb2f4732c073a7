"""Convolution with pixels as vector lanes, for layers whose pixels are contiguous and whose channels are few.

A register tile holds KB output channels of NV vectors of neighbouring pixels, `y[k, q..] += w[k, c] x[c, q..]`:
one load of pixels meets KB broadcast filters. NCHW is read and written in place, so that nothing is moved
that the layer does not have to move; the output may go past the caches. Where channels are many, a tile's sums
go over some of them at a time, whose pixels stay in the first-level cache for all filters, while the next are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.common.algorithm import CALL, GeneratedAlgorithm, traffic
from autoconv.cpu.common.rows import no_streaming, split
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm.kernels import emit, packed_elements, workspace_elements
from autoconv.cpu.gemm.tile import Shape, odd_pixels
from autoconv.layer import ConvLayer

MOST_CHANNELS = 4
MOST_TAPS = 256
PAGE = 4096
TILES = {"avx512": ((8, 3),), "avx2": ((4, 3),), "generic": ((4, 2),)}


def _shape(device: CPU, params: Params) -> Shape:
    KB, NV, nt = (int(params[name]) for name in ("KB", "NV", "nt"))
    return Shape(KB, NV, bool(nt), device.threads, device.facts["l2_bytes"])


def _run(layer: ConvLayer) -> int:
    """Pixels that follow one another and are cut into tiles as one line: planes of 1x1 layers, else rows."""
    whole = (layer.R, layer.S) == (1, 1) and layer.padding == ((0, 0), (0, 0))
    return math.prod(layer.output_shape[2:]) if whole else layer.output_shape[3]


def _idle(instruction_set: str, layer: ConvLayer, shape: Shape) -> float:
    """How much more than its pixels the vectors of a line hold; a single pixel takes a lane for each channel."""
    lanes, pixels = VECTOR_BYTES[instruction_set] // layer.accumulator.itemsize, _run(layer)
    odd = 0 if shape.nt else odd_pixels(instruction_set, shape.KB, shape.NV)
    vectors = 0.0
    for run in split(pixels, lanes, shape.NV, odd):
        whole, rest = divmod(run.pixels, lanes)
        vectors += run.times * (whole + (rest / shape.KB if whole and rest <= odd else 1))
    return vectors * lanes / pixels


class Pixel(GeneratedAlgorithm):
    """Register tiles of KB channels by NV vectors of pixels; `nt` stores past the caches."""

    name = "gemm"
    exact = True
    modules = "pieces", "pixel_kernel", "pixel_pieces", "pixel_strips", "pixel_tile"

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return [{"KB": KB, "NV": NV, "nt": nt} for KB, NV in TILES[device.instruction_set] for nt in (0, 1)]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        if (params["KB"], params["NV"]) not in TILES[device.instruction_set]:
            allowed = ", ".join(f"KB={KB},NV={NV}" for KB, NV in TILES[device.instruction_set])
            reasons.append(f"KB={params['KB']},NV={params['NV']}: allowed are {allowed}")
        if layer.layout == "NHWC":
            reasons.append("NHWC: neighbouring pixels are not contiguous; channels are, and direct uses them as lanes")
        if layer.direction == "wgrad":
            reasons.append("wgrad: a sum over pixels; gemm has lanes for it")
        pointwise = (layer.R, layer.S) == (1, 1)
        if layer.direction == "dgrad" and not (
            pointwise and layer.stride == (1, 1) and layer.padding == ((0, 0), (0, 0))
        ):
            reasons.append("dgrad: only of 1x1 filters with unit stride and no padding")
        if not pointwise and layer.C // layer.groups > MOST_CHANNELS:
            reasons.append(
                f"C={layer.C}: {layer.R}x{layer.S} filters may see {MOST_CHANNELS} channels; direct takes more"
            )
        if layer.depthwise:
            reasons.append(
                f"groups={layer.groups}: every filter sees one channel; depthwise reads it once for all rows"
            )
        if layer.R * layer.S > MOST_TAPS:
            reasons.append(f"R={layer.R}, S={layer.S}: {MOST_TAPS} taps at most are written out; fft takes more")
        if params["nt"]:
            reasons += no_streaming(layer, device)
            run = _run(layer)
            if run * layer.itemsize % VECTOR_BYTES[device.instruction_set]:
                what = "planes" if run > layer.output_shape[3] else "rows"
                reasons.append(f"nt=1: {what} of {run} pixels are not whole vectors")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        own = workspace_elements(device.instruction_set, layer, _shape(device, params))
        return device.threads * own * layer.accumulator.itemsize

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return packed_elements(layer) * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """At peak, but for lanes beyond the last pixel, and for filters read anew by every strip that is copied.

        Stores past the caches gain nothing where planes lie whole pages apart: their lines get in each other's way.
        """
        idle = _idle(device.instruction_set, layer, _shape(device, params))
        far = layer.stride != (1, 1) and math.prod(layer.w_shape) * layer.itemsize > device.facts["l2_bytes"] // 2
        flops = idle * layer.flops * (1.25 if far else 1)
        gains = params["nt"] and math.prod(layer.output_shape[2:]) * layer.itemsize % PAGE
        memory = traffic(layer, bool(gains)) / device.bandwidth()
        return max(flops / (0.95 * device.peak_flops(layer.dtype)), memory) + CALL

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, _shape(device, params))
