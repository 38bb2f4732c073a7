"""The kernels of `depthwise` with pixels as lanes: blocks of output rows held in registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, VECTOR_BYTES, Function, Module, Value, Var, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, correlations
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import interleaved, load_range, store_range
from autoconv.cpu.common.rows import Run, Strip, in_lines, split, stream
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
    """The correlations of a layer, which read the same strips, cut into chunks of row blocks.

    A strided layer's gradient has several: `phases[row][column]` of the output's position modulo the strides. They
    are computed side by side and woven together, so that whole rows are written, once. `problem` sees what all of
    them see; its rows and columns, BH and NV count positions, with an output of every phase.
    """

    problem: Correlation
    phases: tuple[tuple[Correlation, ...], ...]
    looped: bool
    strip: Strip
    BH: int
    NV: int
    blocks: int
    together: int

    @property
    def down(self) -> int:
        """Rows of the output to one of positions."""
        return len(self.phases)

    @property
    def across(self) -> int:
        """Columns of the output to one of positions."""
        return len(self.phases[0])

    @property
    def height(self) -> int:
        """Rows of the output."""
        return sum(row[0].rows.count for row in self.phases)

    @property
    def width(self) -> int:
        """Columns of the output."""
        return sum(c.columns.count for c in self.phases[0])

    @property
    def rows(self) -> int:
        """Rows of a strip."""
        axis = self.problem.rows
        return (self.together * self.BH - 1) * axis.stride + axis.dilation * max(0, len(axis.taps) - 1) + 1

    @property
    def elements(self) -> int:
        """Elements of the strips of one group's input channels, in whole cache lines."""
        return in_lines(self.problem.C * self.rows * self.strip.pitch)

    @property
    def block(self) -> int:
        """Rows of the output to a row block; the last may have fewer."""
        return min(self.BH * self.down, self.height)

    @property
    def output_elements(self) -> int:
        """Elements of a row block's output, in whole cache lines."""
        return in_lines(self.block * self.width)

    @property
    def runs(self) -> list[Run]:
        """Tiles of a row of the output."""
        return split(self.width, self.strip.lanes * self.across, self.NV, 0)

    def row(self, axis: CorrelationAxis, tap: int) -> int:
        """Rows from a position's first in the strip to what a phase's output there sees through a tap."""
        return axis.offset + axis.dilation * tap - self.problem.rows.offset

    def column(self, axis: CorrelationAxis, tap: int) -> int:
        """Elements from a strip's row to what a phase's output 0 sees through a tap."""
        whole = self.problem.columns
        return self.strip.offset((axis.offset + axis.dilation * tap - whole.offset) // whole.dilation)


def cut(problems: Sequence[Correlation], lanes: int, itemsize: int, shape: Shape) -> Plan:
    """Chunks as large as half of the first-level cache, in whole row blocks."""
    across = sum(c.rows.output_start == 0 for c in problems)
    phases = tuple(tuple(problems[n : n + across]) for n in range(0, len(problems), across))
    rows, columns = _seen([row[0].rows for row in phases]), _seen([c.columns for c in phases[0]])
    problem = replace(problems[0], rows=rows, columns=columns)
    looped = any(len(c.rows.taps) * len(c.columns.taps) * c.C > UNROLLED_TAPS for c in problems)
    BH = min(shape.BH, rows.count)
    if looped and any((c.rows.stride, c.rows.dilation) != (1, 1) for c in problems):
        BH = 1  # rows of one block would not see the same rows of the input
    elif looped:
        BH = min(BH, *[len(c.rows.taps) or BH for c in problems])
    strip = Strip(columns, lanes)
    blocks = -(-rows.count // BH)
    held = shape.l1_bytes // 2 // (itemsize * strip.pitch * problem.C)
    span = rows.dilation * max(0, len(rows.taps) - 1) + 1
    most = max(1, ((held - span) // rows.stride + 1) // BH, 2 * span // (BH * rows.stride))
    chunks = -(-blocks // most)
    return Plan(problem, phases, looped, strip, BH, shape.NV, blocks, -(-blocks // chunks))


def _seen(phases: Sequence[CorrelationAxis]) -> CorrelationAxis:
    """An axis that sees what any of the phases sees."""
    if len(phases) == 1:
        return phases[0]
    seen = [axis.offset + axis.dilation * tap for axis in phases for tap in range(len(axis.taps))] or [0]
    return CorrelationAxis(phases[0].size, phases[0].count, 1, min(seen), 1, tuple(range(max(seen) - min(seen) + 1)))


def _planned(instruction_set: str, layer: ConvLayer, shape: Shape) -> Plan:
    itemsize = widened(DTYPES[layer.dtype]).bytes
    return cut(correlations(layer), VECTOR_BYTES[instruction_set] // itemsize, itemsize, shape)


def workspace_bytes(instruction_set: str, layer: ConvLayer, shape: Shape) -> int:
    """Every thread's own workspace: a strip, and the output on its way past the caches."""
    plan = _planned(instruction_set, layer, shape)
    return (plan.elements + plan.output_elements * shape.nt) * widened(DTYPES[layer.dtype]).bytes


def emit(instruction_set: str, layer: ConvLayer, shape: Shape) -> Module:
    """`run` for a depthwise layer in NCHW."""
    m = Module(instruction_set)
    own = workspace_bytes(instruction_set, layer, shape)
    run = m.function("run", *RUN)
    launch(run, run.args[0], *_emit_task(m, layer, _planned(instruction_set, layer, shape), shape, own))
    return m


def _whole(layer: ConvLayer, shape: Shape) -> bool:
    """Whether tasks are of whole planes, which are read from front to back."""
    return layer.N * layer.groups >= 8 * shape.threads


def _emit_task(m: Module, layer: ConvLayer, plan: Plan, shape: Shape, own: int) -> tuple[Function, int]:
    """A task: some planes, chunk by chunk; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    problem = plan.problem
    planes = problem.N * problem.groups
    chunks = -(-plan.blocks // plan.together)
    whole = _whole(layer, shape)
    together = max(1, min(16, planes // (8 * shape.threads)))
    functions = {
        (rows, run.pixels): _emit_tile(m, f"task_{rows}x{run.pixels}", layer, plan, rows, run.pixels)
        for rows in {plan.block, plan.height % plan.block}
        if rows
        for run in plan.runs
    }

    task = m.function("task", *TASK, internal=True)
    context, index, thread = task.args
    x, w, out, bias, residual, workspace = operands(task, context, *[element] * 5)
    strip = task.bytes_at(workspace, thread * own, wide)
    parts = 1 if whole else chunks
    part, first = index % parts, index // parts * together
    last_plane, last_chunk = task.min(first + together, planes), chunks if whole else part + 1
    with task.loop(first, last_plane) as plane, task.loop(part, last_chunk) as chunk:
        first_block = chunk * plan.together
        last_block = task.min(first_block + plan.together, plan.blocks)
        top = first_block * (plan.BH * problem.rows.stride) + problem.rows.offset
        n, group = plane // problem.groups, plane % problem.groups
        source = x + n * problem.input.image + group * problem.input.group
        for c in range(problem.C):
            _fill(task, plan, source + c * problem.input.channel, top, strip + c * (plan.rows * plan.strip.pitch))
        for i in range(problem.K):
            place = n * problem.output.image + group * problem.output.group + i * problem.output.channel
            place = place + first_block * (plan.block * plan.width)
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
    filters, out, residual, bias = pointers

    def block(number: Value, rows: int) -> None:
        at = (number - first) * (plan.block * plan.width)
        begin = strip + (number - first) * (plan.BH * plan.problem.rows.stride * plan.strip.pitch)
        for run in plan.runs:
            with k.loop(run.start, run.start + run.times * run.pixels, run.pixels) as q:
                target = out + (at + q) if stage is None else stage + q
                tile = functions[rows, run.pixels]
                k.call(tile, begin + q // plan.across, filters, target, residual + (at + q), bias, number * plan.BH)
        if stage is not None:
            stream(k, stage, out + at, k.i64(rows * plan.width))

    whole, rest = divmod(plan.height, plan.block)
    if whole:
        with k.loop(first, k.min(last, whole)) as number:
            block(number, plan.block)
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
        if not plan.looped:
            with k.else_():
                plan.strip.clear(k, strip + t * plan.strip.pitch)


def _emit_tile(m: Module, name: str, layer: ConvLayer, plan: Plan, rows: int, pixels: int) -> Function:
    """`function(strip, filters, out, residual, bias, p)` for rows of neighbouring outputs, from position p on."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    k = m.function(name, ptr(wide), *[ptr(element)] * 4, i64, internal=True)
    strip, filters, out, residual, bias, p = k.args
    lanes = plan.strip.lanes
    acc = [
        [[k.var(k.zero(wide, lanes)) for _ in range(0, pixels, lanes * plan.across)] for _ in range(plan.across)]
        for _ in range(rows)
    ]
    sums = _Sums(k, plan, acc, strip, filters)
    if plan.looped:
        sums.run_loops(p)
    else:
        sums.run_unrolled()
    _store(k, layer, plan, acc, pixels, out, residual, bias)
    return k


@dataclass(frozen=True)
class _Sums:
    """The sums of one register tile: `acc[row][phase of the column][vector]`."""

    k: Function
    plan: Plan
    acc: Sequence[Sequence[Sequence[Var]]]
    strip: Value
    filters: Value

    def run_unrolled(self) -> None:
        """Every tap written out; a vector of the strip is read once for all outputs that see it."""
        plan = self.plan
        seen: dict[tuple[int, int], list[tuple[Sequence[Var], int, int]]] = {}
        for i, row in enumerate(self.acc):
            for total, phase in zip(row, plan.phases[i % plan.down], strict=True):
                for r, down in enumerate(phase.rows.taps):
                    t = i // plan.down * phase.rows.stride + plan.row(phase.rows, r)
                    for s, along in enumerate(phase.columns.taps):
                        seen.setdefault((t, plan.column(phase.columns, s)), []).append((total, down, along))
        for c in range(plan.problem.C):
            for t, column in sorted(seen, key=lambda place: place[0]):
                place = self.strip + ((c * plan.rows + t) * plan.strip.pitch + column)
                self._add(place, [(total, self._tap(c, r, s)) for total, r, s in seen[t, column]])

    def _tap(self, c: int, r: int, s: int) -> Value:
        strides = self.plan.problem.filters
        return self.filters + (c * strides.c + r * strides.r + s * strides.s)

    def _add(self, row: Value, taps: Sequence[tuple[Sequence[Var], Value]]) -> None:
        lanes = self.plan.strip.lanes
        pixels = [self.k.load(row + v * lanes, lanes) for v in range(len(self.acc[0][0]))]
        for total, tap in taps:
            weight = self.k.broadcast(tap, lanes)
            for a, v in zip(total, pixels, strict=True):
                a.fma(v, weight)

    def run_loops(self, p: Value) -> None:
        """Row by row of the strip, padding rows skipped: in row u, output i of a phase meets tap u - i.

        A block of one output has its rows `gap` apart; one of several is cut only where they are neighbours.
        """
        k, plan = self.k, self.plan
        for phase in range(plan.down):
            acc, rows = self.acc[phase :: plan.down], plan.phases[phase][0].rows
            BH, taps = len(acc), len(rows.taps)
            if not (BH and taps):
                continue
            top = p * rows.stride + rows.offset
            low = k.max(rows.dilation - 1 - top, 0) // rows.dilation
            high = k.max(rows.dilation - 1 + rows.size - top, 0) // rows.dilation
            for c in range(plan.problem.C):
                for u in range(BH - 1):
                    with k.if_(k.select(low <= u, high, k.i64(0)) > u):
                        self._add_row(c, k.i64(u), phase, range(u + 1))
                with k.loop(k.max(low, BH - 1), k.min(high, taps)) as row:
                    self._add_row(c, row, phase, range(BH))
                for u in range(taps, taps + BH - 1):
                    with k.if_(k.select(low <= u, high, k.i64(0)) > u):
                        self._add_row(c, k.i64(u), phase, range(u - taps + 1, BH))

    def _add_row(self, c: int, u: Value, phase: int, outputs: Sequence[int]) -> None:
        """Row u as a phase of rows counts them, to its outputs of all phases of columns."""
        plan = self.plan
        for n, problem in enumerate(plan.phases[phase]):
            if problem.columns.taps:
                row = self.strip + (u * (problem.rows.dilation * plan.strip.pitch) + c * (plan.rows * plan.strip.pitch))
                row = row + plan.row(problem.rows, 0) * plan.strip.pitch
                totals = [(i, self.acc[i * plan.down + phase][n]) for i in outputs]
                self._add_taps(c, u, problem, row, totals)

    def _add_taps(
        self, c: int, u: Value, problem: Correlation, row: Value, totals: Sequence[tuple[int, Sequence[Var]]]
    ) -> None:
        """A row of the strip through all taps of a row."""
        rows, columns, strides = problem.rows, problem.columns, problem.filters
        down = (rows.taps[-1] - rows.taps[0]) // max(1, len(rows.taps) - 1) * strides.r
        along = (columns.taps[-1] - columns.taps[0]) // max(1, len(columns.taps) - 1) * strides.s
        taps = self._tap(c, rows.taps[0], columns.taps[0]) + u * down
        count = len(columns.taps)
        if columns.stride > 1:  # neighbouring taps lie in different phases
            for s in range(count):
                place = row + self.plan.column(columns, s)
                self._add(place, [(total, taps + (s * along - i * down)) for i, total in totals])
            return
        row = row + self.plan.column(columns, 0)
        unrolled = min(count, 4)

        def several(first: int | Value, number: int) -> None:
            for n in range(number):
                places = [(total, taps + (first + n) * along - i * down) for i, total in totals]
                self._add(row + (first + n) * columns.dilation, places)

        with self.k.loop(0, count // unrolled * unrolled, unrolled) as tap:
            several(tap, unrolled)
        if count % unrolled:
            several(count // unrolled * unrolled, count % unrolled)


def _store(
    k: Function,
    layer: ConvLayer,
    plan: Plan,
    acc: Sequence[Sequence[Sequence[Var]]],
    pixels: int,
    out: Value,
    residual: Value,
    bias: Value,
) -> None:
    lanes = plan.strip.lanes
    epilogue = Epilogue.of(layer)
    b = k.broadcast(bias, lanes) if epilogue.bias else None
    for i, row in enumerate(acc):
        totals = [v for vectors in zip(*row, strict=True) for v in interleaved(k, [total.get() for total in vectors])]
        for first, total in zip(range(0, pixels, lanes), totals, strict=False):
            width = min(lanes, pixels - first)
            place = i * plan.width + first
            r = load_range(k, residual + place, lanes, 0, width) if epilogue.residual else None
            store_range(k, epilogue.apply(k, total, b, r), out + place, 0, width)
