"""Packing the filters of a correlation as the direct microkernel reads them."""

from __future__ import annotations

import math
from collections.abc import Callable

from autoconv.cpu.codegen.ir import Function, Module, Type, Value, widened
from autoconv.cpu.codegen.launch import TASK, operands
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis
from autoconv.cpu.common.lanes import store_transposed


def packed_size(c: Correlation, TK: int) -> int:
    """Elements of the packed filters: `[groups][K/TK][C][R][S][TK]`."""
    return c.groups * math.ceil(c.K / TK) * TK * c.C * len(c.rows.taps) * len(c.columns.taps)


def tap_place(axis: CorrelationAxis, t: int | Value) -> int | Value:
    """The filter row or column of a tap."""
    return axis.taps[t] if isinstance(t, int) else t * axis.tap_step + axis.taps[0]


def emit_pack(
    m: Module,
    c: Correlation,
    TK: int,
    element: Type,
    packed_at: int,
    blocks: int | None = None,
    place: Callable[[Value], Value] | None = None,
) -> tuple[Function, int]:
    """The task that packs one block of filters, and how many there are. Lanes without a filter hold 0 or another.

    A group has so many `blocks`, of which the last may be without filters, and `place` says where one of them goes, if
    they do not follow one another.
    """
    blocks = blocks or math.ceil(c.K / TK)
    R, S = len(c.rows.taps), len(c.columns.taps)
    lanes = m.lanes(element)
    k = m.function(f"pack_{len(m.functions)}", *TASK, internal=True)
    ctx, index, _ = k.args
    w, _, packed = operands(k, ctx, element, element, widened(element), element, element)[:3]
    first = index % blocks * TK
    left = k.i64(c.K) - first
    w = w + index // blocks * c.filters.group + first * c.filters.k
    packed = packed + packed_at + (place(index) if place else index * (c.C * R * S * TK))

    def filters(vector: Value) -> list[Value]:
        """Where the filters of a vector's lanes are; the last one again beyond it."""
        return [w + k.min(vector + lane, left - 1) * c.filters.k for lane in range(lanes)]

    def taps(r: Value, s: Value) -> Value:
        return k.i64(tap_place(c.rows, r) * c.filters.r + tap_place(c.columns, s) * c.filters.s)

    whole = c.rows.taps == tuple(range(R)) and c.columns.taps == tuple(range(S))
    if whole and c.filters[1:4] == (R * S, S, 1):  # channels and taps lie as they should: only lanes move inwards
        with k.loop(0, TK, lanes) as v:
            store_transposed(k, filters(v), packed + v, c.C * R * S, TK)
    elif c.filters.c == 1:
        with k.loop(0, TK, lanes) as v:
            rows = filters(v)
            with k.loop(0, R) as r, k.loop(0, S) as s:
                at = taps(r, s)
                store_transposed(k, [row + at for row in rows], packed + (r * S + s) * TK + v, c.C, R * S * TK)
    else:
        with k.loop(0, c.C) as channel, k.loop(0, R) as r, k.loop(0, S) as s:
            here = w + channel * c.filters.c + taps(r, s)
            there = packed + ((channel * R + r) * S + s) * TK
            with k.loop(0, TK, lanes) as v:
                if c.filters.k == 1:
                    mask = None if c.K % TK == 0 else k.mask(left - v, lanes)
                    k.store(k.load(here + v, lanes, mask=mask), there + v)
                else:
                    for lane in range(lanes):
                        filter_ = k.min(v + lane, left - 1) * c.filters.k
                        k.store(k.load(here + filter_), there + v + lane)
    return k, c.groups * blocks
