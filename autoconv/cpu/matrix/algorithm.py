"""Convolution by products of tiles, on processors with a matrix unit.

A product of 16 pixels and 16 filters over 32 channels is one instruction, on bfloat16. A float16 is the sum of two such
numbers, a float32 of three. Of the nine products of a float32's parts the six largest are more exact than sums in
float32, and the three largest about as exact as Winograd's large tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.codegen.tiles import TILE_FLOPS, TILE_ROWS
from autoconv.cpu.common.algorithm import Emitter
from autoconv.cpu.common.correlation import flat_correlations
from autoconv.cpu.common.estimate import operands_once, side_by_side
from autoconv.cpu.common.tiles.algorithm import FEWEST_TERMS, X3_BOUND, TileAlgorithm, with_few_terms
from autoconv.cpu.common.tiles.products import DEPTH, FILTERS
from autoconv.cpu.device import CPU
from autoconv.cpu.matrix.geometry import (
    MatrixBlocking,
    Panel,
    blocking,
    filter_tiles,
    packed_bytes,
    strips,
)
from autoconv.cpu.matrix.kernels import emit
from autoconv.layer import ConvLayer

STRIPS = (128, 256, 512, 1024)  # outputs
CHANNELS = (64, 128, 256)  # summed at a time, where not all are


class Matrix(TileAlgorithm):
    """Tiles of pixels by tiles of packed filters, as exact as sums in float32.

    Parameters: `products` of parts of numbers, 1 for bfloat16, 3 for float16, 6 for float32; about how many outputs a
    `strip` has, whose pixels are packed together; `BC` channels of the sum at a time.

    Sources: Intel, "Intrinsics for Advanced Matrix Extensions", for tiles; Henry, Tang and Heinecke, "Leveraging the
    bfloat16 artificial intelligence datatype for higher-precision computations" (2019), arXiv:1904.06376, for the parts
    and their products; Georganas et al. (2018), arXiv:1808.05567, for a block of the output that stays in registers for
    all taps.
    """

    name = "matrix"
    directions = ("fwd", "dgrad")
    exact = True
    products: ClassVar[dict[str, int]] = {"bfloat16": 1, "float16": 3, "float32": 6}
    emitter: ClassVar[Emitter] = staticmethod(emit)
    panel: ClassVar[type[Panel]] = Panel
    transposes: ClassVar[bool] = True  # pixels and sums, where channels come first

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        """Strips and blocks of channels."""
        c = max(flat_correlations(layer), key=lambda c: c.macs)
        products = self.products[layer.dtype]
        blocks = sorted({BC for BC in CHANNELS if BC < c.C} | {c.C}, reverse=True)
        found: dict[MatrixBlocking, Params] = {}
        for BC in blocks:
            for strip in STRIPS:
                params = {"products": products, "strip": strip, "BC": BC}
                found.setdefault(blocking(c, products, strip, BC, device.threads), params)
        return found.values()

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        products, strip, BC = (params[name] for name in ("products", "strip", "BC"))
        if products != (needed := self.products[layer.dtype]):
            reasons.append(f"products={products}: expected {needed} for {layer.dtype}")
        if int(strip) < TILE_ROWS:
            reasons.append(f"strip={strip}: expected at least the {TILE_ROWS} outputs of a tile")
        channels = max(c.C for c in flat_correlations(layer))
        if not 0 < int(BC) <= channels or (int(BC) % DEPTH and int(BC) != channels):
            reasons.append(f"BC={BC}: expected all {channels} channels, or some multiple of {DEPTH} of them")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        panels = (
            self.panel(c, b) for c, b in zip(flat_correlations(layer), blockings_of(layer, device, params), strict=True)
        )
        return device.threads * max(panel.thread_bytes for panel in panels)

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return sum(packed_bytes(c, int(params["products"])) for c in flat_correlations(layer))

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """The products of whole tiles, and the packing of each strip by each thread that needs it.

        What is transposed takes as long as what is packed. Filters come from memory, and then for every strip from
        where all of them fit; packed pixels for every block of filters from a thread's own panel. All tiles of pixels
        but the first two find the filters of `BC` channels where these fit beside the panel; sums come and go for every
        `BC` channels more.
        """
        machine = device.machine
        rate, vector = self.rate(device), VECTOR_BYTES[device.instruction_set]
        seconds = machine.call or 0.0
        filters = self.packed_bytes(layer, device, params)
        for c, b in zip(flat_correlations(layer), blockings_of(layer, device, params), strict=True):
            panel, number = self.panel(c, b), strips(c, b)
            blocks = math.ceil(c.K / FILTERS)
            steps = panel.tiles * filter_tiles(c) * panel.blocks * len(panel.taps)
            multiplied = TILE_FLOPS["bfloat16"] * b.products * steps * number / rate
            copied = panel.panel_bytes * number
            turned = self.transposes and c.input.channel != 1
            packed = copied * min(b.chunks, device.threads) * (2 if turned else 1)
            packed += turned * c.N * c.groups * c.K * c.rows.count * c.columns.count * 4
            packing = packed / vector / machine.transforms(vector) / machine.threads
            moved = filters / machine.memory + machine.reading(filters * (number - 1), filters)
            moved += machine.reading(copied * blocks, panel.thread_bytes)
            together, pairs = -(-b.BC // DEPTH), -(-panel.tiles // 2)
            passes = -(-panel.blocks // together)
            held = panel.thread_bytes + filters / max(blocks, 1) / passes
            moved += machine.reading(filters * number * (pairs - 1), held)
            sums = (passes - 1) * blocks * number * panel.tiles * TILE_ROWS * FILTERS * 4
            moved += machine.reading(sums, held) + machine.writing(sums, held)
            seconds += side_by_side(multiplied, moved) + packing
        fresh = machine.writing(self.workspace_bytes(layer, device, params), machine.beyond)
        return seconds + operands_once(layer, machine) + fresh

    def rate(self, device: CPU) -> float:
        """Operations per second that all threads do."""
        return device.machine.tiles(device.matrix_unit or "", "bfloat16")

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        blockings = blockings_of(layer, device, params)
        return compiler.build(self.emitter, device.instruction_set, device.matrix_unit, layer, blockings)


class MatrixX3(Matrix):
    """The same with the three largest products of a float32's parts, for sums of many terms."""

    name = "matrix.x3"
    dtypes = ("float32",)
    exact = False
    rounds_more = True
    products: ClassVar[dict[str, int]] = {"float32": 3}
    float32_bound = X3_BOUND

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        terms = (c.C * len(c.rows.taps) * len(c.columns.taps) for c in flat_correlations(layer))
        return reasons + with_few_terms(min((number for number in terms if number), default=FEWEST_TERMS))


def blockings_of(layer: ConvLayer, device: CPU, params: Params) -> tuple[MatrixBlocking, ...]:
    """How each correlation of a layer is cut."""
    products, strip, BC = (int(params[name]) for name in ("products", "strip", "BC"))
    return tuple(blocking(c, products, strip, BC, device.threads) for c in flat_correlations(layer))
