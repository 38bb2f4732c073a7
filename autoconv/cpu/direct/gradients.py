"""The gradient of the filters, directly: a tile of filters times channels in registers, summed over pixels.

Channels last, lanes are input channels and elements of dy are broadcast; channels first, lanes are
neighbouring output pixels of both operands, and the lanes are summed at the end. Both are read in place.
Blocks of rows that fit the caches are gone through one by one, `dw` itself holding the sums between them; for narrow
types, whose `dw` would round every time, one block is everything. (Georganas et al., 2018, arXiv:1808.05567, keep a
tile of filters by channels in registers in the same way.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoconv.algorithm import Params
from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Type, Value, Var, i32, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, flat_correlations
from autoconv.cpu.common.lanes import overlap
from autoconv.cpu.common.sums import SUM_TERMS, kept_aside
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class WgradBlocking:
    """A register tile of `TK` filters by `BC` channels; tasks of `filters` x `channels` of them, by `rows` of dy."""

    TK: int
    BC: int
    filters: int
    channels: int
    rows: int


def forward(layer: ConvLayer) -> Correlation:
    """The forward correlation whose filters have the gradient that is computed, on one long row where it is 1x1."""
    return flat_correlations(layer.replace(direction="fwd"))[0]


def tap_range(k: Function, axis: CorrelationAxis, tap: Value) -> tuple[Value, Value, Value]:
    """Outputs low .. high - 1 see an input through a tap; and the input that output 0 meets, maybe outside."""
    offset = tap * axis.dilation + axis.offset
    return *overlap(k, offset, axis.stride, axis.size, axis.count), offset


class WgradTile:
    """Writes the sum of one register tile over the pixels of some rows, for one tap.

    `stored` is the type of x and dw as the tile sees them, which may be packed copies; c tells where they lie. A call
    goes through at most so many `rows`, of all its images.
    """

    def __init__(
        self,
        m: Module,
        c: Correlation,
        element: Type,
        stored: Type,
        tile: tuple[int, int],
        rows: int,
        *,
        lanes_are_pixels: bool,
    ) -> None:
        self.c, self.m, self.element = c, m, element
        self.lanes = m.lanes(element)
        self.filters, self.channels = tile
        self.together = self.lanes if lanes_are_pixels else 1  # columns of a term
        self.row_terms = math.ceil(c.columns.count / self.together)
        self.parted = rows * self.row_terms > SUM_TERMS
        #        x,           dy,           dw,          images, rows from, to, columns from, to, channels left, add
        types = (ptr(stored), ptr(element), ptr(stored), i64, i64, i64, i64, i64, i64, i64)
        self.k = m.function(f"tile_{len(m.functions)}", *types, internal=True)
        if lanes_are_pixels:
            self._pixels()
        else:
            self._channels()

    def _each_row(self, sums: Sequence[Var], add: Callable[[Value, Value, Value, Value], None]) -> None:
        """`add(x, dy, from, to)` for every image and row: where the row of x and that of dy start, and columns.

        Where a call adds up many terms, the sums of some are kept aside, and added to what those before came to.
        """
        k, c = self.k, self.c
        x, dy, _, images, low, high, left, right = k.args[:8]

        def each(n: Value, low: Value, high: Value, columns: int = 0, keep: Callable[[], None] | None = None) -> None:
            with k.loop(low, high) as p:
                here = x + n * c.input.image + p * (c.rows.stride * c.input.row)
                there = dy + n * c.output.image + p * c.output.row
                if keep is None:
                    add(here, there, left, right)
                else:
                    with k.loop(left, right, columns) as q:
                        add(here, there, q, k.min(q + columns, right))
                        keep()

        if not self.parted:
            with k.loop(0, images) as n:
                each(n, low, high)
            return
        with kept_aside(k, sums, self.lanes) as keep, k.loop(0, images) as n:
            if self.row_terms > SUM_TERMS:
                each(n, low, high, SUM_TERMS * self.together, keep)
            else:
                rows = SUM_TERMS // self.row_terms
                with k.loop(low, high, rows) as first:
                    each(n, first, k.min(first + rows, high))
                    keep()

    def _pixels(self) -> None:
        k, c, lanes = self.k, self.c, self.lanes
        zero = k.zero(widened(self.element), lanes)
        sums = [[k.var(zero) for _ in range(self.channels)] for _ in range(self.filters)]

        def step(x: Value, dy: Value, q: Value, n: Value | None) -> None:
            mask = None if n is None else k.mask(n, lanes)
            dys = [k.load(dy + q + i * c.output.channel, lanes, mask=mask) for i in range(self.filters)]
            for j in range(self.channels):
                v = self._strided(x + q * c.columns.stride + j * c.input.channel, c.columns.stride, n, mask)
                for i, d in enumerate(dys):
                    sums[i][j].fma(d, v)

        def columns(x: Value, dy: Value, low: Value, high: Value) -> None:
            whole = low + k.max(high - low, 0) // lanes * lanes
            with k.loop(low, whole, lanes) as q:
                step(x, dy, q, None)
            with k.if_(whole < high):
                step(x, dy, whole, high - whole)

        self._each_row(list(itertools.chain(*sums)), columns)
        dw, add = k.args[2], k.args[9]
        for i, row in enumerate(sums):
            for j, acc in enumerate(row):
                place = dw + (i * c.filters.k + j * c.filters.c)
                total = k.var(k.sum(acc.get()))
                with k.if_(add.ne(0)):
                    total.add(k.load(place))
                k.store(total.get(), place)

    def _strided(self, p: Value, stride: int, n: Value | None, mask: Value | None) -> Value:
        """Every `stride`-th element from p: the first n of a vector, or all."""
        k, lanes = self.k, self.lanes
        if stride == 1:
            return k.load(p, lanes, mask=mask)
        if stride == 2:  # read no further than the last one that is used
            last = n * 2 - 1 if n is not None else k.i64(2 * lanes - 1)
            low = k.load(p, lanes, mask=k.mask(last, lanes))
            high = k.load(p + lanes, lanes, mask=k.mask(last - lanes, lanes))
            return k.shuffle(low, high, range(0, 2 * lanes, 2))
        v = k.var(k.zero(widened(self.element), lanes))
        for lane in range(lanes):
            exists = k.const(i64, 1).eq(1) if n is None else n > lane
            with k.if_(exists):
                v.set(k.insert(v.get(), k.load(p + lane * stride), lane))
        return v.get()

    def _channels(self) -> None:
        k, c, lanes = self.k, self.c, self.lanes
        dw, left, add = k.args[2], *k.args[8:]
        vectors = self.channels // lanes
        masks = [None if c.C % self.channels == 0 else k.mask(left - v * lanes, lanes) for v in range(vectors)]
        zero = k.zero(widened(self.element), lanes)
        sums = [[k.var(zero) for _ in range(vectors)] for _ in range(self.filters)]

        def term(x: Value, dy: Value, q: Value) -> None:
            x, dy = x + q * (c.columns.stride * c.input.column), dy + q * c.output.column
            xs = [k.load(x + v * lanes, lanes, mask=masks[v]) for v in range(vectors)]
            for i, row in enumerate(sums):
                d = k.broadcast(dy + i * c.output.channel, lanes)
                for acc, pixel in zip(row, xs, strict=True):
                    acc.fma(d, pixel)

        def columns(x: Value, dy: Value, low: Value, high: Value) -> None:
            k.sweep(low, high, k.module.terms, functools.partial(term, x, dy))

        self._each_row(list(itertools.chain(*sums)), columns)
        for i, row in enumerate(sums):
            for v, (acc, mask) in enumerate(zip(row, masks, strict=True)):
                place = dw + (i * c.filters.k + v * lanes)
                with k.if_(add.ne(0)):
                    acc.set(acc.get() + k.load(place, lanes, mask=mask))
                k.store(acc.get(), place, mask=mask)


def tile_sizes(total: int, tile: int) -> list[tuple[int, int]]:
    """(size, number) of the whole tiles of an extent, and of what is left."""
    return [s for s in ((tile, total // tile), (total % tile, 1)) if all(s)]


def emit_wgrad(instruction_set: str, layer: ConvLayer, b: WgradBlocking) -> Module:
    """`run` of a gradient of the filters: operand a is x, b is dy, out is dw."""
    m = Module(instruction_set)
    c = forward(layer)
    element = DTYPES[layer.dtype]
    pixels = layer.layout == "NCHW"

    channel_sizes = tile_sizes(c.C, b.BC) if pixels else [(b.BC, math.ceil(c.C / b.BC))]
    kinds = [(f, g) for f, _ in tile_sizes(c.K, b.TK) for g, _ in channel_sizes]
    images = c.N if b.rows >= c.rows.count and layer.itemsize < 4 else 1
    rows = images * b.rows
    tiles = {kind: WgradTile(m, c, element, element, kind, rows, lanes_are_pixels=pixels).k for kind in kinds}
    k = m.function("task", *TASK, internal=True)
    ctx, index, _ = k.args
    x, dy, dw = operands(k, ctx, element)[:3]
    filter_blocks = math.ceil(math.ceil(c.K / b.TK) / b.filters)
    channel_blocks = math.ceil(math.ceil(c.C / b.BC) / b.channels)
    kb, rest = index % filter_blocks * b.filters, index // filter_blocks
    cb, group = rest % channel_blocks * b.channels, rest // channel_blocks
    x = x + group * c.input.group
    dy, dw = dy + group * c.output.group, dw + group * c.filters.group

    def blocks(begin: Value, count: int, choices: list[tuple[int, int]], tile: int) -> Iterator[tuple[int, Value]]:
        """The tiles of this task along one extent: their size, and where each starts."""
        base = 0
        for size, number in choices:
            with k.loop(k.max(begin, base), k.min(begin + count, base + number)) as t:
                yield size, t * tile
            base += number

    with k.loop(0, c.N, images) as n, k.loop(0, c.rows.count, b.rows) as first_row:
        for filters, k0 in blocks(kb, b.filters, tile_sizes(c.K, b.TK), b.TK):
            for channels, c0 in blocks(cb, b.channels, channel_sizes, b.BC):
                with k.loop(0, len(c.rows.taps)) as r, k.loop(0, len(c.columns.taps)) as s:
                    low, high, row = tap_range(k, c.rows, r)
                    low, high = k.max(low, first_row), k.min(high, first_row + b.rows)
                    left, right, column = tap_range(k, c.columns, s)
                    here = x + n * c.input.image + c0 * c.input.channel + row * c.input.row + column * c.input.column
                    there = dy + n * c.output.image + k0 * c.output.channel
                    place = dw + k0 * c.filters.k + c0 * c.filters.c + r * c.filters.r + s * c.filters.s
                    again = k.zext(k.cast(n + first_row, i32).ne(0), i64)
                    k.call(
                        tiles[filters, channels],
                        *(here, there, place, images, low, high, left, right, k.i64(c.C) - c0, again),
                    )
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, c.groups * filter_blocks * channel_blocks)
    return m


_LARGE = (4, 6), (14, 2)
TILES = {"avx512": _LARGE, "avx2": ((3, 4), (6, 2)), "neon": _LARGE, "generic": ((3, 3), (5, 2))}
ROW_BYTES = 48 << 10  # of a register tile's rows at a time: near enough to the L1 cache


def wgrad_candidates(layer: ConvLayer, instruction_set: str) -> list[Params]:
    """Register tiles of filters and channels; with few of one, more of the other."""
    c = forward(layer)
    (filters, channels), (broadcast, vectors) = TILES[instruction_set]
    found: list[Params] = []
    if layer.layout == "NCHW":
        BC = min(channels, c.C)
        TK = min(c.K, filters if channels == BC else min(filters * channels // BC, 8))
        found.append({"TK": TK, "BC": BC, "lanes": "pixels"})
    lanes = Module(instruction_set).lanes(DTYPES[layer.dtype])
    needed = min(vectors, math.ceil(c.C / lanes))
    tiles = math.ceil(c.K * needed / (broadcast * vectors))
    found.append({"TK": math.ceil(c.K / tiles), "BC": lanes * needed, "lanes": "channels"})
    return found


def wgrad_blocking(layer: ConvLayer, threads: int, TK: int, BC: int) -> WgradBlocking:
    """Tasks of about 64 x 64 filters and channels, but enough of them for the threads; rows in cache."""
    c = forward(layer)
    filters, channels = max(64 // TK, 1), max(64 // BC, 1)

    def tasks() -> int:
        return c.groups * math.ceil(math.ceil(c.K / TK) / filters) * math.ceil(math.ceil(c.C / BC) / channels)

    while tasks() < 4 * threads and max(filters, channels) > 1:
        if (filters * TK >= channels * BC and filters > 1) or channels == 1:
            filters = math.ceil(filters / 2)
        else:
            channels = math.ceil(channels / 2)
    row = layer.itemsize * (TK * c.columns.count + BC * c.columns.size * c.rows.stride)
    rows = max(ROW_BYTES // row, 1) if layer.itemsize >= 4 else c.rows.count
    return WgradBlocking(TK, BC, filters, channels, min(rows, c.rows.count))
