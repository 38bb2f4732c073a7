"""The kernels of Winograd's gradient of the filters: `dw = GT ((A dy AT) * (BT x B)) G`, summed over tiles.

A forward tile `y = AT ((G w) * (BT x))` is linear in w, and this is its adjoint: tiles of m x m of dy take the
place of the filters, the filters that of a tile's outputs, so that one product still serves m*m*r*r
multiplications of the sum. Tiles go in chunks through two steps: threads transform vectors of channels of both
operands; then every block of filters by channels is multiplied, point by point, by register tiles that sum over
the chunk's tiles, transformed back a row of points at a time, and added to that block's sums.
"""

from __future__ import annotations

from fractions import Fraction

from autoconv.cpu.codegen.ir import Function, Module, Value, i64, ptr
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.lanes import every_nth, store_range, within
from autoconv.cpu.transform.geometry import Side
from autoconv.cpu.transform.input import InputWriter
from autoconv.cpu.transform.matrix import linear
from autoconv.cpu.winograd.gradients_geometry import HEADER, WgradPlan
from autoconv.layer import ConvLayer


def emit(instruction_set: str, layer: ConvLayer, plan: WgradPlan) -> Module:
    """`run` of a gradient of the filters: operand a is x, b is dy, out is dw."""
    m = Module(instruction_set)
    _Gradient(m, layer, plan).emit()
    return m


