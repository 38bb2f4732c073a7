"""The kernels of `depthwise` in NCHW, with pixels as lanes: blocks of output rows held in registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Value, Var, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import interleaved, load_range, overlap, store_range
from autoconv.cpu.common.streaming import stream
from autoconv.cpu.depthwise.geometry import (
    TASKS,
    DepthwiseTiling,
    RowBlocking,
    planes_of_task,
    tiling_of,
    workspace_bytes,
)
from autoconv.layer import ConvLayer


def emit(instruction_set: str, layer: ConvLayer, blocking: RowBlocking) -> Module:
    """`run` for a depthwise layer in NCHW."""
    m = Module(instruction_set)
    own = workspace_bytes(instruction_set, layer, blocking)
    run = m.function("run", *RUN)
    launch(run, run.args[0], *_emit_task(m, layer, tiling_of(instruction_set, layer, blocking), blocking, own))
    return m


def _emit_task(
    m: Module, layer: ConvLayer, tiling: DepthwiseTiling, blocking: RowBlocking, own: int
) -> tuple[Function, int]:
    """A task: some planes, chunk by chunk; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    problem = tiling.problem
    planes = problem.N * problem.groups
    chunks = -(-tiling.blocks // tiling.together)
    whole = planes >= TASKS * blocking.threads  # tasks of whole planes, which are read from front to back
    together = planes_of_task(planes, blocking.threads)
    functions = {
        (rows, segment.pixels): _emit_tile(m, f"task_{rows}x{segment.pixels}", layer, tiling, rows, segment.pixels)
        for rows in {tiling.block, tiling.height % tiling.block}
        if rows
        for segment in tiling.segments
    }

    task = m.function("task", *TASK, internal=True)
    context, index, thread = task.args
    x, w, out, bias, residual, workspace = operands(task, context, *[element] * 5)
    panel = task.bytes_at(workspace, thread * own, wide)
    parts = 1 if whole else chunks
    part, first = index % parts, index // parts * together
    last_plane, last_chunk = task.min(first + together, planes), chunks if whole else part + 1
    with task.loop(first, last_plane) as plane, task.loop(part, last_chunk) as chunk:
        first_block = chunk * tiling.together
        last_block = task.min(first_block + tiling.together, tiling.blocks)
        top = first_block * (tiling.TP * problem.rows.stride) + problem.rows.offset
        n, group = plane // problem.groups, plane % problem.groups
        source = x + n * problem.input.image + group * problem.input.group
        for c in range(problem.C):
            fill(task, tiling, source + c * problem.input.channel, top, panel + c * (tiling.rows * tiling.panel.pitch))
        for i in range(problem.K):
            place = n * problem.output.image + group * problem.output.group + i * problem.output.channel
            place = place + first_block * (tiling.block * tiling.width)
            filters = w + group * problem.filters.group + i * problem.filters.k
            pointers = filters, out + place, residual + place, bias + group * problem.K + i
            stage = task.bytes_at(panel, tiling.elements * wide.bytes, element) if blocking.nt else None
            _blocks(task, tiling, functions, panel, pointers, (first_block, last_block), stage)
    if blocking.nt:
        task.fence()
    return task, -(-planes // together) * parts


def _blocks(
    k: Function,
    tiling: DepthwiseTiling,
    functions: Mapping[tuple[int, int], Function],
    panel: Value,
    pointers: tuple[Value, Value, Value, Value],
    span: tuple[Value, Value],
    stage: Value | None,
) -> None:
    """A span of row blocks of one plane, whose first one's filters, output, residual and bias the pointers are."""
    (filters, out, residual, bias), (first, last) = pointers, span

    def block(number: Value, rows: int) -> None:
        at = (number - first) * (tiling.block * tiling.width)
        begin = panel + (number - first) * (tiling.TP * tiling.problem.rows.stride * tiling.panel.pitch)
        for segment in tiling.segments:
            with k.loop(segment.start, segment.start + segment.times * segment.pixels, segment.pixels) as q:
                target = out + (at + q) if stage is None else stage + q
                tile = functions[rows, segment.pixels]
                k.call(tile, begin + q // tiling.across, filters, target, residual + (at + q), bias, number * tiling.TP)
        if stage is not None:
            stream(k, stage, out + at, k.i64(rows * tiling.width))

    whole, rest = divmod(tiling.height, tiling.block)
    if whole:
        with k.loop(first, k.min(last, whole)) as number:
            block(number, tiling.block)
    if rest:
        with k.if_(last.eq(tiling.blocks)):
            block(k.i64(tiling.blocks - 1), rest)


def fill(k: Function, tiling: DepthwiseTiling, plane: Value, top: Value, panel: Value, *, ahead: bool = True) -> None:
    """Copy the rows from `top` on that lie inside the image; the others are zero, or never read.

    What the next chunk will copy is fetched where it lies `ahead`; no processor looks beyond a page.
    """
    axis = tiling.problem.rows
    with k.loop(0, tiling.rows) as t:
        h = top + t
        inside = k.select(h >= 0, h, k.i64(axis.size)) < axis.size
        with k.if_(inside):
            row, element = plane + h * tiling.problem.input.row, plane.type.to
            assert element is not None
            if ahead:
                with k.loop(0, tiling.problem.columns.size, LINE // element.bytes) as column:
                    k.prefetch(row + tiling.rows * tiling.problem.input.row + column)
            tiling.panel.fill(k, row, panel + t * tiling.panel.pitch)
        if not tiling.looped:
            with k.else_():
                tiling.panel.clear(k, panel + t * tiling.panel.pitch)


def _emit_tile(m: Module, name: str, layer: ConvLayer, tiling: DepthwiseTiling, rows: int, pixels: int) -> Function:
    """`function(panel, filters, out, residual, bias, p)` for rows of neighbouring outputs, from position p on."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    k = m.function(name, ptr(wide), *[ptr(element)] * 4, i64, internal=True)
    panel, filters, out, residual, bias, p = k.args
    lanes = tiling.panel.lanes
    acc = [
        [[k.var(k.zero(wide, lanes)) for _ in range(0, pixels, lanes * tiling.across)] for _ in range(tiling.across)]
        for _ in range(rows)
    ]
    sums = _TileSums(k, tiling, acc, panel, filters)
    if tiling.looped:
        sums.run_loops(p)
    else:
        sums.run_unrolled()
    epilogue = Epilogue.of(layer)
    b = epilogue.of_channels(lambda place: k.broadcast(place, lanes), bias)
    for i, row in enumerate(acc):
        totals = [v for vectors in zip(*row, strict=True) for v in interleaved(k, [total.get() for total in vectors])]
        for first, total in zip(range(0, pixels, lanes), totals, strict=False):
            width = min(lanes, pixels - first)
            place = i * tiling.width + first
            r = load_range(k, residual + place, lanes, 0, width) if epilogue.residual else None
            store_range(k, epilogue.apply(k, total, b, r), out + place, 0, width)
    return k


@dataclass(frozen=True)
class _TileSums:
    """The sums of one register tile: `acc[row][component of the column][vector]`."""

    k: Function
    tiling: DepthwiseTiling
    acc: Sequence[Sequence[Sequence[Var]]]
    panel: Value
    filters: Value

    def run_unrolled(self) -> None:
        """Every tap written out; a vector of the panel is read once for all outputs that see it."""
        tiling = self.tiling
        seen: dict[tuple[int, int], list[tuple[Sequence[Var], int, int]]] = {}
        for i, row in enumerate(self.acc):
            for total, component in zip(row, tiling.components[i % tiling.down], strict=True):
                for r, down in enumerate(component.rows.taps):
                    t = i // tiling.down * component.rows.stride + tiling.row(component.rows, r)
                    for s, along in enumerate(component.columns.taps):
                        seen.setdefault((t, tiling.column(component.columns, s)), []).append((total, down, along))
        for c in range(tiling.problem.C):
            for t, column in sorted(seen, key=lambda place: place[0]):
                place = self.panel + ((c * tiling.rows + t) * tiling.panel.pitch + column)
                self._add(place, [(total, self._tap(c, r, s)) for total, r, s in seen[t, column]])

    def _tap(self, c: int, r: int, s: int) -> Value:
        strides = self.tiling.problem.filters
        return self.filters + (c * strides.c + r * strides.r + s * strides.s)

    def _add(self, row: Value, taps: Sequence[tuple[Sequence[Var], Value]]) -> None:
        lanes = self.tiling.panel.lanes
        pixels = [self.k.load(row + v * lanes, lanes) for v in range(len(self.acc[0][0]))]
        for total, tap in taps:
            weight = self.k.broadcast(tap, lanes)
            for a, v in zip(total, pixels, strict=True):
                a.fma(v, weight)

    def run_loops(self, p: Value) -> None:
        """Row by row of the panel, padding rows skipped: in row u, output i of a component meets tap u - i.

        A block of one output has its rows `dilation` apart; one of several is cut only where they are neighbours.
        """
        k, tiling = self.k, self.tiling
        for component in range(tiling.down):
            acc, rows = self.acc[component :: tiling.down], tiling.components[component][0].rows
            TP, taps = len(acc), len(rows.taps)
            if not (TP and taps):
                continue
            low, high = overlap(k, p * rows.stride + rows.offset, rows.dilation, rows.size, taps + TP - 1)
            for c in range(tiling.problem.C):
                for u in range(TP - 1):
                    with k.if_(k.select(low <= u, high, k.i64(0)) > u):
                        self._add_row(c, k.i64(u), component, range(u + 1))
                with k.loop(k.max(low, TP - 1), k.min(high, taps)) as row:
                    self._add_row(c, row, component, range(TP))
                for u in range(taps, taps + TP - 1):
                    with k.if_(k.select(low <= u, high, k.i64(0)) > u):
                        self._add_row(c, k.i64(u), component, range(u - taps + 1, TP))

    def _add_row(self, c: int, u: Value, component: int, outputs: Sequence[int]) -> None:
        """Row u as a component of rows counts them, to its outputs of all components of columns."""
        tiling, pitch = self.tiling, self.tiling.panel.pitch
        for n, problem in enumerate(tiling.components[component]):
            if problem.columns.taps:
                row = self.panel + (u * (problem.rows.dilation * pitch) + c * (tiling.rows * pitch))
                row = row + tiling.row(problem.rows, 0) * pitch
                totals = [(i, self.acc[i * tiling.down + component][n]) for i in outputs]
                self._add_taps(c, u, problem, row, totals)

    def _add_taps(
        self, c: int, u: Value, problem: Correlation, row: Value, totals: Sequence[tuple[int, Sequence[Var]]]
    ) -> None:
        """A row of the panel through all taps of a row."""
        rows, columns, strides = problem.rows, problem.columns, problem.filters
        down, along = rows.tap_step * strides.r, columns.tap_step * strides.s
        taps = self._tap(c, rows.taps[0], columns.taps[0]) + u * down
        count = len(columns.taps)
        if columns.stride > 1:  # neighbouring taps lie in different components
            for s in range(count):
                place = row + self.tiling.column(columns, s)
                self._add(place, [(total, taps + (s * along - i * down)) for i, total in totals])
            return
        row = row + self.tiling.column(columns, 0)
        unrolled = min(count, 4)

        def several(first: int | Value, number: int) -> None:
            for n in range(number):
                places = [(total, taps + (first + n) * along - i * down) for i, total in totals]
                self._add(row + (first + n) * columns.dilation, places)

        with self.k.loop(0, count // unrolled * unrolled, unrolled) as tap:
            several(tap, unrolled)
        if count % unrolled:
            several(count // unrolled * unrolled, count % unrolled)
