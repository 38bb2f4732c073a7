"""The kernels of `gemm.packed`: a strip of pixels copied tile by tile, and multiplied by blocks of filters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, Value, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.epilogue import Epilogue, emit_store
from autoconv.cpu.common.packing import emit_pack
from autoconv.layer import ConvLayer

TOGETHER = 16  # channels copied at a time, each from its own plane


class Shape(NamedTuple):
    """How the work is cut: BK channels by BQ pixels in registers, BC channels of the sum at a time.

    A task is a strip of so many tiles by one of `chunks` parts of the filters; each of the threads keeps the strip
    that it copied last, for the next part.
    """

    BK: int
    BQ: int
    BC: int
    strip: int
    chunks: int
    threads: int


class Cut(NamedTuple):
    """A plane's pixels as tiles of almost equal length: `longer` of `length` + 1, then the others."""

    tiles: int
    length: int
    longer: int

    @classmethod
    def of(cls, problem: Correlation, BQ: int) -> Cut:
        pixels = _pixels(problem)
        tiles = math.ceil(pixels / BQ)
        return cls(tiles, *divmod(pixels, tiles))

    @property
    def lengths(self) -> list[int]:
        """Those that occur, the longest first."""
        return [self.length + 1, self.length] if self.longer else [self.length]


def product(layer: ConvLayer) -> Correlation:
    """The layer's one correlation with a tap; the others of a strided gradient, which are zero, come after it."""
    return correlations(layer)[0]


def _pixels(problem: Correlation) -> int:
    return problem.rows.count * problem.columns.count


def _spreads(problem: Correlation) -> bool:
    """Whether there are zeros between the outputs."""
    return (problem.rows.output_stride, problem.columns.output_stride) != (1, 1)


