"""Depthwise convolution: every channel by itself, so that memory, not arithmetic, is what there is to save.

In NCHW the vector lanes are pixels: a block of TP output rows by NV vectors stays in registers while the rows
it sees are read once. No arithmetic is spent on rows of padding under large filters. In NHWC the lanes are
channels, and everything is read in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.common.candidate import text_of
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import VECTOR_BYTES, VECTOR_REGISTERS
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.estimate import PAGE, operands_once, side_by_side
from autoconv.cpu.common.grid import steps
from autoconv.cpu.common.panel import strides_too_wide
from autoconv.cpu.common.streaming import nt_values, streaming_refusals
from autoconv.cpu.depthwise import kernels, kernels_nhwc
from autoconv.cpu.depthwise.geometry import (
    ChannelBlocking,
    RowBlocking,
    broken_lines,
    packed_elements,
    tiling_of,
    workspace_bytes,
)
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

MOST_FILTERS = 8  # per channel, in NCHW
MOST_COLUMNS = 15
MOST_ROWS = 8  # of outputs in registers, at most, and columns in NHWC


def _tiles(layer: ConvLayer, device: CPU) -> list[dict[str, int]]:
    """TP rows or TQ columns of outputs by NV vectors; of a strided layer's gradient, with every component's output.

    Their sums fill up to three quarters of the registers; the rest is for what is loaded.
    """
    rows, several = ("TQ", 1) if layer.layout == "NHWC" else ("TP", 1)
    if layer.layout == "NCHW" and layer.direction == "dgrad":
        several = math.prod(layer.stride)
    room = max(VECTOR_REGISTERS[device.instruction_set] * 3 // 4 // several, 1)
    extent = -(-layer.output_shape[2] // (layer.stride[0] if several > 1 else 1))
    grid = ((TP, NV) for NV in range(1, 5) for TP in steps(min(MOST_ROWS, max(extent, 1))) if room >= TP * NV)
    return [{rows: TP, "NV": NV} for TP, NV in sorted(grid, key=lambda tile: -tile[0] * tile[1])]


def _row_blocking(device: CPU, params: Params) -> RowBlocking:
    return RowBlocking(
        int(params["TP"]), int(params["NV"]), bool(params["nt"]), device.threads, device.machine.caches[0]
    )


class Depthwise(GeneratedAlgorithm):
    """Blocks of `TP` rows (NCHW) or `TQ` columns (NHWC) of outputs by `NV` vectors; `nt=1` stores past the caches.

    Source: Zhang, Lo and Lu, "High performance depthwise and pointwise convolutions on mobile devices" (2020),
    arXiv:2001.02504: a block of outputs in registers, for which every row of the input is read once.
    """

    name = "depthwise"
    directions = ("fwd", "dgrad")
    groupings = ("depthwise",)
    exact = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        if layer.layout == "NCHW" and layer.K // layer.C > MOST_FILTERS:
            reasons.append(f"K={layer.K}: expected at most {MOST_FILTERS} filters for each of C={layer.C} channels")
        if layer.layout == "NHWC" and layer.K != layer.C:
            reasons.append(f"K={layer.K}: in NHWC, expected as many filters as the C={layer.C} channels")
        if layer.layout == "NHWC" and layer.S > MOST_COLUMNS:
            reasons.append(f"S={layer.S}: in NHWC, expected at most {MOST_COLUMNS} taps in a row")
        return reasons + (strides_too_wide(layer) if layer.layout == "NCHW" else [])

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return [{**tile, "nt": nt} for tile in _tiles(layer, device) for nt in nt_values(layer, device)]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        allowed = [text_of(tile) for tile in _tiles(layer, device)]
        given = text_of({name: value for name, value in params.items() if name != "nt"})
        if given not in allowed:
            reasons.append(f"{given}: expected {' or '.join(allowed)} for {layer.layout}")
        if params["nt"]:
            reasons += streaming_refusals(layer, device)
            if layer.layout == "NHWC" and layer.C * layer.itemsize % VECTOR_BYTES[device.instruction_set]:
                reasons.append(f"nt=1: expected whole vectors of channels, got C={layer.C}")
            elif layer.layout == "NCHW":
                reasons += broken_lines(layer, params)
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        if layer.layout == "NHWC":
            return 0
        return device.threads * workspace_bytes(device.instruction_set, layer, _row_blocking(device, params))

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        if layer.layout == "NCHW":
            return 0
        return packed_elements(layer) * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """A block loads every row (or column) that it sees once for each tap across, and a filter's taps once.

        Lanes beyond the last column, or channel, hold nothing. Rows of pixels are first copied to panels with zeros
        around them, in whole vectors. Layers whose planes lie whole pages apart gain nothing by stores past the caches:
        their lines get in each other's way.
        """
        machine, size = device.machine, layer.accumulator.itemsize
        lanes = VECTOR_BYTES[device.instruction_set] // size
        _, _, height, width = layer.output_shape
        if layer.layout == "NHWC":
            along, across, block, neighbours = layer.S, layer.R, int(params["TQ"]), layer.C
        else:
            along, across, block, neighbours = layer.R, layer.S, int(params["TP"]), width
        vectors = math.prod(layer.output_shape) / neighbours * math.ceil(neighbours / lanes)
        products = vectors * layer.R * layer.S
        loads = vectors * across * (block + along - 1) / block + products / (block * int(params["NV"]))
        multiply = machine.multiply_adds(device.instruction_set, layer.accumulator.name, lanes)
        computed = max(products / multiply, loads / machine.loads(lanes * size)) / machine.threads
        if layer.layout == "NCHW":
            tiling = tiling_of(device.instruction_set, layer, _row_blocking(device, params))
            chunks = math.ceil(tiling.blocks / tiling.together)
            copied = math.prod(layer.input_shapes[0][:2]) * chunks * tiling.rows * tiling.panel.pitch / lanes
            computed += copied / machine.transforms(lanes * size) / machine.threads
        gains = params["nt"] and (layer.layout == "NHWC" or height * width * layer.itemsize % PAGE)
        return side_by_side(computed, operands_once(layer, machine, past=bool(gains))) + (machine.call or 0.0)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        if layer.layout == "NCHW":
            return compiler.build(kernels.emit, device.instruction_set, layer, _row_blocking(device, params))
        blocking = ChannelBlocking(int(params["TQ"]), int(params["NV"]), bool(params["nt"]))
        return compiler.build(kernels_nhwc.emit, device.instruction_set, layer, blocking)
