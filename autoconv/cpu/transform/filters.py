"""The filters' side of the pipeline: taps of every subfilter and channel, transformed, laid out for the product."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from autoconv.cpu.codegen.ir import Function, Module, Value
from autoconv.cpu.codegen.launch import TASK, operands
from autoconv.cpu.transform.geometry import TiledAxis
from autoconv.cpu.transform.stage import Stage, T
from autoconv.layer import ConvLayer

STACK = 32 * 1024  # bytes of points that wait to be written with those of the next terms
NARROWEST = 4  # taps of a filter that are worth transposing
STREAMED = 8 << 20  # bytes of packed filters that go past the caches: they would not stay there


class FilterStage(Stage[T], ABC):
    """Writes what packs the filters of one correlation.

    The points of one term of the sum lie far apart in what is packed, often in the same set of every cache: those of
    some terms are put together first, and each point's written in one run.
    """

    stack: ClassVar[int] = STACK

    def __init__(self, m: Module, layer: ConvLayer, tiling: T, number: int, packed: int) -> None:
        super().__init__(m, layer, tiling, number)
        self.packed = packed
        fitting = self.stack // (tiling.points * tiling.TK * tiling.itemsize)
        self.together = min(tiling.lanes, tiling.packed_depth, 1 << fitting.bit_length() - 1) if fitting else 1
        self.apart = tiling.u_stride if self.together == 1 else self.together * tiling.TK
        self.streamed = tiling.packed_size * tiling.itemsize > STREAMED

    @abstractmethod
    def transform(self) -> Function:
        """`(taps, u)`: the points of one block of filters for one channel, `apart` elements from one to the next."""

    def write(self, k: Function, points: Value, u: Value, start: Value, terms: Value) -> None:
        """Write the points of some terms, `apart` elements from one to the next, where the product wants them."""
        tiling, TK = self.tiling, self.tiling.TK
        with k.loop(0, tiling.points) as point, k.loop(0, terms * TK, tiling.lanes) as i:
            v = k.load(points + point * self.apart + i, tiling.lanes)
            k.store(v, u + (point * tiling.u_stride + start * TK) + i, nontemporal=self.streamed)

    def emit(self) -> tuple[Function, int]:
        """The task, and how many of them there are: one for a block of filters and a vector of channels."""
        tiling, c, lanes, TK = self.tiling, self.tiling.correlation, self.tiling.lanes, self.tiling.TK
        vectors = -(-tiling.packed_depth // lanes)
        k = self.function("pack_block", *TASK)
        context, index, _ = k.args
        w, _, u = operands(k, context, self.stored, self.real, self.real, self.real, self.real)[:3]
        blocks = index // vectors
        group, block = blocks // tiling.k_blocks, blocks % tiling.k_blocks
        first = index % vectors * lanes
        w = w + (group * c.filters.group + block * (TK * c.filters.k))
        u = u + (self.packed + blocks * tiling.u_size)
        live = k.min(c.K - block * TK, TK)
        rows, columns = tiling.filter_axes

        def gather_singly(d: Value, taps: Value) -> None:
            """Put the taps of a term there, zeros where there are none."""
            subfilter, channel = d // tiling.subfilter_depth, d % tiling.subfilter_depth
            with k.loop(0, rows.r) as i, k.loop(0, columns.r) as j:
                row, row_there = filter_tap(rows, subfilter // columns.subfilters, i)
                column, column_there = filter_tap(columns, subfilter % columns.subfilters, j)
                there = row_there & column_there & (channel < c.C)
                source = w + (channel * c.filters.c + row * c.filters.r + column * c.filters.s)
                known = k.select(there, live, k.i64(0))
                target = taps + (i * columns.r + j) * TK
                with k.loop(0, known) as lane:
                    k.store(k.load(source + lane * c.filters.k), target + lane)
                with k.loop(known, TK) as lane:
                    k.store(k.zero(self.real), target + lane)

        def gather(d: Value, taps: Value) -> None:
            """The same, in blocks where neighbouring taps are neighbours in memory."""
            if not (places := self._neighbours()):
                return gather_singly(d, taps)
            with k.if_(live.eq(TK) & (d < c.C)):
                self._gather_blocks(k, w + d * c.filters.c, places, taps)
            with k.else_():
                gather_singly(d, taps)
            return None

        self.lay_out(k, gather, u, first, k.min(first + lanes, tiling.packed_depth))
        return k, c.groups * tiling.k_blocks * vectors

    def _neighbours(self) -> list[int]:
        """Where the taps of a term lie, if a vector of them, or of fewer lanes, is on end, in either order."""
        tiling, filters = self.tiling, self.tiling.correlation.filters
        down, across = (tiled.axis.taps for tiled in tiling.filter_axes)
        places = [row * filters.r + column * filters.s for row in down for column in across]
        steps = {b - a for a, b in itertools.pairwise(places)}
        on_end = tiling.subfilters == 1 and len(places) >= NARROWEST and steps in ({1}, {-1})
        return places if on_end else []

    def _gather_blocks(self, k: Function, source: Value, places: Sequence[int], taps: Value) -> None:
        """Put the taps of a term of a whole block of filters there, transposed from vectors of a filter's taps."""
        TK, filters = self.tiling.TK, self.tiling.correlation.filters
        count = len(places)
        width = min(self.tiling.lanes, 1 << count.bit_length() - 1)
        for known in range(0, count, width):
            start = min(known, count - width)  # the last block has taps of the one before once more
            block = places[start : start + width]
            for first in range(0, TK, width):
                at = source + (min(block) + first * filters.k)
                columns = k.transpose([k.load(at + lane * filters.k, width) for lane in range(width)])
                for n in range(known - start, width):
                    k.store(columns[block[n] - min(block)], taps + ((start + n) * TK + first))

    def lay_out(self, k: Function, gather: Callable[[Value, Value], None], u: Value, first: Value, last: Value) -> None:
        """Transform some terms of a block of filters, and put their points where the product wants them."""
        tiling, TK = self.tiling, self.tiling.TK
        rows, columns = tiling.filter_axes
        transform, taps = self.transform(), k.scratch(self.real, rows.r * columns.r * TK)

        def transform_term(d: Value, points: Value) -> None:
            gather(d, taps)
            k.call(transform, taps, points)

        if self.together == 1:
            with k.loop(first, last) as d:
                transform_term(d, u + d * TK)
            return
        points = k.scratch(self.real, tiling.points * self.apart)
        with k.loop(first, last, self.together) as start:
            terms = k.min(last - start, self.together)
            with k.loop(0, terms) as n:
                transform_term(start + n, points + n * TK)
            self.write(k, points, u, start, terms)
        if self.streamed:
            k.fence()


def filter_tap(tiled: TiledAxis, subfilter: Value, number: Value) -> tuple[Value, Value]:
    """Which row or column of the filter a subfilter's tap is, and whether there is one."""
    taps, components = tiled.axis.taps, tiled.components
    place = subfilter // components * (tiled.r * components) + subfilter % components + number * components
    return place * tiled.axis.tap_step + taps[0], place < len(taps)
