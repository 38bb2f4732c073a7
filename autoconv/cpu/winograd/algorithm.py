"""Winograd convolution on generated kernels: many layers' fewest multiplications, at the price of rounding.

F(m x m, r x r) needs `(m + r - 1)**2` multiplications for `m * m` outputs instead of `m * m * r * r` (Winograd
1980; Lavin and Gray 2016): for 3x3 filters 4 times fewer with m = 4, 5.4 times with m = 7. Strided layers
are split into phases, dilated ones into grids, large filters into blocks of taps; filters of one row or column
are transformed on one axis.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

from autoconv.algorithm import Params, bound_for
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import GeneratedAlgorithm, traffic
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.device import CPU
from autoconv.cpu.transform.geometry import Plan, side_of
from autoconv.cpu.transform.kernels import emit
from autoconv.cpu.winograd.geometry import cap, most_sizes, refusals, sizes
from autoconv.layer import ConvLayer

FETCHED = 13.0  # bytes a cycle from the last cache
CYCLES = {"avx512": 1.0, "avx2": 0.5, "generic": 0.5}  # of a multiply-add of vectors
KEPT = 10  # the part of the last cache that transformed inputs may take before they fall out of it
KEPT_SMALL = 3  # the same where chunks are small
CONSIDERED = 5  # sizes of tiles for which chunks are looked at
MOST_PIECES = 4  # correlations of a strided gradient, for the sake of compile time


def _plan(layer: ConvLayer, device: CPU, c: Correlation, m: tuple[int, int], rows: int, share: int) -> Plan:
    return Plan(c, device.instruction_set, layer.accumulator.itemsize, m, rows, share)


def _parse(params: Params) -> tuple[tuple[int, int], int, int]:
    down, across = map(int, str(params["m"]).split("x"))
    return (down, across), int(params["rows"]), int(params["share"])


def plans(layer: ConvLayer, device: CPU, params: Params) -> tuple[Plan, ...]:
    """How each correlation of a layer is cut."""
    return tuple(_plan(layer, device, c, *_parse(params)) for c in correlations(layer))


def _blind(pieces: Iterable[Correlation]) -> bool:
    """Whether some piece has no tap at all."""
    return not all(c.rows.taps and c.columns.taps for c in pieces)


def _cost(plan: Plan, threads: int, l2_bytes: int, l3_bytes: int) -> float:
    """Predicted time in multiply-adds of vectors, from counts of operations and of bytes that miss the second cache.

    A register tile loses what it takes to load the filters; a transform takes some time per point and vector.
    Filters come from the last cache, or beyond it from memory, for every chunk anew unless a block of them stays
    in the second cache; what it cannot hold of a chunk's input goes to and fro for every block of filters, and
    so do the products. Loads and multiply-adds go on side by side. What operations take was fitted on a Zen 4,
    what traffic takes on a Zen 3.
    """
    c = plan.correlation
    tiles = c.groups * plan.tile_rows * plan.columns.tiles
    filters = plan.k_blocks * plan.vectors
    register_tile = plan.chunk_tiles / -(-plan.chunk_tiles // plan.pixels) * plan.vectors
    product = tiles * plan.points * plan.depth * filters * (1 + 1.5 / register_tile)
    transforms = tiles * plan.points * (plan.c_blocks * 9.0 + filters * 8.0)

    def spilled(elements: int, cache: int, least: float, all_of_it: float) -> float:
        """The share of a buffer that a cache does not hold, given parts of it where that begins and ends."""
        return min(max((plan.itemsize * elements / cache - least) / (all_of_it - least), 0.0), 1.0)

    passes = -(-plan.chunks // plan.share) if plan.share else plan.chunks
    packed = plan.itemsize * plan.packed_size
    stays = plan.itemsize * plan.u_size < 0.6 * l2_bytes
    fetched = float(packed * (passes if stays else plan.chunks))
    if packed > l3_bytes / 2:
        fetched += packed * passes
    products = plan.points * plan.m_stride
    near = plan.v_size + products
    blocks = c.groups * plan.chunks * plan.k_blocks * plan.itemsize
    from_memory = spilled((min(plan.share, plan.chunks) or threads) * plan.v_size, l3_bytes, 1 / 12, 1 / 3)
    inputs = max(spilled(near, l2_bytes, 0.7, 2.7), 0.5 if plan.share else 0.0)
    fetched += blocks * plan.v_size * inputs * (1 + 8 * from_memory)
    fetched += 6 * blocks * products * spilled(products, l2_bytes, 0.25, 0.75)
    loads = fetched / (FETCHED * CYCLES[plan.instruction_set])
    work = max(product, loads) + min(product, loads) / 10 + transforms
    tasks = plan.k_blocks * min(plan.share, plan.chunks) if plan.share else plan.chunks * c.groups
    barriers = 2 * c.groups * passes * 4000.0 if plan.share else 0.0
    if plan.share and c.N > 1:
        work *= 1.05  # against chunks that threads have to themselves, of which a batch has enough
    return work * -(-tasks // threads) / tasks + barriers


def _chunks(plan: Plan) -> list[int]:
    """Rows of tiles worth trying for a chunk: some that make nearly equal chunks of up to 256 tiles."""
    most = min(plan.tile_rows, 256 // plan.columns.tiles)
    tried = [1, *(rows for rows in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256) if rows <= most)]
    return sorted({-(-plan.tile_rows // -(-plan.tile_rows // rows)) for rows in tried})


@functools.lru_cache(256)
def _ranked(layer: ConvLayer, device: CPU) -> tuple[tuple[tuple[int, int], int, int], ...]:
    """For the most promising sizes of tiles, the best chunks of either schedule."""
    main = max(correlations(layer), key=lambda c: c.macs)
    l2, l3 = device.facts["l2_bytes"], device.facts["l3_bytes"]

    def schedule(m: tuple[int, int], rows: int, kept: int) -> tuple[float, tuple[int, int], int, int]:
        """Chunks of so many rows, with what they cost: by themselves, or as many as a part of the last cache keeps."""
        plan = _plan(layer, device, main, m, rows, min(kept, 1))
        if kept and plan.chunks > 1:
            share = max(1, min(plan.chunks, l3 // kept // (plan.v_size * plan.itemsize)))
            plan = _plan(layer, device, main, m, rows, share)
        return _cost(plan, device.threads, l2, l3), m, rows, plan.share

    def quick(m: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        """Without looking for the best chunks: single rows, or together as many as the last cache keeps."""
        one = _plan(layer, device, main, m, 1, 0)
        kept = l3 // KEPT // (one.v_size * one.itemsize)
        most = max(rows for rows in _chunks(one) if rows <= max(kept, 1))
        return min(schedule(m, 1, 0), schedule(m, most, KEPT))[:2]

    def filling(m: tuple[int, int]) -> tuple[tuple[int, int], int, int]:
        """The largest chunks that fit a register tile."""
        one = _plan(layer, device, main, m, 1, 0)
        rows = max(rows for rows in _chunks(one) if rows == 1 or rows * one.columns.tiles <= one.pixels)
        return schedule(m, rows, KEPT_SMALL)[1:]

    square = main.rows == main.columns  # of a size and its mirror image one is enough
    pairs = [m for m in itertools.product(sizes(main.rows), sizes(main.columns)) if m[0] <= m[1] or not square]
    found = []
    for _, m in sorted(map(quick, pairs))[:CONSIDERED]:
        chunks = _chunks(_plan(layer, device, main, m, 1, 0))
        found.append(sorted(min(schedule(m, rows, kept) for rows in chunks) for kept in (0, KEPT)))
    choices = [choice[1:] for schedules in sorted(found)[: most_sizes(layer)] for choice in schedules]
    if device.instruction_set == "avx512":
        # What traffic takes was not fitted there; chunks like these were good on a Zen 4, when no others were named.
        choices.append(filling(choices[0][0]))
    return tuple(dict.fromkeys(choices))


class Winograd(GeneratedAlgorithm):
    """F(m x m, r x r) for fwd and dgrad: `m` outputs of a tile, `rows` of tiles of a chunk, `share` of chunks."""

    name = "winograd"
    spreads_nonfinite = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        if layer.direction == "wgrad":
            return []
        if layer.depthwise or _blind(correlations(layer)):
            return [{"m": "2x2", "rows": 1, "share": 0}]  # for its reasons
        return [{"m": f"{m[0]}x{m[1]}", "rows": rows, "share": share} for m, rows, share in _ranked(layer, device)]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if layer.direction == "wgrad":
            return ["wgrad: minimal filtering is for fwd and dgrad here"]
        reasons = []
        if min(layer.C, layer.K) // layer.groups < 2:
            reasons.append("a group has a single channel: there is no sum for its products to share a transform")
        cuts = plans(layer, device, params)
        if len(cuts) > MOST_PIECES:
            return [*reasons, f"falls into {len(cuts)} correlations with kernels of their own, more than {MOST_PIECES}"]
        if _blind(plan.correlation for plan in cuts):
            return [*reasons, f"stride {layer.stride[0]}x{layer.stride[1]} leaves inputs that no tap sees"]
        return reasons + refusals(layer, _parse(params)[0], cuts)

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return max(plan.workspace_bytes(device.threads) for plan in plans(layer, device, params))

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return layer.accumulator.itemsize * sum(plan.packed_size for plan in plans(layer, device, params))

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        cuts = plans(layer, device, params)
        caches = device.facts["l2_bytes"], device.facts["l3_bytes"]
        work = sum(_cost(plan, device.threads, *caches) for plan in cuts)
        rate = device.peak_flops(layer.dtype) / (2 * cuts[0].lanes * device.threads)
        return work / rate + traffic(layer) / device.bandwidth() / 2

    def bound(self, layer: ConvLayer, params: Params) -> float:
        down, across = _parse(params)[0]
        sides = [side for c in correlations(layer) for side in (side_of(c.rows, down), side_of(c.columns, across))]
        return bound_for(layer, cap(sides))

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, plans(layer, device, params))
