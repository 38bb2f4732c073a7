"""The kernels of `depthwise` with pixels as lanes: blocks of output rows held in registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoconv.cpu.ir import DTYPES, Function, Module, Value, Var, i64, ptr, widened
from autoconv.cpu.pieces import Correlation, Tail, correlations, load_range, store_range
from autoconv.cpu.pixel_pieces import Strip, finish, split, stream
from autoconv.cpu.pool import RUN, TASK, launch, operands
from autoconv.layer import ConvLayer

UNROLLED_TAPS = 25  # larger filters run in loops


class Shape(NamedTuple):
    """How the work is cut: BH rows by NV vectors in registers, strips of half the first-level cache."""

    BH: int
    NV: int
    nt: bool
    threads: int
    l1_bytes: int


class Plan(NamedTuple):
    """One correlation cut into chunks of row blocks."""

    problem: Correlation
    strip: Strip
    BH: int
    NV: int
    blocks: int
    together: int

    @property
    def rows(self) -> int:
        """Rows of a strip."""
        axis = self.problem.rows
        return (self.together * self.BH - 1) * axis.step + axis.gap * max(0, len(axis.taps) - 1) + 1

    @property
    def elements(self) -> int:
        """Elements of the strips of one group's input channels, in whole cache lines."""
        return _lines(self.problem.C * self.rows * self.strip.pitch)

    @property
    def output_elements(self) -> int:
        """Elements of a row block's output, in whole cache lines."""
        return _lines(self.BH * self.problem.columns.count)


