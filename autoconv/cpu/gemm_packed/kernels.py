"""The kernels of `gemm.packed`: a panel of pixels copied tile by tile, and multiplied by blocks of filters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, Value, Var, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.lines import TileLines
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.epilogue import Epilogue, emit_store
from autoconv.cpu.common.lanes import deinterleaved
from autoconv.cpu.common.packing import emit_pack
from autoconv.cpu.common.sums import channels_of_sum, each_sum, sums_of
from autoconv.cpu.gemm_packed.geometry import (
    PackedGemmBlocking,
    PlaneTiles,
    block_size,
    blocks_of,
    gathered_pitch,
    half_or_all,
    micropanel_pitch,
    panel_size,
    pixels_of,
    product,
    spreads,
    thread_bytes,
)
from autoconv.layer import ConvLayer

TOGETHER = 16  # channels copied at a time, each from its own plane
MOST_STRIDE = 4  # of the columns that are copied as vectors: each is picked from as many
FEWEST_TO_FETCH = 2  # tiles of a panel that has the time to fetch filters


class TaskWriter:
    """Writes the task: it copies a panel's pixels, and multiplies them by its part of the filters."""

    def __init__(self, m: Module, layer: ConvLayer, blocking: PackedGemmBlocking) -> None:
        self.m, self.blocking = m, blocking
        self.problem = product(layer)
        self.plane_tiles = PlaneTiles.of(self.problem, blocking.TQ, blocking.halved)
        self.epilogue = Epilogue.of(layer)
        self.element = DTYPES[layer.dtype]
        self.wide = widened(self.element)
        self.lanes = m.lanes(self.element)
        self.pitch = micropanel_pitch(self.problem, blocking.TQ, blocking.halved)
        self.gathered_pitch = gathered_pitch(blocking)
        self.vectors = blocking.TK // self.lanes
        self.tile_size = blocking.TK * blocking.TQ
        rows, columns, o = self.problem.rows, self.problem.columns, self.problem.output
        self.lines = range(0, blocking.TQ * columns.stride, LINE // self.element.bytes)  # that a tile reads
        strides = o.channel, o.row, columns.output_stride
        self.outputs = TileLines.of_tile(blocking.TK, (rows.output_stride, blocking.TQ), strides, self.element.bytes)
        self.depth = half_or_all(self.problem.C, blocking.halved)
        self.ranges = math.ceil(self.depth / blocking.BC)
        self.sum_channels = channels_of_sum(1, m.terms)
        self.adds = self.ranges > 1 or sums_of(blocking.BC, self.sum_channels) > 1
        self.spreads = spreads(self.problem)
        self.in_place = all((a.stride, a.count) == (1, a.size) for a in (rows, columns))
        apart = columns.stride <= MOST_STRIDE and not self.plane_tiles.longer
        self.in_rows = apart and columns.count % self.plane_tiles.length == 0
        self.unroll = math.gcd(m.terms, self.depth)
        self.rounds = math.ceil((self.depth - (self.ranges - 1) * blocking.BC) / self.unroll)  # of the last range
        tiles = self.problem.N * self.plane_tiles.tiles
        fewest = tiles // math.ceil(tiles / blocking.tiles)  # of a panel
        line = LINE // self.wide.bytes
        self.fetched = math.ceil(self.unroll * blocking.TK / (line * fewest)) if fewest >= FEWEST_TO_FETCH else 0

    def task(self) -> tuple[Function, int]:
        """The task, and how many there are."""
        problem, blocking, plane_tiles = self.problem, self.blocking, self.plane_tiles
        self.micros = [self._micro(length) for length in plane_tiles.lengths]
        self.stores = [self._emit_store(length) for length in plane_tiles.lengths]
        self.spread = _emit_spread(self.m, problem, self.element) if self.spreads else None
        k = self.k = self.m.function("task", *TASK, internal=True)
        context, index, thread = k.args
        types = (self.element, self.wide, *[self.element] * 3)
        x, w, self.out, self.bias, self.residual, workspace = operands(k, context, *types)
        tiles, blocks = problem.N * plane_tiles.tiles, blocks_of(problem, blocking.TK, blocking.halved)
        panels = math.ceil(tiles / blocking.tiles)
        chunk, rest = index % blocking.chunks, index // blocking.chunks
        panel, self.group = rest % panels, rest // panels
        first = panel * tiles // panels
        self._note(first, (panel + 1) * tiles // panels - first)
        own = workspace + thread * thread_bytes(problem, blocking, self.wide.bytes)
        self.micropanels, copied = k.bytes_at(own, LINE, self.wide), k.bytes_at(own, 0, i64)
        self.behind = self.micropanels + panel_size(problem, blocking)
        self.packed = w
        with k.if_(k.load(copied).ne(rest)):
            self._copy(x + self.group * problem.input.group)
            k.store(rest, copied)
        self.sums = self._room()
        with k.loop(chunk * blocks // blocking.chunks, (chunk + 1) * blocks // blocking.chunks) as block:
            self.filters = w + (self.group * blocks + block) * block_size(problem, blocking)
            self._block(block * blocking.TK)
        return k, panels * blocking.chunks * problem.groups

    def _room(self) -> Value:
        """Where the sums lie."""
        return self.k.scratch(self.wide, self.tile_size * (self.blocking.tiles if self.ranges > 1 else 1))

    def _emit_store(self, length: int, room: int | None = None) -> Function:
        """The store of a tile of so many pixels, with room for more in the sums."""
        kept, apart = (self.wide, self.gathered_pitch) if self.spreads else (self.element, self.problem.output.channel)
        shape, strides = (1, length), (apart, length, 1)
        return emit_store(self.m, self.problem, self.epilogue, self.blocking.TK, kept, shape, strides, room)

    def _note(self, first: Value, number: Value) -> None:
        """Write down the image, first pixel and kind of length of each of a panel's tiles, and of what follows."""
        k, plane_tiles = self.k, self.plane_tiles
        self.number = number
        self.images, self.pixels, self.kinds = (k.scratch(i64, self.blocking.tiles + 1) for _ in range(3))
        with k.loop(0, number + 1) as t:
            tile = (first + t) % plane_tiles.tiles
            k.store((first + t) // plane_tiles.tiles, self.images + t)
            k.store(tile * plane_tiles.length + k.min(tile, plane_tiles.longer), self.pixels + t)
            k.store(k.select(tile < plane_tiles.longer, k.i64(0), k.i64(1)), self.kinds + t)

    def _nth(self, t: Value) -> Value:
        """A tile's first pixel, counted through all images."""
        k = self.k
        return k.load(self.images + t) * pixels_of(self.problem) + k.load(self.pixels + t)

    def _call(self, functions: list[Function], t: Value, *arguments: Value) -> None:
        """The function for a tile's length."""
        k = self.k
        if len(functions) == 1:
            k.call(functions[0], *arguments)
            return
        with k.if_(k.load(self.kinds + t).eq(0)):
            k.call(functions[0], *arguments)
        with k.else_():
            k.call(functions[1], *arguments)

    def _block(self, channel: Value) -> None:
        """A panel by a block of filters, `channel` being the first of their group."""
        k, o, blocking, sums, size = self.k, self.problem.output, self.blocking, self.sums, self.tile_size
        self.channel, self.left = channel, k.i64(self.problem.K) - channel
        self.plane = self.group * o.group + channel * o.channel
        if self.ranges == 1:
            with k.loop(0, self.number) as t:
                self._add(t, k.i64(0), sums)
                self._store(t, sums)
        else:
            with k.loop(0, self.number * size, self.lanes) as i:
                k.store(k.zero(self.wide, self.lanes), sums + i)
            with k.loop(0, self.ranges) as part, k.loop(0, self.number) as t:
                self._add(t, part, sums + t * size)
            with k.loop(0, self.number) as t:
                self._store(t, sums + t * size)
        if self.spread is not None:
            with k.loop(0, k.min(self.left, blocking.TK)) as c:
                here, there = self.behind + c * self.gathered_pitch, self.out + (self.plane + c * o.channel)
                k.call(self.spread, here, there, self._nth(k.i64(0)), self._nth(self.number))

    def _target(self, t: Value) -> Value:
        """Where a tile's outputs of the block lie, from the first output on."""
        rows, columns, o = self.problem.rows, self.problem.columns, self.problem.output
        pixel = self._place(self.k.load(self.pixels + t), rows.output_stride * o.row, columns.output_stride)
        return self.plane + self.k.load(self.images + t) * o.image + pixel

    def _add(self, t: Value, part: Value, sums: Value) -> None:
        """A part of the channels to a tile's sums; what is stored and added at the end comes while they are made.

        So do the filters of the next part, a share of them with every tile: by the first tile that multiplies them they
        would be awaited.
        """
        k, blocking = self.k, self.blocking
        start = part * blocking.BC
        count = k.min(self.problem.C - start, blocking.BC)
        micropanel = self.micropanels + t * self.pitch + start * blocking.TQ
        filters, share = self.filters + start * blocking.TK, self._share(blocking.BC)
        following = filters + (blocking.BC * blocking.TK + t * share)
        ahead = self._ahead(self._target(t), part)
        self._call(self.micros, t, micropanel, filters, following, sums, count, *ahead)

    def _ahead(self, target: Value, part: Value, wanted: bool = True) -> tuple[Value, Value, Value]:
        """What rounds fetch: where outputs and residual lie, and 1 if they do, as those of the last part."""
        k = self.k
        ends = k.select(part.eq(self.ranges - 1), k.i64(int(wanted)), k.i64(0))
        return self.out + target, self.residual + target, ends

    def _share(self, channels: int) -> int:
        """Elements of filters that are fetched while so many channels are added to a tile's sums."""
        return math.ceil(channels / self.unroll) * self.fetched * (LINE // self.wide.bytes)

    def _store(self, t: Value, sums: Value) -> None:
        """A tile's sums with their epilogue; what is to be spread, to where the panel's outputs are gathered."""
        there = self._target(t)
        target = self.behind + (self._nth(t) - self._nth(self.k.i64(0))) if self.spreads else self.out + there
        residual, bias = self.residual + there, self.bias + self.group * self.problem.K + self.channel
        self._call(self.stores, t, sums, target, residual, bias, self.left)

    def _copy(self, x: Value) -> None:
        """The pixels of a panel's tiles, `TOGETHER` channels at a time: that many planes are read in order."""
        k, problem, TQ, lanes = self.k, self.problem, self.blocking.TQ, self.lanes
        micropanels, number, images, pixels = self.micropanels, self.number, self.images, self.pixels
        longest, plane, stride = self.plane_tiles.lengths[0], self.problem.input.channel, problem.columns.stride
        vectors = math.ceil(longest / lanes) * lanes  # more than the tile's pixels are read, and written over
        beyond = math.ceil(vectors * stride / plane)
        ample = (problem.C - beyond) // TOGETHER * TOGETHER if self.in_place or self.in_rows else 0
        if ample > 0:
            with k.loop(0, ample, TOGETHER) as start, k.loop(0, number) as t:
                source = x + k.load(images + t) * problem.input.image + self._input(k.load(pixels + t)) + start * plane
                target = micropanels + t * self.pitch + start * TQ
                for c in range(TOGETHER):
                    for line in self.lines:
                        k.prefetch(source + ((c + TOGETHER) * plane + line))
                    for v in range(0, vectors, lanes):
                        first = source + (c * plane + v * stride)
                        several = [k.load(first + n * lanes, lanes) for n in range(stride)]
                        k.store(deinterleaved(k, several, stride, 0), target + (c * TQ + v))
        with k.loop(max(0, ample), problem.C, TOGETHER) as start, k.loop(0, number) as t:
            source = x + k.load(images + t) * problem.input.image
            target = micropanels + t * self.pitch
            offsets = [self._offset(k.load(pixels + t) + n) for n in range(longest)]
            with k.loop(start, k.min(start + TOGETHER, problem.C)) as channel:
                for n, offset in enumerate(offsets):
                    k.store(k.load(source + channel * plane + offset), target + channel * TQ + n)

    def _offset(self, pixel: Value) -> Value:
        """Where the input of an output pixel lies in its plane; the last one's beyond it."""
        return self._input(self.k.min(pixel, pixels_of(self.problem) - 1))

    def _input(self, pixel: Value) -> Value:
        """Where the input of one of the plane's output pixels lies."""
        rows, columns, i = self.problem.rows, self.problem.columns, self.problem.input
        return self._place(pixel, rows.stride * i.row, columns.stride * i.column)

    def _place(self, pixel: Value, row: int, column: int) -> Value:
        """Where an output pixel lies in a plane in which rows and columns are so far apart."""
        Q = self.problem.columns.count
        return pixel * column if row == Q * column else pixel // Q * row + pixel % Q * column

    def _micro(self, length: int) -> Function:
        """`function(micropanel, filters, following, sums, channels, out, residual, ends)`: a tile's sums.

        So many channels are added. Of the filters that follow it fetches a share, and where the sums end, of the lines
        of outputs.
        """
        data, stored = ptr(self.wide), ptr(self.element)
        k = self.m.function(f"micro_{length}", data, data, data, data, i64, stored, stored, i64, internal=True)
        micropanel, filters, following, sums, channels, *ahead = k.args
        places = [sums + (v * length + n) * self.lanes for n in range(length) for v in range(self.vectors)]
        if self.adds and self.ranges == 1:
            for p in places:
                k.store(k.zero(self.wide, self.lanes), p)
        with self._sums(k, length, micropanel, filters, following, channels, ahead) as acc:
            for a, p in zip(itertools.chain(*acc), places, strict=True):
                k.store(k.load(p, self.lanes) + a.get() if self.adds else a.get(), p)
        return k

    @contextmanager
    def _sums(
        self,
        k: Function,
        length: int,
        micropanel: Value,
        filters: Value,
        following: Value,
        channels: Value,
        ahead: Sequence[Value],
    ) -> Iterator[list[list[Var]]]:
        """The products of a tile, pixel by pixel: sums in registers over some channels, then over the next ones."""
        TK, TQ = self.blocking.TK, self.blocking.TQ
        out, residual, ends = ahead
        with each_sum(k, channels, self.blocking.BC, self.sum_channels) as (start, stop):
            acc = [[k.var(k.zero(self.wide, self.lanes)) for _ in range(self.vectors)] for _ in range(length)]
            with k.loop(start, stop, self.unroll) as c:
                for n in range(self.fetched):
                    line = c // self.unroll * self.fetched + n
                    k.prefetch(following + line * (LINE // self.wide.bytes), locality=2)
                with k.if_(ends.ne(0)):
                    added = residual if self.epilogue.residual else None
                    self.outputs.fetch(k, c // self.unroll, self.rounds, out, added)
                for u in range(self.unroll):
                    w = filters + (c + u) * TK
                    several = [k.load(w + v * self.lanes, self.lanes) for v in range(self.vectors)]
                    for n, row in enumerate(acc):
                        pixel = k.broadcast(micropanel + (c + u) * TQ + n, self.lanes)
                        for a, vector in zip(row, several, strict=True):
                            a.fma(pixel, vector)
            yield acc


def _emit_spread(m: Module, problem: Correlation, element: Type) -> Function:
    """`function(sums, out, first, last)`: store pixels first .. last - 1 of a channel, and the zeros that follow each.

    Pixels are counted through all images; `sums` is where the first one lies, `out` the channel in the first image.
    """
    rows, columns, o = problem.rows, problem.columns, problem.output
    wide, lanes, stride = widened(element), m.lanes(element), columns.output_stride
    k = m.function("spread", ptr(wide), ptr(element), i64, i64, internal=True)
    sums, out, first, last = k.args
    whole = min(columns.count, o.row // stride)  # pixels of a row that have all their zeros in it

    def widths(start: Value, stop: Value, write: Callable[[Value, int], None]) -> None:
        """Vectors, then at most one half of a vector, one quarter, ..."""
        for width in (lanes >> n for n in range(lanes.bit_length())):
            end = start + (stop - start) // width * width
            with k.loop(start, end, width) as i:
                write(i, width)
            start = end

    def spread(source: Value, target: Value, width: int) -> None:
        """So many pixels, and the zeros after each in its row."""
        v, zero = k.load(source, width), k.zero(wide, width)
        for start in range(0, width * stride, width):
            picks = [width if cell % stride else cell // stride for cell in range(start, start + width)]
            part = k.shuffle(v, zero, picks) if width > 1 else zero if start else v
            k.store(part, target + start)

    with k.loop(first // columns.count, (last - 1) // columns.count + 1) as row:
        before = row * columns.count
        start, stop = k.max(first - before, 0), k.min(last - before, columns.count)
        image, r = row // rows.count, row % rows.count * rows.output_stride
        source, target = sums + (before - first), out + (image * o.image + r * o.row)
        widths(start, k.min(stop, whole), lambda i, width: spread(source + i, target + i * stride, width))
        with k.if_(stop.eq(columns.count)):
            if whole < columns.count:
                k.store(k.load(source + whole), target + whole * stride)
            done, height = whole * stride + (columns.count - whole), o.channel // o.row
            end = k.min(height - r, rows.output_stride) * o.row
            widths(k.i64(done), end, lambda i, width: k.store(k.zero(wide, width), target + i))
    return k


def emit_run(m: Module, layer: ConvLayer, writer: TaskWriter) -> None:
    """`run`: the writer's tasks, once it is noted that no thread has copied of this input."""
    run = m.function("run", *RUN)
    *_, workspace = operands(run, run.args[0], DTYPES[layer.dtype])
    own = thread_bytes(writer.problem, writer.blocking, layer.accumulator.itemsize)
    with run.loop(0, writer.blocking.threads) as thread:
        run.store(run.i64(-1), run.bytes_at(workspace, thread * own, i64))
    launch(run, run.args[0], *writer.task())


def emit(instruction_set: str, layer: ConvLayer, blocking: PackedGemmBlocking) -> Module:
    """`run` and `pack`."""
    m = Module(instruction_set)
    emit_run(m, layer, TaskWriter(m, layer, blocking))
    pack = m.function("pack", *RUN)
    launch(pack, pack.args[0], *emit_pack(m, product(layer), blocking.TK, DTYPES[layer.dtype], 0))
    return m
