"""Packing for tiles: a strip pixel by pixel in lines of 32 channels, and the filters in pairs of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Value, i8, i32, i64, ptr
from autoconv.cpu.codegen.launch import TASK, operands
from autoconv.cpu.codegen.tiles import TILE_BYTES, TILE_ROWS, WORDS
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.lanes import deinterleaved, within
from autoconv.cpu.common.packing import tap_place
from autoconv.cpu.common.tiles.products import DEPTH, parts_of
from autoconv.cpu.common.tiles.split import split_pairs
from autoconv.cpu.matrix.geometry import Panel, filter_tiles, packed_bytes
from autoconv.layer import ConvLayer

AHEAD = 2  # rows of outputs: so far ahead pixels are fetched


def emit_panel(m: Module, layer: ConvLayer, panel: Panel) -> Function:
    """`fill(x, first image, row, column of the strip, panel)`, x being the first channel of a group."""
    c, lines = panel.c, panel
    element = DTYPES[layer.dtype]
    parts = parts_of(panel.b.products)
    fill_row = _emit_row(m, layer, panel)
    k = m.function(f"fill_{len(m.functions)}", ptr(element), i64, i64, i64, ptr(i8), internal=True)
    x, image, row, column, out = k.args
    with k.loop(0, panel.b.images) as n, k.loop(0, panel.blocks) as block:
        left = k.i64(c.C) - block * DEPTH
        here = x + (image + n) * c.input.image + block * (DEPTH * c.input.channel)
        for i, down in enumerate(lines.rows.residues):
            with k.loop(0, panel.held) as t:
                h = (row + t) * c.rows.stride + (c.rows.offset + down)
                for j, across in enumerate(lines.columns.residues):
                    component = (i * len(lines.columns.residues) + j) * panel.component
                    there = out + (block * panel.block + (n * panel.held + t) * panel.pitch + component) * LINE
                    with k.if_((h >= 0) & (h < c.rows.size)):
                        first = column * c.columns.stride + (c.columns.offset + across)
                        k.call(fill_row, here + h * c.input.row, first, left, there)
                    with k.else_(), k.loop(0, panel.columns.places) as place:
                        _clear(k, there + place * LINE, panel, parts)
    return k


def _clear(k: Function, line: Value, panel: Panel, parts: int) -> None:
    """A pixel of padding."""
    lanes = k.module.lanes(DTYPES["float32"])
    for part in range(parts):
        there = k.bytes_at(line, part * panel.part * LINE, i32)
        for word in range(0, WORDS, lanes):
            k.store(k.zero(i32, lanes), there + word)


def _emit_row(m: Module, layer: ConvLayer, panel: Panel) -> Function:
    """`row(x, column, channels left, out)`: a component's places, from a column that may lie outside."""
    element = DTYPES[layer.dtype]
    k = m.function(f"row_{len(m.functions)}", ptr(element), i64, i64, ptr(i8), internal=True)
    if panel.c.input.channel == 1:
        _channels_last(k, panel)
    else:
        _channels_first(k, panel)
    return k


def _channels_first(k: Function, panel: Panel) -> None:
    """Vectors of pixels of two channels, made into pairs and transposed; channels that do not exist repeat the last."""
    x, column, left, out = k.args
    c, lanes, parts = panel.c, k.module.lanes(DTYPES["float32"]), parts_of(panel.b.products)
    stride, size = c.columns.stride, c.columns.size

    def block(place: Value, first: Value, masks: Sequence[Value | None]) -> None:
        def pixels(channel: Value) -> Value:
            start = x + k.min(channel, left - 1) * c.input.channel + first
            for n in range(stride):
                k.prefetch(start + n * lanes + AHEAD * c.rows.stride * c.input.row)
            vectors = [k.load(start + n * lanes, lanes, mask=mask) for n, mask in enumerate(masks)]
            return deinterleaved(k, vectors, stride, 0)

        with k.loop(0, WORDS, lanes) as pair:
            rows = [split_pairs(k, pixels((pair + n) * 2), pixels((pair + n) * 2 + 1), parts) for n in range(lanes)]
            for part in range(parts):
                there = k.bytes_at(out, place * LINE + part * panel.part * LINE, i32) + pair
                for n, line in enumerate(k.transpose([row[part] for row in rows])):
                    k.store(line, there + n * WORDS)

    with k.loop(0, panel.columns.places, lanes) as place:
        first = column + place * stride
        with k.if_((first >= 0) & (first <= size - stride * lanes)):
            block(place, first, [None] * stride)
        with k.else_():
            block(place, first, [within(k, first + n * lanes, lanes, k.i64(size)) for n in range(stride)])


