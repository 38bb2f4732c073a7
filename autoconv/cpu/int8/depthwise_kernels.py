"""The kernels of `int8.depthwise`: sets of rows of outputs, by words that hold several rows of the image."""

from __future__ import annotations

from collections.abc import Sequence

from autoconv.cpu.codegen.ir import Function, Module, Value, f32, i8, i16, i32, i64, ptr, vec
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.words import add_products
from autoconv.cpu.common.lanes import deinterleaved, store_range
from autoconv.cpu.int8.depthwise_geometry import DepthwisePanel
from autoconv.cpu.int8.store import OUTPUTS, finished, narrowed
from autoconv.cpu.int8.words import joined, repeated, shift_of, widened


def _words(k: Function, panel: DepthwisePanel, rows: Sequence[Value]) -> Value:
    """Words of bytes of so many rows, lane by lane, as they are packed."""
    dtype, product = panel.layer.dtype, panel.product
    lanes = rows[0].type.lanes
    if not lanes:
        return joined([widened(k, row, dtype, product) for row in rows], product)
    while len(rows) > 1:  # neighbours: bytes, then pairs of bytes
        size = rows[0].type.lanes
        picks = [lane + side for lane in range(size) for side in (0, size)]
        rows = [k.shuffle(a, b, picks) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        if len(rows) > 1:
            rows = [k.bits(row, vec(i16, size)) for row in rows]
    words = vec(i32, lanes)
    if panel.rows == 2:
        halves = vec(i16, 2 * lanes)
        return k.bits(k.zext(rows[0], halves) if dtype == "uint8" else k.cast(rows[0], halves), words)
    return k.bits(rows[0], words) ^ (-0x7F7F7F80 if shift_of(dtype, product) else 0)


def emit_fill(m: Module, panel: DepthwisePanel, inside: bool) -> Function:
    """`fill(x, first row, first channel, vectors, out, zero point)`: the words of one set's columns of the image.

    `out` is the first word of the panel's first column; where not all rows are `inside` the image, the others count as
    the zero point.
    """
    layer, lanes, strides = panel.layer, panel.lanes, panel.correlation.input
    name = "fill_inside" if inside else "fill_border"
    k = m.function(name, ptr(i8), i64, i64, i64, ptr(i32), i8, internal=True)
    x, first, channel, vectors, out, zero = k.args
    before = min(layer.padding[1][0], panel.seen)
    columns = min(layer.W, panel.seen - before)  # of the image; none where outputs see padding only, which is there

    def copy(places: Sequence[tuple[Value, Value]], offset: Value, target: Value, width: int) -> None:
        rows = []
        for place, exists in places:
            v = k.load(place + offset, width)
            rows.append(v if inside else k.select(exists, v, k.splat(zero, width)))
        k.store(_words(k, panel, rows), target)

    with k.loop(0, panel.words) as word:
        places = []
        for n in range(panel.rows):
            row = first + (word * panel.rows + n) * layer.dilation[0]
            exists = (row >= 0) & (row < layer.H)
            seen = row if inside else k.max(k.min(row, layer.H - 1), 0)
            places.append((x + seen * strides.row, exists))
        target = out if panel.components > 1 else out + word * panel.pitch
        target = target + before * panel.across
        if columns and panel.channels_last:
            with k.loop(0, columns) as column, k.loop(0, vectors) as v:
                c = k.min(channel + v * lanes, layer.C - panel.width)
                here = target + column * panel.across + v * lanes
                if panel.width == lanes:
                    copy(places, column * strides.column + c, here, lanes)
                else:
                    with k.loop(0, panel.width) as lane:
                        copy(places, column * strides.column + lane, here + lane, 1)
        elif columns >= lanes:
            with k.loop(0, columns, lanes) as start:
                column = k.min(start, columns - lanes)  # the last ones are some of those before again
                copy(places, column, target + column, lanes)
        elif columns:
            with k.loop(0, columns) as column:
                copy(places, column, target + column, 1)
        if panel.components > 1:
            _deal(k, panel, out, out + panel.pitch + word * panel.pitch)
    return k


def _deal(k: Function, panel: DepthwisePanel, words: Value, out: Value) -> None:
    """Words of neighbouring columns, to the components that they are of."""
    stride, lanes = panel.components, panel.lanes
    with k.loop(0, panel.component, lanes) as n:
        vectors = [k.load(words + n * stride + part * lanes, lanes) for part in range(stride)]
        for residue in range(stride):
            k.store(deinterleaved(k, vectors, stride, residue), out + residue * panel.component + n)


def emit_tile(m: Module, panel: DepthwisePanel) -> Function:
    """`tile(words, filters, meanings, out, zero point, rows left)`: some vectors of outputs of each shared row."""
    layer, lanes, count = panel.layer, panel.lanes, panel.filter_lanes
    element = OUTPUTS[layer.output_dtype]
    k = m.function("tile", ptr(i32), ptr(i32), ptr(i32), ptr(element), i32, i64, internal=True)
    words, filters, meanings, out, zero, left = k.args
    sums = [[k.var(k.zero(i32, lanes)) for _ in range(panel.together)] for _ in range(panel.shared)]

    def in_lanes(p: Value) -> Value:
        return k.load(p, lanes) if panel.channels_last else k.broadcast(p, lanes)

    skips = m.table(k, i64, panel.skips)
    with k.loop(0, len(panel.skips)) as n:  # in a loop, or LLVM would add the products first, and spill
        here = words + k.load(skips + n)
        taps = [in_lanes(filters + (n * panel.shared + t) * count) for t in range(panel.shared)]
        for i in range(panel.together):
            v = k.load(here + i * panel.step, lanes)
            for row, tap in zip(sums, taps, strict=True):
                row[i].set(add_products(k, panel.product, row[i].get(), v, tap))
    offset, scale = in_lanes(meanings), in_lanes(k.bits(meanings + count, ptr(f32)))
    strides = panel.correlation.output
    for t, row in enumerate(sums):
        with k.if_(left > t):
            for i, total in enumerate(row):
                v = narrowed(k, layer, finished(k, layer, total.get() + offset, scale, zero))
                place = t * strides.row + i * (strides.column if panel.channels_last else lanes)
                store_range(k, v, out + place, 0, panel.width)
    return k


class _TaskWriter:
    """Writes the task: some units of an image by a chunk of their sets of rows."""

    def __init__(self, m: Module, panel: DepthwisePanel) -> None:
        self.m, self.panel = m, panel
        layer = panel.layer
        self.fills = [emit_fill(m, panel, inside) for inside in (True, False)]
        self.tile = emit_tile(m, panel)
        self.k = k = m.function("task", *TASK, internal=True)
        context, index, thread = k.args
        x, w, out, self.bias, _, workspace = operands(k, context, i8, i32, OUTPUTS[layer.output_dtype], i32, i32)
        self.meanings = k.bytes_at(workspace, thread * panel.own, i32)
        self.words = self.meanings + panel.meanings
        zero = k.load(self.bias + 2 * layer.K)
        self.zero_byte = k.cast(zero, i8)
        self.zero_in = zero + shift_of(layer.dtype, panel.product)
        self.zero_out = k.load(self.bias + (2 * layer.K + 1))
        chunk, rest = index % panel.chunks, index // panel.chunks
        groups = -(-panel.units // panel.units_together)
        first, image = rest % groups * panel.units_together, rest // groups
        self.sets = [part * panel.sets // panel.chunks for part in (chunk, chunk + 1)]
        self.filters = w
        self.x = x + image * (layer.C * layer.H * layer.W)
        self.out = out + image * (layer.K * layer.P * layer.Q)
        with k.loop(0, panel.words * panel.pitch + (panel.pitch if panel.components > 1 else 0), panel.lanes) as n:
            k.store(k.splat(repeated(self.zero_in, panel.product), panel.lanes), self.words + n)  # padding stays
        with k.loop(first, k.min(first + panel.units_together, panel.units)) as unit:
            self._unit(unit)

    def _unit(self, unit: Value) -> None:
        """A block of channels, or a channel, by the chunk's sets."""
        k, panel, layer = self.k, self.panel, self.panel.layer
        first = unit * panel.unit_vectors
        vectors = k.min(k.i64(panel.vectors) - first, panel.unit_vectors)
        with k.loop(0, vectors) as v:
            self._meanings(first + v, self.meanings + v * (2 * panel.filter_lanes))
        x = self.x if panel.channels_last else self.x + unit * (layer.H * layer.W)
        (top, _), stride = layer.padding[0], layer.stride[0]
        with k.loop(*self.sets) as number:
            row = number * (panel.shared * stride) - top
            last = row + (panel.words * panel.rows - 1) * layer.dilation[0]
            arguments = x, row, first * panel.lanes, vectors, self.words, self.zero_byte
            with k.if_((row >= 0) & (last < layer.H)):
                k.call(self.fills[0], *arguments)
            with k.else_():
                k.call(self.fills[1], *arguments)
            with k.loop(0, vectors) as v:
                self._row(first + v, v, number)

    def _meanings(self, vector: Value, place: Value) -> None:
        """What is added to the sums of a vector of filters, and their scales."""
        k, panel = self.k, self.panel
        lanes = min(panel.filter_lanes, panel.width)
        first = self._channel(vector)
        totals = self.filters + vector * panel.filter_words + (panel.filter_words - panel.filter_lanes)
        with k.loop(0, lanes) as lane:
            bias, scale = (k.load(self.bias + (first + lane + n)) for n in (0, panel.layer.K))
            k.store(bias - k.load(totals + lane) * self.zero_in, place + lane)
            k.store(scale, place + lane + panel.filter_lanes)

    def _channel(self, vector: Value) -> Value:
        """The first filter of a vector."""
        panel = self.panel
        return self.k.min(vector * panel.lanes, panel.layer.C - panel.width) if panel.channels_last else vector

    def _row(self, vector: Value, v: Value, number: Value) -> None:
        """A set's outputs by a vector of filters, the unit's number v."""
        k, panel, layer, strides = self.k, self.panel, self.panel.layer, self.panel.correlation.output
        out = self.out + self._channel(vector) * strides.channel + number * (panel.shared * strides.row)
        words = self.words + (panel.pitch if panel.components > 1 else 0)
        if panel.channels_last:
            words = words + v * panel.lanes
        filters, left = self.filters + vector * panel.filter_words, k.i64(layer.P) - number * panel.shared
        with k.loop(0, layer.Q, panel.advance) as n:
            q = k.min(n, layer.Q - panel.advance)
            here = words + q * (panel.step if panel.channels_last else 1)
            meanings = self.meanings + v * (2 * panel.filter_lanes)
            k.call(self.tile, here, filters, meanings, out + q * strides.column, self.zero_out, left)


def emit_filters(m: Module, panel: DepthwisePanel) -> Function:
    """The task that packs the filters of one vector; taps that do not exist are 0."""
    layer, lanes = panel.layer, panel.filter_lanes
    k = m.function("pack_vector", *TASK, internal=True)
    context, vector, _ = k.args
    w, _, packed = operands(k, context, i8, i8, i32, i32, i32)[:3]
    packed = packed + vector * panel.filter_words
    zero = k.const(i32, 0)
    with k.loop(0, lanes) as lane:
        first = k.min(vector * lanes, layer.K - panel.width) if panel.channels_last else vector
        taps = w + k.min(first + lane, layer.K - 1) * (layer.R * layer.S)
        total = k.var(zero)
        with k.loop(0, layer.R * layer.S) as tap:
            total.add(k.cast(k.load(taps + tap), i32))
        k.store(total.get(), packed + (panel.filter_words - lanes) + lane)
        with k.loop(0, layer.S) as s:
            for word in range(panel.words):
                for t in range(panel.shared):
                    found = [panel.tap(word, row, t) for row in range(panel.rows)]
                    numbers = [zero if r is None else k.cast(k.load(taps + (r * layer.S) + s), i32) for r in found]
                    place = ((s + word * layer.S) * panel.shared + t) * lanes
                    k.store(joined(numbers, panel.product), packed + place + lane)
    return k


def emit(instruction_set: str, panel: DepthwisePanel) -> Module:
    """`run` and `pack`."""
    m = Module(instruction_set)
    run, pack = m.function("run", *RUN), m.function("pack", *RUN)
    launch(run, run.args[0], _TaskWriter(m, panel).k, panel.tasks)
    launch(pack, pack.args[0], emit_filters(m, panel), panel.vectors)
    return m
