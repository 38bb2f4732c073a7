"""The filters' side of Winograd: `U = G w GT` for every filter and channel, laid out for the product."""

from __future__ import annotations

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Value, ptr, widened
from autoconv.cpu.codegen.launch import TASK, operands
from autoconv.cpu.transform.geometry import Plan, Side
from autoconv.cpu.transform.matrix import linear
from autoconv.layer import ConvLayer

STACK = 32 * 1024  # bytes of points that wait to be written with those of the next terms
STREAMED = 8 << 20  # bytes of packed filters that go past the caches: they would not stay there


class FilterWriter:
    """Writes what packs the filters of one correlation.

    The points of one term of the sum lie far apart in what is packed, often in the same set of every cache: those of
    some terms are put together first, and each point's written in one run.
    """

    def __init__(self, m: Module, layer: ConvLayer, plan: Plan, number: int, packed: int) -> None:
        self.m, self.plan, self.number, self.packed = m, plan, number, packed
        self.stored = DTYPES[layer.dtype]
        self.real = widened(self.stored)
        fitting = STACK // (plan.points * plan.KB * plan.itemsize)
        self.together = min(plan.lanes, plan.depth, 1 << fitting.bit_length() - 1) if fitting else 1
        self.apart = (plan.depth if self.together == 1 else self.together) * plan.KB

    def emit(self) -> tuple[Function, int]:
        """The task, and how many of them there are: one for a block of filters and a vector of channels."""
        plan, c, lanes, KB = self.plan, self.plan.correlation, self.plan.lanes, self.plan.KB
        transform = self._transform()
        k = self.m.function(f"pack_block{self.number}", *TASK, internal=True)
        context, index, _ = k.args
        w, _, u = operands(k, context, self.stored, self.real, self.real, self.real, self.real)[:3]
        blocks = index // plan.c_blocks
        group, block = blocks // plan.k_blocks, blocks % plan.k_blocks
        first = index % plan.c_blocks * lanes
        w = w + (group * c.filters.group + block * (KB * c.filters.k))
        u = u + (self.packed + blocks * plan.u_size)
        live = k.min(c.K - block * KB, KB)
        rows, columns = plan.rows, plan.columns
        taps = k.scratch(self.real, rows.r * columns.r * KB)

        def transform_term(d: Value, points: Value) -> None:
            """Gather the taps of a term, zeros where there are none, and transform them."""
            part, channel = d // plan.part_depth, d % plan.part_depth
            with k.loop(0, rows.r) as i, k.loop(0, columns.r) as j:
                row, row_there = self._tap(rows, part // columns.parts, i)
                column, column_there = self._tap(columns, part % columns.parts, j)
                there = row_there & column_there & (channel < c.C)
                source = w + (channel * c.filters.c + row * c.filters.r + column * c.filters.s)
                known = k.select(there, live, k.i64(0))
                target = taps + (i * columns.r + j) * KB
                with k.loop(0, known) as lane:
                    k.store(k.load(source + lane * c.filters.k), target + lane)
                with k.loop(known, KB) as lane:
                    k.store(k.zero(self.real), target + lane)
            k.call(transform, taps, points)

        last = k.min(first + lanes, plan.depth)
        if self.together == 1:
            with k.loop(first, last) as d:
                transform_term(d, u + d * KB)
        else:
            points = k.scratch(self.real, plan.points * self.apart)
            streamed = plan.packed_size * plan.itemsize > STREAMED
            with k.loop(first, last, self.together) as start:
                terms = k.min(last - start, self.together)
                with k.loop(0, terms) as n:
                    transform_term(start + n, points + n * KB)
                with k.loop(0, plan.points) as point, k.loop(0, terms * KB, lanes) as i:
                    v = k.load(points + point * self.apart + i, lanes)
                    k.store(v, u + (point * plan.depth + start) * KB + i, nontemporal=streamed)
            if streamed:
                k.fence()
        return k, c.groups * plan.k_blocks * plan.c_blocks

    def _tap(self, side: Side, part: Value, number: Value) -> tuple[Value, Value]:
        """Which row or column of the filter a part's tap is, and whether there is one."""
        taps = side.axis.taps
        place = part // side.phases * (side.r * side.phases) + part % side.phases + number * side.phases
        step = taps[1] - taps[0] if len(taps) > 1 else 0
        return place * step + taps[0], place < len(taps)

    def _transform(self) -> Function:
        """`G w GT` of one block of filters for one channel."""
        plan, lanes, KB = self.plan, self.plan.lanes, self.plan.KB
        rows, columns = plan.rows, plan.columns
        k = self.m.function(f"transform_filters{self.number}", ptr(self.real), ptr(self.real), internal=True)
        taps, u = k.args
        half = k.scratch(self.real, rows.tile * columns.r * lanes)
        with k.loop(0, plan.vectors) as vector:
            with k.loop(0, columns.r) as j:
                source = taps + (j * KB + vector * lanes)
                xs = [k.load(source + i * (columns.r * KB), lanes) for i in range(rows.r)]
                for n, v in enumerate(linear(k, rows.transforms.G, xs)):
                    k.store(v, half + (j + n * columns.r) * lanes)
            with k.loop(0, rows.tile) as i:
                xs = [k.load(half + (i * columns.r + j) * lanes, lanes) for j in range(columns.r)]
                target = u + (i * (columns.tile * self.apart) + vector * lanes)
                for n, v in enumerate(linear(k, columns.transforms.G, xs)):
                    k.store(v, target + n * self.apart)
        return k
