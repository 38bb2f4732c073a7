"""The kernels of `depthwise.inplace`: masked loads leave out columns that are padding, and rows of padding are zeros.

Rows outside of the image are read from a row of zeros instead, so that one function does for all blocks of rows.

Lanes that a mask leaves out cost nothing where their memory is the process's own. Where there is none they cost 150 ns
where that was measured, as a processor then looks for a fault that is not to be. That may be so before an image and
after it, once in a layer; around the row of zeros, which every channel reads, there is memory.
"""

from __future__ import annotations

from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Value, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.lines import fetch_lines
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, correlations
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import by_halves, halved, in_order, load_range, store_range
from autoconv.cpu.common.panel import Segment, in_lines
from autoconv.cpu.common.streaming import stream
from autoconv.cpu.depthwise.geometry import TASKS, column_segments, planes_of_task
from autoconv.layer import ConvLayer

AHEAD = 2  # blocks of rows between one that is read and the one whose lines are fetched meanwhile


class InPlaceBlocking(NamedTuple):
    """TP rows by NV vectors of outputs in registers."""

    TP: int
    NV: int
    nt: bool
    threads: int


def own_elements(layer: ConvLayer, blocking: InPlaceBlocking) -> int:
    """Elements of a thread's own workspace: a row of zeros, and a block of outputs on its way past the caches."""
    (problem,) = correlations(layer)
    return zeros_elements(layer) + in_lines(blocking.TP * problem.columns.count) * blocking.nt


def zeros_elements(layer: ConvLayer) -> int:
    """Elements of a row of zeros and of a vector before and after it, which masks may leave out."""
    (problem,) = correlations(layer)
    return in_lines(problem.columns.size) + 2 * _margin(layer)


def zeros_at(own: Value, layer: ConvLayer) -> Value:
    """Where the row begins in memory for so many elements."""
    return own + _margin(layer)


def clear(k: Function, zeros: Value, layer: ConvLayer) -> None:
    """Write the row, if a tap of some output sees one of padding."""
    (problem,) = correlations(layer)
    rows, columns, element = problem.rows, problem.columns, DTYPES[layer.dtype]
    if not all(rows.sees(p, tap) for p in (0, rows.count - 1) for tap in range(len(rows.taps))):
        lanes = k.module.lanes(element)
        with k.loop(0, in_lines(columns.size), lanes) as column:
            k.store(k.zero(widened(element), lanes), zeros + column)


