"""How `direct` cuts a correlation: register tiles, tasks, blocks of channels, and what of it is unrolled."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoconv.algorithm import Params
from autoconv.cpu.codegen.ir import DTYPES, VECTOR_REGISTERS, Module
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, flat_correlations
from autoconv.cpu.common.packing import packed_size
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cpu.device import CPU

BUFFER = 32 * 1024  # bytes of a task's sums, where they go over some channels at a time
TASKS = 6  # at least, for each thread
UNEVEN = 1.05  # times as many tiles as there must be, at most
MOST_TAPS = {32: 1, 16: 7}  # of a row in one round, by registers: small tiles sum little in each


@dataclass(frozen=True)
class DirectBlocking:
    """How one correlation is cut: `TK` filters by `TP` x `TQ` pixels in registers, `rows` of them in a task.

    The sums of all tiles of a task go over `BC` channels at a time, whose filters stay in the L1 cache
    meanwhile; where that is all channels, each tile is summed and stored at once.
    """

    TK: int
    TP: int
    TQ: int
    packed: bool
    BC: int
    rows: int = 1
    filters_outside: bool = False  # tasks go through all images before the next block of filters
    parts: int = 1  # of the pixels of an image that is one long row, so that each thread has neighbouring ones


@dataclass(frozen=True)
class TileRun:
    """Neighbouring tiles of one axis that the same code serves; `pattern` None: the tap range is computed."""

    start: int
    tiles: int
    length: int
    pattern: tuple[tuple[bool, ...], ...] | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides its code."""
        return self.length, self.pattern


