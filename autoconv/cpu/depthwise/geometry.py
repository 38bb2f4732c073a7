"""How `depthwise` cuts its work: row blocks and panels of planes (NCHW), columns and vectors of channels (NHWC)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autoconv.algorithm import Params
from autoconv.common.candidate import text_of
from autoconv.cpu.codegen.ir import DTYPES, LINE, VECTOR_BYTES, widened
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, correlations
from autoconv.cpu.common.panel import PanelRow, Segment, in_lines, segments_of
from autoconv.layer import ConvLayer

UNROLLED_TAPS = 25  # larger filters run in loops
TASKS = 8  # of whole planes for every thread, if there are planes enough
MOST_PLANES = 16  # of a task


class RowBlocking(NamedTuple):
    """In NCHW: TP rows by NV vectors in registers, panels of half the L1 cache."""

    TP: int
    NV: int
    nt: bool
    threads: int
    l1_bytes: int


class ChannelBlocking(NamedTuple):
    """In NHWC: TQ neighbouring outputs by NV vectors of channels in registers."""

    TQ: int
    NV: int
    nt: bool


class DepthwiseTiling(NamedTuple):
    """The correlations of a layer, which read the same panels, cut into chunks of row blocks.

    A strided layer's gradient has several: polyphase `components[row][column]`, by the residue of the output's position
    modulo the strides. They are computed side by side and interleaved, so that whole rows are written, once. `problem`
    sees what all of them see; its rows and columns, TP and NV count positions, with an output of every component.
    `together` of its `blocks` row blocks are a chunk; `looped` says that taps are not written out.
    """

    problem: Correlation
    components: tuple[tuple[Correlation, ...], ...]
    looped: bool
    panel: PanelRow
    TP: int
    NV: int
    blocks: int
    together: int

    @classmethod
    def of(cls, problems: Sequence[Correlation], lanes: int, itemsize: int, blocking: RowBlocking) -> DepthwiseTiling:
        """Chunks as large as half of the L1 cache, in whole row blocks."""
        across = sum(c.rows.output_start == 0 for c in problems)
        components = tuple(tuple(problems[n : n + across]) for n in range(0, len(problems), across))
        rows, columns = _union([row[0].rows for row in components]), _union([c.columns for c in components[0]])
        problem = replace(problems[0], rows=rows, columns=columns)
        looped = any(len(c.rows.taps) * len(c.columns.taps) * c.C > UNROLLED_TAPS for c in problems)
        TP = min(blocking.TP, rows.count)
        if looped and any((c.rows.stride, c.rows.dilation) != (1, 1) for c in problems):
            TP = 1  # rows of one block would not see the same rows of the input
        elif looped:
            TP = min(TP, *[len(c.rows.taps) or TP for c in problems])
        panel = PanelRow(columns, lanes)
        blocks = -(-rows.count // TP)
        held = blocking.l1_bytes // 2 // (itemsize * panel.pitch * problem.C)
        span = rows.dilation * max(0, len(rows.taps) - 1) + 1
        most = max(1, ((held - span) // rows.stride + 1) // TP, 2 * span // (TP * rows.stride))
        chunks = -(-blocks // most)
        return cls(problem, components, looped, panel, TP, blocking.NV, blocks, -(-blocks // chunks))

    @property
    def down(self) -> int:
        """Rows of the output to one of positions."""
        return len(self.components)

    @property
    def across(self) -> int:
        """Columns of the output to one of positions."""
        return len(self.components[0])

    @property
    def height(self) -> int:
        """Rows of the output."""
        return sum(row[0].rows.count for row in self.components)

    @property
    def width(self) -> int:
        """Columns of the output."""
        return sum(c.columns.count for c in self.components[0])

    @property
    def rows(self) -> int:
        """Rows of a panel."""
        axis = self.problem.rows
        return (self.together * self.TP - 1) * axis.stride + axis.dilation * max(0, len(axis.taps) - 1) + 1

    @property
    def elements(self) -> int:
        """Elements of the panels of one group's input channels, in whole cache lines."""
        return in_lines(self.problem.C * self.rows * self.panel.pitch)

    @property
    def block(self) -> int:
        """Rows of the output to a row block; the last may have fewer."""
        return min(self.TP * self.down, self.height)

    @property
    def output_elements(self) -> int:
        """Elements of a row block's output, in whole cache lines."""
        return in_lines(self.block * self.width)

    @property
    def segments(self) -> list[Segment]:
        """Tiles of a row of the output."""
        return segments_of(self.width, self.panel.lanes * self.across, self.NV, 0)

    def row(self, axis: CorrelationAxis, tap: int) -> int:
        """Rows from a position's first in the panel to what a component's output there sees through a tap."""
        return axis.offset + axis.dilation * tap - self.problem.rows.offset

    def column(self, axis: CorrelationAxis, tap: int) -> int:
        """Elements from the start of a panel's row to what a component's output 0 sees through a tap."""
        whole = self.problem.columns
        return self.panel.offset((axis.offset + axis.dilation * tap - whole.offset) // whole.dilation)


def _union(components: Sequence[CorrelationAxis]) -> CorrelationAxis:
    """An axis that sees what any of the components sees."""
    if len(components) == 1:
        return components[0]
    seen = [axis.offset + axis.dilation * tap for axis in components for tap in range(len(axis.taps))] or [0]
    taps = tuple(range(max(seen) - min(seen) + 1))
    return CorrelationAxis(components[0].size, components[0].count, 1, min(seen), 1, taps)


def tiling_of(instruction_set: str, layer: ConvLayer, blocking: RowBlocking) -> DepthwiseTiling:
    """The tiling of all of a layer's correlations."""
    itemsize = widened(DTYPES[layer.dtype]).bytes
    return DepthwiseTiling.of(correlations(layer), VECTOR_BYTES[instruction_set] // itemsize, itemsize, blocking)


def workspace_bytes(instruction_set: str, layer: ConvLayer, blocking: RowBlocking) -> int:
    """Every thread's own workspace: a panel, and the output on its way past the caches."""
    tiling = tiling_of(instruction_set, layer, blocking)
    return (tiling.elements + tiling.output_elements * blocking.nt) * widened(DTYPES[layer.dtype]).bytes


def planes_of_task(planes: int, threads: int) -> int:
    """Planes that a task computes, where tasks are of whole planes."""
    return max(1, min(MOST_PLANES, planes // (TASKS * threads)))


def broken_lines(layer: ConvLayer, params: Params) -> list[str]:
    """The reason against stores past the caches: blocks of rows, or planes, are cache lines with a remainder."""
    _, _, height, width = layer.output_shape
    rows = int(params["TP"]) * (layer.stride[0] if layer.direction == "dgrad" else 1)
    if all(n * width * layer.itemsize % LINE == 0 for n in (rows, height)):
        return []
    return [f"nt=1: expected blocks of rows in whole cache lines, got {text_of(params)}"]


def packed_elements(layer: ConvLayer) -> int:
    """In NHWC: filters as `R, S, C`, for one filter per channel."""
    return layer.R * layer.S * layer.C


def column_segments(problem: Correlation, TQ: int) -> list[Segment]:
    """A row of outputs as blocks of TQ; neighbours with the same borders are of one segment."""
    columns = problem.columns
    segments: list[Segment] = []
    for start in range(0, columns.count, TQ):
        pixels = min(TQ, columns.count - start)
        if segments:
            first, times, size = segments[-1]
            if size == pixels and columns.pattern(first, size) == columns.pattern(start, pixels):
                segments[-1] = Segment(first, times + 1, size)
                continue
        segments.append(Segment(start, 1, pixels))
    return segments