def _channels_last(k: Function, panel: Panel) -> None:
    """Pixel by pixel, the even and the odd channels of two vectors."""
    x, column, left, out = k.args
    c, lanes, parts = panel.c, k.module.lanes(DTYPES["float32"]), parts_of(panel.b.products)
    with k.loop(0, panel.columns.places) as place:
        at, line = column + place * c.columns.stride, out + place * LINE
        with k.if_((at >= 0) & (at < c.columns.size)):
            pixel = x + at * c.input.column
            for first in range(0, DEPTH, 2 * lanes):
                starts = first, first + lanes
                masks = [None if c.C % DEPTH == 0 else k.mask(left - start, lanes) for start in starts]
                low, high = (k.load(pixel + s, lanes, mask=mask) for s, mask in zip(starts, masks, strict=True))
                even, odd = (k.shuffle(low, high, range(n, 2 * lanes, 2)) for n in range(2))
                for part, pairs in enumerate(split_pairs(k, even, odd, parts)):
                    k.store(pairs, k.bytes_at(line, part * panel.part * LINE, i32) + first // 2)
        with k.else_():
            _clear(k, line, panel, parts)


def emit_filters(m: Module, layer: ConvLayer, c: Correlation, products: int, packed_at: int) -> tuple[Function, int]:
    """The task that packs a tile of filters, and how many there are.

    Row i of a tile holds channels 2i and 2i + 1 of 16 filters. Channels that do not exist are zero; of filters that do
    not exist, no sum is stored.
    """
    element = DTYPES[layer.dtype]
    lanes, parts = m.lanes(DTYPES["float32"]), parts_of(products)
    R, S = len(c.rows.taps), len(c.columns.taps)
    tiles = filter_tiles(c)
    k = m.function(f"pack_{len(m.functions)}", *TASK, internal=True)
    context, index, _ = k.args
    w, _, packed = operands(k, context, element, element, i8, element, element)[:3]
    group, tile = index // tiles, index % tiles
    width = k.min(k.i64(tiles) - (tile & -2), 2)
    blocks = -(-c.C // DEPTH)
    packed = packed + packed_at + group * (packed_bytes(c, products) // c.groups)
    packed = packed + ((tile & -2) * (blocks * R * S * parts) + (tile & 1)) * TILE_BYTES
    w = w + group * c.filters.group
    first = tile * TILE_ROWS

    def channel_of(channel: Value, vector: int, at: Value) -> Value:
        """A vector of filters; zero beyond the last channel."""
        here = w + at + k.min(channel, c.C - 1) * c.filters.c
        if c.filters.k == 1:
            v = k.load(here + first + vector, lanes, mask=k.mask(k.i64(c.K - vector) - first, lanes))
        else:
            v = gathered(k, lambda lane: here + k.min(first + vector + lane, c.K - 1) * c.filters.k, lanes)
        return v if c.C % DEPTH == 0 else k.select(channel < c.C, v, k.zero(DTYPES["float32"], lanes))

    with k.loop(0, blocks) as block, k.loop(0, R) as r, k.loop(0, S) as s:
        at = k.i64(tap_place(c.rows, r) * c.filters.r + tap_place(c.columns, s) * c.filters.s)
        step = ((block * R + r) * S + s) * parts
        with k.loop(0, WORDS) as pair:
            channel = block * DEPTH + pair * 2
            for vector in range(0, TILE_ROWS, lanes):
                even, odd = (channel_of(channel + n, vector, at) for n in range(2))
                for part, pairs in enumerate(split_pairs(k, even, odd, parts)):
                    there = k.bytes_at(packed, (step + part) * width * TILE_BYTES, i32)
                    k.store(pairs, there + pair * WORDS + vector)
    return k, c.groups * tiles


def gathered(k: Function, place: Callable[[int], Value], lanes: int) -> Value:
    """Elements from wherever they are."""
    v = k.zero(DTYPES["float32"], lanes)
    for lane in range(lanes):
        v = k.insert(v, k.load(place(lane)), lane)
    return v