class _Gradient:
    """Writes the functions of a layer."""

    def __init__(self, m: Module, layer: ConvLayer, plan: WgradPlan) -> None:
        self.m, self.plan = m, plan
        self.channels_last = layer.layout == "NHWC"
        writer = InputWriter(m, layer, plan.tiles, 0)
        self.stored, self.real = writer.stored, writer.real
        self.input = writer.write_input()

    def emit(self) -> None:
        """Groups one after the other; the slices' chunks of a step together."""
        plan, tiles = self.plan, self.plan.tiles
        self.dy = self._dy()
        self.products = {size: self._product(size) for _, size in plan.register_tiles}
        self.folds = [self._fold(i) for i in range(tiles.rows.tile)]
        transform, multiply, finish = self._transform_task(), self._multiply_task(), self._finish_task()
        k = self.m.function("run", *RUN)
        (context,) = k.args
        header = k.bits(self._operands(k, context)[-1], ptr(i64))
        blocks = plan.filter_blocks * plan.channel_blocks
        with k.loop(0, tiles.correlation.groups) as group:
            k.store(group, header)
            with k.loop(0, plan.steps) as step:
                k.store(step, header + 1)
                launch(k, context, transform, plan.slices * plan.parts * (tiles.c_blocks + plan.k_vectors))
                launch(k, context, multiply, plan.slices * blocks)
            launch(k, context, finish, blocks)

    def _operands(self, k: Function, context: Value) -> tuple[Value, Value, Value, Value]:
        x, dy, dw, _, _, workspace = operands(k, context, self.stored)
        return x, dy, dw, workspace

    def _chunk(self, k: Function, workspace: Value, slice_: Value) -> tuple[Value, Value]:
        """First row of tiles of a slice's chunk, and how many there are, 0 or less where the slice has ended."""
        tiles = self.plan.tiles
        step = k.load(k.bits(workspace, ptr(i64)) + 1)
        chunk = slice_ * self.plan.steps + step
        within_slice = k.min(tiles.tile_rows - chunk * tiles.chunk, tiles.chunk)
        return chunk * tiles.chunk, within_slice

    def _memory(self, k: Function, workspace: Value) -> tuple[Value, Value, Value, Value]:
        """V, Y, sums, and the threads' buffers."""
        v = k.bytes_at(workspace, HEADER, self.real)
        places = [v]
        for size in self.plan.elements:
            places.append(places[-1] + size)
        return places[0], places[1], places[2], places[3]

    # Both operands, transformed.

    def _transform_task(self) -> Function:
        """A vector of channels of x or dy, for a part of a slice's chunk."""
        plan, tiles = self.plan, self.plan.tiles
        k = self.m.function("transform", *TASK, internal=True)
        context, index, thread = k.args
        x, dy, _, workspace = self._operands(k, context)
        group = k.load(k.bits(workspace, ptr(i64)))
        number, rest = index % (tiles.c_blocks + plan.k_vectors), index // (tiles.c_blocks + plan.k_vectors)
        part, slice_ = rest % plan.parts, rest // plan.parts
        first, rows = self._chunk(k, workspace, slice_)
        skipped = part * plan.part_rows
        first, rows = first + skipped, k.min(rows - skipped, plan.part_rows)
        v, y, _, scratch = self._memory(k, workspace)
        scratch = scratch + thread * plan.thread_size
        tile = skipped * tiles.columns.tiles
        with k.if_(rows > 0):
            with k.if_(number < tiles.c_blocks):
                target = v + slice_ * plan.v_size + tile * plan.lanes
                k.call(self.input, x, target, scratch, first, rows, group, number)
            with k.else_():
                vector = number - tiles.c_blocks
                per_block = plan.KB // plan.lanes
                block, column = vector // per_block, vector % per_block * plan.lanes
                target = y + slice_ * plan.y_size + block * (tiles.chunk_tiles * plan.KB) + tile * plan.KB + column
                k.call(self.dy, dy, target, scratch, first, rows, group, vector)
        return k

    def _dy(self) -> Function:
        """`A dy AT` of a vector of filters, for some rows of tiles."""
        plan, tiles, lanes, real = self.plan, self.plan.tiles, self.plan.lanes, ptr(self.real)
        side, c = tiles.rows, tiles.correlation
        gather, transform = self._gather_dy(), self._transform_dy()
        k = self.m.function("dy", ptr(self.stored), real, real, i64, i64, i64, i64, internal=True)
        dy, target, raw, first, rows, group, vector = k.args
        dy = dy + group * c.output.group + vector * (lanes * c.output.channel)
        live = k.min(c.K - vector * lanes, lanes)
        with k.loop(0, rows) as t:
            image, row = (first + t) // side.tiles, (first + t) % side.tiles
            grid, n = image // c.N, image % c.N
            down, across = grid // tiles.columns.grids, grid % tiles.columns.grids
            with k.loop(0, side.m) as i:
                p = (row * side.m + i) * side.grids + down
                columns = k.select(p < side.axis.count, k.i64(tiles.columns.axis.count), k.i64(0))
                source = dy + n * c.output.image + p * c.output.row
                k.call(gather, source, raw + i * (plan.y_pitch * lanes), live, across, columns)
            k.call(transform, raw, target + t * (tiles.columns.tiles * plan.KB))
        return k

    def _gather_dy(self) -> Function:
        """A row of one grid of dy with channels in lanes, and zeros beyond it; `columns` is its extent, or 0."""
        plan, lanes, c = self.plan, self.plan.lanes, self.plan.tiles.correlation
        k = self.m.function("gather_dy", ptr(self.stored), ptr(self.real), i64, i64, i64, internal=True)
        dy, raw, live, first, columns = k.args
        period = plan.tiles.columns.grids
        if self.channels_last:
            with k.loop(0, plan.y_pitch) as j:
                q = j * period + first
                mask = k.mask(k.select(q < columns, live, k.i64(0)), lanes)
                k.store(k.load(dy + q * c.output.column, lanes, mask=mask), raw + j * lanes)
            return k
        with k.loop(0, plan.y_pitch, lanes) as j:
            q = j * period + first
            masks = [within(k, q + n * lanes, lanes, columns) for n in range(period)]

            def load(lane: int) -> Value:
                here = dy + (q + lane * c.output.channel)
                return every_nth(k, [k.load(here + n * lanes, lanes, mask=x) for n, x in enumerate(masks)], lanes)

            def store(values: list[Value]) -> None:
                for lane, v in enumerate(k.transpose(values)):
                    k.store(v, raw + (j + lane) * lanes)

            with k.if_(live.eq(lanes)):
                if c.K // lanes:
                    store([load(lane) for lane in range(lanes)])
            with k.else_():
                rest = c.K % lanes
                if rest:
                    store([load(lane) if lane < rest else k.zero(self.real, lanes) for lane in range(lanes)])
        return k

    def _transform_dy(self) -> Function:
        """`A` along the columns and then the rows of a row of tiles."""
        plan, tiles, lanes = self.plan, self.plan.tiles, self.plan.lanes
        rows, columns = tiles.rows, tiles.columns
        k = self.m.function("transform_dy", ptr(self.real), ptr(self.real), internal=True)
        raw, target = k.args
        pitch = plan.y_pitch * lanes
        half = raw + rows.m * pitch
        down, across = (list(zip(*side.transforms.AT, strict=True)) for side in (rows, columns))
        if rows.tile == 1:
            half = raw
        else:
            with k.loop(0, columns.tiles * columns.m) as j:
                xs = [k.load(raw + (j * lanes + i * pitch), lanes) for i in range(rows.m)]
                for n, value in enumerate(linear(k, down, xs)):
                    k.store(value, half + (j * lanes + n * pitch))
        with k.loop(0, columns.tiles) as t, k.loop(0, rows.tile) as i:
            source = half + i * pitch + t * (columns.m * lanes)
            place = target + i * (columns.tile * plan.y_stride) + t * plan.KB
            xs = [k.load(source + n * lanes, lanes) for n in range(columns.m)]
            for n, value in enumerate(linear(k, across, xs)):
                k.store(value, place + n * plan.y_stride)
        return k

    # The product, and back.

    def _multiply_task(self) -> Function:
        """One block of filters by channels: add a slice's chunk to its sums."""
        plan, tiles = self.plan, self.plan.tiles
        k = self.m.function("multiply", *TASK, internal=True)
        context, index, thread = k.args
        workspace = self._operands(k, context)[-1]
        step = k.load(k.bits(workspace, ptr(i64)) + 1)
        channel_block, rest = index % plan.channel_blocks, index // plan.channel_blocks
        filter_block, slice_ = rest % plan.filter_blocks, rest // plan.filter_blocks
        _, rows = self._chunk(k, workspace, slice_)
        v, y, sums, scratch = self._memory(k, workspace)
        v = v + slice_ * plan.v_size + channel_block * (plan.vectors * tiles.chunk_tiles * plan.lanes)
        y = y + slice_ * plan.y_size + filter_block * (tiles.chunk_tiles * plan.KB)
        sums, products = sums + index * plan.block_size, scratch + thread * plan.thread_size
        count = rows * tiles.columns.tiles
        with k.if_(step.eq(0)), k.loop(0, plan.block_size, plan.lanes) as n:
            k.store(k.zero(self.real, plan.lanes), sums + n)
        with k.if_(rows > 0):
            for i, fold in enumerate(self.folds):
                with k.loop(0, tiles.columns.tile) as j:
                    point = j + i * tiles.columns.tile
                    first = 0
                    for times, size in plan.register_tiles:
                        with k.loop(first, first + times * size, size) as f:
                            out = products + j * (plan.KB * plan.CB) + f * plan.CB
                            here = v + point * tiles.v_stride, y + point * plan.y_stride + f
                            k.call(self.products[size], *here, out, count)
                        first += times * size
                k.call(fold, products, sums)
        return k

    def _product(self, size: int) -> Function:
        """The register tile: one point of `size` filters by a block of channels, summed over tiles."""
        plan, lanes = self.plan, self.plan.lanes
        k = self.m.function(f"product_of_{size}", *[ptr(self.real)] * 3, i64, internal=True)
        v, y, out, count = k.args
        acc = [[k.var(k.zero(self.real, lanes)) for _ in range(plan.vectors)] for _ in range(size)]

        def add(tile: Value) -> None:
            source = v + tile * lanes
            xs = [k.load(source + n * (plan.tiles.chunk_tiles * lanes), lanes) for n in range(plan.vectors)]
            for f, sums in enumerate(acc):
                one = k.broadcast(y + tile * plan.KB + f, lanes)
                for total, x in zip(sums, xs, strict=True):
                    total.fma(one, x)

        k.sweep(0, count, self.m.terms, add)
        for f, sums in enumerate(acc):
            for n, total in enumerate(sums):
                k.store(total.get(), out + (f * plan.CB + n * lanes))
        return k

    def _fold(self, i: int) -> Function:
        """`GT .. G` of row i of points, added to the sums."""
        plan, tiles, lanes = self.plan, self.plan.tiles, self.plan.lanes
        k = self.m.function(f"fold_{i}", ptr(self.real), ptr(self.real), internal=True)
        products, sums = k.args
        across = list(zip(*tiles.columns.transforms.G, strict=True))
        with k.loop(0, plan.KB) as f, k.loop(0, plan.CB, lanes) as channel:
            source = products + f * plan.CB + channel
            xs = [k.load(source + j * (plan.KB * plan.CB), lanes) for j in range(tiles.columns.tile)]
            target = sums + f * (plan.taps * plan.CB) + channel
            zs = linear(k, across, xs)
            for r, factor in enumerate(tiles.rows.transforms.G[i]):
                for s, z in enumerate(zs if factor else []):
                    place = target + (r * tiles.columns.r + s) * plan.CB
                    (total,) = linear(k, [(Fraction(1), factor)], [k.load(place, lanes), z])
                    k.store(total, place)
        return k

    # The sums of all slices, to dw.

    def _finish_task(self) -> Function:
        """One block of filters by channels, written to dw."""
        plan, tiles, lanes = self.plan, self.plan.tiles, self.plan.lanes
        c = tiles.correlation
        write = self._write_by_vectors if tiles.parts == 1 else self._write_by_elements
        k = self.m.function("finish", *TASK, internal=True)
        context, index, _ = k.args
        _, _, dw, workspace = self._operands(k, context)
        group = k.load(k.bits(workspace, ptr(i64)))
        sums = self._memory(k, workspace)[2] + index * plan.block_size
        filter_block, channel_block = index // plan.channel_blocks, index % plan.channel_blocks
        total = k.scratch(self.real, plan.taps * lanes)
        dw = dw + group * c.filters.group + filter_block * (plan.KB * c.filters.k)
        with k.loop(0, k.min(c.K - filter_block * plan.KB, plan.KB)) as f, k.loop(0, plan.vectors) as n:
            here = sums + f * (plan.taps * plan.CB) + n * lanes
            with k.loop(0, plan.taps) as t:
                vector = k.var(k.load(here + t * plan.CB, lanes))
                for slice_ in range(1, plan.slices):
                    vector.add(k.load(here + t * plan.CB + slice_ * plan.sums_size, lanes))
                k.store(vector.get(), total + t * lanes)
            write(k, total, dw + f * c.filters.k, (channel_block * plan.vectors + n) * lanes)
        return k

    def _write_by_vectors(self, k: Function, total: Value, dw: Value, channel: Value) -> None:
        """The taps of a vector of channels, which all exist."""
        plan, lanes, w = self.plan, self.plan.lanes, self.plan.tiles.correlation.filters
        C = plan.tiles.correlation.C
        if w.c == 1:
            mask = k.mask(C - channel, lanes)
            for r in range(plan.tiles.rows.r):
                for s in range(plan.tiles.columns.r):
                    v = k.load(total + (r * plan.tiles.columns.r + s) * lanes, lanes)
                    k.store(v, dw + channel + (r * w.r + s * w.s), mask=mask)
            return
        for first in range(0, plan.taps, lanes):
            last = min(plan.taps, first + lanes)
            rows = [k.load(total + min(t, plan.taps - 1) * lanes, lanes) for t in range(first, first + lanes)]
            for lane, v in enumerate(k.transpose(rows)):
                with k.if_(channel + lane < C):
                    store_range(k, v, dw + (channel + lane) * w.c + first, 0, last - first)

    def _write_by_elements(self, k: Function, total: Value, dw: Value, channel: Value) -> None:
        """Lanes of several parts: each to its own taps."""
        tiles, lanes = self.plan.tiles, self.plan.lanes
        w = tiles.correlation.filters
        rows, columns = tiles.rows, tiles.columns
        with k.loop(0, k.max(k.min(tiles.depth - channel, lanes), 0)) as lane:
            part, c = (channel + lane) // tiles.part_depth, (channel + lane) % tiles.part_depth
            with k.if_(c < tiles.correlation.C), k.loop(0, rows.r) as i, k.loop(0, columns.r) as j:
                r, s = _tap(rows, part // columns.parts, i), _tap(columns, part % columns.parts, j)
                with k.if_((r < len(rows.axis.taps)) & (s < len(columns.axis.taps))):
                    one = k.load(total + (i * columns.r + j) * lanes + lane)
                    k.store(one, dw + c * w.c + r * w.r + s * w.s)


def _tap(side: Side, part: Value, number: Value) -> Value:
    """The filter's row or column that a part's tap is; beyond the filter where a part has fewer."""
    block, phase = part // side.phases, part % side.phases
    return (block * side.r + number) * side.phases + phase
