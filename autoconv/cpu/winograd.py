"""Winograd convolution on generated kernels: many layers' fewest multiplications, at the price of rounding.

F(m x m, r x r) needs `(m + r - 1)**2` multiplications for `m * m` outputs instead of `m * m * r * r` (Winograd
1980; Lavin and Gray 2016): for 3x3 filters 4 times fewer with m = 4, 5.4 times with m = 7. Strided layers
are split into phases, dilated ones into grids, filters of one row or column are transformed on one axis.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from autoconv.algorithm import Algorithm, Kernel, Params, bound_for
from autoconv.cpu import compiler
from autoconv.cpu.device import CPU
from autoconv.cpu.pieces import Axis, Correlation, correlations
from autoconv.cpu.pool import GeneratedKernel
from autoconv.cpu.winograd_kernels import emit
from autoconv.cpu.winograd_plan import LARGEST_TILE, Plan, Side
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.device import Device

LARGEST_STEP = 8  # input pixels between neighbours of a piece: more would be loads without end


def _side(axis: Axis, m: int) -> Side:
    """Tiles of m outputs, or of one where a single tap leaves nothing to save."""
    side = Side(axis, m)
    return side if side.r > 1 else Side(axis, 1)


def _plan(layer: ConvLayer, device: CPU, c: Correlation, m: tuple[int, int], rows: int, share: int) -> Plan:
    sides = _side(c.rows, m[0]).m, _side(c.columns, m[1]).m
    return Plan(c, device.instruction_set, layer.accumulator.itemsize, sides, rows, share)


def _parse(params: Params) -> tuple[tuple[int, int], int, int]:
    down, across = map(int, str(params["m"]).split("x"))
    return (down, across), int(params["rows"]), int(params["share"])


def plans(layer: ConvLayer, device: CPU, params: Params) -> tuple[Plan, ...]:
    """How each correlation of a layer is cut."""
    return tuple(_plan(layer, device, c, *_parse(params)) for c in correlations(layer))


def _cost(plan: Plan, threads: int, l2_bytes: int, l3_bytes: int) -> float:
    """Predicted cycles, from counts of vector operations; constants fitted on a Zen 4.

    A multiply-add takes a cycle; a register tile loses what it takes to load the filters. Transforms cost
    some cycles per point and vector, the more the further away the memory is that they stream through.
    """
    c = plan.correlation
    tiles = c.groups * plan.tile_rows * plan.columns.tiles
    T = plan.chunk_tiles
    parts = -(-T // plan.pixels)
    filled = T / parts * plan.vectors
    product = tiles * plan.points * plan.depth * plan.k_blocks * plan.vectors * (1 + 2.5 / filled)
    working = plan.itemsize * (plan.scratch_size + (0 if plan.share else plan.v_size))
    far = 1.0 if working <= l2_bytes else 1.6
    transforms = tiles * plan.points * (plan.c_blocks * 9.0 + plan.k_blocks * plan.vectors * 8.0) * far
    filters = float(plan.itemsize * plan.packed_size * plan.chunks)
    if plan.share and plan.k_blocks >= threads:  # a block of filters is fetched once for all chunks together
        filters /= min(plan.share, plan.chunks)
    rate = 16.0 if plan.itemsize * plan.packed_size <= l3_bytes / 2 else 5.0
    tasks = plan.chunks * c.groups if not plan.share else plan.k_blocks * min(plan.share, plan.chunks)
    balance = -(-tasks // threads) * threads / tasks
    barriers = 2 * c.groups * -(-plan.chunks // plan.share) * 4000.0 if plan.share else 0.0
    return (max(product * (far if not plan.share else 1.0), filters / rate) + transforms) * balance / threads + barriers


def _chunks(plan: Plan, threads: int) -> Iterator[int]:
    """Rows of tiles worth trying for a chunk: as many as make nearly equal chunks."""
    seen = set()
    for parts in range(1, plan.tile_rows + 1):
        rows = -(-plan.tile_rows // parts)
        if rows not in seen and rows * plan.columns.tiles <= 256:
            seen.add(rows)
            yield rows
    yield 1


@functools.lru_cache(256)
def _ranked(layer: ConvLayer, device: CPU) -> tuple[tuple[tuple[int, int], int, int], ...]:
    """The best chunking for each size of tile and each schedule, best first; at most five."""
    main = max(correlations(layer), key=lambda c: c.macs)
    facts = device.facts
    cache = facts["l2_bytes"], facts["l3_bytes"]
    found = []
    options = []
    for axis in (main.rows, main.columns):
        r = Side(axis, 1).r
        options.append([m for m in range(2, 8) if r + m - 1 <= LARGEST_TILE] if r > 1 else [1])
    for down in options[0]:
        for across in options[1]:
            for share in (0, 1):
                best = None
                base = _plan(layer, device, main, (down, across), 1, 0)
                for rows in _chunks(base, device.threads):
                    together = 0
                    if share:
                        one = _plan(layer, device, main, (down, across), rows, 1)
                        together = max(1, min(one.chunks, cache[1] // 3 // (one.v_size * one.itemsize)))
                    plan = _plan(layer, device, main, (down, across), rows, together)
                    cost = _cost(plan, device.threads, *cache)
                    if best is None or cost < best[0]:
                        best = cost, (down, across), rows, together
                assert best is not None
                found.append(best)
    found.sort()
    return tuple(choice[1:] for choice in found[:5])


def _cap(side: Side) -> float:
    """Largest float32 error, some times what was measured on random tiles of two channels and more."""
    if side.tile <= 6:
        return 4e-6
    return 1e-5 if side.tile == 7 or (side.tile == 8 and side.m <= 4) else 3e-5


class Winograd(Algorithm):
    """F(m x m, r x r) for fwd and dgrad: `m` outputs of a tile, `rows` of tiles of a chunk, `share` of chunks."""

    name = "winograd"
    exact = False
    spreads_nonfinite = True

    @property
    def version(self) -> str:
        modules = "winograd_plan", "winograd_pieces", "winograd_filters", "winograd_kernels"
        return compiler.version("pieces", *modules)

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        assert isinstance(device, CPU)
        if layer.direction == "wgrad":
            return []
        return [{"m": f"{m[0]}x{m[1]}", "rows": rows, "share": share} for m, rows, share in _ranked(layer, device)]

    def why_not(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        assert isinstance(device, CPU)
        reasons = []
        if (reason := compiler.unavailable()) is not None:
            reasons.append(reason)
        if layer.direction == "wgrad":
            return [*reasons, "wgrad: minimal filtering is for fwd and dgrad here"]
        if min(layer.C, layer.K) // layer.groups < 2:
            reasons.append("a group has a single channel: there is no sum for its products to share a transform")
        cuts = plans(layer, device, params)
        if any(not axis.taps for plan in cuts for axis in (plan.correlation.rows, plan.correlation.columns)):
            return [*reasons, f"stride {layer.stride[0]}x{layer.stride[1]} leaves inputs that no tap sees"]
        sides = [side for plan in cuts for side in (plan.rows, plan.columns)]
        if all(side.r == 1 for side in sides):
            reasons.append(f"the filter is {layer.R}x{layer.S}: no neighbouring taps in any phase of its stride")
        if (largest := max(side.tile for side in sides)) > LARGEST_TILE:
            reasons.append(f"tiles of {largest} points on a side; at most {LARGEST_TILE} keep the error small")
        if (period := max(side.period for side in sides)) > LARGEST_STEP:
            reasons.append(f"its pieces are {period} pixels apart, more than {LARGEST_STEP}")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        assert isinstance(device, CPU)
        return max(plan.workspace_bytes(device.threads) for plan in plans(layer, device, params))

    def packed_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        assert isinstance(device, CPU)
        return layer.accumulator.itemsize * sum(plan.packed_size for plan in plans(layer, device, params))

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        assert isinstance(device, CPU)
        cache = device.facts["l2_bytes"], device.facts["l3_bytes"]
        cuts = plans(layer, device, params)
        cycles = sum(_cost(plan, device.threads, *cache) for plan in cuts)
        rate = device.peak_flops(layer.dtype) / (2 * cuts[0].lanes * device.threads)
        return cycles / rate + layer.bytes / device.bandwidth() / 4

    def bound(self, layer: ConvLayer, params: Params) -> float:
        down, across = _parse(params)[0]
        sides = [side for c in correlations(layer) for side in (_side(c.rows, down), _side(c.columns, across))]
        return bound_for(layer, max(map(_cap, sides)))

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        assert isinstance(device, CPU)
        program = compiler.build(emit, device.instruction_set, layer, plans(layer, device, params))
        sizes = self.workspace_bytes(layer, device, params), self.packed_bytes(layer, device, params)
        return GeneratedKernel(program, device.threads, *sizes)
