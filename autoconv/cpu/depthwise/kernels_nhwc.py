"""The kernels of `depthwise` in NHWC, with channels as lanes: borders cost nothing, and nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Value, Var, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import load_range, overlap, store_range
from autoconv.cpu.common.streaming import launch_streaming
from autoconv.cpu.depthwise.geometry import ChannelBlocking, column_segments
from autoconv.layer import ConvLayer


def emit(instruction_set: str, layer: ConvLayer, blocking: ChannelBlocking) -> Module:
    """`run` and `pack` for as many filters as channels."""
    m = Module(instruction_set)
    element = DTYPES[layer.dtype]
    _emit_pack(m, layer)
    run = m.function("run", *RUN)

    def launch_all(nt: bool) -> None:
        for number, problem in enumerate(correlations(layer)):
            name = f"{'stream' if nt else 'task'}{number}"
            launch(run, run.args[0], *_emit_task(m, name, layer, problem, blocking._replace(nt=nt)))

    if blocking.nt:
        launch_streaming(run, operands(run, run.args[0], element)[2], launch_all)
    else:
        launch_all(False)
    return m


def _emit_pack(m: Module, layer: ConvLayer) -> None:
    """Filters as `R, S, C` in the type of the sums; a task for every tap."""
    element = DTYPES[layer.dtype]
    task = m.function("pack_task", *TASK, internal=True)
    context, tap, _ = task.args
    w, _, packed = operands(task, context, element, element, widened(element))[:3]
    with task.loop(0, layer.C) as c:
        task.store(task.load(w + c * (layer.R * layer.S) + tap), packed + tap * layer.C + c)
    pack = m.function("pack", *RUN)
    launch(pack, pack.args[0], task, layer.R * layer.S)


@dataclass(frozen=True)
class _ChannelTile:
    """`pixels` neighbouring outputs by vectors of `channels` channels; `seen[s][i]`: whether output i sees tap s."""

    layer: ConvLayer
    problem: Correlation
    channels: int
    seen: tuple[tuple[bool, ...], ...]
    pixels: int
    nt: bool

    def emit(self, m: Module, name: str) -> Function:
        """`function(x, w, out, residual, bias, low, high)`: rows of taps from low to high - 1 fall into the image.

        `x` points at what output 0 would see through tap 0, inside the image or not.
        """
        element = DTYPES[self.layer.dtype]
        wide = widened(element)
        k = m.function(name, ptr(element), ptr(wide), *[ptr(element)] * 3, i64, i64, internal=True)
        x, w, out, residual, bias, low, high = k.args
        lanes = m.lanes(element)
        widths = [min(lanes, self.channels - first) for first in range(0, self.channels, lanes)]
        acc = [[k.var(k.zero(wide, lanes)) for _ in widths] for _ in range(self.pixels)]
        rows, columns, filters = self.problem.rows, self.problem.columns, self.problem.filters
        if rows.taps and columns.taps:
            meetings: dict[int, list[tuple[int, int]]] = {}
            for s, seen in enumerate(self.seen):
                for i in range(self.pixels):
                    if seen[i]:
                        meetings.setdefault(i * columns.stride + s * columns.dilation, []).append((i, columns.taps[s]))
            with k.loop(low, high) as r:
                row = x + r * (rows.dilation * self.problem.input.row)
                taps = w + (r * (rows.tap_step * filters.r) + rows.taps[0] * filters.r) * self.layer.C
                for column in sorted(meetings):
                    _add(k, acc, widths, row + column * self.problem.input.column, taps, meetings[column], self.layer.C)
        self._store(k, acc, widths, out, residual, bias)
        return k

    def _store(
        self, k: Function, acc: Sequence[Sequence[Var]], widths: Sequence[int], out: Value, residual: Value, bias: Value
    ) -> None:
        epilogue = Epilogue.of(self.layer)
        pitch = self.problem.columns.output_stride * self.problem.output.column
        lanes = acc[0][0].type.lanes
        of_channels = [
            epilogue.of_channels(partial(load_range, k, lanes=lanes, low=0, high=width), bias + v * lanes)
            for v, width in enumerate(widths)
        ]
        for i, vectors in enumerate(acc):  # pixel by pixel: past the caches, a line is best written in one go
            for v, (width, b) in enumerate(zip(widths, of_channels, strict=True)):
                place = i * pitch + v * lanes
                r = load_range(k, residual + place, lanes, 0, width) if epilogue.residual else None
                result = epilogue.apply(k, vectors[v].get(), b, r)
                if self.nt and width == lanes:
                    k.store(result, out + place, nontemporal=True)
                else:
                    store_range(k, result, out + place, 0, width)


def _add(
    k: Function,
    acc: Sequence[Sequence[Var]],
    widths: Sequence[int],
    pixel: Value,
    taps: Value,
    meetings: Sequence[tuple[int, int]],
    C: int,
) -> None:
    """One pixel's channels to all outputs that see it, each through its own tap."""
    for v, width in enumerate(widths):
        lanes = acc[0][v].type.lanes
        channels = load_range(k, pixel + v * lanes, lanes, 0, width)
        for i, s in meetings:
            acc[i][v].fma(channels, load_range(k, taps + (s * C + v * lanes), lanes, 0, width))


def _emit_task(
    m: Module, name: str, layer: ConvLayer, problem: Correlation, blocking: ChannelBlocking
) -> tuple[Function, int]:
    """A task: one row of outputs of one image; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    rows, columns = problem.rows, problem.columns
    block = blocking.NV * m.lanes(element)
    task = m.function(name, *TASK, internal=True)
    context, index, _ = task.args
    x, w, out, bias, residual, _ = operands(task, context, element, wide, element, element, element)
    n, p = index // rows.count, index % rows.count
    top = p * rows.stride + rows.offset
    low, high = overlap(task, top, rows.dilation, rows.size, len(rows.taps))
    x = x + n * problem.input.image + top * problem.input.row + columns.offset * problem.input.column
    place = n * problem.output.image + (p * rows.output_stride + rows.output_start) * problem.output.row
    place = place + columns.output_start * problem.output.column
    functions: dict[object, Function] = {}

    def block_at(
        q: int | Value, pattern: tuple[tuple[bool, ...], ...], pixels: int, c: int | Value, width: int
    ) -> None:
        key = pattern, pixels, width
        if key not in functions:
            tile = _ChannelTile(layer, problem, width, pattern, pixels, blocking.nt)
            functions[key] = tile.emit(m, f"{name}_{len(functions)}")
        to = place + q * (columns.output_stride * problem.output.column) + c
        source = x + q * (columns.stride * problem.input.column) + c
        task.call(functions[key], source, w + c, out + to, residual + to, bias + c, low, high)

    for start, times, pixels in column_segments(problem, blocking.TQ):
        pattern = columns.pattern(start, pixels)
        with task.loop(start, start + times * pixels, pixels) as q:
            if block <= layer.C:
                with task.loop(0, layer.C // block * block, block) as c:
                    block_at(q, pattern, pixels, c, block)
            if layer.C % block:
                block_at(q, pattern, pixels, layer.C // block * block, layer.C % block)
    if blocking.nt:
        task.fence()
    return task, problem.N * rows.count
