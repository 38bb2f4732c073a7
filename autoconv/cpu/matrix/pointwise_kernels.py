"""The kernels of `matrix.pointwise`: filters are the rows of tiles, and pixels their columns.

A row of a tile on the right holds two channels of 16 pixels that follow one another, which is how they lie in NCHW but
for the other channel between; and a row of the sums is a filter's, of 16 outputs as they lie. So nothing is transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Value, f32, i8, i16, i32, i64, ptr
from autoconv.cpu.codegen.launch import TASK, operands
from autoconv.cpu.codegen.tiles import TILE_BYTES, TILE_ROWS
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import deinterleaved, load_range, store_range, within
from autoconv.cpu.common.tiles.products import DEPTH, Products, emit_begin, emit_step, parts_of, sums_of
from autoconv.cpu.common.tiles.split import split, split_pairs
from autoconv.cpu.matrix import kernels
from autoconv.cpu.matrix.geometry import MatrixBlocking, Panel, filter_tiles, packed_bytes
from autoconv.cpu.matrix.kernels import BLOCK, Fetch, TaskWriter, passes
from autoconv.cpu.matrix.packing import gathered
from autoconv.layer import ConvLayer

AHEAD = 8  # channels: so far ahead pixels are fetched that are packed


@dataclass(frozen=True)
class PointwisePanel(Panel):
    """A strip's pixels: for every two channels a row of all pixels, of each two numbers."""

    @property
    def row(self) -> int:
        """Lines of two channels: an odd number, so that rows fall into different sets of a cache.

        They are filled by whole vectors, which reach beyond the last one.
        """
        return self.tiles + 1 | 1

    @property
    def block(self) -> int:
        return TILE_ROWS * self.row

    @property
    def sums_row(self) -> int:
        """Lines of the sums of a filter."""
        return self.summed | 1


def emit_block(m: Module, panel: PointwisePanel, products: int, tiles: tuple[int, int], fetch: Fetch) -> Function:
    """The same as `kernels.emit_block` writes; `sums` has a row for each filter."""
    parts, (side, filters) = parts_of(products), tiles
    k = m.function(f"block_{side}x{filters}_{len(m.functions)}", *BLOCK, internal=True)
    x, w, sums, blocks, add, *ahead = k.args
    pitch = panel.sums_row * LINE
    pairs = filters, side
    places = {tile: sums + (f * (TILE_ROWS * pitch) + p * LINE) for (f, p), tile in sums_of(pairs).items()}
    emit_begin(k, places, pitch, add)

    def multiply(together: Products, first: bool) -> None:
        with k.loop(0, blocks) as block:
            if first:
                fetch.step(k, block, *ahead)
            here, there = x + block * (panel.block * LINE), w + block * (parts * filters * TILE_BYTES)
            emit_step(
                k,
                together,
                pairs,
                lambda part, f: there + (part * filters + f) * TILE_BYTES,
                lambda part, p: here + (part * panel.part + p) * LINE,
                (LINE, panel.row * LINE),
            )

    for n, together in enumerate(passes(panel, products)):
        multiply(together, n == 0)
    for tile, place in places.items():
        k.tile_store(tile, place, pitch)
    return k


def _emit_row(m: Module, layer: ConvLayer, panel: PointwisePanel) -> Function:
    """`row(x, channels left, out)`: a row of the strip, two channels after the other.

    Channels that do not exist repeat the last.
    """
    element, c = DTYPES[layer.dtype], panel.c
    k = m.function(f"row_{len(m.functions)}", ptr(element), i64, ptr(i8), internal=True)
    x, left, out = k.args
    lanes, parts, stride = m.lanes(f32), parts_of(panel.b.products), c.columns.stride

    def pixels(channel: Value, place: int | Value, length: int) -> Value:
        start = x + k.min(channel, left - 1) * c.input.channel + k.i64(place) * stride
        used = (length - 1) * stride + 1  # of these inputs, of which others may lie outside
        vectors = [
            load_range(k, start + n, lanes, 0, max(0, min(lanes, used - n))) for n in range(0, stride * lanes, lanes)
        ]
        return deinterleaved(k, vectors, stride, 0)

    with k.loop(0, TILE_ROWS) as pair:

        def block(place: int | Value, length: int) -> None:
            for n in range(2):  # rows are too short for the processor to look ahead by itself
                k.prefetch(x + (pair * 2 + (n + AHEAD)) * c.input.channel + k.i64(place) * stride)
            even, odd = (pixels(pair * 2 + n, place, length) for n in range(2))
            there = out + pair * (panel.row * LINE) + k.i64(place) * 4
            for part, pairs in enumerate(split_pairs(k, even, odd, parts)):
                k.store(pairs, k.bytes_at(there, part * panel.part * LINE, i32))

        whole = panel.b.columns // lanes * lanes
        if whole:
            with k.loop(0, whole, lanes) as place:
                block(place, lanes)
        if panel.b.columns > whole:
            block(whole, panel.b.columns - whole)
    return k


