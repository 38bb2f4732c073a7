"""1x1 convolution as a matrix product of packed operands, for channels in planes.

Lanes are output channels and pixels are broadcast, as in `direct`; but a plane is cut into tiles of a few pixels,
and every tile's pixels are copied next to one another, channel after channel: one line of the cache then holds
several channels of a tile where in place it holds a part of one, and a task's tiles are read from the second-level
cache in order, by every block of filters. (The packing of Goto and van de Geijn, doi:10.1145/1356052.1356053, with
filters in the first-level cache.)

The gradient of the input of a layer with strides is such a product too, with zeros between its pixels: what a block of
filters makes of a strip is gathered first, and then spread over the rows of the image, each written in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Params
from autoconv.cpu import compiler
from autoconv.cpu.device import CPU
from autoconv.cpu.direct_pack import emit_pack, packed_size
from autoconv.cpu.generated import CALL, GeneratedAlgorithm
from autoconv.cpu.ir import DTYPES, LINE, Function, Module, Type, Value, i64, ptr, widened
from autoconv.cpu.pieces import Correlation, Tail, correlations, emit_store
from autoconv.cpu.pool import RUN, TASK, launch, operands
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.device import Device

TILES = {"avx512": (2, 14), "avx2": (2, 6), "generic": (2, 5)}  # vectors of channels by pixels
TOGETHER = 16  # channels copied at a time, each from its own plane
SUMS = 32 * 1024  # bytes of a task's sums, where they go over some channels at a time
MOST_TILES = 256  # in a task: what is noted of each lies on the stack
MOST_STRIDE = 8  # of a gradient: the zeros after a pixel are written out


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


class _Cut(NamedTuple):
    """A plane's pixels as tiles of almost equal length: `longer` of `length` + 1, then the others."""

    tiles: int
    length: int
    longer: int

    @classmethod
    def of(cls, problem: Correlation, BQ: int) -> _Cut:
        pixels = _pixels(problem)
        tiles = math.ceil(pixels / BQ)
        return cls(tiles, *divmod(pixels, tiles))

    @property
    def lengths(self) -> list[int]:
        """Those that occur, the longest first."""
        return [self.length + 1, self.length] if self.longer else [self.length]


def _product(layer: ConvLayer) -> Correlation:
    """The layer's one correlation with a tap; the others of a strided gradient, which are zero, come after it."""
    return correlations(layer)[0]


def _pixels(problem: Correlation) -> int:
    return problem.rows.count * problem.columns.count


def _spreads(problem: Correlation) -> bool:
    """Whether there are zeros between the outputs."""
    return (problem.rows.stride, problem.columns.stride) != (1, 1)


