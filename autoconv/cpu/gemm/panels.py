"""`gemm` where outputs see more than the pixel they stand on: the input is copied, packed panel by panel."""

from __future__ import annotations

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Value, widened
from autoconv.cpu.codegen.launch import TASK, operands
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.gemm.geometry import ChannelRange, GemmBlocking, PanelCut, PixelTiles, panel_chunks
from autoconv.cpu.gemm.tile import GemmTile, each_block, sums_elements, tiles_of
from autoconv.layer import ConvLayer


def emit_panels(
    m: Module, name: str, layer: ConvLayer, problem: Correlation, blocking: GemmBlocking, cut: PanelCut
) -> tuple[Function, int]:
    """A task: a panel of one image, copied, by the channels whose filters stay in cache; and how many there are."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    P, Q = problem.rows.count, problem.columns.count
    R, S = len(problem.rows.taps), len(problem.columns.taps)
    taps = tuple(cut.row.offset(s) for s in range(S))
    row_pitch = problem.rows.dilation * cut.row.pitch
    whole = ChannelRange(problem.C)
    block_pitch = problem.C * R * S * blocking.TK
    pitches = cut.pitch, problem.output.channel, block_pitch
    tile = GemmTile(blocking.TK, whole, *pitches, R, row_pitch, taps, blocking.nt, whole=True, outside=True)
    kept, chunks, tiles = panel_chunks(problem, m.instruction_set, layer, blocking, cut)
    functions = tiles_of(m, name, layer, wide, problem.K, tiles, tile)
    blocks = -(-problem.K // blocking.TK)
    images, spans = problem.N * problem.groups, -(-P // cut.rows)

    task = m.function(name, *TASK, internal=True)
    context, index, thread = task.args
    x, w, out, bias, residual, workspace = operands(task, context, element, wide, element, element, element)
    span, rest_index = index % spans, index // spans
    image, chunk = rest_index % images, rest_index // images
    n, group = image // problem.groups, image % problem.groups
    first_row = task.min(span * cut.rows, P - cut.rows)  # the last chunk may do some rows again
    panel = task.bytes_at(workspace, thread * (cut.elements(problem.C) * wide.bytes), wide)
    sums = task.scratch(wide, sums_elements(tiles, lanes, blocking.TK))
    plane = x + n * problem.input.image + group * problem.input.group
    with task.loop(0, problem.C) as c:
        fill(task, problem, cut, plane + c * problem.input.channel, first_row, panel + c * cut.pitch)
    place = n * problem.output.image + group * problem.output.group + first_row * Q
    w = w + group * (problem.K * problem.C * R * S)
    bias = bias + group * problem.K

    first_block = chunk * kept
    last_block = task.min(first_block + kept, blocks)
    for together in dict.fromkeys(of_pixels.blocks for of_pixels in tiles):
        alike = [of_pixels for of_pixels in tiles if of_pixels.blocks == together]

        def block_at(block: Value, TK: int, together: int, alike: list[PixelTiles] = alike) -> None:
            channel = block * blocking.TK
            filters = w + channel * (problem.C * R * S)
            with task.loop(0, 1 if cut.flat else cut.rows) as line:
                for start, times, pixels, _, _ in alike:
                    with task.loop(start, start + times * pixels, pixels) as q:
                        at = place + channel * problem.output.channel + line * Q + q
                        source = panel + line * (problem.rows.stride * cut.row.pitch) + q
                        function = functions[pixels, TK, together]
                        task.call(function, source, filters, source, out + at, residual + at, bias + channel, sums)

        each_block(task, problem.K, blocking.TK, first_block, last_block, together, block_at)
    if blocking.nt:
        task.fence()
    return task, spans * images * chunks


def fill(k: Function, problem: Correlation, cut: PanelCut, plane: Value, first_row: Value, panel: Value) -> None:
    """Copy one channel's rows that the outputs from `first_row` on see, as the cut says."""
    rows = problem.rows
    top = first_row * rows.stride + rows.offset
    with k.loop(0, cut.held) as t:
        if cut.flat:
            cut.row.fill(k, plane + (top + t * rows.stride) * problem.input.row, panel + t * problem.columns.count)
        else:
            h = top + t
            target = panel + t * cut.row.pitch
            with k.if_(k.select(h >= 0, h, k.i64(rows.size)) < rows.size):
                cut.row.fill(k, plane + h * problem.input.row, target)
            with k.else_():
                cut.row.clear(k, target)
