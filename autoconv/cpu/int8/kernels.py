"""The kernels of `int8`: a strip's panel by blocks of filters, in vectors or tiles of words."""

from __future__ import annotations

from autoconv.cpu.codegen.ir import LINE, Function, Module, Value, i8, i32, i64, ptr
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.tiles import TILE_ROWS
from autoconv.cpu.codegen.words import add_products
from autoconv.cpu.common.tiles.products import LEFT, RIGHT, sums_of
from autoconv.cpu.int8.geometry import WORD, Panel
from autoconv.cpu.int8.packing import emit_filters, emit_panel
from autoconv.cpu.int8.store import OUTPUTS, emit_store
from autoconv.cpu.int8.words import repeated, shift_of


def emit_block(m: Module, panel: Panel) -> Function:
    """`block(pixels, starts, filters, sums)`: TK filters by TP outputs, whose sums stay in registers over all words."""
    lanes, TK, TP = panel.cut.lanes, panel.cut.TK, panel.cut.TP
    k = m.function("block", ptr(i8), ptr(i64), ptr(i32), ptr(i32), internal=True)
    x, starts, w, out = k.args
    row = x + k.load(starts)  # in one row all lie equally far apart
    places = [row + p * panel.step if panel.lengths[0] == 1 else x + k.load(starts + p) for p in range(TP)]
    sums = [[k.var(k.zero(i32, lanes)) for _ in range(0, TK, lanes)] for _ in range(TP)]
    skips = m.table(k, i64, panel.taps)
    with k.loop(0, len(panel.taps)) as tap:
        skip, filters = k.load(skips + tap), w + tap * (panel.depth * TK)
        with k.loop(0, panel.depth) as word:  # of more words in a round, LLVM would add the products first, and spill
            vectors = [k.load(filters + word * TK + first, lanes) for first in range(0, TK, lanes)]
            for place, totals in zip(places, sums, strict=True):
                pixel = k.broadcast(k.bytes_at(place, skip + word * WORD, i32), lanes)
                for total, v in zip(totals, vectors, strict=True):
                    total.set(add_products(k, panel.cut.product, total.get(), pixel, v))
    for p, totals in enumerate(sums):
        for n, total in enumerate(totals):
            k.store(total.get(), out + p * TK + n * lanes)
    return k


def emit_tiles(m: Module, panel: Panel, side: int) -> Function:
    """`tiles(pixels, filters, sums)`: two tiles of filters by one or two of outputs, over all words."""
    TK = panel.cut.TK
    k = m.function("tiles", ptr(i8), ptr(i32), ptr(i32), internal=True)
    x, w, out = k.args
    pairs = sums_of((side, 2))
    for tile in pairs.values():
        k.tile_zero(tile)
    skips = m.table(k, i64, panel.taps)
    with k.loop(0, panel.blocks) as block, k.loop(0, len(panel.taps)) as tap:
        pixels = x + block * panel.block_bytes + k.load(skips + tap)
        filters = w + (block * len(panel.taps) + tap) * (panel.depth * TK)
        for p in range(side):
            k.tile_load(LEFT + p, pixels + p * TILE_ROWS * panel.step, panel.step)
        for f in range(2):
            k.tile_load(RIGHT + f, k.bits(filters + f * TILE_ROWS, ptr(i8)), TK * WORD)
        for (p, f), tile in pairs.items():
            k.tile_multiply_bytes(tile, LEFT + p, RIGHT + f)
    for (p, f), tile in pairs.items():
        k.tile_store(tile, k.bits(out + p * TILE_ROWS * TK + f * TILE_ROWS, ptr(i8)), TK * WORD)
    return k


