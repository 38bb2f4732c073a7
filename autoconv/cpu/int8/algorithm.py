"""Quantised convolution: products of words of integers, summed in int32, over a strip of packed pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Kernel, Params
from autoconv.common.types import INTEGERS
from autoconv.cpu import permission
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import VECTOR_BYTES, Module
from autoconv.cpu.codegen.tiles import TILE_ROWS
from autoconv.cpu.codegen.words import CHANNELS, vector_products
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.estimate import busiest, operands_once, side_by_side
from autoconv.cpu.device import CPU
from autoconv.cpu.int8.geometry import Cut, Panel, cut_of, register_tiles
from autoconv.cpu.int8.kernels import emit
from autoconv.layer import ConvLayer

STRIPS = (64, 256, 1024)  # outputs


def products(device: CPU) -> tuple[str, ...]:
    """How this process can multiply words on a device, the fastest first."""
    tiles = bool(device.matrix_unit) and not (device.matrix_unit == "amx" and permission.refused())
    return (*(["tdpbusd"] if tiles else []), *vector_products(device.instruction_set))


class Int8(GeneratedAlgorithm):
    """Words of packed pixels by words of packed filters, on vectors or tiles, exact.

    Parameters: `product`, the instruction that multiplies words; `NV` vectors of filters by `TP` outputs in registers
    (with tiles, always two by two of them); about how many outputs a `strip` has, whose pixels are packed together.

    Sources: Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only
    inference" (2018), arXiv:1712.05877, for zero points left out of the sums; Georganas et al. (2018),
    arXiv:1808.05567, for a block of the output that stays in registers for all taps.
    """

    name = "int8"
    directions = ("fwd",)
    dtypes = tuple(INTEGERS)
    groupings = ("dense", "grouped", "depthwise")
    exact = True
    skips_padding = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        product = products(device)[0]
        tiles = register_tiles(device.instruction_set) if product != "tdpbusd" else [(2, 1)]
        found: dict[Cut, Params] = {}
        for NV, TP in tiles:
            for strip in STRIPS:
                params: Params = {"product": product, "NV": NV, "TP": TP, "strip": strip}
                found.setdefault(_cut(layer, device, params), params)
        return found.values()

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        product, NV, TP, strip = (params[name] for name in ("product", "NV", "TP", "strip"))
        reasons = []
        if product not in (able := products(device)):
            reasons.append(f"product={product}: expected {' or '.join(able)}, as this process may use")
        for name, value in (("NV", NV), ("TP", TP), ("strip", strip)):
            if not isinstance(value, int) or not 0 < value <= 1 << 20:
                reasons.append(f"{name}={value}: expected a positive integer")
        if not reasons and int(NV) * int(TP) > (most := Module(device.instruction_set).registers):
            reasons.append(f"NV * TP={int(NV) * int(TP)}: expected at most the {most} registers")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return device.threads * _panel(layer, device, params).own

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return _panel(layer, device, params).packed_bytes

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """The products of whole words, the packing of each strip by each thread that needs it, and the store."""
        machine, panel, vector = device.machine, _panel(layer, device, params), VECTOR_BYTES[device.instruction_set]
        cut = panel.cut
        strips = layer.N * layer.groups * panel.strips
        outputs = panel.side * TILE_ROWS if panel.tiles else math.ceil(panel.sums / cut.TP) * cut.TP
        steps = strips * outputs * panel.filter_blocks * (panel.filter_words - 1)  # words, by TK filters
        if panel.tiles:
            seconds = 2.0 * CHANNELS[cut.product] * steps * cut.TK / machine.tiles(device.matrix_unit or "", "int8")
        else:
            loads = (1 / cut.TP + cut.lanes / cut.TK) / machine.loads(vector)  # for each product of two vectors
            rate = machine.word_products(device.instruction_set, CHANNELS[cut.product], cut.lanes)
            seconds = steps * cut.TK / cut.lanes * max(1 / rate, loads) / machine.threads
        copied = panel.blocks * panel.block_bytes * strips
        packing = copied * min(cut.chunks, device.threads) / vector / machine.transforms(vector) / machine.threads
        moved = self.packed_bytes(layer, device, params) / machine.memory
        moved += machine.reading(panel.packed_bytes * max(strips - 1, 0), panel.packed_bytes)
        moved += machine.reading(copied * panel.filter_blocks, panel.own)
        stored = machine.reading(4.0 * steps / max(panel.filter_words - 1, 1) * cut.TK, panel.own)
        work = side_by_side(seconds, moved) + packing + stored
        return (machine.call or 0.0) + work * busiest(panel.tasks, device.threads) + operands_once(layer, machine)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        unit = device.matrix_unit if params["product"] == "tdpbusd" else None
        return compiler.build(emit, device.instruction_set, unit, _panel(layer, device, params), device.threads)

    def build(self, layer: ConvLayer, device: CPU, params: Params) -> Kernel:
        if params["product"] == "tdpbusd" and device.matrix_unit == "amx":
            permission.require()
        return super().build(layer, device, params)


def _cut(layer: ConvLayer, device: CPU, params: Params) -> Cut:
    NV, TP, strip = (int(params[name]) for name in ("NV", "TP", "strip"))
    return cut_of(layer, device.threads, device.instruction_set, str(params["product"]), NV, TP, strip)


def _panel(layer: ConvLayer, device: CPU, params: Params) -> Panel:
    return Panel(layer, _cut(layer, device, params))