def _margin(layer: ConvLayer) -> int:
    """Elements of the widest vector."""
    return in_lines(LINE // layer.itemsize)


def emit(instruction_set: str, layer: ConvLayer, blocking: InPlaceBlocking) -> Module:
    """`run` for a layer."""
    m = Module(instruction_set)
    run = m.function("run", *RUN)
    launch(run, run.args[0], *_emit_task(m, layer, blocking))
    return m


def _emit_task(m: Module, layer: ConvLayer, blocking: InPlaceBlocking) -> tuple[Function, int]:
    """A task: the row blocks of some planes, or some of one plane's; and how many there are."""
    element = DTYPES[layer.dtype]
    (problem,) = correlations(layer)
    rows, columns = problem.rows, problem.columns
    segments = column_segments(problem, blocking.NV * m.lanes(element))
    ahead = AHEAD * blocking.TP * rows.stride * problem.input.row  # after a plane's last rows come the next one's first
    tiles: dict[tuple[int, int], Function] = {}

    def emitted(count: int, number: int) -> Function:
        if (count, number) not in tiles:
            tile = InPlaceTile(m, layer, problem, count, segments[number], ahead)
            tiles[count, number] = tile.emit(f"task_{count}_{number}")
        return tiles[count, number]

    task = m.function("task", *TASK, internal=True)
    context, index, thread = task.args
    x, w, out, bias, residual, workspace = operands(task, context, *[element] * 6)
    own = workspace + thread * own_elements(layer, blocking)
    zeros = zeros_at(own, layer)
    stage = own + zeros_elements(layer) if blocking.nt else None
    clear(task, zeros, layer)

    def block(source: Value, pointers: tuple[Value, ...], p: Value, count: int) -> None:
        filters, place, plus, b = pointers
        target = place if stage is None else stage
        for number, (start, times, pixels) in enumerate(segments):
            with task.loop(start, start + times * pixels, pixels) as q:
                seen = q * columns.stride
                task.call(emitted(count, number), source + seen, zeros + seen, filters, target + q, plus + q, b, p)
        if stage is not None:
            stream(task, stage, place, task.i64(count * columns.count))

    planes, blocks = problem.N * problem.groups, -(-rows.count // blocking.TP)
    together = planes_of_task(planes, blocking.threads)
    split = 1 if planes >= TASKS * blocking.threads else min(blocks, -(-TASKS * blocking.threads // planes))
    each = -(-blocks // split)
    split = -(-blocks // each)
    part, first = index % split, index // split * together
    with task.loop(first, task.min(first + together, planes)) as plane, task.loop(0, problem.K) as i:
        n, group = plane // problem.groups, plane % problem.groups
        source = x + n * problem.input.image + group * problem.input.group
        place = n * problem.output.image + group * problem.output.group + i * problem.output.channel
        filters, b = w + group * problem.filters.group + i * problem.filters.k, bias + group * problem.K + i
        whole = rows.count // blocking.TP
        with task.loop(part * each, task.min(part * each + each, whole)) as number:
            p = number * blocking.TP
            at = place + p * columns.count
            block(source, (filters, out + at, residual + at, b), p, blocking.TP)
        if rest := rows.count % blocking.TP:
            with task.if_(part.eq(split - 1)):
                at = place + whole * blocking.TP * columns.count
                block(source, (filters, out + at, residual + at, b), task.i64(whole * blocking.TP), rest)
    if blocking.nt:
        task.fence()
    return task, -(-planes // together) * split


class InPlaceTile:
    """So many rows of outputs in registers, as wide as the tiles of a segment.

    What lies `ahead` elements beyond the rows that the tile above has not seen is fetched, unless that is 0.
    """

    def __init__(
        self, m: Module, layer: ConvLayer, problem: Correlation, rows: int, segment: Segment, ahead: int = 0
    ) -> None:
        self.m, self.layer, self.problem, self.rows, self.segment = m, layer, problem, rows, segment
        self.ahead = ahead
        self.lanes = m.lanes(DTYPES[layer.dtype])

    def emit(self, name: str) -> Function:
        """`function(x, zeros, filters, out, residual, bias, p)`.

        `x` points at column `stride * q` of the image's row 0 for the tile's first output q, `zeros` at that of a row
        of zeros, and `p` is its first row.
        """
        element, rows, problem = DTYPES[self.layer.dtype], self.problem.rows, self.problem
        k = self.m.function(name, *[ptr(element)] * 6, i64, internal=True)
        x, zeros, filters, out, residual, bias, p = k.args
        firsts = range(0, self.segment.pixels, self.lanes)
        acc = [[k.var(k.zero(widened(element), self.lanes)) for _ in firsts] for _ in range(self.rows)]
        meetings: dict[int, list[tuple[int, int]]] = {}
        for i in range(self.rows):
            for r in range(len(rows.taps)):
                meetings.setdefault(i * rows.stride + r * rows.dilation, []).append((i, r))
        for t in sorted(meetings):
            h = p * rows.stride + (rows.offset + t)
            here = x + h * problem.input.row
            if self.ahead and t > max(meetings) - self.rows * rows.stride:
                fetch_lines(k, here + self.ahead, self.segment.pixels * problem.columns.stride)
            row = k.select(k.select(h >= 0, h, k.i64(rows.size)) < rows.size, here, zeros)
            pixels = _Row(k, row, problem.columns, self.segment)
            for s, along in enumerate(problem.columns.taps):
                for i, r in meetings[t]:
                    place = filters + (rows.taps[r] * problem.filters.r + along * problem.filters.s)
                    weight = k.broadcast(place, self.lanes)
                    for v, total in enumerate(acc[i]):
                        total.fma(pixels.seen(s, v), weight)
        epilogue = Epilogue.of(self.layer)
        b = epilogue.of_channels(lambda place: k.broadcast(place, self.lanes), bias)
        for i, totals in enumerate(acc):
            for first, total in zip(firsts, totals, strict=True):
                at, width = i * problem.output.row + first, min(self.lanes, self.segment.pixels - first)
                plus = load_range(k, residual + at, self.lanes, 0, width) if epilogue.residual else None
                y = in_order(k, total.get(), problem.columns.stride)
                store_range(k, epilogue.apply(k, y, b, plus), out + at, 0, width)
        return k


class _Row:
    """A row of the image, as the vectors of outputs of a segment's tiles see it through every tap of a row."""

    def __init__(self, k: Function, row: Value, columns: CorrelationAxis, segment: Segment) -> None:
        self.k, self.row, self.columns, self.segment = k, row, columns, segment
        assert row.type.to is not None
        self.lanes = k.module.lanes(row.type.to)
        self.vectors = -(-segment.pixels // self.lanes)
        self._loaded: dict[int, Value] = {}
        self._made: dict[tuple[int, int], Value] = {}

    def seen(self, s: int, v: int) -> Value:
        """What vector v of outputs sees through tap s."""
        shift, residue = divmod(self.columns.offset + self.columns.dilation * s, self.columns.stride)
        before, after = (v - 1, v) if shift < 0 else (v, v + 1)
        both = 0 < abs(shift) < self.lanes and 0 <= before < after < self.vectors
        if self.columns.stride == 1 or not both or by_halves(self.k, self.lanes, self.columns.stride):
            return self._vector(v * self.lanes + shift, residue)
        first, second = (self._vector(n * self.lanes, residue) for n in (before, after))
        return self.k.shuffle(first, second, range(shift % self.lanes, shift % self.lanes + self.lanes))

    def _vector(self, first: int, residue: int) -> Value:
        """Every stride-th column, from `stride * first + residue` on."""
        if (first, residue) not in self._made:
            stride = self.columns.stride
            vectors = [self._load(stride * first + n * self.lanes) for n in range(stride)]
            self._made[first, residue] = halved(self.k, vectors, stride, residue)
        return self._made[first, residue]

    def _load(self, column: int) -> Value:
        """Columns from there on, counted from the tile's first; zeros for those that not every tile has in the image.

        What some tiles of a segment have and others have not, none of them sees.
        """
        if column not in self._loaded:
            (start, times, pixels), stride = self.segment, self.columns.stride
            low, high = start * stride + column, (start + (times - 1) * pixels) * stride + column
            inside = [low + lane >= 0 and high + lane < self.columns.size for lane in range(self.lanes)]
            place = self.row + column
            assert place.type.to is not None
            zero = self.k.zero(widened(place.type.to), self.lanes)
            loaded = self.k.load(place, self.lanes, mask=self.k.mask_of(inside)) if any(inside) else zero
            self._loaded[column] = loaded
        return self._loaded[column]
