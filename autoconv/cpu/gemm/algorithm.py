"""Convolution as a sum of outer products with pixels as vector lanes.

A register tile holds TK output channels of NV vectors of neighbouring pixels, `y[k, q..] += w[k, c] x[c, q..]`:
one load of pixels meets TK broadcast filters. NCHW is read and written in place, so that nothing is moved
that the layer does not have to move; the output may go past the caches. Where channels are many, a tile's sums
go over a range of them at a time, whose pixels stay in the L1 cache for all filters, while the next are fetched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import LINE, VECTOR_BYTES
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import correlations
from autoconv.cpu.common.estimate import PAGE, busiest, operands_once, side_by_side
from autoconv.cpu.common.grid import parts, register_tiles
from autoconv.cpu.common.panel import strides_too_wide
from autoconv.cpu.common.streaming import nt_values, streaming_refusals
from autoconv.cpu.common.sums import channels_of_sum, sums_of
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm.geometry import (
    GemmBlocking,
    idle_lanes,
    in_place,
    line_pixels,
    packed_elements,
    tasks_of,
    workspace_elements,
)
from autoconv.cpu.gemm.kernels import emit
from autoconv.layer import ConvLayer

MOST_CHANNELS, MOST_FILTERS = 4, 15  # of a group, under filters larger than 1x1: more of either fill vectors as lanes
MOST_TAPS = 256
LEAST_RANGE = 16  # channels of a sum at a time, between which the sums go to memory and back


def blocking_of(device: CPU, params: Params) -> GemmBlocking:
    """What parameters say, with what the device adds to it."""
    TK, NV, BC, nt = (int(params[name]) for name in ("TK", "NV", "BC", "nt"))
    return GemmBlocking(TK, NV, BC, bool(nt), device.threads, *device.machine.caches[:2])


def _ranges(layer: ConvLayer) -> list[int]:
    """Channels of the sum at a time: all, or where an image is read in place some."""
    (problem,) = correlations(layer)
    return [n for n in reversed(parts(problem.C)) if n == problem.C or (n >= LEAST_RANGE and in_place(problem))]


class Gemm(GeneratedAlgorithm):
    """Outer products of filters and pixels in registers, for NCHW layers of 1x1 filters, few channels or few filters.

    Parameters: register tiles of `TK` channels by `NV` vectors of pixels; `BC` channels of a sum at a time; `nt=1`
    stores past the caches.

    Source: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008),
    doi:10.1145/1356052.1356053, for the outer products on a register tile and the filters held in the L2 cache; pixels
    are read in place, as they are contiguous, or from a packed panel of a few rows.
    """

    name = "gemm"
    directions = ("fwd", "dgrad")
    layouts = ("NCHW",)
    groupings = ("dense", "grouped")
    exact = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        grid = itertools.product(register_tiles(device.instruction_set), _ranges(layer), nt_values(layer, device))
        return [{"TK": TK, "NV": NV, "BC": BC, "nt": nt} for (NV, TK), BC, nt in grid]

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        R, S, C, K = layer.R, layer.S, layer.C // layer.groups, layer.K // layer.groups
        if layer.direction == "dgrad" and (R, S, layer.stride, layer.padding) != (1, 1, (1, 1), ((0, 0), (0, 0))):
            reasons.append(
                f"dgrad: expected 1x1 filters, unit stride and no padding, got R={R}, S={S}, stride={layer.stride}, "
                f"padding={layer.padding}"
            )
        if (R, S) != (1, 1) and C > MOST_CHANNELS and K > MOST_FILTERS:
            reasons.append(
                f"{R}x{S} filters: expected at most {MOST_CHANNELS} channels in a group, or {MOST_FILTERS} filters, "
                f"got {C} and {K}"
            )
        if R * S > MOST_TAPS:
            reasons.append(f"R={R}, S={S}: expected at most {MOST_TAPS} taps, which are written out, got {R * S}")
        return reasons + strides_too_wide(layer)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        if (params["NV"], params["TK"]) not in (tiles := register_tiles(device.instruction_set)):
            allowed = " or ".join(f"TK={TK},NV={NV}" for NV, TK in tiles)
            reasons.append(f"TK={params['TK']},NV={params['NV']}: expected {allowed}")
        if params["BC"] not in (ranges := _ranges(layer)):
            reasons.append(f"BC={params['BC']}: expected {' or '.join(map(str, ranges))}")
        if params["nt"]:
            reasons += streaming_refusals(layer, device)
            pixels = line_pixels(layer)
            if pixels * layer.itemsize % VECTOR_BYTES[device.instruction_set]:
                what = "planes" if pixels > layer.output_shape[3] else "rows"
                reasons.append(f"nt=1: expected {what} of whole vectors, got {pixels} pixels")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        own = workspace_elements(device.instruction_set, layer, blocking_of(device, params))
        return device.threads * own * layer.accumulator.itemsize

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return packed_elements(layer) * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """A tile loads a vector of pixels and broadcasts a filter for every column and row of its products.

        Filters come from memory, and then from the L2 cache, for every tile; pixels once for every part of the filters
        that this cache holds. Those of a range of channels come from the first cache where it holds them, and the next
        ones that are fetched meanwhile; a range's sums are loaded before it, and stored after. A tile's stores drain
        while the next ones are computed; past the caches they gain nothing where planes lie whole pages apart: their
        lines get in each other's way.
        """
        machine, blocking = device.machine, blocking_of(device, params)
        C, taps, size = layer.C // layer.groups, layer.R * layer.S, layer.accumulator.itemsize
        lanes = VECTOR_BYTES[device.instruction_set] // size
        products = idle_lanes(device.instruction_set, layer, blocking) * layer.flops / (2 * lanes)
        tile = blocking.TK * blocking.NV
        visits = math.ceil(C / blocking.BC) * sums_of(blocking.BC, channels_of_sum(taps))
        loads, sums = products * (blocking.TK + blocking.NV) / tile, 2 * visits * products / (C * taps)
        multiply = machine.multiply_adds(device.instruction_set, layer.accumulator.name, lanes)
        load = machine.loads(lanes * size)
        computed = (max(products / multiply, loads / load) + sums / load) / machine.threads
        filters = size * math.prod(layer.w_shape)
        kept = min(filters / layer.groups, device.machine.caches[1] / 2)
        tiles = math.ceil(line_pixels(layer) / (blocking.NV * lanes)) * math.prod(layer.output_shape[2:])
        tiles = layer.N * tiles // line_pixels(layer)
        moved = filters / machine.memory + machine.reading(filters * (tiles - 1), kept)
        pixels = math.prod(layer.input_shapes[0]) * layer.itemsize
        moved += machine.reading(pixels * math.ceil(filters / layer.groups / kept), pixels / machine.threads)
        panels = self.workspace_bytes(layer, device, params)
        held = 2 * blocking.BC * (blocking.NV * lanes * size + LINE - size)  # a line's start and end are others' pixels
        if held > blocking.l1_bytes:
            moved += machine.reading(products / blocking.TK * lanes * size, held)
        if panels:
            copied = machine.transforms(lanes * size) * machine.threads
            computed += pixels / (lanes * size) / copied
            moved += machine.writing(panels, machine.beyond)
        gains = params["nt"] and math.prod(layer.output_shape[2:]) * layer.itemsize % PAGE
        stored = operands_once(layer, machine, past=bool(gains))
        share = busiest(tasks_of(device.instruction_set, layer, blocking), machine.threads)
        return side_by_side(computed, moved + stored) * share + (machine.call or 0.0)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, blocking_of(device, params))
