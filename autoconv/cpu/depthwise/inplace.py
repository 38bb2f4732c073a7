"""Depthwise convolution of rows of pixels, read where they lie: nothing is copied."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.common.candidate import text_of
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import LINE, VECTOR_BYTES, VECTOR_REGISTERS
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import correlation_count, correlations
from autoconv.cpu.common.estimate import PAGE, operands_once, side_by_side
from autoconv.cpu.common.grid import parts
from autoconv.cpu.common.panel import strides_too_wide
from autoconv.cpu.common.streaming import nt_values, streaming_refusals
from autoconv.cpu.depthwise.geometry import UNROLLED_TAPS, broken_lines
from autoconv.cpu.depthwise.kernels_inplace import InPlaceBlocking, emit, own_elements
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

MOST_ROWS = 8  # of outputs in registers


class DepthwiseInPlace(GeneratedAlgorithm):
    """Blocks of `TP` rows by `NV` vectors of outputs in NCHW; `nt=1` stores past the caches.

    Source: as `depthwise`, without its copies.
    """

    name = "depthwise.inplace"
    directions = ("fwd", "dgrad")
    layouts = ("NCHW",)
    groupings = ("depthwise",)
    exact = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return [{**tile, "nt": nt} for tile in _tiles(layer, device) for nt in nt_values(layer, device)]

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer) or _several(layer):
            return reasons
        if layer.R * layer.S > UNROLLED_TAPS:
            reasons.append(f"filters: expected at most {UNROLLED_TAPS} taps, written out, got {layer.R * layer.S}")
        return reasons + strides_too_wide(layer)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        tile = {name: value for name, value in params.items() if name != "nt"}
        if tile not in (allowed := _tiles(layer, device)):
            reasons.append(f"{text_of(tile)}: expected {' or '.join(map(text_of, allowed))}")
        if params["nt"]:
            reasons += streaming_refusals(layer, device) + broken_lines(layer, params)
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return device.threads * own_elements(layer, _blocking(device, params)) * layer.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """A block loads every row that it sees once for each tap across, most vectors from two lines.

        With strides it loads every column once, and picks what a tap sees in the time of a load. Lanes beyond the last
        column hold nothing. Where blocks are narrower than a row they read one more line of it, which is a neighbour's,
        too.
        """
        machine, size = device.machine, layer.accumulator.itemsize
        nbytes = VECTOR_BYTES[device.instruction_set]
        _, _, height, width = layer.output_shape
        vectors = math.prod(layer.output_shape[:3]) * math.ceil(width * size / nbytes)
        multiply = machine.multiply_adds(device.instruction_set, layer.accumulator.name, nbytes // size)
        rows = layer.stride[0] + (layer.R - 1) / int(params["TP"])
        stride = layer.stride[1]
        loads = vectors * rows * ((1 + nbytes / LINE) * (stride if stride > 1 else layer.S) + layer.S * (stride > 1))
        computed = max(vectors * layer.R * layer.S / multiply, loads / machine.loads(nbytes)) / machine.threads
        past = bool(params["nt"] and height * width * layer.itemsize % PAGE)
        piece = int(params["NV"]) * nbytes  # of a row of outputs
        lines = 1 + LINE / (piece * stride) if piece < width * size else 1.0
        return side_by_side(computed, operands_once(layer, machine, past=past, lines=lines)) + (machine.call or 0.0)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, _blocking(device, params))


def _blocking(device: CPU, params: Params) -> InPlaceBlocking:
    return InPlaceBlocking(int(params["TP"]), int(params["NV"]), bool(params["nt"]), device.threads)


def _tiles(layer: ConvLayer, device: CPU) -> list[dict[str, int]]:
    """Sums of up to three quarters of the registers, rows in nearly equal parts; the rest is for what is loaded."""
    room = VECTOR_REGISTERS[device.instruction_set] * 3 // 4
    lanes = VECTOR_BYTES[device.instruction_set] // layer.accumulator.itemsize
    height, width = layer.output_shape[2:]
    grid = ((TP, NV) for NV in parts(-(-width // lanes), room) for TP in parts(height, MOST_ROWS))
    return [{"TP": TP, "NV": NV} for TP, NV in sorted(grid, key=lambda tile: -tile[0] * tile[1]) if room >= TP * NV]


def _several(layer: ConvLayer) -> list[str]:
    """Every reason why a layer is not one correlation, of one channel with each filter."""
    if (count := correlation_count(layer)) > 1:
        return [f"dgrad: expected one correlation, got {count}, as of strides"]
    (problem,) = correlations(layer)
    return [f"dgrad: expected one filter for each channel, got {problem.C}"] if problem.C > 1 else []