def _apart(elements: int) -> int:
    """Elements from one line of so many to the next: not a power of two, which would share few sets of a cache."""
    return -(-elements // 16) * 16 + 16


def tile_pitch(problem: Correlation, BQ: int) -> int:
    """Elements from one copied tile to the next."""
    return _apart(problem.C * BQ)


def _gathered_pitch(shape: Shape) -> int:
    """Elements from one channel's outputs to the next one's, where a strip's are gathered."""
    return _apart(shape.strip * shape.BQ)


def thread_bytes(problem: Correlation, shape: Shape, itemsize: int) -> int:
    """A thread's part of the workspace: a line for the number of the strip that it holds, and the strip's tiles.

    Behind them a block's outputs, where they are to be spread.
    """
    gathered = shape.BK * _gathered_pitch(shape) if _spreads(problem) else 0
    return LINE + (shape.strip * tile_pitch(problem, shape.BQ) + gathered) * itemsize


class _Writer:
    """Writes the task: it copies a strip's pixels, and multiplies them by its part of the filters."""

    def __init__(self, m: Module, layer: ConvLayer, shape: Shape) -> None:
        self.m, self.shape = m, shape
        self.problem = product(layer)
        self.cut = Cut.of(self.problem, shape.BQ)
        self.epilogue = Epilogue.of(layer)
        self.element = DTYPES[layer.dtype]
        self.wide = widened(self.element)
        self.lanes = m.lanes(self.element)
        self.pitch, self.gathered_pitch = tile_pitch(self.problem, shape.BQ), _gathered_pitch(shape)
        self.tile_size = shape.BK * shape.BQ
        self.lines = range(0, shape.BQ, LINE // self.element.bytes)  # a pixel of a tile in each line of the cache
        self.adds = shape.BC < self.problem.C
        self.spreads = _spreads(self.problem)
        self.in_place = all((a.stride, a.count) == (1, a.size) for a in (self.problem.rows, self.problem.columns))

    def task(self) -> tuple[Function, int]:
        """The task, and how many there are."""
        problem, shape, cut = self.problem, self.shape, self.cut
        self.micros = [self._micro(length) for length in cut.lengths]
        kept, apart = (self.wide, self.gathered_pitch) if self.spreads else (self.element, problem.output.channel)
        shapes = [((1, length), (apart, length, 1)) for length in cut.lengths]
        self.stores = [emit_store(self.m, problem, self.epilogue, shape.BK, kept, *place) for place in shapes]
        self.spread = _emit_spread(self.m, problem, self.element) if self.spreads else None
        k = self.k = self.m.function("task", *TASK, internal=True)
        context, index, thread = k.args
        types = (self.element, self.wide, *[self.element] * 3)
        x, w, self.out, self.bias, self.residual, workspace = operands(k, context, *types)
        tiles, blocks = problem.N * cut.tiles, math.ceil(problem.K / shape.BK)
        strips = math.ceil(tiles / shape.strip)
        chunk, rest = index % shape.chunks, index // shape.chunks
        strip, self.group = rest % strips, rest // strips
        first = strip * tiles // strips
        self._note(first, (strip + 1) * tiles // strips - first)
        own = workspace + thread * thread_bytes(problem, shape, self.wide.bytes)
        self.panels, copied = k.bytes_at(own, LINE, self.wide), k.bytes_at(own, 0, i64)
        self.gathered = self.panels + shape.strip * self.pitch
        with k.if_(k.load(copied).ne(rest)):
            self._copy(x + self.group * problem.input.group)
            k.store(rest, copied)
        self.sums = k.scratch(self.wide, self.tile_size * (shape.strip if self.adds else 1))
        with k.loop(chunk * blocks // shape.chunks, (chunk + 1) * blocks // shape.chunks) as block:
            self.filters = w + (self.group * blocks + block) * (problem.C * shape.BK)
            self._block(block * shape.BK)
        return k, strips * shape.chunks * problem.groups

    def _note(self, first: Value, number: Value) -> None:
        """Write down the image, first pixel and kind of length of each of a strip's tiles, and of what follows."""
        k, cut = self.k, self.cut
        self.number = number
        self.images, self.pixels, self.kinds = (k.scratch(i64, self.shape.strip + 1) for _ in range(3))
        with k.loop(0, number + 1) as t:
            tile = (first + t) % cut.tiles
            k.store((first + t) // cut.tiles, self.images + t)
            k.store(tile * cut.length + k.min(tile, cut.longer), self.pixels + t)
            k.store(k.select(tile < cut.longer, k.i64(0), k.i64(1)), self.kinds + t)

    def _nth(self, t: Value) -> Value:
        """A tile's first pixel, counted through all images."""
        k = self.k
        return k.load(self.images + t) * _pixels(self.problem) + k.load(self.pixels + t)

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
        """A strip by a block of filters, `channel` being the first of their group."""
        k, o, shape, sums, size = self.k, self.problem.output, self.shape, self.sums, self.tile_size
        self.channel, self.left = channel, k.i64(self.problem.K) - channel
        self.plane = self.group * o.group + channel * o.channel
        if not self.adds:
            with k.loop(0, self.number) as t:
                self._add(t, k.i64(0), sums)
                self._store(t, sums)
        else:
            with k.loop(0, self.number * size, self.lanes) as i:
                k.store(k.zero(self.wide, self.lanes), sums + i)
            with k.loop(0, math.ceil(self.problem.C / shape.BC)) as part, k.loop(0, self.number) as t:
                self._add(t, part, sums + t * size)
            with k.loop(0, self.number) as t:
                self._store(t, sums + t * size)
        if self.spread is not None:
            with k.loop(0, k.min(self.left, shape.BK)) as c:
                here, there = self.gathered + c * self.gathered_pitch, self.out + (self.plane + c * o.channel)
                k.call(self.spread, here, there, self._nth(k.i64(0)), self._nth(self.number))

    def _target(self, t: Value) -> Value:
        """Where a tile's outputs of the block lie, from the first output on."""
        rows, columns, o = self.problem.rows, self.problem.columns, self.problem.output
        pixel = self._place(self.k.load(self.pixels + t), rows.output_stride * o.row, columns.output_stride)
        return self.plane + self.k.load(self.images + t) * o.image + pixel

    def _add(self, t: Value, part: Value, sums: Value) -> None:
        """A part of the channels to a tile's sums; what is stored and added at the end comes while they are made."""
        k, shape, o = self.k, self.shape, self.problem.output
        for n, line in itertools.product(range(shape.BK), self.lines):
            there = self._target(t) + (n * o.channel + line * self.problem.columns.output_stride)
            for row in range(self.problem.rows.output_stride):
                k.prefetch(self.out + (there + row * o.row), write=True)
            if self.epilogue.residual:
                k.prefetch(self.residual + there)
        start = part * shape.BC
        count = k.min(self.problem.C - start, shape.BC)
        panel = self.panels + t * self.pitch + start * shape.BQ
        self._call(self.micros, t, panel, self.filters + start * shape.BK, sums, count)

    def _store(self, t: Value, sums: Value) -> None:
        """A tile's sums with their epilogue; what is to be spread, to where the strip's outputs are gathered."""
        there = self._target(t)
        target = self.gathered + (self._nth(t) - self._nth(self.k.i64(0))) if self.spreads else self.out + there
        residual, bias = self.residual + there, self.bias + self.group * self.problem.K + self.channel
        self._call(self.stores, t, sums, target, residual, bias, self.left)

    def _copy(self, x: Value) -> None:
        """The pixels of a strip's tiles, `TOGETHER` channels at a time: that many planes are read in order."""
        k, problem, BQ, lanes = self.k, self.problem, self.shape.BQ, self.lanes
        panels, number, images, pixels = self.panels, self.number, self.images, self.pixels
        longest, plane = self.cut.lengths[0], self.problem.input.channel
        vectors = math.ceil(longest / lanes) * lanes  # more than the tile's pixels are read, and written over
        ample = max(0, (problem.C - math.ceil(vectors / plane)) // TOGETHER) * TOGETHER if self.in_place else 0
        if ample:
            with k.loop(0, ample, TOGETHER) as start, k.loop(0, number) as t:
                source = x + k.load(images + t) * problem.input.image + k.load(pixels + t) + start * plane
                target = panels + t * self.pitch + start * BQ
                for c in range(TOGETHER):
                    for line in self.lines:
                        k.prefetch(source + ((c + TOGETHER) * plane + line))
                    for v in range(0, vectors, lanes):
                        k.store(k.load(source + (c * plane + v), lanes), target + (c * BQ + v))
        with k.loop(ample, problem.C, TOGETHER) as start, k.loop(0, number) as t:
            source = x + k.load(images + t) * problem.input.image
            target = panels + t * self.pitch
            offsets = [self._offset(k.load(pixels + t) + n) for n in range(longest)]
            with k.loop(start, k.min(start + TOGETHER, problem.C)) as channel:
                for n, offset in enumerate(offsets):
                    k.store(k.load(source + channel * plane + offset), target + channel * BQ + n)

    def _offset(self, pixel: Value) -> Value:
        """Where the input of an output pixel lies in its plane; the last one's beyond it."""
        rows, columns, i = self.problem.rows, self.problem.columns, self.problem.input
        return self._place(self.k.min(pixel, _pixels(self.problem) - 1), rows.stride * i.row, columns.stride * i.column)

    def _place(self, pixel: Value, row: int, column: int) -> Value:
        """Where an output pixel lies in a plane in which rows and columns are so far apart."""
        Q = self.problem.columns.count
        return pixel * column if row == Q * column else pixel // Q * row + pixel % Q * column

    def _micro(self, length: int) -> Function:
        """`function(panel, filters, sums, channels)`: add so many channels to a tile's sums."""
        BK, BQ = self.shape.BK, self.shape.BQ
        data = ptr(self.wide)
        k = self.m.function(f"micro_{length}", data, data, data, i64, internal=True)
        panel, filters, sums, channels = k.args
        vectors = BK // self.lanes
        places = [[sums + (v * length + n) * self.lanes for v in range(vectors)] for n in range(length)]
        zero = k.zero(self.wide, self.lanes)
        acc = [[k.var(k.load(p, self.lanes) if self.adds else zero) for p in row] for row in places]
        unroll = math.gcd(self.m.terms, self.problem.C)
        with k.loop(0, channels, unroll) as c:
            for u in range(unroll):
                w = filters + (c + u) * BK
                several = [k.load(w + v * self.lanes, self.lanes) for v in range(vectors)]
                for n, row in enumerate(acc):
                    pixel = k.broadcast(panel + (c + u) * BQ + n, self.lanes)
                    for a, vector in zip(row, several, strict=True):
                        a.fma(pixel, vector)
        for row, there in zip(acc, places, strict=True):
            for a, p in zip(row, there, strict=True):
                k.store(a.get(), p)
        return k


def _emit_spread(m: Module, problem: Correlation, element: Type) -> Function:
    """`function(sums, out, first, last)`: store pixels first .. last - 1 of a channel, and the zeros that follow each.

    Pixels are counted through all images; `sums` is where the first one lies, `out` the channel in the first image.
    """
    rows, columns, o = problem.rows, problem.columns, problem.output
    wide, lanes, step = widened(element), m.lanes(element), columns.output_stride
    k = m.function("spread", ptr(wide), ptr(element), i64, i64, internal=True)
    sums, out, first, last = k.args
    whole = min(columns.count, o.row // step)  # pixels of a row that have all their zeros in it

    def pieces(start: Value, stop: Value, write: Callable[[Value, int], None]) -> None:
        """Vectors, then at most one half of a vector, one quarter, ..."""
        for width in (lanes >> n for n in range(lanes.bit_length())):
            end = start + (stop - start) // width * width
            with k.loop(start, end, width) as i:
                write(i, width)
            start = end

    def weave(source: Value, target: Value, width: int) -> None:
        """So many pixels, and the zeros after each in its row."""
        v, zero = k.load(source, width), k.zero(wide, width)
        for start in range(0, width * step, width):
            picks = [width if cell % step else cell // step for cell in range(start, start + width)]
            piece = k.shuffle(v, zero, picks) if width > 1 else zero if start else v
            k.store(piece, target + start)

    with k.loop(first // columns.count, (last - 1) // columns.count + 1) as row:
        before = row * columns.count
        start, stop = k.max(first - before, 0), k.min(last - before, columns.count)
        image, r = row // rows.count, row % rows.count * rows.output_stride
        source, target = sums + (before - first), out + (image * o.image + r * o.row)
        pieces(start, k.min(stop, whole), lambda i, width: weave(source + i, target + i * step, width))
        with k.if_(stop.eq(columns.count)):
            if whole < columns.count:
                k.store(k.load(source + whole), target + whole * step)
            done, height = whole * step + (columns.count - whole), o.channel // o.row
            end = k.min(height - r, rows.output_stride) * o.row
            pieces(k.i64(done), end, lambda i, width: k.store(k.zero(wide, width), target + i))
    return k


def emit(instruction_set: str, layer: ConvLayer, shape: Shape) -> Module:
    """`run` and `pack`."""
    m = Module(instruction_set)
    problem = product(layer)
    run = m.function("run", *RUN)
    *_, workspace = operands(run, run.args[0], DTYPES[layer.dtype])
    own = thread_bytes(problem, shape, layer.accumulator.itemsize)  # no thread has copied of this input
    with run.loop(0, shape.threads) as thread:
        run.store(run.i64(-1), run.bytes_at(workspace, thread * own, i64))
    launch(run, run.args[0], *_Writer(m, layer, shape).task())
    pack = m.function("pack", *RUN)
    launch(pack, pack.args[0], *emit_pack(m, 0, problem, shape.BK, DTYPES[layer.dtype], 0))
    return m
