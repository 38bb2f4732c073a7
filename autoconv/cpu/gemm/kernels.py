"""The kernels of `gemm`: the image read in place or by strips, and the packing of filters."""

from __future__ import annotations

import itertools

from autoconv.cpu.codegen.ir import DTYPES, LINE, VECTOR_BYTES, Function, Module, Value, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.rows import launch_streaming, split
from autoconv.cpu.gemm.strips import Strips, emit_strips
from autoconv.cpu.gemm.tile import Part, Shape, Tile, chunks_of, each_block, odd_pixels, tiles_of
from autoconv.layer import ConvLayer

SUMS = 32 * 1024  # bytes of a task's sums, where there are several parts


def packed_elements(layer: ConvLayer) -> int:
    """Filters as `groups, K / KB, C, R, S, KB`; the last block is as narrow as K leaves it."""
    return layer.K * (layer.C // layer.groups) * layer.R * layer.S


def emit(instruction_set: str, layer: ConvLayer, shape: Shape) -> Module:
    """`run` and `pack`."""
    m = Module(instruction_set)
    (problem,) = correlations(layer)
    _emit_pack(m, layer, problem, shape.KB)
    run = m.function("run", *RUN)
    cut = _strips(m.instruction_set, layer, shape)

    def launch_one(nt: bool) -> None:
        name, one = "stream" if nt else "task", shape._replace(nt=nt)
        if cut is None:
            launch(run, run.args[0], *_InPlace(m, name, layer, problem, one).task())
        else:
            launch(run, run.args[0], *emit_strips(m, name, layer, problem, one, cut))

    if shape.nt:
        launch_streaming(run, operands(run, run.args[0], DTYPES[layer.dtype])[2], launch_one)
    else:
        launch_one(False)
    return m


def in_place(problem: Correlation) -> bool:
    """Whether outputs see the pixel they stand on, and no other."""
    return all(
        (len(axis.taps), axis.offset, axis.stride, axis.output_stride, axis.count) == (1, 0, 1, 1, axis.size)
        for axis in (problem.rows, problem.columns)
    )


def _emit_pack(m: Module, layer: ConvLayer, problem: Correlation, KB: int) -> None:
    """Filters as `groups, K / KB, C, R, S, KB`, in the type of the sums."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    taps = [(r, s) for r in problem.rows.taps for s in problem.columns.taps]
    task = m.function("pack_task", *TASK, internal=True)
    context, index, _ = task.args
    w, _, out = operands(task, context, element, element, wide)[:3]
    blocks = -(-problem.K // KB)
    group, block = index // blocks, index % blocks
    source = w + group * problem.filters.group + block * (KB * problem.filters.k)
    target = out + (group * problem.K + block * KB) * (problem.C * len(taps))

    def copy(width: int) -> None:
        with task.loop(0, problem.C) as c:
            for t, (r, s) in enumerate(taps):
                p = source + c * problem.filters.c + (r * problem.filters.r + s * problem.filters.s)
                to = target + (c * len(taps) + t) * width
                for i in range(width):
                    task.store(task.load(p + i * problem.filters.k), to + i)

    if problem.K >= KB:
        with task.if_((block + 1) * KB <= problem.K):
            copy(KB)
    if problem.K % KB:
        with task.if_((block + 1) * KB > problem.K):
            copy(problem.K % KB)
    pack = m.function("pack", *RUN)
    launch(pack, pack.args[0], task, problem.groups * blocks)


class _InPlace:
    """Writes the task that reads an image where it lies: some of its tiles by channels whose filters stay in cache."""

    def __init__(self, m: Module, name: str, layer: ConvLayer, problem: Correlation, shape: Shape) -> None:
        self.layer, self.problem, self.shape = layer, problem, shape
        self.element = DTYPES[layer.dtype]
        self.wide = widened(self.element)
        lanes = m.lanes(self.element)
        odd = 0 if shape.nt else odd_pixels(m.instruction_set, shape.KB, shape.NV)
        self.runs = split(problem.rows.count * problem.columns.count, lanes, shape.NV, odd)
        self.parts = Part.all(problem.C)
        self.sums_size = shape.KB * (shape.NV * lanes + odd)
        i, o = problem.input, problem.output
        tile = Tile(shape.KB, 0, odd, 1, i.channel, 0, (0,), o.channel, shape.nt, self.parts[0])
        self.functions = {
            part: tiles_of(m, f"{name}_{n}", layer, self.element, problem.K, self.runs, tile._replace(part=part))
            for n, part in enumerate(dict.fromkeys(self.parts))
        }
        self.k = m.function(name, *TASK, internal=True)

    def task(self) -> tuple[Function, int]:
        """The task, and how many there are."""
        k, problem, shape, i, o = self.k, self.problem, self.shape, self.problem.input, self.problem.output
        blocks = -(-problem.K // shape.KB)
        most = SUMS // (self.sums_size * self.wide.bytes) if len(self.parts) > 1 else blocks
        self.kept, chunks = chunks_of(problem, shape, self.wide.bytes, most)
        self.tiles = sum(run.times for run in self.runs)
        images = problem.N * problem.groups
        together = max(1, min(8, self.tiles * images * chunks // (8 * shape.threads)))
        spans = -(-self.tiles // together)
        context, index, _ = k.args
        x, w, self.out, bias, self.residual, _ = operands(k, context, self.element, self.wide, *[self.element] * 3)
        span, rest_index = index % spans, index // spans
        image, chunk = rest_index % images, rest_index // images
        n, group = image // problem.groups, image % problem.groups
        self.x = x + n * i.image + group * i.group
        self.place = n * o.image + group * o.group
        last_tile = k.min((span + 1) * together, self.tiles)
        self.first_block = chunk * self.kept
        self.last_block = k.min(self.first_block + self.kept, blocks)
        self.w = w + group * (problem.K * problem.C)
        self.bias = bias + group * problem.K
        self.sums = k.scratch(self.wide, self.sums_size * (self.kept if len(self.parts) > 1 else 1))
        with k.loop(span * together, last_tile) as t:
            self._tile(t)
        if shape.nt:
            k.fence()
        return k, spans * images * chunks

    def _tile(self, t: Value) -> None:
        """Tile number t, of whichever run it is."""
        k, before = self.k, 0
        for run in self.runs:
            inside = k.select(t >= before, t, k.i64(self.tiles)) < before + run.times
            with k.if_(inside):
                start, done = (t - before) * run.pixels + run.start, 0
                for part, same in itertools.groupby(self.parts):
                    channels = len(list(same)) * part.C
                    with k.loop(done, done + channels, part.C) as channel:
                        self._part(start, run.pixels, part, channel)
                    done += channels
            before += run.times

    def _part(self, start: Value, size: int, part: Part, channel: Value) -> None:
        """A part of the sums of a tile, for all blocks; each fetches its share of the pixels that come next."""
        k, problem, shape, i, o = self.k, self.problem, self.shape, self.problem.input, self.problem.output
        here = self.x + (start + channel * i.channel)
        following = self.x + (start + size) if part.ends else here + part.C * i.channel

        def add_block(block: Value, width: int) -> None:
            number = block - self.first_block
            with k.loop(number * part.C // self.kept, (number + 1) * part.C // self.kept) as c:
                self._fetch(following + c * i.channel, size)
            place = self.place + block * (shape.KB * o.channel) + start
            for row in range(width if part.ends else 0):
                if self.layer.residual:
                    self._fetch(self.residual + (place + row * o.channel), size)
                if not shape.nt:
                    self._fetch(self.out + (place + row * o.channel), size, write=True)
            first = block * shape.KB
            filters = self.w + (first * problem.C + channel * width)
            own = self.sums + number * self.sums_size if len(self.parts) > 1 else self.sums
            tail = self.out + place, self.residual + place, self.bias + first
            k.call(self.functions[part][size, width], here, filters, *tail, own)

        each_block(k, problem.K, shape.KB, self.first_block, self.last_block, add_block)

    def _fetch(self, p: Value, size: int, *, write: bool = False) -> None:
        for pixel in (*range(0, size, LINE // self.element.bytes), size - 1):
            self.k.prefetch(p + pixel, write=write)


def _strips(instruction_set: str, layer: ConvLayer, shape: Shape) -> Strips | None:
    """How the input is copied; None where the image is read in place."""
    (problem,) = correlations(layer)
    wide = widened(DTYPES[layer.dtype])
    lanes = VECTOR_BYTES[instruction_set] // wide.bytes
    return None if in_place(problem) else Strips.cut(problem, lanes, wide.bytes, shape)


def workspace_elements(instruction_set: str, layer: ConvLayer, shape: Shape) -> int:
    """Elements of every thread's strip."""
    cut = _strips(instruction_set, layer, shape)
    return 0 if cut is None else cut.elements(layer.C // layer.groups)
