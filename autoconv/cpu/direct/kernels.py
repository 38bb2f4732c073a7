"""The kernels of `direct`: a task's tiles, and the microkernel that sums each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, Value, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.lines import TileLines
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis
from autoconv.cpu.common.epilogue import Epilogue, emit_store
from autoconv.cpu.common.lanes import overlap
from autoconv.cpu.common.packing import emit_pack, packed_size, tap_place
from autoconv.cpu.common.sums import channels_of_sum, each_sum, sums_of
from autoconv.cpu.direct.geometry import MOST_TAPS, DirectBlocking, TileRun, cut, tap_rounds, tile_runs
from autoconv.layer import ConvLayer

AHEAD = 24  # products of each sum that pass between fetching an input and reading it: some hundreds of cycles
FEWEST_AHEAD = 4  # channels, where each has many taps
FEWEST_TO_FETCH = 3  # tiles of a task that has the time to fetch filters


class Microkernel:
    """Writes one microkernel: a tile of pixels times TK channels, summed over channels and taps into memory.

    Sums of some channels are added to what those before came to. Meanwhile `fetched` lines of the filters that follow
    are fetched in every round over channels, and where the block of them is the last, the lines of the outputs.
    """

    def __init__(
        self,
        m: Module,
        c: Correlation,
        b: DirectBlocking,
        epilogue: Epilogue,
        element: Type,
        rows: TileRun,
        columns: TileRun,
        fetched: int,
    ) -> None:
        self.c, self.b, self.rows, self.columns = c, b, rows, columns
        self.element, self.fetched = element, fetched
        lanes = self.lanes = m.lanes(element)
        self.vectors = b.TK // lanes
        self.most = MOST_TAPS[m.registers]
        wide = widened(element)
        w = ptr(wide if b.packed else element)
        #       x,    w, w to fetch, sums, channels, channels left, tap ranges, one, out, residual, the last
        data = ptr(element)
        types = (data, w, w, ptr(wide), i64, i64, i64, i64, i64, i64, i64, data, data, i64)
        k = self.k = m.function(f"micro_{len(m.functions)}", *types, internal=True)
        self.x, self.w, self.following, tile, self.channels, self.left, *more = k.args
        *self.ranges, self.one, self.out, residual, self.ends = more
        self.residual = residual if epilogue.residual else None
        self.outputs = outputs_of(c, b, rows, columns, element)
        pixels = rows.length * columns.length
        places = [[tile + (v * pixels + n) * lanes for v in range(self.vectors)] for n in range(pixels)]
        zero = k.zero(wide, lanes)
        self.sums = [[k.var(zero) for _ in row] for row in places]

        def keep(added: bool) -> None:
            for acc, p in zip(itertools.chain(*self.sums), itertools.chain(*places), strict=True):
                k.store(k.load(p, lanes) + acc.get() if added else acc.get(), p)

        taps = len(c.rows.taps) * len(c.columns.taps)
        each = channels_of_sum(taps, channels_together(c))
        several = sums_of(b.BC, each) > 1
        if several and b.BC == c.C:
            keep(added=False)
        with each_sum(k, self.channels, b.BC, each) as channels:
            for acc in itertools.chain(*self.sums):
                acc.set(zero)
            if taps:
                self._sum(*channels)
            keep(added=several or b.BC < c.C)

    def _sum(self, first: Value, last: Value) -> None:
        k, c = self.k, self.c
        R, S = len(c.rows.taps), len(c.columns.taps)
        unroll = channels_together(c)
        offsets = [] if self.b.packed else self._filter_offsets()
        with k.loop(first, last, unroll) as channel:
            for n in range(self.fetched):
                line = channel // unroll * self.fetched + n
                k.prefetch(self.following + line * (LINE // self.element.bytes), locality=2)
            with k.if_(self.ends.ne(0)):
                self.outputs.fetch(k, channel // unroll, rounds_of(c, self.b), self.out, self.residual)
            for u in range(unroll):
                x = self.x + (channel + u) * c.input.channel
                if self.b.packed:
                    w = self.w + (channel + u) * (R * S * self.b.TK)
                else:
                    w = self.w + (channel + u) * c.filters.c
                self._fetch(x)
                x, w = k.launder(x), k.launder(w)
                for r, row_pattern in self._taps(self.rows, c.rows, self.ranges[:2], 1):
                    for s, column_pattern in self._taps(self.columns, c.columns, self.ranges[2:], self.most):
                        self._tap(x, w, offsets, r, s, row_pattern, column_pattern)

    def _fetch(self, x: Value) -> None:
        """Ask for what the tile sees of a channel to come: planes lie too far apart for the processor to foresee it."""
        k, rows, columns, i = self.k, self.c.rows, self.c.columns, self.c.input
        ahead = max(FEWEST_AHEAD, AHEAD // max(1, len(rows.taps) * len(columns.taps)))
        if ahead >= self.c.C or i.channel < i.row:
            return  # there is none, or they are neighbours
        x = x + ahead * i.channel
        for row in _inputs(self.rows, rows, 1):
            start = x + ((row + rows.offset) * i.row + columns.offset * i.column)
            for column in _inputs(self.columns, columns, LINE // self.element.bytes):
                k.prefetch(start + column)

    def _taps(
        self, run: TileRun, axis: CorrelationAxis, between: Sequence[Value], most: int
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
                for number, together in tap_rounds(1 + len(others), most) if any(seen) else ():
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
            w = w + (r * len(column.taps) + s) * self.b.TK
            alone = len(self.sums) == 1  # then filters are a stream, and the only one
            vectors = [k.load(w + v * self.lanes, self.lanes, ordered=alone) for v in range(self.vectors)]
        else:
            # Of known origin, LLVM would carry an address along for many a filter: slower, and long in the making.
            w = k.launder(w + tap_place(row, r) * c.filters.r + tap_place(column, s) * c.filters.s)
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
        return [k.min(k.i64(lane), self.left - 1) * c.filters.k for lane in range(self.b.TK)]

    def _gathered(self, w: Value, offsets: list[Value]) -> Value:
        k = self.k
        scalars = [k.load(w + offset) for offset in offsets]
        v = k.zero(scalars[0].type, self.lanes)
        for lane, scalar in enumerate(scalars):
            v = k.insert(v, scalar, lane) if self.lanes > 1 else scalar
        return v


def _inputs(run: TileRun, axis: CorrelationAxis, apart: int) -> list[int]:
    """Inputs that a tile sees along an axis, from the first output's first tap on; of each few neighbours the first.

    The last one is among them: its line may be another one.
    """
    pattern = run.pattern or ((True,) * run.length,) * len(axis.taps)
    places = {
        p * axis.stride + t * axis.dilation for t, seen in enumerate(pattern) for p, sees in enumerate(seen) if sees
    }
    kept: list[int] = []
    for place in sorted(places):
        if not kept or place - kept[-1] >= apart or place == max(places):
            kept.append(place)
    return kept


def outputs_of(c: Correlation, b: DirectBlocking, rows: TileRun, columns: TileRun, element: Type) -> TileLines:
    """What a tile stores to."""
    o = c.output
    strides = o.channel, o.row * c.rows.output_stride, o.column * c.columns.output_stride
    return TileLines.of_tile(b.TK, (rows.length, columns.length), strides, element.bytes)


def rounds_of(c: Correlation, b: DirectBlocking) -> int:
    """Rounds of the loop over channels, of the last block of them."""
    return math.ceil((c.C - (math.ceil(c.C / b.BC) - 1) * b.BC) / channels_together(c))


def channels_together(c: Correlation) -> int:
    """Channels of one round of the loop over them."""
    alone = len(c.rows.taps) * len(c.columns.taps) != 1
    return next(n for n in (4, 2, 1) if c.C % n == 0 and (n == 1 or not alone))


def _tap_range(k: Function, axis: CorrelationAxis, position: Value) -> tuple[Value, Value]:
    """First tap inside the input, and the one after the last, of one output position."""
    return overlap(k, position * axis.stride + axis.offset, axis.dilation, axis.size, len(axis.taps))


class _Tile(NamedTuple):
    """A tile of a task: of which runs, from which output row and column on, and its number."""

    rows: TileRun
    columns: TileRun
    row: Value
    column: Value
    number: Value


class _TaskWriter:
    """Writes the task of one correlation: some rows of an image's tiles by a block of filters."""

    def __init__(
        self, m: Module, n: int, c: Correlation, epilogue: Epilogue, b: DirectBlocking, element: Type, packed_at: int
    ) -> None:
        self.c, self.b, self.element, self.packed_at = c, b, element, packed_at
        self.row_runs, self.column_runs = tile_runs(c.rows, b.TP), tile_runs(c.columns, b.TQ)
        kinds = {(r.kind, s.kind): (r, s) for r in self.row_runs for s in self.column_runs}
        shapes = {(r.length, s.length) for r in self.row_runs for s in self.column_runs}
        o = c.output
        strides = (o.channel, o.row * c.rows.output_stride, o.column * c.columns.output_stride)
        self.stores = {shape: emit_store(m, c, epilogue, b.TK, element, shape, strides) for shape in sorted(shapes)}
        self.positions, self.tiles = (sum(run.tiles for run in runs) for runs in (self.row_runs, self.column_runs))
        self.chunks, self.blocks = math.ceil(self.positions / b.rows), math.ceil(c.K / b.TK)
        self.adds = b.BC < c.C
        self.tile_size = b.TK * b.TP * b.TQ
        self.of_block = b.BC * len(c.rows.taps) * len(c.columns.taps) * b.TK  # elements of a block of channels' filters
        rounds, fewest = math.ceil(b.BC / channels_together(c)), self.positions // self.chunks * self.tiles
        line = LINE // element.bytes
        worth = b.packed and self.adds and fewest >= FEWEST_TO_FETCH and element == widened(element)
        fetched = math.ceil(self.of_block / (line * rounds * fewest)) if worth else 0
        self.share = rounds * fetched * line
        self.micros = {kind: Microkernel(m, c, b, epilogue, element, r, s, fetched).k for kind, (r, s) in kinds.items()}
        self.k = m.function(f"task_{n}", *TASK, internal=True)

    def task(self) -> tuple[Function, int]:
        """The task, and how many there are."""
        k, c, b, element, chunks, blocks = self.k, self.c, self.b, self.element, self.chunks, self.blocks
        context, index, _ = k.args
        sums = widened(element)
        types = element, sums if b.packed else element, element, element, element
        a, w, out, bias, residual, _ = operands(k, context, *types)
        if b.filters_outside:
            block, rest = index // (c.N * c.groups * chunks), index % (c.N * c.groups * chunks)
        else:
            block, rest = index % blocks, index // blocks
        chunk, image = rest % chunks, rest // chunks
        group, image = image % c.groups, image // c.groups
        first = block * b.TK
        self.left = k.i64(c.K) - first
        self.a = a + image * c.input.image + group * c.input.group
        place = image * c.output.image + group * c.output.group + first * c.output.channel
        place = place + (c.rows.output_start * c.output.row + c.columns.output_start * c.output.column)
        self.out, self.residual = out + place, residual + place
        self.bias = bias + group * c.K + first
        if b.packed:
            self.w = w + self.packed_at + (group * blocks + block) * (packed_size(c, b.TK) // c.groups // blocks)
        else:
            self.w = w + group * c.filters.group + first * c.filters.k
        held = b.rows * self.tiles * self.tile_size if self.adds else self.tile_size
        self.sums = k.scratch(sums, held)
        self.zero = k.i64(0)
        self.span = chunk * self.positions // chunks, (chunk + 1) * self.positions // chunks
        if self.adds:
            lanes = k.module.lanes(element)
            with k.loop(0, held, lanes) as i:
                k.store(k.zero(sums, lanes), self.sums + i)
            with k.loop(0, math.ceil(c.C / b.BC)) as block:
                for tile in self._tiles():
                    self._add(block, tile)
            for tile in self._tiles():
                self._store(tile)
        else:
            for tile in self._tiles():
                self._add(self.zero, tile)
                self._store(tile)
        return k, blocks * c.N * c.groups * chunks

    def _tiles(self) -> Iterator[_Tile]:
        """All tiles of the task."""
        k, (start, end), begin = self.k, self.span, 0
        for r in self.row_runs:  # rows of tiles begin .. begin + r.tiles - 1 are of this run
            low, high = k.max(start, begin), k.min(end, begin + r.tiles)
            with k.loop(low, high) as i:
                before = 0
                for s in self.column_runs:
                    with k.loop(0, s.tiles) as j:
                        number = (i - start) * self.tiles + j + before
                        yield _Tile(r, s, (i - begin) * r.length + r.start, j * s.length + s.start, number)
                    before += s.tiles
            begin += r.tiles

    def _sums_of(self, tile: _Tile) -> Value:
        return self.sums + tile.number * self.tile_size if self.adds else self.sums

    def _add(self, block: Value, tile: _Tile) -> None:
        """Sum a block of channels."""
        k, c, b, i = self.k, self.c, self.b, self.c.input
        rows = _tap_range(k, c.rows, tile.row) if tile.rows.pattern is None else (self.zero, self.zero)
        columns = _tap_range(k, c.columns, tile.column) if tile.columns.pattern is None else (self.zero, self.zero)
        here = self.a + tile.row * (c.rows.stride * i.row) + tile.column * (c.columns.stride * i.column)
        here = here + block * (b.BC * i.channel)
        filters = self.w + block * self.of_block if self.adds else self.w
        following = filters + (tile.number * self.share + self.of_block)
        channels = k.min(c.C - block * b.BC, b.BC)
        micro = self.micros[tile.rows.kind, tile.columns.kind]
        there = self._place(tile)
        ends = k.select(block.eq(math.ceil(c.C / b.BC) - 1), k.i64(1), self.zero)
        ahead = self.out + there, self.residual + there, ends
        k.call(micro, here, filters, following, self._sums_of(tile), channels, self.left, *rows, *columns, 1, *ahead)

    def _place(self, tile: _Tile) -> Value:
        """Of a tile's first output."""
        c, o = self.c, self.c.output
        return tile.row * (c.rows.output_stride * o.row) + tile.column * (c.columns.output_stride * o.column)

    def _store(self, tile: _Tile) -> None:
        """Store what has been summed."""
        there = self._place(tile)
        store = self.stores[tile.rows.length, tile.columns.length]
        self.k.call(store, self._sums_of(tile), self.out + there, self.residual + there, self.bias, self.left)


def emit(instruction_set: str, layer: ConvLayer, blockings: tuple[DirectBlocking, ...]) -> Module:
    """`run`, and `pack` where the filters are packed, of a forward pass or a gradient of the input."""
    m = Module(instruction_set)
    element = DTYPES[layer.dtype]
    epilogue = Epilogue.of(layer)
    run = m.function("run", *RUN)
    pack = m.function("pack", *RUN) if blockings[0].packed else None
    packed_at = 0
    for n, (c, b) in enumerate(cut(layer, blockings)):
        launch(run, run.args[0], *_TaskWriter(m, n, c, epilogue, b, element, packed_at).task())
        if pack is not None and packed_size(c, b.TK):
            launch(pack, pack.args[0], *emit_pack(m, c, b.TK, element, packed_at))
            packed_at += packed_size(c, b.TK)
    return m
