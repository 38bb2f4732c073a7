"""The kernels of `matrix`: a strip's panel, multiplied by blocks of filters tile by tile, and the store of its sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Value, f32, i8, i64, ptr
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.tiles import TILE_BYTES, TILE_ROWS
from autoconv.cpu.common.correlation import Correlation, flat_correlations
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import load_range, store_range
from autoconv.cpu.common.tiles.products import (
    DEPTH,
    FILTERS,
    PRODUCTS,
    Products,
    emit_begin,
    emit_step,
    parts_of,
    sums_of,
)
from autoconv.cpu.matrix.geometry import (
    MatrixBlocking,
    Panel,
    filter_tiles,
    packed_bytes,
    strips,
)
from autoconv.cpu.matrix.packing import emit_filters, emit_panel
from autoconv.layer import ConvLayer

BLOCK = (*[ptr(i8)] * 3, i64, i64, ptr(i8), ptr(i8))  # what `emit_block` says of its function


@dataclass(frozen=True)
class Fetch:
    """What a block fetches while it multiplies: lines of the filters that come next, and of its outputs.

    Products fill the processor's view of what comes: too few loads are seen for memory to be busy meanwhile.
    """

    filters: int  # in every step, so that all pairs of tiles of a strip fetch as many as they read
    outputs: int  # of every filter
    apart: int  # bytes from a filter's outputs to the next one's
    steps: int  # that a block has, or fewer

    @classmethod
    def of(cls, layer: ConvLayer, panel: Panel) -> Fetch:
        """Of a strip's blocks; no outputs where a filter's do not follow one another."""
        c, b = panel.c, panel.b
        pairs, o, itemsize = math.ceil(panel.tiles / 2), c.output, layer.itemsize
        filters = math.ceil(parts_of(b.products) * FILTERS / pairs) if c.K > FILTERS else 0
        rows = b.rows if c.rows.output_stride * o.row == b.columns else 1
        together = b.images == 1 and rows == b.rows and c.columns.output_stride * o.column == 1
        outputs = math.ceil(rows * b.columns * itemsize / (pairs * LINE)) if together else 0
        steps = max(1, len(panel.taps) * min(-(-b.BC // DEPTH), panel.blocks))
        return cls(filters, outputs, o.channel * itemsize, steps)

    def step(self, k: Function, number: Value, filters: Value, outputs: Value) -> None:
        """The part of one step, by its number; filters come into the second cache, as they are used much later."""
        for n in range(self.filters):
            k.prefetch(filters + (number * self.filters + n) * LINE, locality=2)
        each = math.ceil(FILTERS / self.steps)
        for n in range(each):
            for line in range(self.outputs):
                k.prefetch(outputs + ((number * each + n) * self.apart + line * LINE), write=True)


def emit_block(m: Module, panel: Panel, products: int, tiles: tuple[int, int], fetch: Fetch) -> Function:
    """`block(pixels, filters, sums, blocks of channels, add, next filters, outputs)`: one or two tiles of pixels.

    The sums go on from memory where `add` is not 0, and back to it. `pixels` are the lines of the tiles, `filters`
    the first step of one or two of filters, `sums` a row for each pixel; the last two are fetched meanwhile.
    """
    parts, taps, filters = parts_of(products), panel.taps, tiles[1]
    k = m.function(f"block_{tiles[0]}x{filters}_{len(m.functions)}", *BLOCK, internal=True)
    x, w, sums, blocks, add, *ahead = k.args
    places = {tile: sums + (p * TILE_ROWS * FILTERS + f * TILE_ROWS) * 4 for (p, f), tile in sums_of(tiles).items()}
    emit_begin(k, places, FILTERS * 4, add)
    if taps:
        skips = m.table(k, i64, [tap * LINE for tap in taps])

        def multiply(together: Products, first: bool) -> None:
            with k.loop(0, blocks) as block, k.loop(0, len(taps)) as tap:
                if first:
                    fetch.step(k, block * len(taps) + tap, *ahead)
                here = x + block * (panel.block * LINE) + k.load(skips + tap)
                there = w + (block * len(taps) + tap) * (parts * filters * TILE_BYTES)
                emit_step(
                    k,
                    together,
                    tiles,
                    lambda part, p: here + (part * panel.part + p * TILE_ROWS) * LINE,
                    lambda part, f: there + (part * filters + f) * TILE_BYTES,
                    (LINE, LINE),
                )

        for n, together in enumerate(passes(panel, products)):
            multiply(together, n == 0)
    for tile, place in places.items():
        k.tile_store(tile, place, FILTERS * 4)
    return k


def passes(panel: Panel, products: int) -> list[Products]:
    """The products of each pass over the taps: of six, and few channels, the large one comes after all others.

    A step of few channels adds little that is large, but rounds the sum six times; small sums lose nothing that counts.
    """
    all_of_them = PRODUCTS[products]
    return [all_of_them[:-1], all_of_them[-1:]] if products == 6 and panel.blocks == 1 else [all_of_them]


Block = Callable[[Module, Any, int, tuple[int, int], Fetch], Function]  # a writer such as `emit_block`


class TaskWriter:
    """Writes the task of one correlation: a strip by some blocks of filters."""

    panel_of = Panel
    emit_filters = staticmethod(emit_filters)

    def __init__(
        self, m: Module, n: int, layer: ConvLayer, c: Correlation, b: MatrixBlocking, packed_at: int, block: Block
    ) -> None:
        self.m, self.layer, self.c, self.b, self.packed_at = m, layer, c, b, packed_at
        self.panel = self.panel_of(c, b)
        self.element = DTYPES[layer.dtype]
        fill = self._fill() if self.panel.taps else None
        sides = [n for n in (2, 1) if self.panel.tiles >= n]
        widths = [n for n in (2, 1) if (filter_tiles(c) > 1 if n == 2 else filter_tiles(c) % 2)]
        self.fetch = Fetch.of(layer, self.panel)
        self.blocks = {(p, f): block(m, self.panel, b.products, (p, f), self.fetch) for p in sides for f in widths}
        outputs = [b.columns]
        if self.panel.summed < self.panel.tiles:
            outputs = [n for n in (FILTERS, b.rows * b.columns % FILTERS) if n]
        self.stores = {(n, width): self._store(n, width) for n in outputs for width in widths}
        self.k = m.function(f"task_{n}", *TASK, internal=True)
        self._task(fill)

    def _fill(self) -> Function:
        """`fill(x, first image, row, column of the strip, panel)`, x being the first channel of a group."""
        return emit_panel(self.m, self.layer, self.panel)

    def _pixels(self, first: Value, tile: int | Value) -> Value:
        """A tile of pixels, from a block of channels on."""
        return self.lines + (first * self.panel.block + tile * TILE_ROWS) * LINE

    def _sums(self, number: int | Value) -> Value:
        """Those of the output of that number."""
        return self.sums + number * (FILTERS * 4)

    def _task(self, fill: Function | None) -> None:
        k, c, b, panel = self.k, self.c, self.b, self.panel
        context, index, thread = k.args
        if self.m.matrix_unit:
            k.configure_tiles()
        x, w, self.out, self.bias, self.residual, workspace = operands(
            k, context, self.element, i8, self.element, self.element, self.element
        )
        chunk, strip = index % b.chunks, index // b.chunks
        across, rest = self._part(strip, c.columns.count, b.columns)
        down, rest = self._part(rest, c.rows.count, b.rows)
        image, group = self._part(rest, c.N, b.images)
        own = workspace + thread * panel.thread_bytes
        self.lines = own + LINE
        self.sums = self.lines + panel.panel_bytes
        if fill is not None:
            held = k.bits(own, ptr(i64))
            with k.if_(k.load(held).ne(strip)):
                k.call(fill, x + group * c.input.group, image, down, across, self.lines)
                k.store(strip, held)
        o = c.output
        down, across = (
            start * axis.output_stride + axis.output_start for start, axis in ((down, c.rows), (across, c.columns))
        )
        place = group * o.group + image * o.image + down * o.row + across * o.column
        self.out, self.residual, self.bias = self.out + place, self.residual + place, self.bias + group * c.K
        self.w = w + self.packed_at + group * (packed_bytes(c, b.products) // c.groups)
        number = -(-filter_tiles(c) // 2)
        first, last = chunk * number // b.chunks, (chunk + 1) * number // b.chunks
        self.last, self.following = last, (chunk + b.threads) % b.chunks * number // b.chunks  # of its next task
        if filter_tiles(c) > 1:
            with k.loop(first, k.min(last, filter_tiles(c) // 2)) as block:
                self._filters(block, 2)
        if filter_tiles(c) % 2:
            with k.if_(last.eq(number)):
                self._filters(k.i64(number - 1), 1)
        if self.m.matrix_unit:
            k.release_tiles()

    def _part(self, index: Value, extent: int, length: int) -> tuple[Value, Value]:
        """Where the part of an extent starts that an index names, and the index of what it is a part of.

        The last part is as long as the others, and does some of its neighbour's work again.
        """
        number = -(-extent // length)
        return self.k.min(index % number * length, extent - length), index // number

    def _filters(self, block: Value, width: int) -> None:
        """The strip by a block of one or two tiles of filters."""
        k, c, b, panel, o = self.k, self.c, self.b, self.panel, self.c.output
        step = len(panel.taps) * parts_of(b.products) * TILE_BYTES
        filters = self.w + block * (2 * panel.blocks * step)
        together = -(-b.BC // DEPTH)
        pairs = panel.tiles // 2
        channel = block * FILTERS
        after = self.w + k.select(block + 1 < self.last, block + 1, self.following) * (2 * panel.blocks * step)
        outputs = k.bits(self.out + channel * o.channel, ptr(i8))

        def multiply(tiles: int, pair: int | Value, first: Value, sums: Value) -> None:
            count, pair = k.min(k.i64(panel.blocks) - first, together), k.i64(pair)
            there = filters + first * (width * step)
            ahead = k.select(first + count < panel.blocks, there + count * (width * step), after)
            ahead = ahead + pair * count * (len(panel.taps) * self.fetch.filters * LINE)
            target = outputs + pair * (self.fetch.outputs * LINE)
            k.call(self.blocks[tiles, width], self._pixels(first, pair * 2), there, sums, count, first, ahead, target)

        def store(outputs: int, source: Value, place: Value) -> None:
            place = place + channel * o.channel
            k.call(
                self.stores[outputs, width],
                *(source, self.out + place, self.residual + place, self.bias + channel, k.i64(c.K) - channel),
            )

        if panel.summed < panel.tiles:
            between = c.columns.output_stride * o.column
            whole, rest = divmod(b.rows * b.columns, FILTERS)
            with k.loop(0, whole) as pair:
                multiply(2, pair, k.i64(0), self.sums)
                store(FILTERS, self.sums, pair * (FILTERS * between))
            if rest:
                multiply(-(-rest // TILE_ROWS), whole, k.i64(0), self.sums)
                store(rest, self.sums, k.i64(whole * FILTERS * between))
            return
        with k.loop(0, panel.blocks, together) as first:
            if pairs:
                with k.loop(0, pairs) as pair:
                    multiply(2, pair, first, self._sums(pair * (2 * TILE_ROWS)))
            if panel.tiles % 2:
                multiply(1, pairs, first, self._sums((panel.tiles - 1) * TILE_ROWS))
        with k.loop(0, b.images) as n, k.loop(0, b.rows) as row:
            source = self._sums((n * panel.held + row) * panel.pitch)
            store(b.columns, source, n * o.image + row * (c.rows.output_stride * o.row))

    def _store(self, outputs: int, width: int) -> Function:
        """`store(sums, out, residual, bias, channels left)`: outputs in a row, of one or two tiles of filters."""
        data = ptr(self.element)
        k = self.m.function(f"store_{len(self.m.functions)}", ptr(f32), data, data, data, i64, internal=True)
        step = self.c.columns.output_stride * self.c.output.column
        if self.c.output.channel == 1:
            self._channels_last(k, outputs, width, step)
        elif step == 1:
            self._channels_first(k, outputs, width)
        else:
            self._scattered(k, outputs, width, step)
        return k

    def _channels_last(self, k: Function, outputs: int, width: int, step: int) -> None:
        sums, out, residual, bias, left = k.args
        lanes, epilogue = self.m.lanes(f32), Epilogue.of(self.layer)
        with k.loop(0, outputs) as q, k.loop(0, width * TILE_ROWS, lanes) as first:
            mask = None if self.c.K % TILE_ROWS == 0 else k.mask(left - first, lanes)
            place = q * step + first
            v = k.load(sums + q * FILTERS + first, lanes)
            load = functools.partial(k.load, lanes=lanes, mask=mask)
            b = epilogue.of_channels(load, bias + first)
            r = load(residual + place) if epilogue.residual else None
            k.store(epilogue.apply(k, v, b, r), out + place, mask=mask)

    def _channels_first(self, k: Function, outputs: int, width: int) -> None:
        """Blocks of as many pixels as channels, transposed."""
        sums, out, residual, bias, left = k.args
        lanes, epilogue, o = self.m.lanes(f32), Epilogue.of(self.layer), self.c.output

        def block(q: int | Value, first: Value, length: int) -> None:
            rows = [k.load(sums + (k.i64(q) + n) * FILTERS + first, lanes) for n in range(lanes)]
            for n, v in enumerate(k.transpose(rows)):
                with k.if_(left > first + n):
                    place = (first + n) * o.channel + q
                    b = epilogue.of_channels(lambda place: k.broadcast(place, lanes), bias + first + n)
                    r = load_range(k, residual + place, lanes, 0, length) if epilogue.residual else None
                    store_range(k, epilogue.apply(k, v, b, r), out + place, 0, length)

        with k.loop(0, width * TILE_ROWS, lanes) as first:
            if outputs >= lanes:
                with k.loop(0, outputs // lanes * lanes, lanes) as q:
                    block(q, first, lanes)
            if outputs % lanes:
                block(outputs // lanes * lanes, first, outputs % lanes)

    def _scattered(self, k: Function, outputs: int, width: int, step: int) -> None:
        """One by one: only a strided gradient's outputs lie apart."""
        sums, out, residual, bias, left = k.args
        epilogue = Epilogue.of(self.layer)
        with k.loop(0, k.min(left, width * TILE_ROWS)) as channel, k.loop(0, outputs) as q:
            place = channel * self.c.output.channel + q * step
            b = epilogue.of_channels(k.load, bias + channel)
            r = k.load(residual + place) if epilogue.residual else None
            k.store(epilogue.apply(k, k.load(sums + q * FILTERS + channel), b, r), out + place)


def emit(
    instruction_set: str,
    matrix_unit: str | None,
    layer: ConvLayer,
    blockings: tuple[MatrixBlocking, ...],
    block: Block = emit_block,
    writer_of: type[TaskWriter] = TaskWriter,
) -> Module:
    """`run` and `pack` of a forward pass or a gradient of the input."""
    m = Module(instruction_set, matrix_unit=matrix_unit)
    run, pack = m.function("run", *RUN), m.function("pack", *RUN)
    *_, workspace = operands(run, run.args[0], DTYPES[layer.dtype])
    packed_at = 0
    for n, (c, b) in enumerate(zip(flat_correlations(layer), blockings, strict=True)):
        writer = writer_of(m, n, layer, c, b, packed_at, block)
        with run.loop(0, b.threads) as thread:  # no thread holds a strip of this input
            run.store(run.i64(-1), run.bytes_at(workspace, thread * writer.panel.thread_bytes, i64))
        launch(run, run.args[0], writer.k, strips(c, b) * b.chunks)
        if size := packed_bytes(c, b.products):
            launch(pack, pack.args[0], *writer.emit_filters(m, layer, c, b.products, packed_at))
            packed_at += size
    return m
