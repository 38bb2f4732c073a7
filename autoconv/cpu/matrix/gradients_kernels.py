"""The kernels of the gradient of the filters: what threads pack, what they multiply, what they store.

Strip after strip of outputs, all threads first write dy and x as bfloat16 parts, channel by channel; then each
multiplies blocks of both, tap by tap, and the sums stay in the workspace. Between rows of outputs dy has zeros, which
meet whatever x has there.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Value, f32, i8, i16, i32, i64, ptr
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.tiles import TILE_ROWS, WORDS
from autoconv.cpu.common.correlation import Strides
from autoconv.cpu.common.lanes import deinterleaved, within
from autoconv.cpu.common.tiles.products import PRODUCTS, emit_begin, emit_step, sums_of
from autoconv.cpu.common.tiles.split import split
from autoconv.cpu.matrix.geometry import PanelAxis
from autoconv.cpu.matrix.gradients_geometry import WgradCut
from autoconv.layer import ConvLayer


def _emit_row(m: Module, layer: ConvLayer, image: Strides, columns: PanelAxis, cut: WgradCut, apart: int) -> Function:
    """`row(source, column, channels left, out)`: up to 16 channels of a row of an image.

    The column may lie outside. In `out` the numbers of channels lie `apart`, of parts 16 times as far.
    """
    element = DTYPES[layer.dtype]
    k = m.function(f"row_{len(m.functions)}", ptr(element), i64, i64, ptr(i16), internal=True)
    source, column, left, out = k.args
    lanes, axis = m.lanes(f32), columns.axis

    def keep(v: Value, there: Value, width: int) -> None:
        for part, bits in enumerate(split(k, v, cut.parts)):
            k.store(bits, there + part * (TILE_ROWS * apart), mask=k.mask(width, lanes))

    def planes(place: int | Value, width: int) -> None:
        first = column + k.i64(place) * axis.stride
        masks = [within(k, first + n * lanes, lanes, k.i64(axis.size)) for n in range(axis.stride)]
        with k.loop(0, k.min(left, TILE_ROWS)) as channel:
            here = source + channel * image.channel + first
            vectors = [k.load(here + n * lanes, lanes, mask=mask) for n, mask in enumerate(masks)]
            keep(deinterleaved(k, vectors, axis.stride, 0), out + channel * apart + place, width)

    def pixels(place: int | Value, width: int) -> None:
        with k.loop(0, k.min(left, TILE_ROWS), lanes) as channel:
            found = []
            for n in range(lanes):
                at = column + (k.i64(place) + n) * axis.stride
                inside = k.var(k.zero(f32, lanes))
                with k.if_((at >= 0) & (at < axis.size)):
                    here = source + at * image.column + channel
                    inside.set(k.load(here, lanes, mask=k.mask(left - channel, lanes)))
                found.append(inside.get())
            for n, v in enumerate(k.transpose(found)):
                keep(v, out + (channel + n) * apart + place, width)

    block = pixels if image.channel == 1 else planes
    whole = columns.places // lanes * lanes
    if whole:
        with k.loop(0, whole, lanes) as place:
            block(place, lanes)
    if columns.places > whole:
        block(whole, columns.places - whole)
    return k


class _WgradWriter:
    """Writes the three kinds of tasks: packing, multiplying, and storing."""

    def __init__(self, m: Module, layer: ConvLayer, cut: WgradCut) -> None:
        self.m, self.layer, self.cut = m, layer, cut
        self.element = DTYPES[layer.dtype]

    def emit(self) -> None:
        """`run`."""
        cut, c = self.cut, self.cut.c
        run = self.m.function("run", *RUN)
        pack, multiply, store = self._pack(), self._multiply(), self._store()
        *_, workspace = operands(run, run.args[0], self.element)
        images, rows, columns = cut.strips
        filters, channels = cut.tiles
        blocks = -(-filters // cut.filters) * -(-channels // cut.channels)
        with run.loop(0, images * rows * columns) as strip:
            run.store(strip, run.bits(workspace, ptr(i64)))
            launch(run, run.args[0], pack, c.groups * (filters + channels))
            launch(run, run.args[0], multiply, c.groups * blocks)
        launch(run, run.args[0], store, c.groups * c.K)

    def _strip(self, k: Function, workspace: Value) -> tuple[Value, Value, Value]:
        """The first image, row and column of the strip at hand."""
        _, rows, columns = self.cut.strips
        strip, b = k.load(k.bits(workspace, ptr(i64))), self.cut.b
        return (
            strip // (rows * columns) * b.images,
            strip // columns % rows * b.rows,
            strip % columns * b.columns,
        )

    def _pack(self) -> Function:
        """16 channels of x, or 16 filters of dy, of the strip at hand."""
        cut, c, m = self.cut, self.cut.c, self.m
        fill_x = self._rows(c.input, c.C, cut.panel.rows, cut.panel.columns, cut.length)
        fill_dy = self._rows(c.output, c.K, *cut.outputs, cut.dy_row // 2)
        turn = self._turn()
        k = m.function("pack_strip", *TASK, internal=True)
        context, index, thread = k.args
        x, dy, _, _, _, workspace = operands(k, context, self.element)
        filters, channels = cut.tiles
        at_x, at_dy, _, at_rows = cut.places
        place = self._strip(k, workspace)
        with k.if_(index < c.groups * channels):
            group, tile = index // channels, index % channels
            rows = workspace + at_rows + thread * cut.rows_bytes
            k.call(fill_x, x + group * c.input.group, *place, tile * TILE_ROWS, rows)
            k.call(turn, rows, workspace + at_x + index * (cut.parts * cut.x_part))
        with k.else_():
            number = index - c.groups * channels
            group, tile = number // filters, number % filters
            out = workspace + at_dy + number * (cut.parts * cut.dy_part)
            k.call(fill_dy, dy + group * c.output.group, *place, tile * TILE_ROWS, out)
        return k

    def _rows(self, image: Strides, extent: int, rows: PanelAxis, columns: PanelAxis, length: int) -> Function:
        """`fill(source, image, row, column, channel, out)`: zero, but for what lies inside the image.

        `[component][part][16 channels][length]`; rows of x that the next strip sees are there, too.
        """
        cut, c, m = self.cut, self.cut.c, self.m
        fill_row = _emit_row(m, self.layer, image, columns, cut, length)
        k = m.function(f"fill_{len(m.functions)}", ptr(self.element), i64, i64, i64, i64, ptr(i8), internal=True)
        source, n0, first_row, first_column, channel, out = k.args
        lanes, size = m.lanes(f32), cut.parts * TILE_ROWS * length * 2
        components = len(rows.residues) * len(columns.residues)
        with k.loop(0, components * size // 4, lanes) as word:
            k.store(k.zero(i32, lanes), k.bits(out, ptr(i32)) + word)
        source = source + channel * image.channel
        images = k.min(k.i64(c.N) - n0, cut.b.images)
        with k.loop(0, images) as n, k.loop(0, rows.places) as t:
            for i, down in enumerate(rows.residues):
                h = (first_row + t) * rows.axis.stride + (rows.axis.offset + down)
                with k.if_((h >= 0) & (h < rows.axis.size)):
                    for j, across in enumerate(columns.residues):
                        number = (n * cut.panel.held + t) * cut.panel.pitch
                        there = k.bytes_at(out, (i * len(columns.residues) + j) * size, i16) + number
                        column = first_column * columns.axis.stride + (columns.axis.offset + across)
                        here = source + (n0 + n) * image.image + h * image.row
                        k.call(fill_row, here, column, k.i64(extent) - channel, there)
        return k

    def _turn(self) -> Function:
        """`turn(rows, out)`: rows of 16 channels to lines of pairs, `[part][component][copy][pair][channel]`."""
        cut, lanes = self.cut, self.m.lanes(f32)
        k = self.m.function("turn", ptr(i8), ptr(i8), internal=True)
        rows, out = k.args
        row = cut.length * 2
        with k.loop(0, cut.components) as component, k.loop(0, cut.parts) as part, k.loop(0, cut.copies) as copy:
            source = rows + (component * cut.parts + part) * (TILE_ROWS * row) + copy * 2
            target = out + part * cut.x_part + (component * cut.copies + copy) * cut.copy_bytes
            with k.loop(0, cut.length // 2, lanes) as pair, k.loop(0, WORDS, lanes) as channel:
                block = [
                    k.load(k.bytes_at(source, (channel + n) * row, i32) + pair, lanes, align=2) for n in range(lanes)
                ]
                for n, line in enumerate(k.transpose(block)):
                    k.store(line, k.bytes_at(target, (pair + n) * LINE, i32) + channel)
        return k

    def _multiply(self) -> Function:
        """A block of filters by one of channels, through every tap."""
        cut = self.cut
        filters, channels = cut.tiles
        sides = [[n for n in (2, 1) if (tiles >= 2 if n == 2 else tiles % 2)] for tiles in cut.tiles]
        blocks = {(f, g): self._block(f, g) for f in sides[0] for g in sides[1]}
        k = self.m.function("multiply", *TASK, internal=True)
        context, index, _ = k.args
        k.configure_tiles()
        *_, workspace = operands(k, context, self.element)
        at_x, at_dy, at_sums, _ = cut.places
        down, across = -(-filters // cut.filters), -(-channels // cut.channels)
        group, rest = index // (down * across), index % (down * across)
        first_filter, first_channel = rest // across * cut.filters, rest % across * cut.channels
        add = k.load(k.bits(workspace, ptr(i64)))
        skips = [(comp * cut.copies + skip % 2) * cut.copy_bytes + skip // 2 * LINE for comp, skip in cut.taps]
        table = k.module.table(k, i64, skips)
        sums = workspace + at_sums + group * cut.sums_bytes
        x = workspace + at_x + group * (channels * cut.parts * cut.x_part)
        dy = workspace + at_dy + group * (filters * cut.parts * cut.dy_part)

        def each(first: Value, together: int, tiles: int) -> Iterable[tuple[int, Value]]:
            """Pairs of tiles, and the last one where it is alone."""
            last = k.min(first + together, tiles)
            if tiles >= 2:
                with k.loop(first, k.min(last, tiles // 2 * 2), 2) as tile:
                    yield 2, tile
            if tiles % 2:
                with k.if_(last.eq(tiles)):
                    yield 1, k.i64(tiles - 1)

        for f, filter_ in each(first_filter, cut.filters, filters):
            for g, channel in each(first_channel, cut.channels, channels):
                with k.loop(0, len(cut.taps)) as tap:
                    here = dy + filter_ * (cut.parts * cut.dy_part)
                    there = x + channel * (cut.parts * cut.x_part) + k.load(table + tap)
                    tile = (tap * filters + filter_) * (TILE_ROWS * channels) + channel
                    k.call(blocks[f, g], here, there, sums + tile * (TILE_ROWS * 4), add)
        k.release_tiles()
        return k

    def _block(self, filters: int, channels: int) -> Function:
        """`block(dy, x, sums, add)`: one or two tiles of filters by as many of channels, over a strip's outputs."""
        cut = self.cut
        k = self.m.function(f"block_{filters}x{channels}", ptr(i8), ptr(i8), ptr(i8), i64, internal=True)
        dy, x, sums, add = k.args
        pitch = cut.tiles[1] * TILE_ROWS * 4
        tiles = filters, channels
        places = {tile: sums + f * TILE_ROWS * pitch + g * TILE_ROWS * 4 for (f, g), tile in sums_of(tiles).items()}
        emit_begin(k, places, pitch, add)
        with k.loop(0, cut.steps) as step:
            emit_step(
                k,
                PRODUCTS[cut.b.products],
                tiles,
                lambda part, f: dy + (f * cut.parts + part) * cut.dy_part + step * LINE,
                lambda part, g: x + (g * cut.parts + part) * cut.x_part + step * (TILE_ROWS * LINE),
                (cut.dy_row, LINE),
            )
        for tile, place in places.items():
            k.tile_store(tile, place, pitch)
        return k

    def _store(self) -> Function:
        """A filter's gradient, from the sums of all taps."""
        cut, c = self.cut, self.cut.c
        R, S, lanes = len(c.rows.taps), len(c.columns.taps), self.m.lanes(f32)
        filters, channels = cut.tiles
        k = self.m.function("store", *TASK, internal=True)
        context, index, _ = k.args
        _, _, dw, _, _, workspace = operands(k, context, self.element)
        group, number = index // c.K, index % c.K
        sums = k.bytes_at(workspace, group * cut.sums_bytes + cut.places[2], f32) + number * (channels * TILE_ROWS)
        dw = dw + group * c.filters.group + number * c.filters.k
        with k.loop(0, R) as r, k.loop(0, S) as s:
            source = sums + (r * S + s) * (filters * TILE_ROWS * channels * TILE_ROWS)
            target = dw + r * c.filters.r + s * c.filters.s
            if c.filters.c == 1:
                with k.loop(0, c.C, lanes) as channel:
                    mask = None if c.C % lanes == 0 else k.mask(k.i64(c.C) - channel, lanes)
                    k.store(k.load(source + channel, lanes, mask=mask), target + channel, mask=mask)
            else:
                with k.loop(0, c.C) as channel:
                    k.store(k.load(source + channel), target + channel * c.filters.c)
        return k


def emit(instruction_set: str, matrix_unit: str, layer: ConvLayer, cut: WgradCut) -> Module:
    """`run` of a gradient of the filters: operand a is x, b is dy, out is dw."""
    m = Module(instruction_set, matrix_unit=matrix_unit)
    _WgradWriter(m, layer, cut).emit()
    return m
