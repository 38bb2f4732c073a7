"""The kernels of Winograd's gradient of the filters: `dw = GT ((A dy AT) * (BT x B)) G`, summed over tiles.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). A forward tile `y = AT ((G w) * (BT x))` is
linear in w, and this is its adjoint: tiles of m x m of dy take the place of the filters, the filters that of a tile's
outputs, so that one product still serves m*m*r*r multiplications of the sum. Tiles go in chunks through two steps:
threads transform vectors of channels of both operands; then every block of filters by channels is multiplied, point by
point, by register tiles that sum over the chunk's tiles, transformed back a row of points at a time, and added to that
block's sums.
"""

from __future__ import annotations

from fractions import Fraction

from autoconv.cpu.codegen.ir import Function, Module, Value, i64, ptr
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.lanes import every_nth, store_range, within
from autoconv.cpu.transform.filters import filter_tap
from autoconv.cpu.transform.geometry import HEADER
from autoconv.cpu.winograd.gradients_geometry import WgradTiling
from autoconv.cpu.winograd.kernels import WinogradInput
from autoconv.cpu.winograd.matrix import matrix_vector
from autoconv.layer import ConvLayer


def emit(instruction_set: str, layer: ConvLayer, tiling: WgradTiling) -> Module:
    """`run` of a gradient of the filters: operand a is x, b is dy, out is dw."""
    m = Module(instruction_set)
    _Gradient(m, layer, tiling).emit()
    return m