def cut(problem: Correlation, lanes: int, itemsize: int, shape: Shape) -> Plan:
    """Chunks as large as half of the first-level cache, in whole row blocks."""
    BH = min(shape.BH, problem.rows.count)
    if looped(problem) and (problem.rows.step, problem.rows.gap) != (1, 1):
        BH = 1  # rows of one block would not see the same rows of the input
    elif looped(problem):
        BH = min(BH, len(problem.rows.taps))
    strip = Strip(problem.columns, lanes)
    blocks = -(-problem.rows.count // BH)
    held = shape.l1_bytes // 2 // (itemsize * strip.pitch * problem.C)
    span = problem.rows.gap * max(0, len(problem.rows.taps) - 1) + 1
    most = max(1, ((held - span) // problem.rows.step + 1) // BH, 2 * span // (BH * problem.rows.step))
    chunks = -(-blocks // most)
    return Plan(problem, strip, BH, shape.NV, blocks, -(-blocks // chunks))


def looped(problem: Correlation) -> bool:
    """Whether the taps are too many to write them all out."""
    return len(problem.rows.taps) * len(problem.columns.taps) * problem.C > UNROLLED_TAPS


def workspace_elements(layer: ConvLayer, lanes: int, itemsize: int, shape: Shape) -> int:
    """Elements of every thread's own workspace: a strip, and the output on its way past the caches."""
    plans = [cut(problem, lanes, itemsize, shape) for problem in correlations(layer)]
    return max(plan.elements + plan.output_elements * shape.nt for plan in plans)


def _lines(elements: int) -> int:
    return -(-elements // 16) * 16


def emit(instruction_set: str, layer: ConvLayer, shape: Shape) -> Module:
    """`run` for a depthwise layer in NCHW."""
    m = Module(instruction_set)
    wide = widened(DTYPES[layer.dtype])
    own = workspace_elements(layer, m.lanes(wide), wide.bytes, shape)
    plans = [cut(problem, m.lanes(wide), wide.bytes, shape) for problem in correlations(layer)]
    tasks = [_emit_task(m, f"task{n}", layer, plan, shape, own) for n, plan in enumerate(plans)]
    if len(tasks) > 1 and _whole(layer, shape):  # phases of the same planes: what one has written, the next has at hand
        every = m.function("every", *TASK, internal=True)
        for task, _ in tasks:
            every.call(task, *every.args)
        tasks = [(every, tasks[0][1])]
    run = m.function("run", *RUN)
    for task, count in tasks:
        launch(run, run.args[0], task, count)
    return m


def _whole(layer: ConvLayer, shape: Shape) -> bool:
    """Whether tasks are of whole planes, which are read from front to back."""
    return layer.N * layer.groups >= 8 * shape.threads


def _emit_task(m: Module, name: str, layer: ConvLayer, plan: Plan, shape: Shape, own: int) -> tuple[Function, int]:
    """A task: some planes, chunk by chunk; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    problem = plan.problem
    planes = problem.N * problem.groups
    chunks = -(-plan.blocks // plan.together)
    whole = _whole(layer, shape)
    together = max(1, min(16, planes // (8 * shape.threads)))
    rest = problem.rows.count % plan.BH
    runs = split(problem.columns.count, plan.strip.lanes, plan.NV, 0)
    functions = {
        (BH, run.pixels): _emit_tile(m, f"{name}_{BH}x{run.pixels}", layer, plan, BH, run.pixels)
        for BH in {plan.BH, rest}
        if BH
        for run in runs
    }

    task = m.function(name, *TASK, internal=True)
    context, index, thread = task.args
    x, w, out, bias, residual, workspace = operands(task, context, *[element] * 5)
    strip = task.bytes_at(workspace, thread * (own * wide.bytes), wide)
    parts = 1 if whole else chunks
    part, first = index % parts, index // parts * together
    last_plane, last_chunk = task.min(first + together, planes), chunks if whole else part + 1
    with task.loop(first, last_plane) as plane, task.loop(part, last_chunk) as chunk:
        first_block = chunk * plan.together
        last_block = task.min(first_block + plan.together, plan.blocks)
        top = first_block * (plan.BH * problem.rows.step) + problem.rows.first
        n, group = plane // problem.groups, plane % problem.groups
        source = x + n * problem.input.image + group * problem.input.group
        for c in range(problem.C):
            _fill(task, plan, source + c * problem.input.channel, top, strip + c * (plan.rows * plan.strip.pitch))
        for i in range(problem.K):
            place = n * problem.output.image + group * problem.output.group + i * problem.output.channel
            place = place + problem.rows.start * problem.output.row + problem.columns.start
            place = place + first_block * (plan.BH * problem.rows.stride * problem.output.row)
            filters = w + group * problem.filters.group + i * problem.filters.k
            pointers = filters, out + place, residual + place, bias + group * problem.K + i
            stage = task.bytes_at(strip, plan.elements * wide.bytes, element) if shape.nt else None
            _blocks(task, plan, functions, strip, pointers, first_block, last_block, stage)
    if shape.nt:
        task.fence()
    return task, -(-planes // together) * parts


def _blocks(
    k: Function,
    plan: Plan,
    functions: Mapping[tuple[int, int], Function],
    strip: Value,
    pointers: tuple[Value, ...],
    first: Value,
    last: Value,
    stage: Value | None,
) -> None:
    """Row blocks first .. last - 1 of one plane; filters, output, residual and bias are those of row block first."""
    problem = plan.problem
    filters, out, residual, bias = pointers

    def block(number: Value, BH: int) -> None:
        at = (number - first) * (plan.BH * problem.rows.stride * problem.output.row)
        begin = strip + (number - first) * (plan.BH * problem.rows.step * plan.strip.pitch)
        for run in split(problem.columns.count, plan.strip.lanes, plan.NV, 0):
            with k.loop(run.start, run.start + run.times * run.pixels, run.pixels) as q:
                to = at + q * problem.columns.stride
                target = out + to if stage is None else stage + q
                tile = functions[BH, run.pixels]
                k.call(tile, begin + q, filters, target, residual + to, bias, number * plan.BH)
        if stage is not None:
            stream(k, stage, out + at, k.i64(BH * problem.columns.count))

    whole, rest = divmod(problem.rows.count, plan.BH)
    if whole:
        with k.loop(first, k.min(last, whole)) as number:
            block(number, plan.BH)
    if rest:
        with k.if_(last.eq(plan.blocks)):
            block(k.i64(plan.blocks - 1), rest)


def _fill(k: Function, plan: Plan, plane: Value, top: Value, strip: Value) -> None:
    """Copy the rows from `top` on that lie inside the image; the others are zero, or never read."""
    axis = plan.problem.rows
    with k.loop(0, plan.rows) as t:
        h = top + t
        inside = k.select(h >= 0, h, k.i64(axis.size)) < axis.size
        with k.if_(inside):
            row, element = plane + h * plan.problem.input.row, plane.type.to
            assert element is not None
            # What the next chunk will copy; no processor looks ahead beyond a page.
            for column in range(0, plan.problem.columns.size, 64 // element.bytes):
                k.prefetch(row + (plan.rows * plan.problem.input.row + column))
            plan.strip.fill(k, row, strip + t * plan.strip.pitch)
        if not looped(plan.problem):
            with k.else_():
                plan.strip.clear(k, strip + t * plan.strip.pitch)


def _emit_tile(m: Module, name: str, layer: ConvLayer, plan: Plan, BH: int, pixels: int) -> Function:
    """`function(strip, filters, out, residual, bias, p)` for BH rows from p on of so many neighbouring pixels."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    k = m.function(name, ptr(wide), *[ptr(element)] * 4, i64, internal=True)
    strip, filters, out, residual, bias, p = k.args
    acc = [[k.var(k.zero(wide, plan.strip.lanes)) for _ in range(0, pixels, plan.strip.lanes)] for _ in range(BH)]
    sums = _Sums(k, plan, acc, strip, filters)
    if looped(plan.problem):
        sums.run_loops(p)
    else:
        sums.run_unrolled()
    _store(k, layer, plan.problem, acc, pixels, out, residual, bias)
    return k


@dataclass(frozen=True)
class _Sums:
    """The sums of one register tile: `acc[row][vector]`."""

    k: Function
    plan: Plan
    acc: Sequence[Sequence[Var]]
    strip: Value
    filters: Value

    def run_unrolled(self) -> None:
        """Every tap written out; a row of the strip is read once for all outputs that see it."""
        rows, columns = self.plan.problem.rows, self.plan.problem.columns
        seen: dict[int, list[tuple[int, int]]] = {}
        for i in range(len(self.acc)):
            for r in range(len(rows.taps)):
                seen.setdefault(i * rows.step + r * rows.gap, []).append((i, r))
        for c in range(self.plan.problem.C):
            for t in sorted(seen):
                for s in range(len(columns.taps)):
                    row = self.strip + ((c * self.plan.rows + t) * self.plan.strip.pitch + self.plan.strip.offset(s))
                    self._add(row, [(i, self._tap(c, rows.taps[r], columns.taps[s])) for i, r in seen[t]])

    def _tap(self, c: int, r: int, s: int) -> Value:
        strides = self.plan.problem.filters
        return self.filters + (c * strides.c + r * strides.r + s * strides.s)

    def _add(self, row: Value, taps: Sequence[tuple[int, Value]]) -> None:
        lanes = self.plan.strip.lanes
        pixels = [self.k.load(row + v * lanes, lanes) for v in range(len(self.acc[0]))]
        for i, tap in taps:
            weight = self.k.broadcast(tap, lanes)
            for a, v in zip(self.acc[i], pixels, strict=True):
                a.fma(v, weight)

    def run_loops(self, p: Value) -> None:
        """Row by row of the strip, padding rows skipped: in row u, output i meets tap u - i.

        A block of one output has its rows `gap` apart; one of several is cut only where they are neighbours.
        """
        k, rows = self.k, self.plan.problem.rows
        BH, taps = len(self.acc), len(rows.taps)
        top = p * rows.step + rows.first
        low = k.max(rows.gap - 1 - top, 0) // rows.gap
        high = k.max(rows.gap - 1 + rows.size - top, 0) // rows.gap
        for c in range(self.plan.problem.C):
            for u in range(BH - 1):
                with k.if_(k.select(low <= u, high, k.i64(0)) > u):
                    self._add_row(c, k.i64(u), range(u + 1))
            with k.loop(k.max(low, BH - 1), k.min(high, taps)) as row:
                self._add_row(c, row, range(BH))
            for u in range(taps, taps + BH - 1):
                with k.if_(k.select(low <= u, high, k.i64(0)) > u):
                    self._add_row(c, k.i64(u), range(u - taps + 1, BH))

    def _add_row(self, c: int, u: Value, outputs: Sequence[int]) -> None:
        rows, columns = self.plan.problem.rows, self.plan.problem.columns
        strides, strip = self.plan.problem.filters, self.plan.strip
        down = (rows.taps[-1] - rows.taps[0]) // max(1, len(rows.taps) - 1) * strides.r
        along = (columns.taps[-1] - columns.taps[0]) // max(1, len(columns.taps) - 1) * strides.s
        row = self.strip + (u * (rows.gap * strip.pitch) + c * (self.plan.rows * strip.pitch))
        taps = self._tap(c, rows.taps[0], columns.taps[0]) + u * down
        count = len(columns.taps)
        if columns.step > 1:  # neighbouring taps lie in different phases
            for s in range(count):
                self._add(row + strip.offset(s), [(i, taps + (s * along - i * down)) for i in outputs])
            return
        unrolled = min(count, 4)

        def several(first: int | Value, number: int) -> None:
            for n in range(number):
                place = [(i, taps + (first + n) * along - i * down) for i in outputs]
                self._add(row + (first + n) * columns.gap, place)

        with self.k.loop(0, count // unrolled * unrolled, unrolled) as tap:
            several(tap, unrolled)
        if count % unrolled:
            several(count // unrolled * unrolled, count % unrolled)


def _store(
    k: Function,
    layer: ConvLayer,
    problem: Correlation,
    acc: Sequence[Sequence[Var]],
    pixels: int,
    out: Value,
    residual: Value,
    bias: Value,
) -> None:
    lanes = acc[0][0].type.lanes
    tail = Tail.of(layer)
    b = k.broadcast(bias, lanes) if tail.bias else None
    for i, row in enumerate(acc):
        for v, total in enumerate(row):
            column = v * lanes
            width = min(lanes, pixels - column)
            place = i * problem.rows.stride * problem.output.row + column * problem.columns.stride
            r = load_range(k, residual + place, lanes, 0, width) if tail.residual else None
            result = finish(k, tail, total.get(), b, r)
            if problem.columns.stride == 1:
                store_range(k, result, out + place, 0, width)
            elif problem.columns.stride == 2 and width == lanes and 2 * problem.columns.count <= problem.output.row:
                _weave(k, result, out + place, problem.columns.start)
            else:
                for lane in range(width):
                    k.store(k.extract(result, lane), out + (place + lane * problem.columns.stride))


def _weave(k: Function, v: Value, p: Value, start: int) -> None:
    """Store a vector's lanes to every other place from `p` on, as two whole vectors.

    Places between those of the first phase are the second's, which comes later and keeps the first's.
    """
    lanes = v.type.lanes
    for half in range(2):
        spread = [half * lanes // 2 + lane // 2 for lane in range(lanes)]
        there = p + (half * lanes - start)
        if start == 0:
            k.store(k.shuffle(v, v, spread), there)
        else:
            picks = [lanes + place if lane % 2 else lane for lane, place in enumerate(spread)]
            k.store(k.shuffle(k.load(there, lanes), v, picks), there)
