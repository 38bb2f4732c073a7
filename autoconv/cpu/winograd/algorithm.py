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
from collections.abc import Iterable

from autoconv.algorithm import Params, bound_for
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.device import CPU
from autoconv.cpu.transform.geometry import unfit
from autoconv.cpu.winograd.estimate import seconds
from autoconv.cpu.winograd.geometry import (
    WinogradTiling,
    cap,
    most_sizes,
    refusals_of,
    single_channels,
    sizes,
    winograd_axis,
)
from autoconv.cpu.winograd.kernels import emit
from autoconv.layer import ConvLayer

KEPT = 10  # the part of the LLC that transformed inputs may take before they fall out of it
CONSIDERED = 5  # sizes of tiles for which chunks are looked at
MOST_CORRELATIONS = 4  # of a strided gradient, for the sake of compile time


def _tiling(layer: ConvLayer, device: CPU, c: Correlation, m: tuple[int, int], rows: int, coop: int) -> WinogradTiling:
    return WinogradTiling(c, device.instruction_set, layer.accumulator.itemsize, m, rows, coop)


def _parse(params: Params) -> tuple[tuple[int, int], int, int]:
    down, across = map(int, str(params["m"]).split("x"))
    return (down, across), int(params["rows"]), int(params["coop"])


def tilings(layer: ConvLayer, device: CPU, params: Params) -> tuple[WinogradTiling, ...]:
    """How each correlation of a layer is cut."""
    return tuple(_tiling(layer, device, c, *_parse(params)) for c in correlations(layer))


def _chunks(tiling: WinogradTiling) -> list[int]:
    """Rows of tiles worth trying for a chunk: some that make nearly equal chunks of up to 256 tiles."""
    most = min(tiling.tile_rows, 256 // tiling.columns.tiles)
    tried = [1, *(rows for rows in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256) if rows <= most)]
    return sorted({-(-tiling.tile_rows // -(-tiling.tile_rows // rows)) for rows in tried})


@functools.lru_cache(256)
def _ranked(layer: ConvLayer, device: CPU) -> tuple[tuple[tuple[int, int], int, int], ...]:
    """For the most promising sizes of tiles, the best chunks of either schedule."""
    main = max(correlations(layer), key=lambda c: c.macs)
    l3 = device.machine.caches[2]

    def schedule(m: tuple[int, int], rows: int, kept: int) -> tuple[float, tuple[int, int], int, int]:
        """Chunks of so many rows, with their cost: by themselves, or as many in a batch as a part of the LLC keeps."""
        tiling = _tiling(layer, device, main, m, rows, min(kept, 1))
        if kept and tiling.chunks > 1:
            coop = max(1, min(tiling.chunks, l3 // kept // (tiling.v_size * tiling.itemsize)))
            tiling = _tiling(layer, device, main, m, rows, coop)
        return seconds(tiling, device.machine), m, rows, tiling.coop

    def quick(m: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        """Without looking for the best chunks: single rows, or in batches of as many as the LLC keeps."""
        one = _tiling(layer, device, main, m, 1, 0)
        kept = l3 // KEPT // (one.v_size * one.itemsize)
        most = max(rows for rows in _chunks(one) if rows <= max(kept, 1))
        return min(schedule(m, 1, 0), schedule(m, most, KEPT))[:2]

    square = main.rows == main.columns  # of a size and its mirror image one is enough
    pairs = [m for m in itertools.product(sizes(main.rows), sizes(main.columns)) if m[0] <= m[1] or not square]
    found = []
    for _, m in sorted(map(quick, pairs))[:CONSIDERED]:
        chunks = _chunks(_tiling(layer, device, main, m, 1, 0))
        found.append(sorted(min(schedule(m, rows, kept) for rows in chunks) for kept in (0, KEPT)))
    choices = [choice[1:] for schedules in sorted(found)[: most_sizes(layer)] for choice in schedules]
    return tuple(dict.fromkeys(choices))


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
        return [{"m": f"{m[0]}x{m[1]}", "rows": rows, "coop": coop} for m, rows, coop in _ranked(layer, device)]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        return refusals_of(_parse(params)[0], tilings(layer, device, params))

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return max(tiling.workspace_bytes(device.threads) for tiling in tilings(layer, device, params))

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return layer.accumulator.itemsize * sum(tiling.packed_size for tiling in tilings(layer, device, params))

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        return sum(seconds(tiling, device.machine) for tiling in tilings(layer, device, params))

    def bound(self, layer: ConvLayer, params: Params) -> float:
        down, across = _parse(params)[0]
        pairs = ((winograd_axis(c.rows, down), winograd_axis(c.columns, across)) for c in correlations(layer))
        return bound_for(layer, cap(itertools.chain.from_iterable(pairs)))

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, tilings(layer, device, params))
