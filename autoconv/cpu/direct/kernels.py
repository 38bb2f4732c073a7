"""The kernels of `direct`: a task's tiles, the microkernel that sums each, and how much of it is unrolled."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, Value, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, correlations
from autoconv.cpu.common.epilogue import Epilogue, emit_store
from autoconv.cpu.common.packing import emit_pack, packed_size, tap_place
from autoconv.layer import ConvLayer

TOGETHER = {"avx512": 1, "avx2": 7, "generic": 7}  # taps of a row in one round: small tiles sum little in each
AHEAD = 4  # channels


@dataclass(frozen=True)
class Blocking:
    """How one correlation is cut: `BK` filters by `BP` x `BQ` pixels in registers, `rows` of them in a task.

    The sums of all tiles of a task go over `BC` channels at a time, whose filters stay in the first-level
    cache meanwhile; where that is all channels, each tile is summed and stored at once.
    """

    BK: int
    BP: int
    BQ: int
    packed: bool
    BC: int
    rows: int = 1
    filters_outside: bool = False  # tasks go through all images before the next block of filters


@dataclass(frozen=True)
class Run:
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
def tiles(axis: CorrelationAxis, length: int) -> list[Run]:
    """An axis cut into tiles of almost equal length, at most `length`."""
    if length == 1:
        return [Run(0, axis.count, 1, None)]
    number = math.ceil(axis.count / length)
    edges = [axis.count * n // number for n in range(number + 1)]
    cut = [(a, b - a, axis.pattern(a, b - a)) for a, b in itertools.pairwise(edges)]
    runs = []
    for (size, pattern), same in itertools.groupby(cut, key=lambda t: t[1:]):
        first, *others = same
        runs.append(Run(first[0], 1 + len(others), size, pattern))
    return runs


def flattened(c: Correlation) -> Correlation:
    """A 1x1 correlation as one on a single long row."""
    h, w = c.rows, c.columns
    plain = all(a.taps == (0,) and (a.size, a.stride, a.offset, a.output_stride) == (a.count, 1, 0, 1) for a in (h, w))
    if not plain or any(t.row != w.size * t.column for t in (c.input, c.output)):
        return c
    return replace(c, rows=replace(h, size=1, count=1), columns=replace(w, size=h.size * w.size, count=h.size * w.size))


@functools.lru_cache(256)
def pieces_of(layer: ConvLayer) -> tuple[Correlation, ...]:
    """The correlations of a layer, flat where they can be."""
    return tuple(flattened(c) for c in correlations(layer))


class Micro:
    """Writes one microkernel: a tile of pixels times BK channels, summed over channels and taps into memory.

    Its sums are added to what is there where not all channels are summed at once.
    """

    def __init__(self, m: Module, c: Correlation, b: Blocking, element: Type, rows: Run, columns: Run):
        self.c, self.b, self.rows, self.columns = c, b, rows, columns
        self.element = element
        lanes = self.lanes = m.lanes(element)
        self.vectors = b.BK // lanes
        self.most = TOGETHER[m.instruction_set]
        wide = widened(element)
        w = ptr(wide if b.packed else element)
        #        x,            w, sums,      channels, channels left, tap ranges, one
        types = (ptr(element), w, ptr(wide), i64, i64, i64, i64, i64, i64, i64)
        k = self.k = m.function(f"micro_{len(m.functions)}", *types, internal=True)
        self.x, self.w, tile, self.channels, self.left, *self.ranges, self.one = k.args
        pixels = rows.length * columns.length
        places = [[tile + (v * pixels + n) * lanes for v in range(self.vectors)] for n in range(pixels)]
        zero = k.zero(wide, lanes)
        self.sums = [[k.var(zero if b.BC == c.C else k.load(p, lanes)) for p in row] for row in places]
        if c.rows.taps and c.columns.taps:
            self._sum()
        for sums, row in zip(self.sums, places, strict=True):
            for acc, p in zip(sums, row, strict=True):
                k.store(acc.get(), p)

    def _sum(self) -> None:
        k, c = self.k, self.c
        R, S = len(c.rows.taps), len(c.columns.taps)
        unroll = next(u for u in (4, 2, 1) if c.C % u == 0 and (u == 1 or R * S == 1))
        offsets = [] if self.b.packed else self._filter_offsets()
        with k.loop(0, self.channels, unroll) as channel:
            for u in range(unroll):
                x = self.x + (channel + u) * c.input.channel
                if self.b.packed:
                    w = self.w + (channel + u) * (R * S * self.b.BK)
                else:
                    w = self.w + (channel + u) * c.filters.c
                self._fetch(x + AHEAD * c.input.channel)
                x, w = k.launder(x), k.launder(w)
                for r, row_pattern in self._taps(self.rows, c.rows, self.ranges[:2], 1):
                    for s, column_pattern in self._taps(self.columns, c.columns, self.ranges[2:], self.most):
                        self._tap(x, w, offsets, r, s, row_pattern, column_pattern)

    def _fetch(self, x: Value) -> None:
        """Ask for what the tile sees of a channel: planes lie too far apart for the processor to foresee it."""
        k, rows, columns, i = self.k, self.c.rows, self.c.columns, self.c.input
        if self.c.C <= AHEAD or i.channel < i.row or len(rows.taps) * len(columns.taps) == 1:
            return  # there is none, or they are neighbours, or give a tile too little to do
        height = (self.rows.length - 1) * rows.stride + (len(rows.taps) - 1) * rows.dilation + 1
        width = (self.columns.length - 1) * columns.stride + (len(columns.taps) - 1) * columns.dilation + 1
        for row in range(height):
            start = x + ((row + rows.offset) * i.row + columns.offset * i.column)
            for column in range(0, width, LINE // self.element.bytes):
                k.prefetch(start + column)

    def _taps(
        self, run: Run, axis: CorrelationAxis, between: Sequence[Value], most: int
    ) -> Iterator[tuple[int | Value, tuple[bool, ...]]]:
        """Taps to sum over and the outputs of the tile that see them, up to `most` taps in one round of a loop.

        What neighbouring taps load overlaps: LLVM would keep it in registers and spill the sums. So each is a
        loop, even of one tap, and an unrolled one takes steps of `self.one`, which LLVM does not know to be 1.
        Where one round does not suffice, each loop is over taps that the same outputs see.
        """
        n = len(axis.taps)
        if run.pattern is None:
            with self.k.loop(*between) as t:
                yield t, (True,) * run.length
        elif n == 1:
            yield 0, run.pattern[0]
        elif n <= most:
            with self.k.loop(0, n, n) as t:
                for number, seen in enumerate(run.pattern):
                    if any(seen):
                        yield t + self.one * number, seen
        else:
            for seen, same in itertools.groupby(range(n), key=run.pattern.__getitem__):
                first, *others = same
                for number, together in _loops(1 + len(others), most) if any(seen) else ():
                    with self.k.loop(first, first + number if number > 1 else self.one + first, together) as t:
                        for n in range(together):
                            yield t + self.one * n, seen
                    first += number

    def _tap(
        self,
        x: Value,
        w: Value,
        offsets: list[Value],
        r: int | Value,
        s: int | Value,
        rows: tuple[bool, ...],
        columns: tuple[bool, ...],
    ) -> None:
        k, c, i = self.k, self.c, self.c.input
        row, column = c.rows, c.columns
        x = (
            x
            + r * (row.dilation * i.row)
            + s * (column.dilation * i.column)
            + (row.offset * i.row + column.offset * i.column)
        )
        if self.b.packed:
            w = w + (r * len(column.taps) + s) * self.b.BK
            vectors = [k.load(w + v * self.lanes, self.lanes) for v in range(self.vectors)]
        else:
            w = w + tap_place(row.taps, r) * c.filters.r + tap_place(column.taps, s) * c.filters.s
            vectors = [self._gathered(w, offsets[v * self.lanes : (v + 1) * self.lanes]) for v in range(self.vectors)]
        for n, sums in enumerate(self.sums):
            p, q = divmod(n, self.columns.length)
            if rows[p] and columns[q]:
                pixel = k.broadcast(x + (p * row.stride * i.row + q * column.stride * i.column), self.lanes)
                for acc, vector in zip(sums, vectors, strict=True):
                    acc.fma(pixel, vector)

    def _filter_offsets(self) -> list[Value]:
        """Where each lane's filter starts; lanes beyond the last filter repeat it."""
        k, c = self.k, self.c
        return [k.min(k.i64(lane), self.left - 1) * c.filters.k for lane in range(self.b.BK)]

    def _gathered(self, w: Value, offsets: list[Value]) -> Value:
        k = self.k
        scalars = [k.load(w + offset) for offset in offsets]
        v = k.zero(scalars[0].type, self.lanes)
        for lane, scalar in enumerate(scalars):
            v = k.insert(v, scalar, lane) if self.lanes > 1 else scalar
        return v


