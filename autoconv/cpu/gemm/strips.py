"""`gemm` where outputs do not see the pixel they stand on alone: the input is copied, strip by strip."""

from __future__ import annotations

from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Value, widened
from autoconv.cpu.codegen.launch import TASK, operands
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.rows import Strip, in_lines, split
from autoconv.cpu.gemm.tile import Part, Shape, Tile, chunks_of, each_block, odd_pixels, tiles_of
from autoconv.layer import ConvLayer


class Strips(NamedTuple):
    """The output cut into chunks of rows, for whose pixels the input is copied to a strip of C channels.

    Under a 1x1 filter without padding the rows of a strip follow one another without gaps, as those of the
    output do, and are cut into tiles as one line of pixels.
    """

    strip: Strip
    rows: int
    flat: bool
    held: int
    pitch: int

    @classmethod
    def cut(cls, problem: Correlation, lanes: int, itemsize: int, shape: Shape) -> Strips:
        """Chunks with the fewest vectors for the busiest thread, whose strips fill half of the second-level cache."""
        P, Q = problem.rows.count, problem.columns.count
        R, S = len(problem.rows.taps), len(problem.columns.taps)
        padded = any(not (axis.sees(0, 0) and axis.sees(axis.count - 1, 0)) for axis in (problem.rows, problem.columns))
        flat = R == S == 1 and not padded
        strip = Strip(problem.columns, lanes)

        def sized(rows: int) -> Strips:
            held = rows if flat else (rows - 1) * problem.rows.stride + problem.rows.dilation * (R - 1) + 1
            pitch = in_lines(rows * Q + lanes) if flat else held * strip.pitch
            return cls(strip, rows, flat, held, pitch)

        def aligned(rows: int) -> bool:
            return not (shape.nt and (rows * Q % lanes or (P - rows) * Q % lanes))

        def fits(rows: int) -> bool:
            return problem.C * sized(rows).pitch * itemsize <= shape.l2_bytes // 2

        def cost(rows: int) -> float:
            runs = split(rows * Q if flat else Q, lanes, shape.NV, 0)
            vectors = sum(run.times * -(-run.pixels // lanes) for run in runs) * (1 if flat else rows)
            tasks = problem.N * problem.groups * -(-P // rows)
            return -(-tasks // shape.threads) * (vectors + 1)

        sizes = [rows for rows in (*range(1, min(P, 64)), P) if aligned(rows)]
        return sized(min(filter(fits, sizes), key=lambda rows: (cost(rows), -rows), default=sizes[0]))

    def elements(self, channels: int) -> int:
        """Of a thread's strip of so many channels."""
        return in_lines(channels * self.pitch)


def emit_strips(
    m: Module, name: str, layer: ConvLayer, problem: Correlation, shape: Shape, cut: Strips
) -> tuple[Function, int]:
    """A task: a strip of one image, copied, by the channels whose filters stay in cache; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    odd = 0 if shape.nt else odd_pixels(m.instruction_set, shape.KB, shape.NV)
    P, Q = problem.rows.count, problem.columns.count
    R, S = len(problem.rows.taps), len(problem.columns.taps)
    runs = split(cut.rows * Q if cut.flat else Q, lanes, shape.NV, odd)
    taps = tuple(cut.strip.offset(s) for s in range(S))
    row_pitch = problem.rows.dilation * cut.strip.pitch
    part = Part(problem.C)
    tile = Tile(shape.KB, 0, odd, R, cut.pitch, row_pitch, taps, problem.output.channel, shape.nt, part)
    functions = tiles_of(m, name, layer, wide, problem.K, runs, tile)
    blocks = -(-problem.K // shape.KB)
    kept, chunks = chunks_of(problem, shape, wide.bytes, blocks)
    images, spans = problem.N * problem.groups, -(-P // cut.rows)

    task = m.function(name, *TASK, internal=True)
    context, index, thread = task.args
    x, w, out, bias, residual, workspace = operands(task, context, element, wide, element, element, element)
    span, rest_index = index % spans, index // spans
    image, chunk = rest_index % images, rest_index // images
    n, group = image // problem.groups, image % problem.groups
    first_row = task.min(span * cut.rows, P - cut.rows)  # the last chunk may do some rows again
    strip = task.bytes_at(workspace, thread * (cut.elements(problem.C) * wide.bytes), wide)
    plane = x + n * problem.input.image + group * problem.input.group
    with task.loop(0, problem.C) as c:
        _fill(task, problem, cut, plane + c * problem.input.channel, first_row, strip + c * cut.pitch)
    place = n * problem.output.image + group * problem.output.group + first_row * Q
    w = w + group * (problem.K * problem.C * R * S)
    bias = bias + group * problem.K

    def block_at(block: Value, KB: int) -> None:
        channel = block * shape.KB
        filters = w + channel * (problem.C * R * S)
        with task.loop(0, 1 if cut.flat else cut.rows) as line:
            for run in runs:
                with task.loop(run.start, run.start + run.times * run.pixels, run.pixels) as q:
                    at = place + channel * problem.output.channel + line * Q + q
                    source = strip + line * (problem.rows.stride * cut.strip.pitch) + q
                    task.call(
                        functions[run.pixels, KB], source, filters, out + at, residual + at, bias + channel, strip
                    )

    first_block = chunk * kept
    last_block = task.min(first_block + kept, blocks)
    each_block(task, problem.K, shape.KB, first_block, last_block, block_at)
    if shape.nt:
        task.fence()
    return task, spans * images * chunks


def _fill(k: Function, problem: Correlation, cut: Strips, plane: Value, first_row: Value, strip: Value) -> None:
    """Copy one channel's rows that the outputs from `first_row` on see."""
    rows = problem.rows
    top = first_row * rows.stride + rows.offset
    with k.loop(0, cut.held) as t:
        if cut.flat:
            cut.strip.fill(k, plane + (top + t * rows.stride) * problem.input.row, strip + t * problem.columns.count)
        else:
            h = top + t
            target = strip + t * cut.strip.pitch
            with k.if_(k.select(h >= 0, h, k.i64(rows.size)) < rows.size):
                cut.strip.fill(k, plane + h * problem.input.row, target)
            with k.else_():
                cut.strip.clear(k, target)
