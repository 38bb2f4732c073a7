"""1x1 convolution as a matrix product of packed operands, for channels in planes.

Lanes are output channels and pixels are broadcast, as in `direct`; but a plane is cut into tiles of a few pixels,
and every tile's pixels are copied next to one another, channel after channel: one line of the cache then holds
several channels of a tile where in place it holds a part of one, and a task's tiles are read from the L2 cache in
order, by every block of filters.

The gradient of the input of a layer with strides is such a product too, with zeros between its pixels: what a block of
filters makes of a panel is gathered first, and then spread over the rows of the image, each written in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from autoconv.algorithm import Params
from autoconv.common.candidate import text_of
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.common.algorithm import Emitter, GeneratedAlgorithm
from autoconv.cpu.common.estimate import busiest, operands_once, side_by_side
from autoconv.cpu.common.sums import channels_of_sum, sums_of
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm_packed.geometry import (
    PackedGemmBlocking,
    PlaneTiles,
    blocking_of,
    blocks_of,
    grid_of,
    half_or_all,
    packed_filters,
    panel_size,
    pixels_of,
    product,
    spreads,
    thread_bytes,
)
from autoconv.cpu.gemm_packed.kernels import emit
from autoconv.layer import ConvLayer

ADDITIONS, ZEROS = 12, 4  # of seven products to the sums of four blocks of outputs, and what these start as
MOST_STRIDE = 8  # of a gradient: the zeros after a pixel are written out


class GemmPacked(GeneratedAlgorithm):
    """Register tiles of `TK` channels by `TQ` pixels, from packed filters and `panels` packed panels of pixels.

    `BC` channels of the sum at a time.

    Source: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008),
    doi:10.1145/1356052.1356053: the packing of both operands, with a panel of pixels in the L2 cache and a block of
    filters in the L1 cache.
    """

    name = "gemm.packed"
    directions = ("fwd", "dgrad")
    layouts = ("NCHW",)
    groupings = ("dense", "grouped")
    exact = True
    emitter: ClassVar[Emitter] = staticmethod(emit)
    halved: ClassVar[bool] = False

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return grid_of(layer, device, self.halved)

    def blocking(self, layer: ConvLayer, device: CPU, params: Params) -> PackedGemmBlocking:
        """The cut that the parameters name."""
        return blocking_of(layer, device, params, self.halved)

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        if (layer.R, layer.S) != (1, 1):
            reasons.append(f"R={layer.R}, S={layer.S}: expected 1x1 filters")
        if layer.padding != ((0, 0), (0, 0)):
            reasons.append(f"padding={layer.padding}: expected none, as pixels of the border would not be copied")
        if layer.direction == "dgrad" and max(layer.stride) > MOST_STRIDE:
            stride = f"{layer.stride[0]}x{layer.stride[1]}"
            reasons.append(f"dgrad: expected strides up to {MOST_STRIDE}, whose zeros are written out, got {stride}")
        if spreads(product(layer)) and layer.has_epilogue:
            reasons.append("epilogue: expected none, as zeros are written between the outputs, got one")
        return reasons

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        if params not in (grid := grid_of(layer, device, self.halved)):
            for name in ("TK", "TQ", "BC", "panels"):
                allowed = sorted({cut[name] for cut in grid})
                if params[name] not in allowed:
                    reasons.append(f"{name}={params[name]}: expected {' or '.join(map(str, allowed))}")
            given = text_of(params)
            reasons = reasons or [f"{given}: expected sums that fill the registers and a task's buffer, and no more"]
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        blocking = self.blocking(layer, device, params)
        return device.threads * thread_bytes(product(layer), blocking, layer.accumulator.itemsize)

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return packed_filters(product(layer), self.blocking(layer, device, params)) * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """A tile loads a vector of filters and broadcasts a pixel for every row and column of its products.

        Pixels are copied to panels for every part of the filters that is a task of its own; a block of filters comes
        from memory, for every further panel from where all of them stay, and for every further tile from the first
        cache; sums go to and fro for every block of channels.
        Halved, there are seven such products, whose pixels and filters are copied and read, and sums go more often.
        """
        machine, problem, blocking = device.machine, product(layer), self.blocking(layer, device, params)
        size, TK, halved = layer.accumulator.itemsize, blocking.TK, blocking.halved
        lanes = VECTOR_BYTES[device.instruction_set] // size
        tiles = PlaneTiles.of(problem, blocking.TQ, halved)
        depth, plane = half_or_all(problem.C, halved), half_or_all(pixels_of(problem), halved)
        blocks, images = blocks_of(problem, TK, halved), problem.N * problem.groups
        pixels, vectors = plane / tiles.tiles, TK // lanes
        parts = math.ceil(depth / blocking.BC) * sums_of(blocking.BC, channels_of_sum(1))
        number = images * tiles.tiles * blocks * blocking.products
        multiply = machine.multiply_adds(device.instruction_set, layer.accumulator.name, lanes)
        load = machine.loads(lanes * size)
        visits = (ADDITIONS * parts + ZEROS) / blocking.products if halved else parts
        sums = 2 * pixels * vectors * visits / load
        one = depth * max(pixels * vectors / multiply, (pixels + vectors) / load) + sums
        copied = images * blocking.products * depth * plane * size
        copies = copied * blocking.chunks / (lanes * size) / machine.transforms(lanes * size)
        filters = size * packed_filters(problem, blocking)
        moved = filters / machine.memory
        panels = math.ceil(problem.N * tiles.tiles / blocking.tiles)
        moved += machine.reading(filters * (panels - 1), filters / problem.groups)
        moved += machine.reading(filters * (problem.N * tiles.tiles - panels), size * blocking.BC * TK)
        moved += machine.reading(copied * blocks, size * panel_size(problem, blocking))
        computed = (number * one + copies) / machine.threads
        fresh = machine.writing(self.workspace_bytes(layer, device, params), machine.beyond)
        tasks = panels * blocking.chunks * problem.groups
        both = side_by_side(computed, moved) * busiest(tasks, machine.threads)
        return both + operands_once(layer, machine) + fresh + (machine.call or 0.0)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(self.emitter, device.instruction_set, layer, self.blocking(layer, device, params))
