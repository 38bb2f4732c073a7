"""Packing for `int8`: a strip's pixels in lines of words, and the filters in blocks of them."""

from __future__ import annotations

from collections.abc import Callable

from autoconv.cpu.codegen.ir import Function, Module, Value, i8, i32, i64, ptr
from autoconv.cpu.codegen.launch import TASK, operands
from autoconv.cpu.codegen.words import CHANNELS
from autoconv.cpu.int8.geometry import WORD, Panel
from autoconv.cpu.int8.words import joined, whole_words, widened


def emit_panel(m: Module, panel: Panel) -> Function:
    """`fill(x, first row of outputs, panel, padding)`, x being the first channel of a group; `padding` is a word."""
    layer, line, row_step = panel.layer, panel.line, panel.correlation.input.row
    (top, _), (left, _) = layer.padding
    before = min(left, panel.pitch)  # places of padding
    there = panel.pitch if panel.flat else min(layer.W, panel.pitch - before)  # and of the image
    copy = emit_row(m, panel, there) if there else None
    k = m.function("fill", ptr(i8), i64, ptr(i8), i32, internal=True)
    x, first, out, padding = k.args
    if copy is not None and panel.flat:
        k.call(copy, x + first * row_step, out)
        return k

    def clear(place: Value, count: int) -> None:
        if count > 0:
            with k.loop(0, panel.blocks) as block, k.loop(0, count * line, WORD * panel.cut.lanes) as at:
                k.store(k.splat(padding, panel.cut.lanes), k.bytes_at(place, block * panel.block_bytes + at, i32))

    with k.loop(0, panel.held) as t:
        h = first * layer.stride[0] + t - top
        place = out + (t % layer.stride[0] * panel.alike + t // layer.stride[0]) * (panel.pitch * line)
        inside = (h >= 0) & (h < layer.H)
        with k.if_(inside):
            clear(place, before)
            if copy is not None:
                k.call(copy, x + h * row_step, place + before * line)
            clear(place + (before + there) * line, panel.pitch - before - there)
        with k.else_():
            clear(place, panel.pitch)
    return k


def emit_row(m: Module, panel: Panel, count: int) -> Function:
    """`row(x, out)`: so many neighbouring pixels."""
    layer, lanes, product = panel.layer, panel.cut.lanes, panel.cut.product
    channel_step, column_step = panel.correlation.input.channel, panel.correlation.input.column
    channels = CHANNELS[product]
    k = m.function("row", ptr(i8), ptr(i8), internal=True)
    x, out = k.args

    def place(word: Value) -> Value:
        """Of a word in a pixel's first line."""
        if panel.blocks == 1:
            return out + word * WORD
        return out + word // panel.depth * panel.block_bytes + word % panel.depth * WORD

    def vectors(word: Value, pixels: Value, width: int) -> Value:
        """A word of each of `width` pixels; channels that do not exist repeat the last, and meet filters of 0."""
        numbers = []
        for n in range(channels):
            channel = k.min(word * channels + n, panel.C - 1)
            numbers.append(widened(k, k.load(pixels + channel * channel_step, width), layer.dtype, product))
        return joined(numbers, product)

    def one_by_one(first: int) -> None:
        with k.loop(0, count) as pixel, k.loop(first, panel.words) as word:
            v = vectors(word, x + pixel * column_step, 1)
            k.store(v, k.bits(place(word) + pixel * panel.line, ptr(i32)))

    if column_step == 1 and count >= lanes and panel.line % (WORD * lanes) == 0:
        with k.loop(0, count, lanes) as q:
            pixel = k.min(q, count - lanes)  # the last ones are some of those before again
            with k.loop(0, panel.words, lanes) as word:
                rows = [vectors(word + n, x + pixel, lanes) for n in range(lanes)]
                for n, v in enumerate(k.transpose(rows)):
                    k.store(v, k.bytes_at(place(word), (pixel + n) * panel.line, i32))
    elif channel_step == 1:
        whole = panel.C // channels // lanes * lanes
        if whole:
            with k.loop(0, count) as pixel, k.loop(0, whole, lanes) as word:
                v = whole_words(k, x + pixel * column_step + word * channels, lanes, layer.dtype, product)
                k.store(v, k.bytes_at(place(word), pixel * panel.line, i32))
        if whole < panel.words:
            one_by_one(whole)
    else:
        one_by_one(0)
    return k


def emit_filters(m: Module, panel: Panel) -> tuple[Function, int]:
    """The task that packs a block of filters, and how many there are; channels and filters that do not exist are 0."""
    layer, TK, channels = panel.layer, panel.cut.TK, CHANNELS[panel.cut.product]
    strides = panel.correlation.filters
    k = m.function("pack_block", *TASK, internal=True)
    context, index, _ = k.args
    w, _, packed = operands(k, context, i8, i8, i32, i32, i32)[:3]
    group, first = index // panel.filter_blocks, index % panel.filter_blocks * TK
    packed = packed + index * (panel.filter_words * TK)
    w = w + (group * panel.K) * strides.k

    def byte(start: Value, channel: Value, exists: Callable[[Value], Value]) -> Value:
        number = k.cast(k.load(start + k.min(channel, panel.C - 1) * strides.c), i32)
        return k.select(exists(channel), number, k.const(i32, 0))

    with k.loop(0, TK) as f:
        missing = first + f >= panel.K
        here = w + k.min(first + f, panel.K - 1) * strides.k
        total = k.var(k.const(i32, 0))
        with k.loop(0, panel.blocks) as block, k.loop(0, len(panel.taps)) as tap, k.loop(0, panel.depth) as word:
            channel = (block * panel.depth + word) * channels
            limit = k.select(missing, k.i64(0), k.i64(panel.C))
            numbers = [byte(here + tap * strides.s, channel + n, lambda c: c < limit) for n in range(channels)]
            for number in numbers:
                total.add(number)
            at = (block * len(panel.taps) + tap) * panel.depth + word
            k.store(joined(numbers, panel.cut.product), packed + at * TK + f)
        k.store(total.get(), packed + (panel.filter_words - 1) * TK + f)
    return k, layer.groups * panel.filter_blocks
