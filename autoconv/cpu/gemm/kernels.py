"""The kernels of `gemm`: the image read in place, or by the packed panels of `panels`, and the packing of filters."""

from __future__ import annotations

import itertools

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Value, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.packing import tap_place
from autoconv.cpu.common.streaming import launch_streaming
from autoconv.cpu.gemm.geometry import ChannelRange, GemmBlocking, InPlaceCut, PixelTiles, panel_cut
from autoconv.cpu.gemm.panels import emit_panels
from autoconv.cpu.gemm.tile import GemmTile, each_block, tiles_of
from autoconv.layer import ConvLayer

MOST_UNROLLED = 512  # elements that packing copies in one go: LLVM's time grows with the square of them


def emit(instruction_set: str, layer: ConvLayer, blocking: GemmBlocking) -> Module:
    """`run` and `pack`."""
    m = Module(instruction_set)
    (problem,) = correlations(layer)
    emit_pack(m, layer, problem, blocking.TK)
    run = m.function("run", *RUN)
    cut = panel_cut(m.instruction_set, layer, blocking)

    def launch_one(nt: bool) -> None:
        name, one = "stream" if nt else "task", blocking._replace(nt=nt)
        if cut is None:
            launch(run, run.args[0], *_InPlaceWriter(m, name, layer, problem, one).task())
        else:
            launch(run, run.args[0], *emit_panels(m, name, layer, problem, one, cut))

    if blocking.nt:
        launch_streaming(run, operands(run, run.args[0], DTYPES[layer.dtype])[2], launch_one)
    else:
        launch_one(False)
    return m


def emit_pack(m: Module, layer: ConvLayer, problem: Correlation, TK: int) -> None:
    """Filters as `groups, K / TK, C, R, S, TK`, in the type of the sums."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    R, S = len(problem.rows.taps), len(problem.columns.taps)
    task = m.function("pack_task", *TASK, internal=True)
    context, index, _ = task.args
    w, _, out = operands(task, context, element, element, wide)[:3]
    blocks = -(-problem.K // TK)
    group, block = index // blocks, index % blocks
    source = w + group * problem.filters.group + block * (TK * problem.filters.k)
    target = out + (group * problem.K + block * TK) * (problem.C * R * S)

    def copy_row(c: Value, r: int | Value, width: int) -> None:
        row = source + (c * problem.filters.c + tap_place(problem.rows, r) * problem.filters.r)
        for s, place in enumerate(problem.columns.taps):
            p, to = row + place * problem.filters.s, target + ((c * R + r) * S + s) * width
            for i in range(width):
                task.store(task.load(p + i * problem.filters.k), to + i)

    def copy(width: int) -> None:
        with task.loop(0, problem.C) as c:
            if R * S * width <= MOST_UNROLLED:
                for r in range(R):
                    copy_row(c, r, width)
            else:
                with task.loop(0, R) as row:
                    copy_row(c, row, width)

    if problem.K >= TK:
        with task.if_((block + 1) * TK <= problem.K):
            copy(TK)
    if problem.K % TK:
        with task.if_((block + 1) * TK > problem.K):
            copy(problem.K % TK)
    pack = m.function("pack", *RUN)
    launch(pack, pack.args[0], task, problem.groups * blocks)


class _InPlaceWriter:
    """Writes the task that reads an image where it lies: some of its tiles by channels whose filters stay in cache."""

    def __init__(self, m: Module, name: str, layer: ConvLayer, problem: Correlation, blocking: GemmBlocking) -> None:
        self.layer, self.problem, self.blocking = layer, problem, blocking
        self.element = DTYPES[layer.dtype]
        self.wide = widened(self.element)
        self.ranges = ChannelRange.all(problem.C, blocking.BC)
        cut = InPlaceCut.cut(problem, m.instruction_set, layer, blocking)
        self.kept, self.chunks, self.tiles, self.units, self.spans, self.sums_size = cut
        i, o = problem.input, problem.output
        block_pitch = problem.C * blocking.TK
        self.functions = {}
        for n, channels in enumerate(dict.fromkeys(self.ranges)):
            pitches = i.channel, o.channel, block_pitch
            tile = GemmTile(blocking.TK, channels, *pitches, nt=blocking.nt, outside=True, shares=self.kept)
            self.functions[channels] = tiles_of(m, f"{name}_{n}", layer, self.element, problem.K, self.tiles, tile)
        self.k = m.function(name, *TASK, internal=True)

    def task(self) -> tuple[Function, int]:
        """The task, and how many there are."""
        k, problem, blocking, i, o = self.k, self.problem, self.blocking, self.problem.input, self.problem.output
        blocks, units, spans = -(-problem.K // blocking.TK), self.units, self.spans
        images = problem.N * problem.groups
        context, index, _ = k.args
        x, w, self.out, bias, self.residual, _ = operands(k, context, self.element, self.wide, *[self.element] * 3)
        span, rest_index = index % spans, index // spans
        image, chunk = rest_index % images, rest_index // images
        n, group = image // problem.groups, image % problem.groups
        self.x = x + n * i.image + group * i.group
        self.place = n * o.image + group * o.group
        self.first_block = chunk * self.kept
        self.last_block = k.min(self.first_block + self.kept, blocks)
        self.w = w + group * (problem.K * problem.C)
        self.bias = bias + group * problem.K
        together = self.kept if len(self.ranges) > 1 else max(tile.blocks for tile in self.tiles)
        self.sums = k.scratch(self.wide, self.sums_size * together)
        # Single pixels go with the last tile of their line, whose filters are in the cache then.
        first, beyond = span * units // spans, (span + 1) * units // spans
        last = k.select(span.eq(spans - 1), k.i64(sum(tile.times for tile in self.tiles)), beyond)
        with k.loop(first, last) as t:
            self._tile(t)
        if blocking.nt:
            k.fence()
        return k, spans * images * self.chunks

    def _tile(self, t: Value) -> None:
        """Tile number t, of whichever kind it is."""
        k, before = self.k, 0
        for tile in self.tiles:
            inside = k.select(t >= before, t, k.i64(before + tile.times)) < before + tile.times
            with k.if_(inside):
                start, done = (t - before) * tile.pixels + tile.start, 0
                for channels, same in itertools.groupby(self.ranges):
                    number = len(list(same)) * channels.C
                    with k.loop(done, done + number, channels.C) as channel:
                        self._add_range(start, tile, channels, channel)
                    done += number
            before += tile.times

    def _add_range(self, start: Value, tile: PixelTiles, channels: ChannelRange, channel: Value) -> None:
        """A range of the sums of a tile, for all blocks; each fetches its share of the pixels that come next."""
        k, problem, blocking, i, o = self.k, self.problem, self.blocking, self.problem.input, self.problem.output
        size = tile.pixels
        here = self.x + (start + channel * i.channel)
        following = self.x + (start + size) if channels.ends else here + channels.C * i.channel

        def add_block(block: Value, width: int, together: int) -> None:
            number, first = block - self.first_block, block * blocking.TK
            place = self.place + first * o.channel + start
            ahead = following + number * channels.C // self.kept * i.channel
            filters = self.w + (first * problem.C + channel * width)
            own = self.sums + number * self.sums_size if len(self.ranges) > 1 else self.sums
            stored = self.out + place, self.residual + place, self.bias + first
            k.call(self.functions[channels][size, width, together], here, filters, ahead, *stored, own)

        each_block(k, problem.K, blocking.TK, self.first_block, self.last_block, tile.blocks, add_block)
