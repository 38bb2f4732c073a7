"""The gradient of the filters with channels as lanes, for images that keep channels first.

A thread copies some rows of the input, `BC` channels of them, to a packed panel with channels last, and goes through
all its filters and taps with it; the sums stay in the workspace as `[k][r][s][BC]`, and are written to `dw` at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, i8, i32, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, FilterStrides, Strides
from autoconv.cpu.common.lanes import store_transposed
from autoconv.cpu.direct.gradients import WgradTile, forward, tap_range, tile_sizes
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class PackedWgradBlocking:
    """A register tile of `TK` filters by `BC` channels, tasks of `filters` such tiles, panels for `rows` of dy."""

    TK: int
    BC: int
    filters: int
    rows: int

    def sums(self, c: Correlation) -> int:
        """Elements of a thread's sums."""
        return self.filters * self.TK * len(c.rows.taps) * len(c.columns.taps) * self.BC

    def panel(self, c: Correlation) -> int:
        """Elements of a thread's copy of the input."""
        span = (self.rows - 1) * c.rows.stride + (len(c.rows.taps) - 1) * c.rows.dilation + 1
        return min(span, c.rows.size) * c.columns.size * self.BC

    def thread_bytes(self, layer: ConvLayer) -> int:
        """Workspace of one thread."""
        c = forward(layer)
        return -(-(self.sums(c) + self.panel(c)) * layer.accumulator.itemsize // LINE) * LINE


PANEL_BYTES = 128 << 10  # half of a small L2 cache


def packed_blocking(layer: ConvLayer, threads: int, TK: int, BC: int) -> PackedWgradBlocking:
    """As many filters to a task as leave enough tasks; panels that stay in cache."""
    c = forward(layer)
    tiles, others = math.ceil(c.K / TK), c.groups * math.ceil(c.C / BC)
    filters = tiles
    while filters > 1 and others * math.ceil(tiles / filters) < 4 * threads:
        filters = math.ceil(filters / 2)
    row = c.columns.size * BC * layer.accumulator.itemsize
    rows = max((PANEL_BYTES // row - (len(c.rows.taps) - 1) * c.rows.dilation) // c.rows.stride, 1)
    return PackedWgradBlocking(TK, BC, filters, min(rows, c.rows.count))


def _emit_pack(m: Module, c: Correlation, element: Type, BC: int) -> Function:
    """One row of BC channels to channels last; channels that do not exist repeat the last one."""
    lanes = m.lanes(element)
    k = m.function("pack_row", ptr(element), ptr(widened(element)), i64, internal=True)
    x, panel, left = k.args
    with k.loop(0, BC, lanes) as first:
        channels = [x + k.min(first + lane, left - 1) * c.input.channel for lane in range(lanes)]
        store_transposed(k, channels, panel + first, c.columns.size, BC)
    return k


def emit_wgrad_packed(instruction_set: str, layer: ConvLayer, b: PackedWgradBlocking) -> Module:
    """`run` of a gradient of the filters: operand a is x, b is dy, out is dw; rows of x are contiguous."""
    m = Module(instruction_set)
    c = forward(layer)
    element = DTYPES[layer.dtype]
    total = widened(element)
    R, S, W = len(c.rows.taps), len(c.columns.taps), c.columns.size
    inside = replace(
        c,
        C=b.BC,
        input=Strides(0, 1, W * b.BC, b.BC, 0),
        filters=FilterStrides(R * S * b.BC, 1, S * b.BC, b.BC, 0),
    )
    pack = _emit_pack(m, c, element, b.BC)
    filter_sizes = tile_sizes(c.K, b.TK)
    tiles = {
        f: WgradTile(m, inside, element, total, (f, b.BC), b.rows, lanes_are_pixels=False).k for f, _ in filter_sizes
    }

    k = m.function("task", *TASK, internal=True)
    ctx, index, thread = k.args
    x, dy, dw, _, _, workspace = operands(k, ctx, element)
    mine = k.bytes_at(workspace, thread * b.thread_bytes(layer), i8)
    sums, panel = k.bits(mine, ptr(total)), k.bits(mine, ptr(total)) + b.sums(c)
    filter_blocks = math.ceil(math.ceil(c.K / b.TK) / b.filters)
    channel_blocks = math.ceil(c.C / b.BC)
    first, rest = index % filter_blocks * b.filters, index // filter_blocks
    c0, group = rest % channel_blocks * b.BC, rest // channel_blocks
    left = k.i64(c.C) - c0
    x = x + group * c.input.group + c0 * c.input.channel
    dy = dy + group * c.output.group
    dw = dw + group * c.filters.group + c0 * c.filters.c

    with k.loop(0, c.N) as n, k.loop(0, c.rows.count, b.rows) as start:
        stop = k.min(start + b.rows, c.rows.count)
        top = k.max(start * c.rows.stride + c.rows.offset, 0)
        below = (stop - 1) * c.rows.stride + (c.rows.offset + (R - 1) * c.rows.dilation + 1)
        with k.loop(top, k.min(below, c.rows.size)) as h:
            here = x + n * c.input.image + h * c.input.row
            k.call(pack, here, panel + (h - top) * (W * b.BC), left)
        base = 0
        for filters, number in filter_sizes:
            with k.loop(k.max(first, base), k.min(first + b.filters, base + number)) as t:
                there = dy + n * c.output.image + t * (b.TK * c.output.channel)
                kept = sums + (t - first) * (b.TK * R * S * b.BC)
                with k.loop(0, R) as r, k.loop(0, S) as s:
                    low, high, row = tap_range(k, c.rows, r)
                    low, high = k.max(low, start), k.min(high, stop)
                    near, far, column = tap_range(k, c.columns, s)
                    source = panel + (row - top) * (W * b.BC) + column * b.BC
                    again = k.zext(k.cast(n + start, i32).ne(0), i64)
                    target = kept + (r * S + s) * b.BC
                    k.call(tiles[filters], source, there, target, 1, low, high, near, far, b.BC, again)
            base += number

    with k.loop(first * b.TK, k.min((first + b.filters) * b.TK, c.K)) as row, k.loop(0, k.min(left, b.BC)) as column:
        kept = sums + (row - first * b.TK) * (R * S * b.BC) + column
        place = dw + row * c.filters.k + column * c.filters.c
        with k.loop(0, R) as r, k.loop(0, S) as s:
            k.store(k.load(kept + (r * S + s) * b.BC), place + r * c.filters.r + s * c.filters.s)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, c.groups * filter_blocks * channel_blocks)
    return m