def emit_filters(m: Module, layer: ConvLayer, c: Correlation, products: int, packed_at: int) -> tuple[Function, int]:
    """The task that packs a tile of filters, and how many there are.

    Row i of a tile holds 32 channels of a filter. Channels that do not exist are zero; of filters that do not exist, no
    sum is stored.
    """
    element = DTYPES[layer.dtype]
    lanes, parts, tiles, blocks = m.lanes(f32), parts_of(products), filter_tiles(c), -(-c.C // DEPTH)
    k = m.function(f"pack_{len(m.functions)}", *TASK, internal=True)
    context, index, _ = k.args
    w, _, packed = operands(k, context, element, element, i8, element, element)[:3]
    group, tile = index // tiles, index % tiles
    width = k.min(k.i64(tiles) - (tile & -2), 2)
    packed = packed + packed_at + group * (packed_bytes(c, products) // c.groups)
    packed = packed + ((tile & -2) * (blocks * parts) + (tile & 1)) * TILE_BYTES
    w = w + group * c.filters.group
    with k.loop(0, TILE_ROWS) as row, k.loop(0, blocks) as block, k.loop(0, DEPTH, lanes) as first:
        here, channel = w + k.min(tile * TILE_ROWS + row, c.K - 1) * c.filters.k, block * DEPTH + first
        mask = within(k, channel, lanes, k.i64(c.C))
        if c.filters.c == 1:
            v = k.load(here + channel, lanes, mask=mask)
        else:
            v = gathered(k, lambda lane: here + k.min(channel + lane, c.C - 1) * c.filters.c, lanes)
            v = k.select(mask, v, k.zero(f32, lanes))
        for part, bits in enumerate(split(k, v, parts)):
            there = packed + (block * parts + part) * (width * TILE_BYTES) + row * LINE + first * 2
            k.store(bits, k.bits(there, ptr(i16)))
    return k, c.groups * tiles


class PointwiseWriter(TaskWriter):
    """Writes the task of a convolution that sees one pixel for each output."""

    panel: PointwisePanel
    panel_of = PointwisePanel
    emit_filters = staticmethod(emit_filters)

    def _fill(self) -> Function:
        m, c, panel = self.m, self.c, self.panel
        row_of = _emit_row(m, self.layer, panel)
        k = m.function(f"fill_{len(m.functions)}", ptr(self.element), i64, i64, i64, ptr(i8), internal=True)
        x, image, row, column, out = k.args
        x = x + column * (c.columns.stride * c.input.column)
        with k.loop(0, self.b.images) as n, k.loop(0, self.b.rows) as t, k.loop(0, panel.blocks) as block:
            here = x + (image + n) * c.input.image + (row + t) * (c.rows.stride * c.input.row)
            number = (n * panel.held + t) * panel.pitch
            there = out + block * (panel.block * LINE) + number * 4
            k.call(row_of, here + block * (DEPTH * c.input.channel), k.i64(c.C) - block * DEPTH, there)
        return k

    def _pixels(self, first: Value, tile: int | Value) -> Value:
        return self.lines + (first * self.panel.block + tile) * LINE

    def _sums(self, number: int | Value) -> Value:
        return self.sums + number * 4

    def _store(self, outputs: int, width: int) -> Function:
        data = ptr(self.element)
        k = self.m.function(f"store_{len(self.m.functions)}", ptr(f32), data, data, data, i64, internal=True)
        sums, out, residual, bias, left = k.args
        lanes, epilogue = self.m.lanes(f32), Epilogue.of(self.layer)
        row = self.panel.sums_row * (LINE // 4)

        def block(f: Value, q: int | Value, length: int) -> None:
            place = f * self.c.output.channel + q
            b = epilogue.of_channels(lambda place: k.broadcast(place, lanes), bias + f)
            r = load_range(k, residual + place, lanes, 0, length) if epilogue.residual else None
            v = load_range(k, sums + f * row + q, lanes, 0, length)
            store_range(k, epilogue.apply(k, v, b, r), out + place, 0, length)

        whole = outputs // lanes * lanes
        with k.loop(0, k.min(left, width * TILE_ROWS)) as f:
            if whole:
                with k.loop(0, whole, lanes) as q:
                    block(f, q, lanes)
            if outputs > whole:
                block(f, whole, outputs - whole)
        return k


def emit(
    instruction_set: str, matrix_unit: str | None, layer: ConvLayer, blockings: tuple[MatrixBlocking, ...]
) -> Module:
    """`run` and `pack` of a forward pass or a gradient of the input."""
    return kernels.emit(instruction_set, matrix_unit, layer, blockings, emit_block, PointwiseWriter)
