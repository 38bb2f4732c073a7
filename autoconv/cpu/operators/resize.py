"""Resizing along one axis: weighted sums of a few elements, whose places and weights are given.

Where elements that are neighbours along other axes fill vectors, those are the lanes, and places are read from a table.
Else rows are resized: a vector of outputs is picked from one or two vectors of the row, by shuffles that the code of
each has of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autoconv.cpu.codegen.ir import Function, Module, Value, f32, i64
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.operators import TASK_ELEMENTS
from autoconv.cpu.operators.images import Apart, places

WRITTEN_OUT = 32  # terms of an output; more are a loop
MOST_PICKED = 256  # vectors of a row, times terms: as many as are written out
FEWEST_LANES = 4


def emit(
    instruction_set: str, outer: int, old: int, inner: int, new: int, taps: int, apart: Apart | None = None
) -> Module:
    """`run` of a, seen as (outer, old, inner), to out (outer, new, inner), whose images may lie apart.

    b has the places of `new` x `taps` elements along the axis (int64), bias their weights.
    """
    m = Module(instruction_set)
    lanes = m.lanes(f32) if inner >= m.lanes(f32) else 1
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, table, out, weights = operands(k, context, f32, i64, f32, f32, f32)[:4]
    together = max(1, TASK_ELEMENTS // inner)
    with k.loop(index * together, k.min((index + 1) * together, outer * new)) as row:
        source, target = places(row // new, (old * inner, new * inner), apart)
        place = row % new * taps
        for i in _vectors(k, inner, lanes):
            total = k.var(k.zero(f32, lanes))
            for tap in _each(k, taps):
                at = x + source + k.load(table + place + tap) * inner
                total.fma(k.load(at + i, lanes), k.splat(k.load(weights + place + tap), lanes))
            k.store(total.get(), out + target + row % new * inner + i)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-outer * new // together))
    return m


def _vectors(k: Function, count: int, lanes: int) -> Iterator[int | Value]:
    """Where vectors of so many elements begin; the last ends with them, and may repeat some of the one before."""
    with k.loop(0, count - lanes + 1, lanes) as i:
        yield i
    if count % lanes:
        yield count - lanes


def _each(k: Function, taps: int) -> Iterator[int | Value]:
    """The terms of an output, by their numbers."""
    if taps <= WRITTEN_OUT:
        yield from range(taps)
    else:
        with k.loop(0, taps) as tap:
            yield tap


class Rows(NamedTuple):
    """Rows of `old` elements each, and what their outputs are made of, by vectors of so many lanes.

    Rows of several images may lie apart.
    """

    outer: int
    old: int
    lanes: int
    places: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    apart: Apart | None = None

    @property
    def starts(self) -> list[int]:
        """Of the vectors of an output row; the last begins where it ends with the row."""
        last = len(self.places) - self.lanes
        return sorted({*range(0, last + 1, self.lanes), last})


def rows_of(
    instruction_set: str,
    outer: int,
    old: int,
    inner: int,
    indices: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
) -> Rows | None:
    """What resizes (outer, old, inner) by rows of `old * inner`; None where `emit` does as well, or rows are long."""
    lanes = Module(instruction_set).lanes(f32)
    if inner >= lanes or len(indices) * inner > MOST_PICKED * lanes:
        return None
    flat = tuple(tuple(place * inner + n for place in row) for row in indices for n in range(inner))
    factors = tuple(tuple(row) for row in weights for _ in range(inner))
    while lanes >= FEWEST_LANES:
        found = Rows(outer, old * inner, lanes, flat, factors)
        if lanes <= min(old * inner, len(flat)) and len(found.starts) * len(flat[0]) <= MOST_PICKED:
            seen = (flat[start : start + lanes] for start in found.starts)
            if all(max(terms) - min(terms) < 2 * lanes for some in seen for terms in zip(*some, strict=True)):
                return found
        lanes //= 2
    return None


def emit_rows(instruction_set: str, rows: Rows) -> Module:
    """`run` of a, by rows, to out, without a table of places."""
    m = Module(instruction_set)
    lanes, new = rows.lanes, len(rows.places)
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, _, out = operands(k, context, f32)[:3]
    together = max(1, TASK_ELEMENTS // new)
    with k.loop(index * together, k.min((index + 1) * together, rows.outer)) as row:
        source, target = places(row, (rows.old, new), rows.apart)
        for first in rows.starts:
            total: Value | None = None
            for t in range(len(rows.places[0])):
                some = range(first, first + lanes)
                one = _picked(k, x + source, rows.old, lanes, [rows.places[n][t] for n in some])
                factors = [rows.weights[n][t] for n in some]
                if factors != [1.0] * lanes:
                    factor = k.load(m.table(k, f32, factors), lanes)
                    total = one * factor if total is None else k.fma(one, factor, total)
                else:
                    total = one if total is None else total + one
            assert total is not None
            k.store(total, out + target + first)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-rows.outer // together))
    return m


def _picked(k: Function, row: Value, old: int, lanes: int, places: Sequence[int]) -> Value:
    """The elements of a row at these places, less than two vectors apart."""
    starts = [min(min(places), old - lanes)]
    if max(places) >= starts[0] + lanes:
        starts.append(min(starts[0] + lanes, old - lanes))
    low, high = (k.load(row + start, lanes) for start in (starts[0], starts[-1]))
    within = [p - starts[0] if p < starts[0] + lanes else lanes + p - starts[-1] for p in places]
    return low if within == [*range(lanes)] else k.shuffle(low, high, within)