def _loops(taps: int, most: int) -> list[tuple[int, int]]:
    """Loops over so many taps: how many each is over, and how many of them in one round, which comes out even."""
    together = next(n for n in range(most, 0, -1) if taps % n == 0)
    if 2 * together < min(taps, most):  # as of 11 or 13
        return _loops(taps // 2, most) + _loops(taps - taps // 2, most)
    return [(taps, together)]


def _tap_range(k: Function, axis: CorrelationAxis, position: Value) -> tuple[Value, Value]:
    """First tap inside the input, and the one after the last, of one output position."""
    base = position * axis.stride + axis.offset
    low = (k.max(0 - base, 0) + (axis.dilation - 1)) // axis.dilation
    high = (k.max(axis.size - base, 0) + (axis.dilation - 1)) // axis.dilation
    return low, k.min(high, len(axis.taps))


def _emit_task(
    m: Module, n: int, c: Correlation, epilogue: Epilogue, b: Blocking, element: Type, packed_at: int
) -> tuple[Function, int]:
    """The task of one correlation, and how many there are."""
    blocks = math.ceil(c.K / b.BK)
    row_runs, column_runs = tiles(c.rows, b.BP), tiles(c.columns, b.BQ)
    kinds = {(r.kind, s.kind): (r, s) for r in row_runs for s in column_runs}
    shapes = {(r.length, s.length) for r in row_runs for s in column_runs}
    o = c.output
    strides = (o.channel, o.row * c.rows.output_stride, o.column * c.columns.output_stride)
    stores = {shape: emit_store(m, c, epilogue, b.BK, element, shape, strides) for shape in sorted(shapes)}
    micros = {kind: Micro(m, c, b, element, r, s).k for kind, (r, s) in kinds.items()}
    k = m.function(f"task_{n}", *TASK, internal=True)
    ctx, index, _ = k.args
    sums = widened(element)
    a, w, out, bias, residual, _ = operands(k, ctx, element, sums if b.packed else element, element, element, element)

    positions = sum(r.tiles for r in row_runs)
    chunks = math.ceil(positions / b.rows)
    if b.filters_outside:
        block, strip = index // (c.N * c.groups * chunks), index % (c.N * c.groups * chunks)
    else:
        block, strip = index % blocks, index // blocks
    chunk, image = strip % chunks, strip // chunks
    group, image = image % c.groups, image // c.groups
    first = block * b.BK
    left = k.i64(c.K) - first
    a = a + image * c.input.image + group * c.input.group
    place = image * c.output.image + group * c.output.group + first * c.output.channel
    place = place + (c.rows.output_start * c.output.row + c.columns.output_start * c.output.column)
    out, residual = out + place, residual + place
    bias = bias + group * c.K + first
    if b.packed:
        w = w + packed_at + (group * blocks + block) * (packed_size(c, b.BK) // c.groups // blocks)
    else:
        w = w + group * c.filters.group + first * c.filters.k

    tile_size = b.BK * b.BP * b.BQ
    row_size = sum(s.tiles for s in column_runs) * tile_size
    adds = b.BC < c.C
    buffer = k.scratch(sums, b.rows * row_size if adds else tile_size)
    zero = k.i64(0)
    start = chunk * b.rows

    def each(visit: Callable[[Run, Run, Value, Value, Value], None]) -> None:
        """Visit the tiles of a task: their kinds, first output row and column, and sums."""
        begin = 0
        for r in row_runs:  # rows of tiles begin .. begin + r.tiles - 1 are of this run
            low, high = k.max(start, begin), k.min(start + b.rows, begin + r.tiles)
            with k.loop(low, high) as i:
                before = 0
                for s in column_runs:
                    with k.loop(0, s.tiles) as j:
                        slot = (i - start) * row_size + (j + before) * tile_size if adds else zero
                        visit(r, s, (i - begin) * r.length + r.start, j * s.length + s.start, buffer + slot)
                    before += s.tiles
            begin += r.tiles

    def add(block: Value, r: Run, s: Run, row: Value, column: Value, tile: Value) -> None:
        """Sum a block of channels."""
        rows = _tap_range(k, c.rows, row) if r.pattern is None else (zero, zero)
        columns = _tap_range(k, c.columns, column) if s.pattern is None else (zero, zero)
        here = a + row * (c.rows.stride * c.input.row) + column * (c.columns.stride * c.input.column)
        here = here + block * (b.BC * c.input.channel)
        filters = w + block * (b.BC * len(c.rows.taps) * len(c.columns.taps) * b.BK) if adds else w
        channels = k.min(c.C - block * b.BC, b.BC)
        k.call(micros[r.kind, s.kind], here, filters, tile, channels, left, *rows, *columns, 1)

    def store(r: Run, s: Run, row: Value, column: Value, tile: Value) -> None:
        there = row * (c.rows.output_stride * c.output.row) + column * (c.columns.output_stride * c.output.column)
        k.call(stores[r.length, s.length], tile, out + there, residual + there, bias, left)

    def add_and_store(*tile: Any) -> None:
        add(zero, *tile)
        store(*tile)

    if adds:
        lanes = m.lanes(element)
        with k.loop(0, b.rows * row_size, lanes) as i:
            k.store(k.zero(sums, lanes), buffer + i)
        with k.loop(0, math.ceil(c.C / b.BC)) as block:
            each(functools.partial(add, block))
        each(store)
    else:
        each(add_and_store)
    return k, blocks * c.N * c.groups * chunks


def emit(instruction_set: str, layer: ConvLayer, blockings: tuple[Blocking, ...]) -> Module:
    """`run`, and `pack` where the filters are packed, of a forward pass or a gradient of the input."""
    m = Module(instruction_set)
    element = DTYPES[layer.dtype]
    epilogue = Epilogue.of(layer)
    run = m.function("run", *RUN)
    pack = m.function("pack", *RUN) if blockings[0].packed else None
    packed_at = 0
    for n, (c, b) in enumerate(zip(pieces_of(layer), blockings, strict=True)):
        task, count = _emit_task(m, n, c, epilogue, b, element, packed_at)
        launch(run, run.args[0], task, count)
        if pack is not None and packed_size(c, b.BK):
            task, count = emit_pack(m, n, c, b.BK, element, packed_at)
            launch(pack, pack.args[0], task, count)
            packed_at += packed_size(c, b.BK)
    return m


@functools.lru_cache(256)
def unrolled(instruction_set: str, c: Correlation, b: Blocking) -> int:
    """How often the microkernels of a correlation multiply a vector of filters, unrolled as they are."""
    total = 0
    for r in {r.kind: r for r in tiles(c.rows, b.BP)}.values():
        for s in {s.kind: s for s in tiles(c.columns, b.BQ)}.values():
            groups = [[len(list(same)) for _, same in itertools.groupby(run.pattern or (1,))] for run in (r, s)]
            most, taps = TOGETHER[instruction_set], sum(groups[1])
            columns = taps if taps <= most else sum(together for n in groups[1] for _, together in _loops(n, most))
            total += len(groups[0]) * columns * r.length * s.length
    return total
