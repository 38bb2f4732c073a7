"""Winograd convolution on generated kernels: many layers' fewest multiplications, at the price of rounding.

F(m x m, r x r) needs `(m + r - 1)**2` multiplications for `m * m` outputs instead of `m * m * r * r` (Winograd,
"Arithmetic Complexity of Computations", 1980; Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks",
2016): for 3x3 filters 4 times fewer with m = 4, 5.4 times with m = 7. Filters of one row or column are transformed on
one axis. Strided layers are split into polyphase components of the filter, dilated ones into output residue classes,
large filters into blocks of taps: see `geometry`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

from autoconv.algorithm import Params, bound_for
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import GeneratedAlgorithm, traffic
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.grid import batches, parts
from autoconv.cpu.device import CPU
from autoconv.cpu.transform.geometry import unfit
from autoconv.cpu.winograd.geometry import (
    WinogradTiling,
    cap,
    refusals_of,
    single_channels,
    sizes,
    winograd_axis,
)
from autoconv.cpu.winograd.kernels import emit
from autoconv.layer import ConvLayer

FETCHED = 13.0  # bytes a cycle from the LLC
CYCLES = {"avx512": 1.0, "avx2": 0.5, "generic": 0.5}  # of a multiply-add of vectors
MOST_TILES = 256  # of a chunk
MOST_CORRELATIONS = 4  # of a strided gradient, for the sake of compile time


def _tiling(layer: ConvLayer, device: CPU, c: Correlation, m: tuple[int, int], rows: int, coop: int) -> WinogradTiling:
    return WinogradTiling(c, device.instruction_set, layer.accumulator.itemsize, m, rows, coop)


def _parse(params: Params) -> tuple[tuple[int, int], int, int]:
    down, across = map(int, str(params["m"]).split("x"))
    return (down, across), int(params["rows"]), int(params["coop"])


def tilings(layer: ConvLayer, device: CPU, params: Params) -> tuple[WinogradTiling, ...]:
    """How each correlation of a layer is cut."""
    return _tilings(layer, device, *_parse(params))


@functools.lru_cache(16)  # what is asked of one candidate of a grid comes together
def _tilings(layer: ConvLayer, device: CPU, m: tuple[int, int], rows: int, coop: int) -> tuple[WinogradTiling, ...]:
    return tuple(_tiling(layer, device, c, m, rows, coop) for c in correlations(layer))


def _cost(tiling: WinogradTiling, threads: int, l2_bytes: int, l3_bytes: int) -> float:
    """Predicted time in multiply-adds of vectors, from counts of operations and of bytes that miss L2.

    A register tile loses what it takes to load the filters; a transform takes some time per point and vector.
    Filters come from the LLC, or beyond it from memory, for every chunk anew unless a block of them stays in L2; what
    it cannot hold of a chunk's input goes to and fro for every block of filters, and so do the products. Loads and
    multiply-adds go on side by side. What operations take was fitted on a Zen 4, what traffic takes on a Zen 3.
    """
    c = tiling.correlation
    tiles = c.groups * tiling.tile_rows * tiling.columns.tiles
    filters = tiling.k_blocks * tiling.vectors
    register_tile = tiling.chunk_tiles / -(-tiling.chunk_tiles // tiling.most_tiles) * tiling.vectors
    product = tiles * tiling.points * tiling.depth * filters * (1 + 1.5 / register_tile)
    transforms = tiles * tiling.points * (tiling.c_blocks * 9.0 + filters * 8.0)

    def spilled(elements: int, cache: int, least: float, all_of_it: float) -> float:
        """The part of a buffer that a cache does not hold, given parts of it where that begins and ends."""
        return min(max((tiling.itemsize * elements / cache - least) / (all_of_it - least), 0.0), 1.0)

    passes = -(-tiling.chunks // tiling.coop) if tiling.coop else tiling.chunks
    packed = tiling.itemsize * tiling.packed_size
    stays = tiling.itemsize * tiling.u_size < 0.6 * l2_bytes
    fetched = float(packed * (passes if stays else tiling.chunks))
    if packed > l3_bytes / 2:
        fetched += packed * passes
    products = tiling.points * tiling.m_stride
    near = tiling.v_size + products
    blocks = c.groups * tiling.chunks * tiling.k_blocks * tiling.itemsize
    from_memory = spilled((min(tiling.coop, tiling.chunks) or threads) * tiling.v_size, l3_bytes, 1 / 12, 1 / 3)
    inputs = max(spilled(near, l2_bytes, 0.7, 2.7), 0.5 if tiling.coop else 0.0)
    fetched += blocks * tiling.v_size * inputs * (1 + 8 * from_memory)
    fetched += 6 * blocks * products * spilled(products, l2_bytes, 0.25, 0.75)
    loads = fetched / (FETCHED * CYCLES[tiling.instruction_set])
    work = max(product, loads) + min(product, loads) / 10 + transforms
    tasks = tiling.k_blocks * min(tiling.coop, tiling.chunks) if tiling.coop else tiling.chunks * c.groups
    barriers = 2 * c.groups * passes * 4000.0 if tiling.coop else 0.0
    if tiling.coop and c.N > 1:
        work *= 1.05  # against chunks that threads have to themselves, of which a batch has enough
    return work * -(-tasks // threads) / tasks + barriers


def _grid(layer: ConvLayer, device: CPU) -> Iterator[Params]:
    """Sizes of tiles by chunks of up to `MOST_TILES` tiles, of each thread's own or in batches that the LLC holds."""
    main = max(correlations(layer), key=lambda c: c.macs)
    square = main.rows == main.columns  # of a size and its mirror image one is enough
    for m in itertools.product(sizes(main.rows), sizes(main.columns)):
        if square and m[0] > m[1]:
            continue
        one = _tiling(layer, device, main, m, 1, 0)
        for rows in parts(one.tile_rows, MOST_TILES // one.columns.tiles):
            tiling = _tiling(layer, device, main, m, rows, 0)
            most = device.facts["l3_bytes"] // (tiling.v_size * tiling.itemsize)
            for coop in (0, *batches(max(1, min(tiling.chunks, most)))):
                yield {"m": f"{m[0]}x{m[1]}", "rows": rows, "coop": coop}


class Winograd(GeneratedAlgorithm):
    """F(m x m, r x r) for fwd and dgrad.

    Tiles of `m` outputs; chunks of `rows` of tiles; cooperative batches of `coop` chunks, 0 for threads on their own.
    """

    name = "winograd"
    directions = ("fwd", "dgrad")
    groupings = ("dense", "grouped")
    spreads_nonfinite = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        return super().unsupported(layer) or single_channels(layer) + unfit(layer, MOST_CORRELATIONS)

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        if self.unsupported(layer):
            return []
        return _grid(layer, device)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        return refusals_of(_parse(params)[0], tilings(layer, device, params))

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return max(tiling.workspace_bytes(device.threads) for tiling in tilings(layer, device, params))

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return layer.accumulator.itemsize * sum(tiling.packed_size for tiling in tilings(layer, device, params))

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        cuts = tilings(layer, device, params)
        caches = device.facts["l2_bytes"], device.facts["l3_bytes"]
        work = sum(_cost(tiling, device.threads, *caches) for tiling in cuts)
        rate = device.peak_flops(layer.dtype) / (2 * cuts[0].lanes * device.threads)
        return work / rate + traffic(layer) / device.bandwidth() / 2

    def bound(self, layer: ConvLayer, params: Params) -> float:
        down, across = _parse(params)[0]
        pairs = ((winograd_axis(c.rows, down), winograd_axis(c.columns, across)) for c in correlations(layer))
        return bound_for(layer, cap(itertools.chain.from_iterable(pairs)))

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, tilings(layer, device, params))
