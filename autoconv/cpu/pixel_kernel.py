"""The kernels of `pixel`: register tiles, the split of a plane into them, and the packing of filters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from autoconv.cpu.ir import (
    DTYPES,
    LINE,
    VECTOR_BYTES,
    VECTOR_REGISTERS,
    Function,
    Module,
    Type,
    Value,
    Var,
    ptr,
    widened,
)
from autoconv.cpu.pieces import Correlation, Tail, correlations, load_range, store_range
from autoconv.cpu.pixel_pieces import Run, Strip, finish, launch_streaming, split
from autoconv.cpu.pool import RUN, TASK, launch, operands
from autoconv.layer import ConvLayer

PART = 64  # channels of a sum at a time: pixels of a tile stay in the first-level cache for all blocks of filters
SUMS = 32 * 1024  # bytes of a task's sums, where there are several parts


class Shape(NamedTuple):
    """How the work is cut: KB channels by NV vectors in registers; filters of half the second-level cache."""

    KB: int
    NV: int
    nt: bool
    threads: int
    l2_bytes: int


def packed_elements(layer: ConvLayer) -> int:
    """Filters as `groups, K / KB, C, R, S, KB`; the last block is as narrow as K leaves it."""
    return layer.K * (layer.C // layer.groups) * layer.R * layer.S


class _Part(NamedTuple):
    """Channels of a sum that are added in one go, and whether they are the first and the last of it."""

    C: int
    begins: bool = True
    ends: bool = True

    @classmethod
    def all(cls, C: int) -> list[_Part]:
        """About `PART` channels each, all but the last as many; one of twice as many costs less than two."""
        each = math.ceil(C / (C // PART if C > 2 * PART else 1))
        starts = range(0, C, each)
        return [cls(min(each, C - c), c == 0, c == starts[-1]) for c in starts]


class _Tile(NamedTuple):
    """One register tile: `KB` channels of `pixels` pixels, `odd` of them single ones.

    Channels of the input lie `pitch` elements apart, rows of taps `row_pitch`, and `taps` are the places of
    the taps in a row. Channels of the output lie `out_pitch` apart. The sums are those of a part of the channels:
    they go on from memory unless the part is the first, and back to it unless it is the last.
    """

    KB: int
    pixels: int
    odd: int
    R: int
    pitch: int
    row_pitch: int
    taps: tuple[int, ...]
    out_pitch: int
    nt: bool
    part: _Part


def _odd_pixels(instruction_set: str, KB: int, NV: int) -> int:
    """How many single pixels a tile can hold besides its vectors: a register each, with channels as lanes."""
    return max(0, min(4, VECTOR_REGISTERS[instruction_set] - KB * NV - NV - 2)) if KB & (KB - 1) == 0 else 0


def _tile(m: Module, name: str, layer: ConvLayer, source_type: Type, tile: _Tile) -> Function:
    """`function(x, w, out, residual, bias, sums)`, each pointing at the tile's first element."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    k = m.function(name, ptr(source_type), ptr(wide), *[ptr(element)] * 3, ptr(wide), internal=True)
    x, w, out, residual, bias, sums = k.args
    together = tile.pixels - tile.odd
    widths = [min(lanes, together - first) for first in range(0, together, lanes)]
    places = [[sums + (i * len(widths) + v) * lanes for v in range(len(widths))] for i in range(tile.KB)]
    odd_places = [sums + (tile.KB * len(widths) * lanes + n * tile.KB) for n in range(tile.odd)]

    def begun(p: Value, n: int) -> Var:
        return k.var(k.zero(wide, n) if tile.part.begins else k.load(p, n))

    acc = [[begun(p, lanes) for p in row] for row in places]
    singles = [begun(p, tile.KB) for p in odd_places]
    source, filters = k.var(x), k.var(w)

    def rows(count: int) -> None:
        """The next rows of taps, `count` channels' single ones or one of several."""
        for c in range(count):
            for n, tap in enumerate(tile.taps):
                f = filters.get() + (c * len(tile.taps) + n) * tile.KB
                _multiply(k, acc, singles, widths, source.get() + (c * tile.pitch + tap), f)
        source.set(source.get() + (count * tile.pitch if tile.R == 1 else tile.row_pitch))
        filters.set(filters.get() + count * len(tile.taps) * tile.KB)

    if tile.R > 1:
        with k.loop(0, tile.part.C):
            with k.loop(0, tile.R):
                rows(1)
            source.set(source.get() + (tile.pitch - tile.R * tile.row_pitch))
    else:
        unroll = min(tile.part.C, max(1, 4 // len(tile.taps)))
        with k.loop(0, tile.part.C // unroll):
            rows(unroll)
        if tile.part.C % unroll:
            rows(tile.part.C % unroll)
    if not tile.part.ends:
        for variables, there in zip([*acc, singles], [*places, odd_places], strict=True):
            for a, p in zip(variables, there, strict=True):
                k.store(a.get(), p)
        return k
    tail = Tail.of(layer)
    for i, row in enumerate(acc):
        b = k.load(bias + i) if tail.bias else None
        bs = None if b is None else k.splat(b, lanes)
        for v, a in enumerate(row):
            place = i * tile.out_pitch + v * lanes
            r = load_range(k, residual + place, lanes, 0, widths[v]) if tail.residual else None
            result = finish(k, tail, a.get(), bs, r)
            if tile.nt:
                k.store(result, out + place, nontemporal=True)
            else:
                store_range(k, result, out + place, 0, widths[v])
        for n, single in enumerate(singles):
            place = i * tile.out_pitch + tile.pixels - tile.odd + n
            r = k.load(residual + place) if tail.residual else None
            one = k.extract(single.get(), i) if tile.KB > 1 else single.get()
            k.store(finish(k, tail, one, b, r), out + place)
    return k


def _multiply(
    k: Function, acc: Sequence[Sequence[Var]], singles: Sequence[Var], widths: Sequence[int], p: Value, f: Value
) -> None:
    """One tap of one channel: outer product of pixels and filters."""
    lanes = k.module.lanes(p.type.to) if p.type.to else 0
    pixels = [load_range(k, p + v * lanes, lanes, 0, width) for v, width in enumerate(widths)]
    for i, row in enumerate(acc):
        one = k.broadcast(f + i, lanes)
        for a, v in zip(row, pixels, strict=True):
            a.fma(v, one)
    if singles:
        several = k.load(f, len(acc))
        first = sum(widths)
        for n, single in enumerate(singles):
            single.fma(several, k.broadcast(p + first + n, len(acc)))


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
            launch(run, run.args[0], *_emit_strips(m, name, layer, problem, one, cut))

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


def _tiles(
    m: Module, name: str, layer: ConvLayer, source: Type, K: int, runs: Sequence[Run], tile: _Tile
) -> dict[tuple[int, int], Function]:
    """Functions for tiles of so many pixels and channels; `tile` says the rest, and how many single pixels it takes."""
    lanes = m.lanes(DTYPES[layer.dtype])
    functions = {}
    for _, _, pixels in runs:
        for KB, _ in _blocks(K, tile.KB):
            rest = pixels % lanes
            odd = rest if rest <= tile.odd and tile.KB == KB and pixels > lanes else 0
            one = tile._replace(KB=KB, pixels=pixels, odd=odd)
            functions[pixels, KB] = _tile(m, f"{name}_{pixels}x{KB}", layer, source, one)
    return functions


def _blocks(K: int, KB: int) -> list[tuple[int, int]]:
    """Channel blocks as (channels, how many)."""
    return [(width, count) for width, count in ((KB, K // KB), (K % KB, 1)) if width and count]


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


def _chunks(problem: Correlation, shape: Shape, itemsize: int, most: int) -> tuple[int, int]:
    """Blocks of KB channels, at most so many, whose filters fill half of the second-level cache; how many chunks."""
    blocks = -(-problem.K // shape.KB)
    taps = len(problem.rows.taps) * len(problem.columns.taps)
    kept = max(1, min(most, shape.l2_bytes // 2 // (shape.KB * problem.C * taps * itemsize)))
    chunks = -(-blocks // kept)
    return -(-blocks // chunks), chunks


def _emit_in_place(m: Module, name: str, layer: ConvLayer, problem: Correlation, shape: Shape) -> tuple[Function, int]:
    """A task: some tiles of one image by the channels whose filters stay in cache; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    odd = 0 if shape.nt else _odd_pixels(m.instruction_set, shape.KB, shape.NV)
    runs = split(problem.rows.count * problem.columns.count, lanes, shape.NV, odd)
    parts = _Part.all(problem.C)
    i, o = problem.input, problem.output
    tile = _Tile(shape.KB, 0, odd, 1, i.channel, 0, (0,), o.channel, shape.nt, parts[0])
    functions = {
        part: _tiles(m, f"{name}_{n}", layer, element, problem.K, runs, tile._replace(part=part))
        for n, part in enumerate(dict.fromkeys(parts))
    }

    blocks = -(-problem.K // shape.KB)
    sums_size = shape.KB * (shape.NV * lanes + odd)
    kept, chunks = _chunks(problem, shape, wide.bytes, SUMS // (sums_size * wide.bytes) if len(parts) > 1 else blocks)
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

    def tile_at(start: Value, size: int, part: _Part, channel: Value) -> None:
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

        if problem.K >= shape.KB:
            with task.loop(first_block, task.min(last_block, problem.K // shape.KB)) as block:
                block_at(block, shape.KB)
        if problem.K % shape.KB:
            with task.if_(last_block.eq(blocks)):
                block_at(task.i64(blocks - 1), problem.K % shape.KB)

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


class _Strips(NamedTuple):
    """The output cut into chunks of rows, for whose pixels the input is copied to a strip of C channels.

    Under a 1x1 filter without padding the rows of a strip follow one another without gaps, as those of the
    output do, and are cut into tiles as one line of pixels.
    """

    strip: Strip
    rows: int
    flat: bool
    held: int
    pitch: int

    @classmethod
    def cut(cls, problem: Correlation, lanes: int, itemsize: int, shape: Shape) -> _Strips:
        """Chunks with the fewest vectors for the busiest thread, whose strips fill half of the second-level cache."""
        P, Q = problem.rows.count, problem.columns.count
        R, S = len(problem.rows.taps), len(problem.columns.taps)
        padded = any(not (axis.sees(0, 0) and axis.sees(axis.count - 1, 0)) for axis in (problem.rows, problem.columns))
        flat = R == S == 1 and not padded
        strip = Strip(problem.columns, lanes)

        def sized(rows: int) -> _Strips:
            held = rows if flat else (rows - 1) * problem.rows.step + problem.rows.gap * (R - 1) + 1
            pitch = -(-(rows * Q + lanes) // 16) * 16 if flat else held * strip.pitch
            return cls(strip, rows, flat, held, pitch)

        def aligned(rows: int) -> bool:
            return not (shape.nt and (rows * Q % lanes or (P - rows) * Q % lanes))

        def fits(rows: int) -> bool:
            return problem.C * sized(rows).pitch * itemsize <= shape.l2_bytes // 2

        def cost(rows: int) -> float:
            runs = split(rows * Q if flat else Q, lanes, shape.NV, 0)
            vectors = sum(run.times * -(-run.pixels // lanes) for run in runs) * (1 if flat else rows)
            tasks = problem.N * problem.groups * -(-P // rows)
            return -(-tasks // shape.threads) * (vectors + 1)

        sizes = [rows for rows in (*range(1, min(P, 64)), P) if aligned(rows)]
        return sized(min(filter(fits, sizes), key=lambda rows: (cost(rows), -rows), default=sizes[0]))


def _strips(instruction_set: str, layer: ConvLayer, shape: Shape) -> _Strips | None:
    """How the input is copied; None where the image is read in place."""
    (problem,) = correlations(layer)
    wide = widened(DTYPES[layer.dtype])
    lanes = VECTOR_BYTES[instruction_set] // wide.bytes
    return None if in_place(problem) else _Strips.cut(problem, lanes, wide.bytes, shape)


def workspace_elements(instruction_set: str, layer: ConvLayer, shape: Shape) -> int:
    """Elements of every thread's strips, in whole cache lines."""
    cut = _strips(instruction_set, layer, shape)
    return 0 if cut is None else -(-layer.C // layer.groups * cut.pitch // 16) * 16


def _emit_strips(
    m: Module, name: str, layer: ConvLayer, problem: Correlation, shape: Shape, cut: _Strips
) -> tuple[Function, int]:
    """A task: a strip of one image, copied, by the channels whose filters stay in cache; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    odd = 0 if shape.nt else _odd_pixels(m.instruction_set, shape.KB, shape.NV)
    P, Q = problem.rows.count, problem.columns.count
    R, S = len(problem.rows.taps), len(problem.columns.taps)
    runs = split(cut.rows * Q if cut.flat else Q, lanes, shape.NV, odd)
    taps = tuple(cut.strip.offset(s) for s in range(S))
    row_pitch = problem.rows.gap * cut.strip.pitch
    part = _Part(problem.C)
    tile = _Tile(shape.KB, 0, odd, R, cut.pitch, row_pitch, taps, problem.output.channel, shape.nt, part)
    functions = _tiles(m, name, layer, wide, problem.K, runs, tile)
    blocks = -(-problem.K // shape.KB)
    kept, chunks = _chunks(problem, shape, wide.bytes, blocks)
    images, spans = problem.N * problem.groups, -(-P // cut.rows)

    task = m.function(name, *TASK, internal=True)
    context, index, thread = task.args
    x, w, out, bias, residual, workspace = operands(task, context, element, wide, element, element, element)
    span, rest_index = index % spans, index // spans
    image, chunk = rest_index % images, rest_index // images
    n, group = image // problem.groups, image % problem.groups
    first_row = task.min(span * cut.rows, P - cut.rows)  # the last chunk may do some rows again
    own = -(-problem.C * cut.pitch // 16) * (16 * wide.bytes)
    strip = task.bytes_at(workspace, thread * own, wide)
    plane = x + n * problem.input.image + group * problem.input.group
    with task.loop(0, problem.C) as c:
        _fill(task, problem, cut, plane + c * problem.input.channel, first_row, strip + c * cut.pitch)
    place = n * problem.output.image + group * problem.output.group + first_row * Q
    w = w + group * (problem.K * problem.C * R * S)
    bias = bias + group * problem.K

    def block_at(block: Value, KB: int) -> None:
        channel = block * shape.KB
        filters = w + channel * (problem.C * R * S)
        with task.loop(0, 1 if cut.flat else cut.rows) as line:
            for run in runs:
                with task.loop(run.start, run.start + run.times * run.pixels, run.pixels) as q:
                    at = place + channel * problem.output.channel + line * Q + q
                    source = strip + line * (problem.rows.step * cut.strip.pitch) + q
                    task.call(
                        functions[run.pixels, KB], source, filters, out + at, residual + at, bias + channel, strip
                    )

    first_block = chunk * kept
    last_block = task.min(first_block + kept, blocks)
    if problem.K >= shape.KB:
        with task.loop(first_block, task.min(last_block, problem.K // shape.KB)) as block:
            block_at(block, shape.KB)
    if problem.K % shape.KB:
        with task.if_(last_block.eq(blocks)):
            block_at(task.i64(blocks - 1), problem.K % shape.KB)
    if shape.nt:
        task.fence()
    return task, spans * images * chunks


def _fill(k: Function, problem: Correlation, cut: _Strips, plane: Value, first_row: Value, strip: Value) -> None:
    """Copy one channel's rows that the outputs from `first_row` on see."""
    rows = problem.rows
    top = first_row * rows.step + rows.first
    with k.loop(0, cut.held) as t:
        if cut.flat:
            cut.strip.fill(k, plane + (top + t * rows.step) * problem.input.row, strip + t * problem.columns.count)
        else:
            h = top + t
            target = strip + t * cut.strip.pitch
            with k.if_(k.select(h >= 0, h, k.i64(rows.size)) < rows.size):
                cut.strip.fill(k, plane + h * problem.input.row, target)
            with k.else_():
                cut.strip.clear(k, target)
