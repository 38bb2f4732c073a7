"""Winograd's gradient of the filters on generated kernels, for the layers whose forward pass `winograd` takes.

F(m x m, r x r) turned around needs `(m + r - 1)**2` multiplications for what `m * m` pixels of dy add to `r * r`
taps, as the forward pass does for its outputs (Lavin and Gray 2016); the same splits serve strides and dilation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

from autoconv.algorithm import Params, bound_for
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.device import CPU
from autoconv.cpu.transform.geometry import Plan, side_of
from autoconv.cpu.winograd.geometry import cap, most_sizes, refusals, sizes
from autoconv.cpu.winograd.gradients_geometry import WgradPlan
from autoconv.cpu.winograd.gradients_kernels import emit
from autoconv.layer import ConvLayer

CHUNKS = 16, 32, 64, 128, 256  # tiles of a chunk, about


def _forward(layer: ConvLayer) -> Correlation:
    return correlations(layer.replace(direction="fwd"))[0]


def _plan(layer: ConvLayer, device: CPU, m: tuple[int, int], rows: int, slices: int) -> WgradPlan:
    """`slices` 0: as many as make enough tasks of blocks of filters and channels."""
    c = _forward(layer)
    tiles = Plan(c, device.instruction_set, layer.accumulator.itemsize, m, rows, 0)
    one = WgradPlan(tiles, 1, 1)
    enough = -(-2 * device.threads // (one.filter_blocks * one.channel_blocks))
    slices = min(slices or enough, tiles.chunks)
    parts = min(-(-4 * device.threads // (slices * (tiles.c_blocks + one.k_vectors))), tiles.chunk)
    return WgradPlan(tiles, slices, parts)


def _parse(params: Params) -> tuple[tuple[int, int], int, int]:
    down, across = map(int, str(params["m"]).split("x"))
    return (down, across), int(params["rows"]), int(params["slices"])


def plan_of(layer: ConvLayer, device: CPU, params: Params) -> WgradPlan:
    """How a layer is cut."""
    return _plan(layer, device, *_parse(params))


def _cost(plan: WgradPlan, threads: int, l3_bytes: int) -> float:
    """Predicted cycles of a thread, from counts of vector operations as for the forward pass."""
    tiles = plan.tiles
    groups, points = tiles.correlation.groups, tiles.points
    number = groups * tiles.tile_rows * tiles.columns.tiles
    vectors = plan.filter_blocks * plan.KB * plan.channel_blocks * plan.vectors
    register_tile = plan.register_tiles[0][1] * plan.vectors
    product = points * vectors * (number * (1 + 1.5 / register_tile) + groups * tiles.chunks * 6.0)
    transforms = number * points * (tiles.c_blocks * 9.0 + plan.k_vectors * 9.0)
    folds = groups * tiles.chunks * vectors * points * 4.0
    finish = groups * vectors * plan.taps * (8.0 + 2 * plan.slices)
    used = plan.slices * (plan.v_size + plan.y_size) * tiles.itemsize
    crowded = min(max(2 * used / l3_bytes - 0.5, 0.0), 1.0)
    work = (product + transforms) * (1 + 0.5 * crowded) + folds + finish
    return work / threads + groups * (plan.steps * 2 + 1) * 4000.0


@functools.lru_cache(256)
def _ranked(layer: ConvLayer, device: CPU) -> tuple[tuple[tuple[int, int], int], ...]:
    """The most promising sizes of tiles, with the best sizes of chunks."""
    c = _forward(layer)
    found: dict[tuple[int, ...], tuple[float, tuple[int, int], int]] = {}
    for m in itertools.product(sizes(c.rows), sizes(c.columns)):
        one = _plan(layer, device, m, 1, 1).tiles
        for rows in {min(max(tiles // one.columns.tiles, 1), one.tile_rows) for tiles in CHUNKS}:
            cost = _cost(_plan(layer, device, m, rows, 0), device.threads, device.facts["l3_bytes"])
            key = *sorted(m), rows >= one.tile_rows
            found[key] = min(found.get(key, (cost, m, rows)), (cost, m, rows))
    return tuple(choice[1:] for choice in sorted(found.values())[: most_sizes(layer)])


class WinogradWgrad(GeneratedAlgorithm):
    """Tiles of m x m pixels of dy; chunks of `rows` of tiles; `slices` of chunks with sums of their own."""

    name = "winograd.wgrad"
    spreads_nonfinite = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        if layer.direction != "wgrad":
            return []
        found: list[Params] = []
        for m, rows in _ranked(layer, device):
            plan = _plan(layer, device, m, rows, 0)
            found.append({"m": f"{m[0]}x{m[1]}", "rows": rows, "slices": plan.slices})
        return found

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if layer.direction != "wgrad":
            return [f"{layer.direction}: winograd computes that"]
        reasons = []
        if min(layer.C, layer.K) // layer.groups < 2:
            reasons.append("a group has a single channel: transforms would serve a single product")
        tiles = plan_of(layer, device, params).tiles
        return reasons + refusals(layer, tiles.m, (tiles,))

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return plan_of(layer, device, params).workspace_bytes(device.threads)

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        plan = plan_of(layer, device, params)
        rate = device.peak_flops(layer.dtype) / (2 * plan.lanes * device.threads)
        cycles = _cost(plan, device.threads, device.facts["l3_bytes"])
        return cycles / rate + layer.bytes / device.bandwidth() / 4

    def bound(self, layer: ConvLayer, params: Params) -> float:
        c, (down, across) = _forward(layer), _parse(params)[0]
        sides = side_of(c.rows, down), side_of(c.columns, across)
        return bound_for(layer, cap(sides))  # of the forward pass, whose errors are no smaller

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, plan_of(layer, device, params))