@functools.lru_cache(256)
def tile_runs(axis: CorrelationAxis, length: int) -> list[TileRun]:
    """An axis cut into tiles of almost equal length, at most `length`."""
    if length == 1:
        return [TileRun(0, axis.count, 1, None)]
    number = math.ceil(axis.count / length)

    def tile(n: int) -> TileRun:
        start, end = axis.count * n // number, axis.count * (n + 1) // number
        return TileRun(start, 1, end - start, axis.pattern(start, end - start))

    def inside(n: int) -> bool:
        return all(map(all, tile(n).pattern or ()))

    # Of the tiles from the first to the last whose outputs see every tap, and there may be millions of them, only the
    # lengths differ: some are an output shorter. Each of these begins a run of its own, and so does what follows it.
    first = next(filter(inside, range(number)), number)
    last = next(filter(inside, range(number - 1, first, -1)), first)
    shorter = -axis.count % number
    short = (n * number // shorter for n in range(shorter))
    begins = {*range(first), *range(last, number), min(first, number - 1), *(m for n in short for m in (n, n + 1))}
    runs: list[TileRun] = []
    for begin, end in itertools.pairwise([*sorted(n for n in begins if n < number), number]):
        found = replace(tile(begin), tiles=end - begin)
        if runs and runs[-1].kind == found.kind:
            alike = runs.pop()
            found = replace(alike, tiles=alike.tiles + found.tiles)
        runs.append(found)
    return runs


def tap_rounds(taps: int, most: int) -> list[tuple[int, int]]:
    """Loops over so many taps: how many each is over, and how many of them in one round, which comes out even."""
    together = next(n for n in range(most, 0, -1) if taps % n == 0)
    if 2 * together < min(taps, most):  # as of 11 or 13
        return tap_rounds(taps // 2, most) + tap_rounds(taps - taps // 2, most)
    return [(taps, together)]


@functools.lru_cache(256)
def _unrolled(instruction_set: str, c: Correlation, b: DirectBlocking) -> int:
    """How often the microkernels of a correlation multiply a vector of filters, unrolled as they are."""
    total = 0
    for r in {r.kind: r for r in tile_runs(c.rows, b.TP)}.values():
        for s in {s.kind: s for s in tile_runs(c.columns, b.TQ)}.values():
            groups = [[len(list(same)) for _, same in itertools.groupby(run.pattern or (1,))] for run in (r, s)]
            most, taps = MOST_TAPS[VECTOR_REGISTERS[instruction_set]], sum(groups[1])
            columns = taps if taps <= most else sum(together for n in groups[1] for _, together in tap_rounds(n, most))
            total += len(groups[0]) * columns * r.length * s.length
    return total


def unrolled(layer: ConvLayer, device: CPU, params: Params) -> int:
    """The multiply-adds that the program of these parameters is unrolled to."""
    lanes = Module(device.instruction_set).lanes(DTYPES[layer.dtype])
    vectors = int(params["TK"]) // lanes
    every = cut(layer, blockings(layer, device, params))
    return vectors * sum(_unrolled(device.instruction_set, c, b) for c, b in every)


def blocking(c: Correlation, params: Params) -> DirectBlocking:
    """The register tile and the block of channels asked for; tasks of one row of tiles."""
    TK, TP, TQ, BC = (int(params[name]) for name in ("TK", "TP", "TQ", "BC"))
    return DirectBlocking(TK, TP, TQ, params["filters"] == "packed", min(BC, c.C))


def blockings(layer: ConvLayer, device: CPU, params: Params) -> tuple[DirectBlocking, ...]:
    """The blocking of each correlation: the tile asked for, and tasks whose input fits half the L2 cache.

    Where tasks go through all images before the next block of filters, and some channels at a time, the input comes
    from beyond that cache anyway, and only sums limit a task.
    """
    chosen = []
    for flat in flat_correlations(layer):
        b = blocking(flat, params)
        b = replace(b, parts=_parts(flat, b, device.threads))
        c = in_parts(flat, b.parts)
        positions = sum(run.tiles for run in tile_runs(c.rows, b.TP))
        share = positions // device.threads if b.parts > 1 else positions
        row_bytes = layer.itemsize * c.C * c.columns.size
        room = device.machine.caches[1] // 2 // max(row_bytes, 1) - len(c.rows.taps)
        fitting = min(max(room // (b.TP * c.rows.stride), 1), share)
        most = max(min(BUFFER // sums_bytes(layer, c, b), share), 1) if b.BC < c.C else fitting
        blocks = math.ceil(c.K / b.TK)
        images = c.N * c.rows.size * row_bytes
        filters = packed_size(c, b.TK) // c.groups * layer.itemsize
        rows = _for_all_threads(min(fitting, most), positions, c.N * c.groups * blocks, device.threads)
        outside = images * blocks + filters < images + filters * c.N * math.ceil(positions / rows)
        if outside := outside and b.parts == 1:
            rows = _for_all_threads(most, positions, c.N * c.groups * blocks, device.threads)
        chosen.append(replace(b, rows=rows, filters_outside=outside))
    return tuple(chosen)


def cut(layer: ConvLayer, chosen: Sequence[DirectBlocking]) -> list[tuple[Correlation, DirectBlocking]]:
    """The correlations of a layer as they are cut."""
    return [(in_parts(c, b.parts), b) for c, b in zip(flat_correlations(layer), chosen, strict=True)]


def in_parts(c: Correlation, parts: int) -> Correlation:
    """A correlation over one long row of pixels as one over several shorter rows."""
    if parts == 1:
        return c
    count = c.columns.count // parts
    return replace(
        c,
        rows=replace(c.rows, size=parts, count=parts),
        columns=replace(c.columns, size=count, count=count),
        input=c.input._replace(row=count * c.input.column),
        output=c.output._replace(row=count * c.output.column),
    )


def passes_pixels(c: Correlation, threads: int) -> bool:
    """Whether a thread should have all channels of some pixels, in place of some channels of all.

    Where channels are neighbours, others read the output by pixels, too: what a thread has written is then in its own
    caches. All threads read all filters for that, which must not be more than what is not passed between them; and the
    pixels are those of an image that is one long row.
    """
    once = all(
        a.taps == (0,) and (a.size, a.stride, a.offset, a.output_stride) == (a.count, 1, 0, 1)
        for a in (c.rows, c.columns)
    )
    worth = (c.K + c.C) * c.columns.count >= c.K * c.C
    return once and worth and c.rows.count == c.output.channel == c.groups == 1 and threads > c.N


def _parts(c: Correlation, b: DirectBlocking, threads: int) -> int:
    """How many parts those pixels make: as few as give each thread several tasks; one where tiles were not as even."""
    found, pixels, blocks = 1, c.columns.count, math.ceil(c.K / b.TK)
    if not passes_pixels(c, threads):
        return found
    for parts in range(threads, min(2 * TASKS * threads, pixels) + 1, threads):
        tiles = parts * math.ceil(pixels // parts / b.TQ)
        if pixels % parts == 0 and tiles <= UNEVEN * math.ceil(pixels / b.TQ):
            found = parts
            if c.N * blocks * parts >= TASKS * threads:
                break
    return found


def _for_all_threads(rows: int, positions: int, others: int, threads: int) -> int:
    """As many rows in a task as leave several for each thread."""
    while rows > 1 and others * math.ceil(positions / rows) < TASKS * threads:
        rows = math.ceil(rows / 2)
    return rows


def sums_bytes(layer: ConvLayer, c: Correlation, b: DirectBlocking) -> int:
    """The sums of one row of tiles."""
    return sum(run.tiles for run in tile_runs(c.columns, b.TQ)) * b.TP * b.TQ * b.TK * layer.accumulator.itemsize


def even_columns(c: Correlation, pixels: int) -> int:
    """Columns of a tile, at most so many: as few tiles as there must be, of almost equal width."""
    return math.ceil(c.columns.count / math.ceil(c.columns.count / pixels))


def padded(extent: int, block: int) -> float:
    """How many times the extent its whole blocks hold."""
    return math.ceil(extent / block) * block / extent
