"""The kernels of `direct`: a task's tiles, and the microkernel that sums each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, Value, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, flat_correlations
from autoconv.cpu.common.epilogue import Epilogue, emit_store
from autoconv.cpu.common.lanes import overlap
from autoconv.cpu.common.packing import emit_pack, packed_size, tap_place
from autoconv.cpu.common.sums import channels_of_sum, each_sum, sums_of
from autoconv.cpu.direct.geometry import MOST_TAPS, DirectBlocking, TileRun, tap_rounds, tile_runs
from autoconv.layer import ConvLayer

AHEAD = 4  # channels
FEWEST_TO_FETCH = 3  # tiles of a task that has the time to fetch filters


class Microkernel:
    """Writes one microkernel: a tile of pixels times TK channels, summed over channels and taps into memory.

    Sums of some channels are added to what those before came to. Meanwhile `fetched` lines of the filters that follow
    are fetched in every round over channels.
    """

    def __init__(
        self, m: Module, c: Correlation, b: DirectBlocking, element: Type, rows: TileRun, columns: TileRun, fetched: int
    ):
        self.c, self.b, self.rows, self.columns = c, b, rows, columns
        self.element, self.fetched = element, fetched
        lanes = self.lanes = m.lanes(element)
        self.vectors = b.TK // lanes
        self.most = MOST_TAPS[m.instruction_set]
        wide = widened(element)
        w = ptr(wide if b.packed else element)
        #        x,            w, w to fetch, sums, channels, channels left, tap ranges, one
        types = (ptr(element), w, w, ptr(wide), i64, i64, i64, i64, i64, i64, i64)
        k = self.k = m.function(f"micro_{len(m.functions)}", *types, internal=True)
        self.x, self.w, self.following, tile, self.channels, self.left, *self.ranges, self.one = k.args
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
            for u in range(unroll):
                x = self.x + (channel + u) * c.input.channel
                if self.b.packed:
                    w = self.w + (channel + u) * (R * S * self.b.TK)
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
            vectors = [k.load(w + v * self.lanes, self.lanes) for v in range(self.vectors)]
        else:
            w = w + tap_place(row, r) * c.filters.r + tap_place(column, s) * c.filters.s
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


def channels_together(c: Correlation) -> int:
    """Channels of one round of the loop over them."""
    alone = len(c.rows.taps) * len(c.columns.taps) != 1
    return next(n for n in (4, 2, 1) if c.C % n == 0 and (n == 1 or not alone))


def _tap_range(k: Function, axis: CorrelationAxis, position: Value) -> tuple[Value, Value]:
    """First tap inside the input, and the one after the last, of one output position."""
    return overlap(k, position * axis.stride + axis.offset, axis.dilation, axis.size, len(axis.taps))


def _emit_task(
    m: Module, n: int, c: Correlation, epilogue: Epilogue, b: DirectBlocking, element: Type, packed_at: int
) -> tuple[Function, int]:
    """The task of one correlation, and how many there are."""
    blocks = math.ceil(c.K / b.TK)
    row_runs, column_runs = tile_runs(c.rows, b.TP), tile_runs(c.columns, b.TQ)
    kinds = {(r.kind, s.kind): (r, s) for r in row_runs for s in column_runs}
    shapes = {(r.length, s.length) for r in row_runs for s in column_runs}
    o = c.output
    strides = (o.channel, o.row * c.rows.output_stride, o.column * c.columns.output_stride)
    stores = {shape: emit_store(m, c, epilogue, b.TK, element, shape, strides) for shape in sorted(shapes)}
    positions = sum(r.tiles for r in row_runs)
    chunks = math.ceil(positions / b.rows)
    adds = b.BC < c.C
    tiles = sum(s.tiles for s in column_runs)
    of_block = b.BC * len(c.rows.taps) * len(c.columns.taps) * b.TK  # elements of a block of channels' filters
    rounds, fewest = math.ceil(b.BC / channels_together(c)), positions // chunks * tiles
    line = LINE // element.bytes
    worth = b.packed and adds and fewest >= FEWEST_TO_FETCH and element == widened(element)
    fetched = math.ceil(of_block / (line * rounds * fewest)) if worth else 0
    micros = {kind: Microkernel(m, c, b, element, r, s, fetched).k for kind, (r, s) in kinds.items()}
    k = m.function(f"task_{n}", *TASK, internal=True)
    ctx, index, _ = k.args
    sums = widened(element)
    a, w, out, bias, residual, _ = operands(k, ctx, element, sums if b.packed else element, element, element, element)

    if b.filters_outside:
        block, rest = index // (c.N * c.groups * chunks), index % (c.N * c.groups * chunks)
    else:
        block, rest = index % blocks, index // blocks
    chunk, image = rest % chunks, rest // chunks
    group, image = image % c.groups, image // c.groups
    first = block * b.TK
    left = k.i64(c.K) - first
    a = a + image * c.input.image + group * c.input.group
    place = image * c.output.image + group * c.output.group + first * c.output.channel
    place = place + (c.rows.output_start * c.output.row + c.columns.output_start * c.output.column)
    out, residual = out + place, residual + place
    bias = bias + group * c.K + first
    if b.packed:
        w = w + packed_at + (group * blocks + block) * (packed_size(c, b.TK) // c.groups // blocks)
    else:
        w = w + group * c.filters.group + first * c.filters.k

    tile_size = b.TK * b.TP * b.TQ
    buffer = k.scratch(sums, b.rows * tiles * tile_size if adds else tile_size)
    zero = k.i64(0)
    start, end = chunk * positions // chunks, (chunk + 1) * positions // chunks

    def each(visit: Callable[[TileRun, TileRun, Value, Value, Value], None]) -> None:
        """Visit the tiles of a task: their kinds, first output row and column, and number."""
        begin = 0
        for r in row_runs:  # rows of tiles begin .. begin + r.tiles - 1 are of this run
            low, high = k.max(start, begin), k.min(end, begin + r.tiles)
            with k.loop(low, high) as i:
                before = 0
                for s in column_runs:
                    with k.loop(0, s.tiles) as j:
                        number = (i - start) * tiles + j + before
                        visit(r, s, (i - begin) * r.length + r.start, j * s.length + s.start, number)
                    before += s.tiles
            begin += r.tiles

    def sums_of(number: Value) -> Value:
        return buffer + number * tile_size if adds else buffer

    def add(block: Value, r: TileRun, s: TileRun, row: Value, column: Value, number: Value) -> None:
        """Sum a block of channels."""
        rows = _tap_range(k, c.rows, row) if r.pattern is None else (zero, zero)
        columns = _tap_range(k, c.columns, column) if s.pattern is None else (zero, zero)
        here = a + row * (c.rows.stride * c.input.row) + column * (c.columns.stride * c.input.column)
        here = here + block * (b.BC * c.input.channel)
        filters = w + block * of_block if adds else w
        following = filters + (number * (rounds * fetched * line) + of_block)
        channels = k.min(c.C - block * b.BC, b.BC)
        k.call(micros[r.kind, s.kind], here, filters, following, sums_of(number), channels, left, *rows, *columns, 1)

    def store(r: TileRun, s: TileRun, row: Value, column: Value, number: Value) -> None:
        there = row * (c.rows.output_stride * c.output.row) + column * (c.columns.output_stride * c.output.column)
        k.call(stores[r.length, s.length], sums_of(number), out + there, residual + there, bias, left)

    def add_and_store(*tile: Any) -> None:
        add(zero, *tile)
        store(*tile)

    if adds:
        lanes = m.lanes(element)
        with k.loop(0, b.rows * tiles * tile_size, lanes) as i:
            k.store(k.zero(sums, lanes), buffer + i)
        with k.loop(0, math.ceil(c.C / b.BC)) as block:
            each(functools.partial(add, block))
        each(store)
    else:
        each(add_and_store)
    return k, blocks * c.N * c.groups * chunks


def emit(instruction_set: str, layer: ConvLayer, blockings: tuple[DirectBlocking, ...]) -> Module:
    """`run`, and `pack` where the filters are packed, of a forward pass or a gradient of the input."""
    m = Module(instruction_set)
    element = DTYPES[layer.dtype]
    epilogue = Epilogue.of(layer)
    run = m.function("run", *RUN)
    pack = m.function("pack", *RUN) if blockings[0].packed else None
    packed_at = 0
    for n, (c, b) in enumerate(zip(flat_correlations(layer), blockings, strict=True)):
        task, count = _emit_task(m, n, c, epilogue, b, element, packed_at)
        launch(run, run.args[0], task, count)
        if pack is not None and packed_size(c, b.TK):
            task, count = emit_pack(m, c, b.TK, element, packed_at)
            launch(pack, pack.args[0], task, count)
            packed_at += packed_size(c, b.TK)
    return m