class _TaskWriter:
    """Writes the task: a strip by some blocks of filters."""

    def __init__(self, m: Module, panel: Panel) -> None:
        self.m, self.panel = m, panel
        layer, cut, i, o = panel.layer, panel.cut, panel.correlation.input, panel.correlation.output
        element = OUTPUTS[layer.output_dtype]
        fill, self.store = emit_panel(m, panel), emit_store(m, panel, element)
        self.multiply = emit_tiles(m, panel, min(panel.side, 2)) if panel.tiles else emit_block(m, panel)
        self.k = k = m.function("task", *TASK, internal=True)
        if panel.tiles:
            k.configure_tiles()
        self.starts = m.table(k, i64, panel.starts)
        context, index, thread = k.args
        x, w, out, self.bias, _, workspace = operands(k, context, i8, i32, element, i32, i32)
        chunk, strip = index % cut.chunks, index // cut.chunks
        first, rest = k.min(strip % panel.strips * cut.rows, layer.P - cut.rows), strip // panel.strips
        group, image = rest % layer.groups, rest // layer.groups
        own = workspace + thread * panel.own
        self.lines = own + LINE
        self.sums = k.bytes_at(self.lines, panel.blocks * panel.block_bytes, i32)
        self.finish = self.sums + panel.sums * cut.TK
        zero = k.load(self.bias + 2 * layer.K) + shift_of(layer.dtype, cut.product)
        held = k.bits(own, ptr(i64))
        with k.if_(k.load(held).ne(strip)):
            start = x + image * i.image + group * i.group
            k.call(fill, start, first, self.lines, repeated(zero, cut.product))
            k.store(strip, held)
        self.out = out + image * o.image + group * o.group + first * o.row
        self.w = w + group * (panel.filter_blocks * panel.filter_words * cut.TK)
        begin, end = (side * panel.filter_blocks // cut.chunks for side in (chunk, chunk + 1))
        with k.loop(begin, end) as block:
            self._filters(block, group * panel.K + block * cut.TK, k.i64(panel.K) - block * cut.TK, zero)
        if panel.tiles:
            k.release_tiles()

    def _filters(self, block: Value, channel: Value, left: Value, zero: Value) -> None:
        """The strip by a block of filters, of which so many are left, the first one being `channel`."""
        k, panel, cut, o = self.k, self.panel, self.panel.cut, self.panel.correlation.output
        filters = self.w + block * (panel.filter_words * cut.TK)
        self._meanings(filters + (panel.filter_words - 1) * cut.TK, channel, left, zero)
        out = self.out + block * (cut.TK * o.channel)
        zero_out = k.load(self.bias + (2 * panel.layer.K + 1))
        if panel.tiles:
            together = min(panel.side, 2) * TILE_ROWS
            with k.loop(0, panel.side * TILE_ROWS, together) as n:
                k.call(self.multiply, self.lines + n * panel.step, filters, self.sums + n * cut.TK)
        else:
            with k.loop(0, panel.sums, cut.TP) as n:
                first = k.min(n, panel.sums - cut.TP)  # the last outputs are some of those before again
                k.call(self.multiply, self.lines, self.starts + first, filters, self.sums + first * cut.TK)
        with k.loop(0, panel.stored[0]) as row:
            sums = self.sums + row * (panel.numbers * cut.TK)
            k.call(self.store, sums, self.finish, out + row * o.row, left, zero_out)

    def _meanings(self, totals: Value, channel: Value, left: Value, zero: Value) -> None:
        """What is added to a block's sums, and their scales, to where `store` reads them."""
        k, lanes, TK, K = self.k, self.panel.cut.lanes, self.panel.cut.TK, self.panel.layer.K
        for first in range(0, TK, lanes):
            mask = k.mask(left - first, lanes)
            bias, scale = (k.load(self.bias + (channel + (first + n)), lanes, mask=mask) for n in (0, K))
            offset = bias - k.load(totals + first, lanes) * k.splat(zero, lanes)
            k.store(offset, self.finish + first)
            k.store(scale, self.finish + (TK + first))


def emit(instruction_set: str, matrix_unit: str | None, panel: Panel, threads: int) -> Module:
    """`run` and `pack`."""
    m = Module(instruction_set, matrix_unit=matrix_unit)
    run, pack = m.function("run", *RUN), m.function("pack", *RUN)
    *_, workspace = operands(run, run.args[0], i8)
    with run.loop(0, threads) as thread:  # no thread holds a strip of this input
        run.store(run.i64(-1), run.bytes_at(workspace, thread * panel.own, i64))
    launch(run, run.args[0], _TaskWriter(m, panel).k, panel.tasks)
    launch(pack, pack.args[0], *emit_filters(m, panel))
    return m