def _apart(elements: int) -> int:
    """Elements from one line of so many to the next: not a power of two, which would share few sets of a cache."""
    return -(-elements // 16) * 16 + 16


def _pitch(problem: Correlation, BQ: int) -> int:
    """Elements from one copied tile to the next."""
    return _apart(problem.C * BQ)


def _gathered_pitch(shape: Shape) -> int:
    """Elements from one channel's outputs to the next one's, where a strip's are gathered."""
    return _apart(shape.strip * shape.BQ)


def _thread_bytes(problem: Correlation, shape: Shape, itemsize: int) -> int:
    """A thread's part of the workspace: a line for the number of the strip that it holds, and the strip's tiles.

    Behind them a block's outputs, where they are to be spread.
    """
    gathered = shape.BK * _gathered_pitch(shape) if _spreads(problem) else 0
    return LINE + (shape.strip * _pitch(problem, shape.BQ) + gathered) * itemsize


class _Writer:
    """Writes the task: it copies a strip's pixels, and multiplies them by its part of the filters."""

    def __init__(self, m: Module, layer: ConvLayer, shape: Shape) -> None:
        self.m, self.shape = m, shape
        self.problem = _product(layer)
        self.cut = _Cut.of(self.problem, shape.BQ)
        self.tail = Tail.of(layer)
        self.element = DTYPES[layer.dtype]
        self.wide = widened(self.element)
        self.lanes = m.lanes(self.element)
        self.pitch = _pitch(self.problem, shape.BQ)
        self.spreads = _spreads(self.problem)
        self.in_place = all((a.step, a.count) == (1, a.size) for a in (self.problem.rows, self.problem.columns))

    def task(self) -> tuple[Function, int]:
        """The task, and how many there are."""
        problem, shape, cut, o = self.problem, self.shape, self.cut, self.problem.output
        micros = [self._micro(length) for length in cut.lengths]
        kept, pitch = (self.wide, _gathered_pitch(shape)) if self.spreads else (self.element, o.channel)
        stores = [emit_store(self.m, problem, self.tail, shape.BK, kept, (1, n), (pitch, n, 1)) for n in cut.lengths]
        spread = _emit_spread(self.m, problem, self.element) if self.spreads else None
        k = self.k = self.m.function("task", *TASK, internal=True)
        context, index, thread = k.args
        types = (self.element, self.wide, *[self.element] * 3)
        x, w, out, bias, residual, workspace = operands(k, context, *types)
        tiles, blocks = problem.N * cut.tiles, math.ceil(problem.K / shape.BK)
        strips = math.ceil(tiles / shape.strip)
        chunk, rest = index % shape.chunks, index // shape.chunks
        strip, group = rest % strips, rest // strips
        first = strip * tiles // strips
        number = (strip + 1) * tiles // strips - first
        images, pixels, kinds = (k.scratch(i64, shape.strip + 1) for _ in range(3))  # of each tile, and what follows
        with k.loop(0, number + 1) as t:
            tile = (first + t) % cut.tiles
            k.store((first + t) // cut.tiles, images + t)
            k.store(tile * cut.length + k.min(tile, cut.longer), pixels + t)
            k.store(k.select(tile < cut.longer, k.i64(0), k.i64(1)), kinds + t)
        own = workspace + thread * _thread_bytes(problem, shape, self.wide.bytes)
        panels, copied = k.bytes_at(own, LINE, self.wide), k.bytes_at(own, 0, i64)
        gathered = panels + shape.strip * self.pitch
        with k.if_(k.load(copied).ne(rest)):
            self._copy(x + group * problem.input.group, panels, number, images, pixels)
            k.store(rest, copied)

        def nth(t: Value) -> Value:
            """A tile's first pixel, counted through all images."""
            return k.load(images + t) * _pixels(problem) + k.load(pixels + t)

        def call(functions: list[Function], t: Value, *arguments: Value) -> None:
            """The function for a tile's length."""
            if len(functions) == 1:
                k.call(functions[0], *arguments)
                return
            with k.if_(k.load(kinds + t).eq(0)):
                k.call(functions[0], *arguments)
            with k.else_():
                k.call(functions[1], *arguments)

        parts = math.ceil(problem.C / shape.BC)
        size = shape.BK * shape.BQ
        sums = k.scratch(self.wide, size * (shape.strip if parts > 1 else 1))
        with k.loop(chunk * blocks // shape.chunks, (chunk + 1) * blocks // shape.chunks) as block:
            filters = w + (group * blocks + block) * (problem.C * shape.BK)
            channel = block * shape.BK
            left = k.i64(problem.K) - channel
            plane = group * o.group + channel * o.channel

            def place(t: Value) -> Value:
                pixel = self._place(k.load(pixels + t), problem.rows.stride * o.row, problem.columns.stride)
                return plane + k.load(images + t) * o.image + pixel

            def add(t: Value, part: Value, tile: Value) -> None:
                for n in range(shape.BK):  # what is stored and added at the end comes while the sums are made
                    there = place(t) + n * o.channel
                    for row in range(problem.rows.stride):
                        k.prefetch(out + (there + row * o.row), write=True)
                    if self.tail.residual:
                        k.prefetch(residual + there)
                start = part * shape.BC
                count = k.min(problem.C - start, shape.BC)
                call(micros, t, panels + t * self.pitch + start * shape.BQ, filters + start * shape.BK, tile, count)

            def store(t: Value, tile: Value) -> None:
                there = place(t)
                target = gathered + (nth(t) - nth(k.i64(0))) if self.spreads else out + there
                call(stores, t, tile, target, residual + there, bias + group * problem.K + channel, left)

            if parts == 1:
                with k.loop(0, number) as t:
                    add(t, k.i64(0), sums)
                    store(t, sums)
            else:
                with k.loop(0, number * size, self.lanes) as i:
                    k.store(k.zero(self.wide, self.lanes), sums + i)
                with k.loop(0, parts) as part, k.loop(0, number) as t:
                    add(t, part, sums + t * size)
                with k.loop(0, number) as t:
                    store(t, sums + t * size)
            if spread is not None:
                with k.loop(0, k.min(left, shape.BK)) as c:
                    here, there = gathered + c * pitch, out + (plane + c * o.channel)
                    k.call(spread, here, there, nth(k.i64(0)), nth(number))
        return k, strips * shape.chunks * problem.groups

    def _copy(self, x: Value, panels: Value, number: Value, images: Value, pixels: Value) -> None:
        """The pixels of a strip's tiles, `TOGETHER` channels at a time: that many planes are read in order."""
        k, problem, BQ, lanes = self.k, self.problem, self.shape.BQ, self.lanes
        longest, plane = self.cut.lengths[0], self.problem.input.channel
        vectors = math.ceil(longest / lanes) * lanes  # more than the tile's pixels are read, and written over
        ample = max(0, (problem.C - math.ceil(vectors / plane)) // TOGETHER) * TOGETHER if self.in_place else 0
        if ample:
            with k.loop(0, ample, TOGETHER) as start, k.loop(0, number) as t:
                source = x + k.load(images + t) * problem.input.image + k.load(pixels + t) + start * plane
                target = panels + t * self.pitch + start * BQ
                for c in range(TOGETHER):
                    k.prefetch(source + (c + TOGETHER) * plane)
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
        return self._place(self.k.min(pixel, _pixels(self.problem) - 1), rows.step * i.row, columns.step * i.column)

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
        adds = self.shape.BC < self.problem.C
        zero = k.zero(self.wide, self.lanes)
        acc = [[k.var(k.load(p, self.lanes) if adds else zero) for p in row] for row in places]
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
    wide, lanes, step = widened(element), m.lanes(element), columns.stride
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
        image, r = row // rows.count, row % rows.count * rows.stride
        source, target = sums + (before - first), out + (image * o.image + r * o.row)
        pieces(start, k.min(stop, whole), lambda i, width: weave(source + i, target + i * step, width))
        with k.if_(stop.eq(columns.count)):
            if whole < columns.count:
                k.store(k.load(source + whole), target + whole * step)
            done, height = whole * step + (columns.count - whole), o.channel // o.row
            end = k.min(height - r, rows.stride) * o.row
            pieces(k.i64(done), end, lambda i, width: k.store(k.zero(wide, width), target + i))
    return k


def emit(instruction_set: str, layer: ConvLayer, shape: Shape) -> Module:
    """`run` and `pack`."""
    m = Module(instruction_set)
    problem = _product(layer)
    run = m.function("run", *RUN)
    *_, workspace = operands(run, run.args[0], DTYPES[layer.dtype])
    own = _thread_bytes(problem, shape, layer.accumulator.itemsize)  # no thread has copied of this input
    with run.loop(0, shape.threads) as thread:
        run.store(run.i64(-1), run.bytes_at(workspace, thread * own, i64))
    launch(run, run.args[0], *_Writer(m, layer, shape).task())
    pack = m.function("pack", *RUN)
    launch(pack, pack.args[0], *emit_pack(m, 0, problem, shape.BK, DTYPES[layer.dtype], 0))
    return m


def _tile(layer: ConvLayer, device: CPU) -> dict[str, int]:
    vectors, pixels = TILES[device.instruction_set]
    return {"BK": vectors * Module(device.instruction_set).lanes(DTYPES[layer.dtype]), "BQ": pixels}


def _shape(layer: ConvLayer, device: CPU, params: Params) -> Shape:
    """Tiles of a strip fill half of the second-level cache, a block's filters half of the first."""
    problem = _product(layer)
    BK, BQ = int(params["BK"]), int(params["BQ"])
    itemsize = layer.accumulator.itemsize
    parts = math.ceil(problem.C * BK * itemsize / (device.facts["l1_bytes"] // 2))
    unrolled = Module(device.instruction_set).terms
    BC = math.ceil(problem.C / (parts * unrolled)) * unrolled
    tiles = problem.N * _Cut.of(problem, BQ).tiles
    most = SUMS // (BK * BQ * itemsize) if parts > 1 else MOST_TILES
    fit = max(1, min(most, device.facts["l2_bytes"] // 2 // (_pitch(problem, BQ) * itemsize)))
    strips = math.ceil(tiles / fit)
    blocks = math.ceil(problem.K / BK)
    chunks = 1
    while strips * chunks * problem.groups < 8 * device.threads and chunks * 2 <= blocks:
        chunks *= 2
    return Shape(BK, BQ, BC, math.ceil(tiles / strips), chunks, device.threads)


class Pointwise(GeneratedAlgorithm):
    """Register tiles of BK channels by BQ pixels, from packed filters and copied pixels."""

    name = "pointwise"
    exact = True
    modules = "direct_pack", "pieces"

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        assert isinstance(device, CPU)
        return [_tile(layer, device)]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        if params != (tile := _tile(layer, device)):
            reasons.append(f"BK={params['BK']},BQ={params['BQ']}: allowed is BK={tile['BK']},BQ={tile['BQ']}")
        if (layer.R, layer.S) != (1, 1):
            reasons.append(f"R={layer.R}, S={layer.S}: 1x1 filters are wanted; direct takes others")
        if layer.padding != ((0, 0), (0, 0)):
            reasons.append(f"padding {layer.padding}: pixels of the border would not be copied; direct takes it")
        if layer.layout == "NHWC":
            reasons.append("NHWC: channels are neighbours already; direct reads them in place")
        if layer.direction == "wgrad":
            reasons.append("wgrad: a sum over pixels")
        if layer.depthwise:
            reasons.append(f"groups={layer.groups}: one channel in a group; depthwise has lanes for it")
        if layer.direction == "dgrad" and max(layer.stride) > MOST_STRIDE:
            stride = f"{layer.stride[0]}x{layer.stride[1]}"
            reasons.append(f"dgrad of stride {stride}: zeros are written out for strides up to {MOST_STRIDE}")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        assert isinstance(device, CPU)
        shape = _shape(layer, device, params)
        problem = _product(layer)
        return device.threads * _thread_bytes(problem, shape, layer.accumulator.itemsize)

    def packed_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        problem = _product(layer)
        return packed_size(problem, int(params["BK"])) * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        """At peak, but for what a tile's sums and a pixel's copies cost, which more channels or filters share."""
        problem = _product(layer)
        shares = 1.05 + 16 / problem.C + 8 / problem.K
        return max(shares * layer.flops / device.peak_flops(layer.dtype), layer.bytes / device.bandwidth()) + CALL

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, _shape(layer, device, params))
