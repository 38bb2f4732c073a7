"""The kernels of `pixel`: register tiles, the split of a plane into them, and the packing of filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoconv.cpu.ir import DTYPES, VECTOR_REGISTERS, Function, Module, Value, Var, ptr, widened
from autoconv.cpu.pieces import Correlation, Tail, correlations, load_range, store_range
from autoconv.cpu.pool import RUN, TASK, launch, operands
from autoconv.cpu.strip import finish, split
from autoconv.layer import ConvLayer


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


class _Tile(NamedTuple):
    """One register tile: `KB` channels of `pixels` pixels; `pitch` elements from channel to channel of the input."""

    KB: int
    pixels: int
    vectors: int
    odd: int
    C: int
    pitch: int
    taps: tuple[int, ...]
    out_pitch: int
    nt: bool


def _odd_pixels(instruction_set: str, KB: int, NV: int) -> int:
    """How many single pixels a tile can hold besides its vectors: a register each, with channels as lanes."""
    return max(0, min(4, VECTOR_REGISTERS[instruction_set] - KB * NV - NV - 2)) if KB & (KB - 1) == 0 else 0


def _tile(m: Module, name: str, layer: ConvLayer, tile: _Tile) -> Function:
    """`function(x, w, out, residual, bias)`, each pointing at the tile's first element."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    k = m.function(name, ptr(element), ptr(wide), *[ptr(element)] * 3, internal=True)
    x, w, out, residual, bias = k.args
    widths = [min(lanes, tile.pixels - tile.odd - v * lanes) for v in range(tile.vectors)]
    acc = [[k.var(k.zero(wide, lanes)) for _ in widths] for _ in range(tile.KB)]
    singles = [k.var(k.zero(wide, tile.KB)) for _ in range(tile.odd)]
    source, filters = k.var(x), k.var(w)

    def channels(count: int) -> None:
        for c in range(count):
            for n, tap in enumerate(tile.taps):
                p = source.get() + (c * tile.pitch + tap)
                f = filters.get() + (c * len(tile.taps) + n) * tile.KB
                _multiply(k, acc, singles, widths, p, f)
        source.set(source.get() + count * tile.pitch)
        filters.set(filters.get() + count * len(tile.taps) * tile.KB)

    unroll = min(tile.C, max(1, 4 // len(tile.taps)))
    with k.loop(0, tile.C // unroll):
        channels(unroll)
    if tile.C % unroll:
        channels(tile.C % unroll)
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
    """`run` and `pack` for a 1x1 layer read in place."""
    m = Module(instruction_set)
    (problem,) = correlations(layer)
    _emit_pack(m, layer, problem, shape.KB)
    run = m.function("run", *RUN)
    plain, count = _emit_task(m, "task", layer, problem, shape._replace(nt=False))
    if not shape.nt:
        launch(run, run.args[0], plain, count)
        return m
    streaming, count = _emit_task(m, "stream", layer, problem, shape)
    address = run.load(run.args[0] + 2)
    with run.if_((address & 63).eq(0)):
        launch(run, run.args[0], streaming, count)
    with run.else_():
        launch(run, run.args[0], plain, count)
    return m


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


def _emit_task(m: Module, name: str, layer: ConvLayer, problem: Correlation, shape: Shape) -> tuple[Function, int]:
    """A task: some tiles of one image by the channels whose filters stay in cache; and how many there are."""
    element = DTYPES[layer.dtype]
    lanes = m.lanes(element)
    odd = 0 if shape.nt else _odd_pixels(m.instruction_set, shape.KB, shape.NV)
    pixels = problem.rows.count * problem.columns.count
    runs = split(pixels, lanes, shape.NV, odd)
    functions = {}
    for _, _, size in runs:
        for width, _ in _blocks(problem.K, shape.KB):
            whole, rest = divmod(size, lanes)
            singles = rest if rest <= odd and width == shape.KB and whole else 0
            vectors = whole + (rest > singles)
            tile = _Tile(
                width, size, vectors, singles, problem.C, problem.input.channel, (0,), problem.output.channel, shape.nt
            )
            functions[size, width] = _tile(m, f"{name}_{size}x{width}", layer, tile)

    wide = widened(element)
    blocks = -(-problem.K // shape.KB)
    kept = max(1, shape.l2_bytes // 2 // (shape.KB * problem.C * wide.bytes))
    chunks = -(-blocks // kept)
    kept = -(-blocks // chunks)
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
    x = x + n * problem.input.image + group * problem.input.group
    out_offset = n * problem.output.image + group * problem.output.group
    last_tile = task.min((span + 1) * together, tiles)
    first_block = chunk * kept
    last_block = task.min(first_block + kept, blocks)
    w = w + group * (problem.K * problem.C)
    bias = bias + group * problem.K

    def tile_at(start: Value, size: int) -> None:
        def block_at(block: Value, width: int) -> None:
            channel = block * shape.KB
            place = out_offset + channel * problem.output.channel + start
            f = functions[size, width]
            task.call(f, x + start, w + channel * problem.C, out + place, residual + place, bias + channel)

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
                tile_at((t - before) * run.pixels + run.start, run.pixels)
            before += run.times
    if shape.nt:
        task.fence()
    return task, spans * images * chunks
