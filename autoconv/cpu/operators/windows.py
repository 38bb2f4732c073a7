"""Pooling: rows of windows first, into scratch memory, then their columns.

Several rows of windows go into memory before the first is read again: a load of what two stores have just written
waits until they are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoconv.cpu.codegen.ir import Function, Module, Value, f32
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.lines import fetch_lines
from autoconv.cpu.common.lanes import by_halves, every_nth, halved, in_order, overlap
from autoconv.cpu.operators import TASK_ELEMENTS
from autoconv.cpu.operators.elements import ELEMENTS, floats, joined, neutral, stored
from autoconv.cpu.operators.images import Apart, places

Pair = tuple[int, int]
MOST_SCRATCH = 1 << 14  # bytes of memory on the stack, in which a row of windows has to fit
TOGETHER = 16  # rows of windows in scratch memory, if it holds as many
AHEAD = 4  # rows of windows between one that is read and the one whose last lines are fetched meanwhile
WRITTEN_OUT = 1 << 8  # loads of the rows or columns of a vector of windows; beyond, they go in loops


@dataclass(frozen=True)
class PoolShape:
    """Pooling of so many images of one channel; the arguments are those of `networks.operators.Pool`."""

    reduction: str
    planes: int
    size: Pair
    out: Pair
    window: Pair
    stride: Pair
    padding: tuple[Pair, Pair]
    dilation: Pair
    include_padding: bool
    dtype: str = "float32"
    apart: Apart | None = None

    def row_elements(self, lanes: int) -> int:
        """Scratch memory of a row: padded, and as far as whole vectors read."""
        vectors = -(-self.out[1] // lanes) * lanes
        reach = vectors * self.stride[1] + (self.window[1] - 1) * self.dilation[1]
        return (-(-max(reach, self.padding[1][0] + self.size[1]) // lanes) + 1) * lanes

    def counts(self, axis: int) -> list[int]:
        """For every output, how many places of the window count."""
        low, high = (-self.padding[axis][0], self.size[axis] + self.padding[axis][1])
        if not self.include_padding:
            low, high = 0, self.size[axis]
        starts = (place * self.stride[axis] - self.padding[axis][0] for place in range(self.out[axis]))
        apart, taps = self.dilation[axis], self.window[axis]
        inside = ((max(0, -((start - low) // apart)), min(taps, -((start - high) // apart))) for start in starts)
        return [max(1, last - first) for first, last in inside]


def emit(instruction_set: str, pool: PoolShape) -> Module:
    """`run` that pools a to out."""
    m = Module(instruction_set)
    together = max(1, TASK_ELEMENTS // (4 * pool.out[0] * pool.out[1]))
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, _, out = operands(k, context, ELEMENTS[pool.dtype])[:3]
    writer = _PlaneWriter(m, k, pool)
    with k.loop(index * together, k.min((index + 1) * together, pool.planes)) as plane:
        sizes = [height * width for height, width in (pool.size, pool.out)]
        source, target = places(plane, sizes, pool.apart)
        writer.write(x + source, out + target)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-pool.planes // together))
    return m


class _PlaneWriter:
    """Writes the pooling of one plane."""

    def __init__(self, m: Module, k: Function, pool: PoolShape) -> None:
        self.k, self.pool, self.lanes = k, pool, m.lanes(f32)
        self.elements = pool.row_elements(self.lanes)
        self.together = max(1, min(TOGETHER, pool.out[0], MOST_SCRATCH // (self.elements * f32.bytes)))
        self.rows = k.scratch(f32, self.together * self.elements)
        self.neutral = neutral(pool.reduction)
        with k.loop(0, self.together * self.elements, self.lanes) as i:  # borders keep this; the rest is written
            k.store(k.const(k.zero(f32, self.lanes).type, self.neutral), self.rows + i)
        self.scales: Sequence[Value] = ()
        if pool.reduction == "mean":
            slack = [1.0] * self.lanes
            self.scales = [m.table(k, f32, [1 / count for count in pool.counts(axis)] + slack) for axis in (0, 1)]

    def write(self, x: Value, out: Value) -> None:
        """All rows of a plane."""
        k, pool = self.k, self.pool
        height, span = pool.size[0], (pool.window[0] - 1) * pool.dilation[0]
        with k.loop(0, pool.out[0], self.together) as first:
            last = k.min(first + self.together, pool.out[0])
            with k.loop(first, last) as p:
                top = p * pool.stride[0] - pool.padding[0][0]
                below = x + (top + (span + 1 + (AHEAD - 1) * pool.stride[0])) * pool.size[1]
                fetch_lines(k, below, pool.stride[0] * pool.size[1])
                target = self.rows + ((p - first) * self.elements + pool.padding[1][0])
                whole = k.select(top >= 0, top + span, k.i64(height)) < height
                with k.if_(whole):
                    self._gather(x + top * pool.size[1], target, None, pool.window[0])
                with k.else_():
                    taps = overlap(k, top, pool.dilation[0], height, pool.window[0])
                    self._gather(x + top * pool.size[1], target, *taps)
            with k.loop(first, last) as p:
                self._columns(self.rows + (p - first) * self.elements, p, out + p * pool.out[1])

    def _gather(self, x: Value, target: Value, first: Value | None, last: int | Value) -> None:
        """A row of scratch memory from rows of the image: taps first .. last - 1 of a window that begins at `x`."""
        k, pool, lanes = self.k, self.pool, self.lanes
        step = pool.dilation[0] * pool.size[1]
        width = pool.size[1]

        def vector(i: Value | int, mask: Value | None = None) -> None:
            total = k.var(k.const(k.zero(f32, lanes).type, self.neutral))
            if first is None and isinstance(last, int) and last <= WRITTEN_OUT:
                for row in range(last):
                    total.set(joined(k, pool.reduction, total.get(), self._loaded(x + i + row * step, mask)))
            else:
                with k.loop(0 if first is None else first, last) as tap:
                    total.set(joined(k, pool.reduction, total.get(), self._loaded(x + i + tap * step, mask)))
            k.store(total.get(), target + i, mask=mask)

        if width < lanes:
            vector(0, k.mask_of([lane < width for lane in range(lanes)]))
            return
        whole = width // lanes * lanes
        with k.loop(0, whole, lanes) as i:
            vector(i)
        if whole < width:
            vector(width - lanes)  # some columns once more

    def _loaded(self, p: Value, mask: Value | None) -> Value:
        return floats(self.k, self.k.load(p, self.lanes, mask=mask), self.pool.dtype)

    def _columns_in_turn(self, row: Value, p: Value, out: Value) -> None:
        """A row of the output from its row of scratch memory, by single elements."""
        k, pool = self.k, self.pool
        with k.loop(0, pool.out[1]) as q:
            total = k.var(k.const(f32, self.neutral))
            with k.loop(0, pool.window[1]) as tap:
                loaded = k.load(row + (q * pool.stride[1] + tap * pool.dilation[1]))
                total.set(joined(k, pool.reduction, total.get(), loaded))
            found = total.get()
            for scale, place in zip(self.scales, (p, q), strict=False):
                found = found * k.load(scale + place)
            k.store(stored(k, found, pool.dtype), out + q)

    def _columns(self, row: Value, p: Value, out: Value) -> None:
        """A row of the output from its row of scratch memory."""
        k, pool, lanes = self.k, self.pool, self.lanes
        stride, width = pool.stride[1], pool.out[1]
        if pool.window[1] * stride > WRITTEN_OUT:
            self._columns_in_turn(row, p, out)
            return

        def vector(q: Value | int, mask: Value | None) -> None:
            total: Value | None = None
            for tap in range(pool.window[1]):
                start = row + (q * stride + tap * pool.dilation[1])
                neighbours = [k.load(start + n * lanes, lanes) for n in range(stride)]
                apart = by_halves(k, lanes, stride)
                loaded = halved(k, neighbours, stride, 0) if apart else every_nth(k, neighbours, lanes)
                total = loaded if total is None else joined(k, pool.reduction, total, loaded)
            assert total is not None
            total = in_order(k, total, stride)
            if self.scales:
                rows, columns = self.scales
                total = total * k.broadcast(rows + p, lanes) * k.load(columns + q, lanes)
            k.store(stored(k, total, pool.dtype), out + q, mask=mask)

        whole = width // lanes * lanes
        if whole:
            with k.loop(0, whole, lanes) as q:
                vector(q, None)
        if whole < width:
            vector(k.i64(whole), k.mask(width - whole, lanes))