class _Gradient:
    """Writes the functions of a layer."""

    def __init__(self, m: Module, layer: ConvLayer, tiling: WgradTiling) -> None:
        self.m, self.tiling = m, tiling
        stage = WinogradInput(m, layer, tiling.forward, 0)
        self.stored, self.real, self.channels_last = stage.stored, stage.real, stage.channels_last
        self.input = stage.emit()

    def emit(self) -> None:
        """Groups one after the other; the slices' chunks of a step together."""
        tiling, forward = self.tiling, self.tiling.forward
        self.dy = self._dy()
        self.products = {size: self._product(size) for _, size in tiling.register_tiles}
        self.folds = [self._fold(i) for i in range(forward.rows.tile)]
        transform, multiply, finish = self._transform_task(), self._multiply_task(), self._finish_task()
        k = self.m.function("run", *RUN)
        (context,) = k.args
        header = k.bits(self._operands(k, context)[-1], ptr(i64))  # group and step
        blocks = tiling.filter_blocks * tiling.channel_blocks
        with k.loop(0, forward.correlation.groups) as group:
            k.store(group, header)
            with k.loop(0, tiling.steps) as step:
                k.store(step, header + 1)
                launch(k, context, transform, tiling.slices * tiling.sections * (forward.c_blocks + tiling.k_vectors))
                launch(k, context, multiply, tiling.slices * blocks)
            launch(k, context, finish, blocks)

    def _operands(self, k: Function, context: Value) -> tuple[Value, Value, Value, Value]:
        x, dy, dw, _, _, workspace = operands(k, context, self.stored)
        return x, dy, dw, workspace

    def _chunk(self, k: Function, workspace: Value, slice_: Value) -> tuple[Value, Value]:
        """First row of tiles of a slice's chunk, and how many there are, 0 or less where the slice has ended."""
        forward = self.tiling.forward
        step = k.load(k.bits(workspace, ptr(i64)) + 1)
        chunk = slice_ * self.tiling.steps + step
        within_slice = k.min(forward.tile_rows - chunk * forward.chunk, forward.chunk)
        return chunk * forward.chunk, within_slice

    def _memory(self, k: Function, workspace: Value) -> tuple[Value, Value, Value, Value]:
        """V, Y, sums, and the threads' buffers."""
        v = k.bytes_at(workspace, HEADER, self.real)
        places = [v]
        for size in self.tiling.elements:
            places.append(places[-1] + size)
        return places[0], places[1], places[2], places[3]

    # Both operands, transformed.

    def _transform_task(self) -> Function:
        """A vector of channels of x or dy, for a section of a slice's chunk."""
        tiling, forward = self.tiling, self.tiling.forward
        k = self.m.function("transform", *TASK, internal=True)
        context, index, thread = k.args
        x, dy, _, workspace = self._operands(k, context)
        group = k.load(k.bits(workspace, ptr(i64)))
        number, rest = index % (forward.c_blocks + tiling.k_vectors), index // (forward.c_blocks + tiling.k_vectors)
        section, slice_ = rest % tiling.sections, rest // tiling.sections
        first, rows = self._chunk(k, workspace, slice_)
        skipped = section * tiling.section_rows
        first, rows = first + skipped, k.min(rows - skipped, tiling.section_rows)
        v, y, _, scratch = self._memory(k, workspace)
        scratch = scratch + thread * tiling.thread_size
        tile = skipped * forward.columns.tiles
        with k.if_(rows > 0):
            with k.if_(number < forward.c_blocks):
                target = v + slice_ * tiling.v_size + tile * tiling.lanes
                k.call(self.input, x, target, scratch, first, rows, group, number)
            with k.else_():
                vector = number - forward.c_blocks
                per_block = tiling.BF // tiling.lanes
                block, column = vector // per_block, vector % per_block * tiling.lanes
                target = y + slice_ * tiling.y_size + block * (forward.chunk_tiles * tiling.BF)
                target = target + tile * tiling.BF + column
                k.call(self.dy, dy, target, scratch, first, rows, group, vector)
        return k

    def _dy(self) -> Function:
        """`A dy AT` of a vector of filters, for some rows of tiles."""
        tiling, forward, lanes, real = self.tiling, self.tiling.forward, self.tiling.lanes, ptr(self.real)
        vertical, c = forward.rows, forward.correlation
        gather, transform = self._gather_dy(), self._transform_dy()
        k = self.m.function("dy", ptr(self.stored), real, real, i64, i64, i64, i64, internal=True)
        dy, target, raw, first, rows, group, vector = k.args
        dy = dy + group * c.output.group + vector * (lanes * c.output.channel)
        live = k.min(c.K - vector * lanes, lanes)
        with k.loop(0, rows) as t:
            image, row = (first + t) // vertical.tiles, (first + t) % vertical.tiles
            residue, n = image // c.N, image % c.N
            down, across = residue // forward.columns.residues, residue % forward.columns.residues
            with k.loop(0, vertical.m) as i:
                p = (row * vertical.m + i) * vertical.residues + down
                columns = k.select(p < vertical.axis.count, k.i64(forward.columns.axis.count), k.i64(0))
                there = k.min(p, vertical.axis.count - 1)  # masks leave out all of a row beyond the last
                source = dy + n * c.output.image + there * c.output.row
                k.call(gather, source, raw + i * (tiling.y_pitch * lanes), live, across, columns)
            k.call(transform, raw, target + t * (forward.columns.tiles * tiling.BF))
        return k

    def _gather_dy(self) -> Function:
        """A row of one residue class of dy with channels in lanes, zeros beyond it; `columns` is its extent, or 0."""
        tiling, lanes, c = self.tiling, self.tiling.lanes, self.tiling.forward.correlation
        k = self.m.function("gather_dy", ptr(self.stored), ptr(self.real), i64, i64, i64, internal=True)
        dy, raw, live, first, columns = k.args
        period = tiling.forward.columns.residues
        if self.channels_last:
            with k.loop(0, tiling.y_pitch) as j:
                q = j * period + first
                mask = k.mask(k.select(q < columns, live, k.i64(0)), lanes)
                k.store(k.load(dy + q * c.output.column, lanes, mask=mask), raw + j * lanes)
            return k
        with k.loop(0, tiling.y_pitch, lanes) as j:
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
        tiling, forward, lanes = self.tiling, self.tiling.forward, self.tiling.lanes
        rows, columns = forward.rows, forward.columns
        k = self.m.function("transform_dy", ptr(self.real), ptr(self.real), internal=True)
        raw, target = k.args
        pitch = tiling.y_pitch * lanes
        half = raw + rows.m * pitch
        down, across = (list(zip(*tiled.transforms.AT, strict=True)) for tiled in (rows, columns))
        if rows.tile == 1:
            half = raw
        else:
            with k.loop(0, columns.tiles * columns.m) as j:
                xs = [k.load(raw + (j * lanes + i * pitch), lanes) for i in range(rows.m)]
                for n, value in enumerate(matrix_vector(k, down, xs)):
                    k.store(value, half + (j * lanes + n * pitch))
        with k.loop(0, columns.tiles) as t, k.loop(0, rows.tile) as i:
            source = half + i * pitch + t * (columns.m * lanes)
            place = target + i * (columns.tile * tiling.y_stride) + t * tiling.BF
            xs = [k.load(source + n * lanes, lanes) for n in range(columns.m)]
            for n, value in enumerate(matrix_vector(k, across, xs)):
                k.store(value, place + n * tiling.y_stride)
        return k

    # The product, and back.

    def _multiply_task(self) -> Function:
        """One block of filters by channels: add a slice's chunk to its sums."""
        tiling, forward = self.tiling, self.tiling.forward
        k = self.m.function("multiply", *TASK, internal=True)
        context, index, thread = k.args
        workspace = self._operands(k, context)[-1]
        step = k.load(k.bits(workspace, ptr(i64)) + 1)
        channel_block, rest = index % tiling.channel_blocks, index // tiling.channel_blocks
        filter_block, slice_ = rest % tiling.filter_blocks, rest // tiling.filter_blocks
        _, rows = self._chunk(k, workspace, slice_)
        v, y, sums, scratch = self._memory(k, workspace)
        v = v + slice_ * tiling.v_size + channel_block * (tiling.vectors * forward.chunk_tiles * tiling.lanes)
        y = y + slice_ * tiling.y_size + filter_block * (forward.chunk_tiles * tiling.BF)
        sums, products = sums + index * tiling.block_size, scratch + thread * tiling.thread_size
        count = rows * forward.columns.tiles
        with k.if_(step.eq(0)), k.loop(0, tiling.block_size, tiling.lanes) as n:
            k.store(k.zero(self.real, tiling.lanes), sums + n)
        with k.if_(rows > 0):
            for i, fold in enumerate(self.folds):
                with k.loop(0, forward.columns.tile) as j:
                    point = j + i * forward.columns.tile
                    first = 0
                    for times, size in tiling.register_tiles:
                        with k.loop(first, first + times * size, size) as f:
                            out = products + j * (tiling.BF * tiling.BC) + f * tiling.BC
                            here = v + point * forward.v_stride, y + point * tiling.y_stride + f
                            k.call(self.products[size], *here, out, count)
                        first += times * size
                k.call(fold, products, sums)
        return k

    def _product(self, size: int) -> Function:
        """The register tile: one point of `size` filters by a block of channels, summed over tiles."""
        tiling, lanes = self.tiling, self.tiling.lanes
        k = self.m.function(f"product_of_{size}", *[ptr(self.real)] * 3, i64, internal=True)
        v, y, out, count = k.args
        acc = [[k.var(k.zero(self.real, lanes)) for _ in range(tiling.vectors)] for _ in range(size)]

        def add(tile: Value) -> None:
            source = v + tile * lanes
            xs = [k.load(source + n * (tiling.forward.chunk_tiles * lanes), lanes) for n in range(tiling.vectors)]
            for f, sums in enumerate(acc):
                one = k.broadcast(y + tile * tiling.BF + f, lanes)
                for total, x in zip(sums, xs, strict=True):
                    total.fma(one, x)

        k.sweep(0, count, self.m.terms, add)
        for f, sums in enumerate(acc):
            for n, total in enumerate(sums):
                k.store(total.get(), out + (f * tiling.BC + n * lanes))
        return k

    def _fold(self, i: int) -> Function:
        """`GT .. G` of row i of points, added to the sums."""
        tiling, forward, lanes = self.tiling, self.tiling.forward, self.tiling.lanes
        k = self.m.function(f"fold_{i}", ptr(self.real), ptr(self.real), internal=True)
        products, sums = k.args
        across = list(zip(*forward.columns.transforms.G, strict=True))
        with k.loop(0, tiling.BF) as f, k.loop(0, tiling.BC, lanes) as channel:
            source = products + f * tiling.BC + channel
            xs = [k.load(source + j * (tiling.BF * tiling.BC), lanes) for j in range(forward.columns.tile)]
            target = sums + f * (tiling.taps * tiling.BC) + channel
            zs = matrix_vector(k, across, xs)
            for r, factor in enumerate(forward.rows.transforms.G[i]):
                for s, z in enumerate(zs if factor else []):
                    place = target + (r * forward.columns.r + s) * tiling.BC
                    (total,) = matrix_vector(k, [(Fraction(1), factor)], [k.load(place, lanes), z])
                    k.store(total, place)
        return k

    # The sums of all slices, to dw.

    def _finish_task(self) -> Function:
        """One block of filters by channels, written to dw."""
        tiling, forward, lanes = self.tiling, self.tiling.forward, self.tiling.lanes
        c = forward.correlation
        write = self._write_by_vectors if forward.subfilters == 1 else self._write_by_elements
        k = self.m.function("finish", *TASK, internal=True)
        context, index, _ = k.args
        _, _, dw, workspace = self._operands(k, context)
        group = k.load(k.bits(workspace, ptr(i64)))
        sums = self._memory(k, workspace)[2] + index * tiling.block_size
        filter_block, channel_block = index // tiling.channel_blocks, index % tiling.channel_blocks
        total = k.scratch(self.real, tiling.taps * lanes)
        dw = dw + group * c.filters.group + filter_block * (tiling.BF * c.filters.k)
        with k.loop(0, k.min(c.K - filter_block * tiling.BF, tiling.BF)) as f, k.loop(0, tiling.vectors) as n:
            here = sums + f * (tiling.taps * tiling.BC) + n * lanes
            with k.loop(0, tiling.taps) as t:
                vector = k.var(k.load(here + t * tiling.BC, lanes))
                for slice_ in range(1, tiling.slices):
                    vector.add(k.load(here + t * tiling.BC + slice_ * tiling.sums_size, lanes))
                k.store(vector.get(), total + t * lanes)
            write(k, total, dw + f * c.filters.k, (channel_block * tiling.vectors + n) * lanes)
        return k

    def _write_by_vectors(self, k: Function, total: Value, dw: Value, channel: Value) -> None:
        """The taps of a vector of channels, which all exist."""
        tiling, lanes, w = self.tiling, self.tiling.lanes, self.tiling.forward.correlation.filters
        C = tiling.forward.correlation.C
        if w.c == 1:
            mask = k.mask(C - channel, lanes)
            for r in range(tiling.forward.rows.r):
                for s in range(tiling.forward.columns.r):
                    v = k.load(total + (r * tiling.forward.columns.r + s) * lanes, lanes)
                    k.store(v, dw + channel + (r * w.r + s * w.s), mask=mask)
            return
        for first in range(0, tiling.taps, lanes):
            last = min(tiling.taps, first + lanes)
            rows = [k.load(total + min(t, tiling.taps - 1) * lanes, lanes) for t in range(first, first + lanes)]
            for lane, v in enumerate(k.transpose(rows)):
                with k.if_(channel + lane < C):
                    store_range(k, v, dw + (channel + lane) * w.c + first, 0, last - first)

    def _write_by_elements(self, k: Function, total: Value, dw: Value, channel: Value) -> None:
        """Lanes of several subfilters: each to its own taps."""
        forward, lanes = self.tiling.forward, self.tiling.lanes
        w = forward.correlation.filters
        rows, columns = forward.rows, forward.columns
        with k.loop(0, k.max(k.min(forward.depth - channel, lanes), 0)) as lane:
            subfilter, c = (channel + lane) // forward.subfilter_depth, (channel + lane) % forward.subfilter_depth
            with k.if_(c < forward.correlation.C), k.loop(0, rows.r) as i, k.loop(0, columns.r) as j:
                r, row_there = filter_tap(rows, subfilter // columns.subfilters, i)
                s, column_there = filter_tap(columns, subfilter % columns.subfilters, j)
                with k.if_(row_there & column_there):
                    one = k.load(total + (i * columns.r + j) * lanes + lane)
                    k.store(one, dw + c * w.c + r * w.r + s * w.s)
