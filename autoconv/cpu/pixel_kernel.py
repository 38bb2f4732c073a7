"""The kernels of `pixel`: the image read in place or by strips, and the packing of filters."""

from __future__ import annotations

import itertools

from autoconv.cpu.ir import DTYPES, LINE, VECTOR_BYTES, Function, Module, Value, widened
from autoconv.cpu.pieces import Correlation, correlations
from autoconv.cpu.pixel_pieces import launch_streaming, split
from autoconv.cpu.pixel_strips import Strips, emit_strips
from autoconv.cpu.pixel_tile import Part, Shape, Tile, chunks_of, each_block, odd_pixels, tiles_of
from autoconv.cpu.pool import RUN, TASK, launch, operands
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
            launch(run, run.args[0], *_emit_in_place(m, name, layer, problem, one))
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
        (len(axis.taps), axis.first, axis.step, axis.stride, axis.count) == (1, 0, 1, 1, axis.size)
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


def _emit_in_place(m: Module, name: str, layer: ConvLayer, problem: Correlation, shape: Shape) -> tuple[Function, int]:
    """A task: some tiles of one image by the channels whose filters stay in cache; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    odd = 0 if shape.nt else odd_pixels(m.instruction_set, shape.KB, shape.NV)
    runs = split(problem.rows.count * problem.columns.count, lanes, shape.NV, odd)
    parts = Part.all(problem.C)
    i, o = problem.input, problem.output
    tile = Tile(shape.KB, 0, odd, 1, i.channel, 0, (0,), o.channel, shape.nt, parts[0])
    functions = {
        part: tiles_of(m, f"{name}_{n}", layer, element, problem.K, runs, tile._replace(part=part))
        for n, part in enumerate(dict.fromkeys(parts))
    }

    blocks = -(-problem.K // shape.KB)
    sums_size = shape.KB * (shape.NV * lanes + odd)
    kept, chunks = chunks_of(problem, shape, wide.bytes, SUMS // (sums_size * wide.bytes) if len(parts) > 1 else blocks)
    tiles = sum(run.times for run in runs)
    images = problem.N * problem.groups
    together = max(1, min(8, tiles * images * chunks // (8 * shape.threads)))
    spans = -(-tiles // together)

    task = m.function(name, *TASK, internal=True)
    context, index, _ = task.args
    x, w, out, bias, residual, _ = operands(task, context, element, wide, element, element, element)
    span, rest_index = index % spans, index // spans
    image, chunk = rest_index % images, rest_index // images
    n, group = image // problem.groups, image % problem.groups
    x = x + n * i.image + group * i.group
    out_offset = n * o.image + group * o.group
    last_tile = task.min((span + 1) * together, tiles)
    first_block = chunk * kept
    last_block = task.min(first_block + kept, blocks)
    w = w + group * (problem.K * problem.C)
    bias = bias + group * problem.K
    sums = task.scratch(wide, sums_size * (kept if len(parts) > 1 else 1))

    def fetch(p: Value, size: int, *, write: bool = False) -> None:
        for pixel in (*range(0, size, LINE // element.bytes), size - 1):
            task.prefetch(p + pixel, write=write)

    def tile_at(start: Value, size: int, part: Part, channel: Value) -> None:
        """A part of the sums of a tile, for all blocks; each fetches its share of the pixels that come next."""
        here = x + (start + channel * i.channel)
        following = x + (start + size) if part.ends else here + part.C * i.channel

        def block_at(block: Value, width: int) -> None:
            number = block - first_block
            with task.loop(number * part.C // kept, (number + 1) * part.C // kept) as c:
                fetch(following + c * i.channel, size)
            place = out_offset + block * (shape.KB * o.channel) + start
            for row in range(width if part.ends else 0):
                if layer.residual:
                    fetch(residual + (place + row * o.channel), size)
                if not shape.nt:
                    fetch(out + (place + row * o.channel), size, write=True)
            first = block * shape.KB
            filters = w + (first * problem.C + channel * width)
            own = sums + number * sums_size if len(parts) > 1 else sums
            task.call(functions[part][size, width], here, filters, out + place, residual + place, bias + first, own)

        each_block(task, problem.K, shape.KB, first_block, last_block, block_at)

    with task.loop(span * together, last_tile) as t:
        before = 0
        for run in runs:
            inside = task.select(t >= before, t, task.i64(tiles)) < before + run.times
            with task.if_(inside):
                start, done = (t - before) * run.pixels + run.start, 0
                for part, same in itertools.groupby(parts):
                    channels = len(list(same)) * part.C
                    with task.loop(done, done + channels, part.C) as channel:
                        tile_at(start, run.pixels, part, channel)
                    done += channels
            before += run.times
    if shape.nt:
        task.fence()
    return task, spans * images * chunks


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
