"""The kernel of fused layers: strip by strip of rows, each by one thread, from the first input to the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Value
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import correlations, pitches
from autoconv.cpu.common.panel import Segment
from autoconv.cpu.depthwise.geometry import column_segments
from autoconv.cpu.depthwise.kernels_inplace import InPlaceTile, clear, zeros_at
from autoconv.cpu.fused.geometry import Caches, FusedBlocking, FusedLayers, FusedTiling, line_tile
from autoconv.cpu.gemm.geometry import ChannelRange, PanelCut, pixel_tiles
from autoconv.cpu.gemm.panels import fill
from autoconv.cpu.gemm.tile import GemmTile, each_block, sums_elements, tiles_of
from autoconv.layer import ConvLayer


def emit(instruction_set: str, layers: FusedLayers, blocking: FusedBlocking, caches: Caches) -> Module:
    """`run`, which takes filters as `packing.packed` lays them, and the `channel_values` of all layers."""
    m = Module(instruction_set)
    run = m.function("run", *RUN)
    launch(run, run.args[0], *_Writer(m, layers, blocking, caches).task())
    return m


class _Writer:
    """Writes the task: a strip of the output's rows of one image.

    Some hidden channels at a time are computed for the rows that the strip sees, and each goes through the depthwise
    layer at once. The layer after it starts when all channels are there, on the strip as one line of pixels.
    """

    def __init__(self, m: Module, layers: FusedLayers, blocking: FusedBlocking, caches: Caches) -> None:
        self.m, self.layers, self.blocking, self.caches = m, layers, blocking, caches
        self.tiling = FusedTiling.of(m.instruction_set, layers, blocking)
        self.element = DTYPES[layers.depthwise.dtype]
        self.k = m.function("task", *TASK, internal=True)
        self.filters: dict[str, Value] = {}
        self.biases: dict[str, Value] = {}

    def task(self) -> tuple[Function, int]:
        """The task, and how many there are."""
        k, layers, tiling, blocking = self.k, self.layers, self.tiling, self.blocking
        middle, head, last = layers.depthwise, layers.layers[0], layers.layers[-1]
        strips = -(-middle.P // blocking.rows)
        context, index, thread = k.args
        x, w, out, bias, residual, workspace = operands(k, context, *[self.element] * 5)
        image, strip = index // strips, index % strips
        first = k.min(strip * blocking.rows, middle.P - blocking.rows)  # the last strip may do some rows again
        x = x + image * pitches(head)[0]
        out, residual = (p + (image * pitches(last)[1] + first * last.Q) for p in (out, residual))
        weights = constants = 0
        for role, layer in layers.roles.items():
            self.filters[role], self.biases[role] = w + weights, bias + constants
            weights, constants = weights + math.prod(layer.w_shape), constants + layer.channel_values
        made = k.bytes_at(workspace, thread * (tiling.elements * self.element.bytes), self.element)
        rest = made + tiling.after_elements
        target, pitch = (out, middle.P * middle.Q) if layers.after is None else (made, tiling.made_pitch)
        self._depthwise(x, first, residual, target, pitch, rest)
        if layers.after is not None:
            w, bias = self.filters["after"], self.biases["after"]
            line = _Line(self, "after", layers.after, layers.after.K, blocking.rows * middle.Q)
            line.multiply(made, w, out, residual, bias, pitch, last.P * last.Q)
        return k, middle.N * strips

    def _depthwise(self, x: Value, first: Value, residual: Value, out: Value, out_pitch: int, workspace: Value) -> None:
        """A strip of all hidden channels from row `first` on, to `out`: some of them at a time, as they are made."""
        k, tiling, before, middle = self.k, self.tiling, self.layers.before, self.layers.depthwise
        plane = middle.H * middle.W
        seen, zeros = workspace, zeros_at(workspace + tiling.before_elements, middle)
        clear(k, zeros, middle)
        top = first * middle.stride[0] - middle.padding[0][0]
        begin = k.max(k.min(top, middle.H - tiling.seen), 0)  # the first row that is computed; all lie in the image
        channels = self.blocking.channels if before is not None else middle.C
        hidden = None if before is None else self._hidden(before, x, begin, seen, workspace)
        tiles = self._tiles()
        with k.loop(0, middle.C, channels) as group:
            if hidden is not None:
                hidden(group)
            with k.loop(0, channels) as c:
                channel = group + c
                here = x + channel * plane if hidden is None else seen + (c * tiling.seen_pitch - begin * middle.W)
                taps = self.filters["depthwise"] + channel * (middle.R * middle.S)
                to, plus = out + channel * out_pitch, residual + channel * out_pitch
                self._rows(tiles, here, zeros, (taps, to, plus, self.biases["depthwise"] + channel), first)

    def _hidden(
        self, layer: ConvLayer, x: Value, begin: Value, seen: Value, workspace: Value
    ) -> Callable[[Value], None]:
        """What computes the rows from `begin` on of some hidden channels, given the first; what all need is copied."""
        k, tiling, channels = self.k, self.tiling, self.blocking.channels
        (problem,) = correlations(layer)
        depth, cut = layer.C * layer.R * layer.S, tiling.cut
        if cut is None:
            line = _Line(self, "before", layer, channels, tiling.seen * layer.Q)
            source, pitch = x + begin * layer.Q, layer.P * layer.Q
        else:
            line = _Line(self, "before", layer, channels, layer.Q, cut)
            source, pitch = workspace + (tiling.before_elements + tiling.zeros_elements), cut.pitch
            with k.loop(0, layer.C) as c:
                fill(k, problem, cut, x + c * problem.input.channel, begin, source + c * pitch)

        def compute(group: Value) -> None:
            w, bias = self.filters["before"] + group * depth, self.biases["before"] + group
            line.multiply(source, w, seen, seen, bias, pitch, tiling.seen_pitch)

        return compute

    def _tiles(self) -> list[tuple[Segment, Function]]:
        """The register tiles of a row of the depthwise layer."""
        middle, tiling = self.layers.depthwise, self.tiling
        (problem,) = correlations(middle)
        found: list[tuple[Segment, Function]] = []
        for segment in column_segments(problem, tiling.NV * self.m.lanes(self.element)):
            tile = InPlaceTile(self.m, middle, problem, tiling.TP, segment)
            found.append((segment, tile.emit(f"rows_{len(found)}")))
        return found

    def _rows(
        self,
        tiles: Sequence[tuple[Segment, Function]],
        image: Value,
        zeros: Value,
        pointers: tuple[Value, Value, Value, Value],
        first: Value,
    ) -> None:
        """All rows of one channel; the pointers are its filter, output, residual and bias, `first` its first row."""
        k, middle, (taps, out, residual, bias) = self.k, self.layers.depthwise, pointers
        with k.loop(0, self.blocking.rows, self.tiling.TP) as row:
            for (start, times, pixels), tile in tiles:
                with k.loop(start, start + times * pixels, pixels) as q:
                    seen, at = q * middle.stride[1], row * middle.Q + q
                    k.call(tile, image + seen, zeros + seen, taps, out + at, residual + at, bias, first + row)


class _Line:
    """A layer on lines of pixels, by so many of its filters at a time: a 1x1 layer on one, or on those of a panel."""

    def __init__(
        self, writer: _Writer, name: str, layer: ConvLayer, filters: int, pixels: int, cut: PanelCut | None = None
    ) -> None:
        self.writer, self.name, self.layer, self.filters = writer, name, layer, filters
        self.pixels, self.cut = pixels, cut
        m = writer.m
        blocking = line_tile(m.instruction_set, layer, filters, writer.caches)
        self.lanes, self.TK = m.lanes(writer.element), blocking.TK
        tiles = pixel_tiles(m.instruction_set, self.lanes, pixels, blocking)
        self.blocks = -(-filters // blocking.TK)
        self.tiles = [tile._replace(blocks=min(tile.blocks, self.blocks)) for tile in tiles]

    def multiply(
        self, x: Value, w: Value, out: Value, residual: Value, bias: Value, pitch: int, out_pitch: int
    ) -> None:
        """Tile by tile of pixels, each by all filters; channels lie `pitch` and `out_pitch` elements apart."""
        k, layer, TK, cut = self.writer.k, self.layer, self.TK, self.cut
        depth = layer.C * layer.R * layer.S
        one, lines, step = GemmTile(TK, ChannelRange(layer.C), pitch, out_pitch, depth * TK), 1, 0
        if cut is not None:
            taps = tuple(cut.row.offset(s) for s in range(layer.S))
            one = one._replace(R=layer.R, row_pitch=layer.dilation[0] * cut.row.pitch, taps=taps, whole=True)
            lines, step = cut.rows, layer.stride[0] * cut.row.pitch
        functions = tiles_of(self.writer.m, self.name, layer, self.writer.element, self.filters, self.tiles, one)
        sums = k.scratch(self.writer.element, sums_elements(self.tiles, self.lanes, TK))

        def tile(line: Value, q: Value, pixels: int, together: int) -> None:
            here, at = x + (line * step + q), line * self.pixels + q

            def visit(block: Value, width: int, together: int) -> None:
                first = block * TK
                to, plus = (p + (first * out_pitch + at) for p in (out, residual))
                k.call(functions[pixels, width, together], here, w + first * depth, x, to, plus, bias + first, sums)

            each_block(k, self.filters, TK, k.i64(0), k.i64(self.blocks), together, visit)

        with k.loop(0, lines) as line:
            for start, times, pixels, _, together in self.tiles:
                with k.loop(start, start + times * pixels, pixels) as q:
                    tile(line, q, pixels, together)
