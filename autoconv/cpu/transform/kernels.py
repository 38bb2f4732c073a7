"""The kernels of a Winograd convolution: `y = AT ((G w GT) * (BT x B)) A`, tile by tile, lanes as channels.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). A chunk of tiles goes through
three steps: its input is laid out with channels in lanes, transformed along columns and then along rows;
every point of all its tiles is multiplied with the transformed filters by a register-tiled product over
channels; the products are transformed back and stored with the fused epilogue.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from autoconv.cpu.codegen.ir import LINE, Function, Module, Value, i32, i64, ptr
from autoconv.cpu.codegen.launch import CONTEXT, RUN, TASK, launch, operands
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import every_nth, store_range
from autoconv.cpu.transform.filters import FilterWriter
from autoconv.cpu.transform.geometry import Plan
from autoconv.cpu.transform.input import InputWriter
from autoconv.cpu.transform.matrix import linear, split_evenly
from autoconv.layer import ConvLayer

WIDEST_SPREAD = 4  # columns from output to output that masked stores are worth it for
FEWEST_TO_FETCH = 4  # tiles of a register tile that has the time to fetch filters
HEADER = 64  # bytes of the workspace in front: group and first chunk of what is being transformed together


def emit(instruction_set: str, layer: ConvLayer, plans: tuple[Plan, ...]) -> Module:
    """`run` and `pack` for the correlations of a layer."""
    return emit_with(Writer, FilterWriter, instruction_set, layer, plans)


def emit_with(
    writer: type[Writer], packer: type[FilterWriter], instruction_set: str, layer: ConvLayer, plans: Sequence[Plan]
) -> Module:
    """The same, with transforms and a product of the caller's own."""
    m = Module(instruction_set)
    steps, packs = [], []
    packed = 0
    for n, plan in enumerate(plans):
        steps.append(writer(m, layer, plan, n, packed).emit())
        packs.append(packer(m, layer, plan, n, packed).emit())
        packed += plan.packed_size
    k = m.function("run", *RUN)
    for run in steps:
        k.call(run, k.args[0])
    k = m.function("pack", *RUN)
    for task, tasks in packs:
        launch(k, k.args[0], task, tasks)
    return m


class Writer(InputWriter):
    """Writes the functions of one correlation."""

    def __init__(self, m: Module, layer: ConvLayer, plan: Plan, number: int, packed: int) -> None:
        super().__init__(m, layer, plan, number)
        self.packed, self.epilogue = packed, Epilogue.of(layer)

    def emit(self) -> Function:
        """What runs this correlation, given the context."""
        plan = self.plan
        self.input = self.write_input()
        row_counts = sorted({plan.chunk, plan.last_chunk})
        parts = [split_evenly(rows * plan.columns.tiles, plan.pixels) for rows in row_counts]
        sizes = sorted({size for split in parts for _, size in split})
        self.register_tiles = min(sum(count for count, _ in split) for split in parts)
        self.registers = {size: self._product_of(size) for size in sizes}
        self.products = {rows: self._product(rows, split) for rows, split in zip(row_counts, parts, strict=True)}
        self.unpack = self._unpack()
        self.inverse = self._inverse()
        self.output = self._output()
        return self._run_together() if plan.share else self._run_apart()

    # Schedules.

    def _operands(self, k: Function) -> list[Value]:
        stored = self.stored
        return operands(k, k.args[0], stored, self.real, stored, stored, stored)

    def _run_apart(self) -> Function:
        """Every thread takes chunks, and keeps all of a chunk to itself."""
        plan = self.plan
        k = self.function("chunk", *TASK)
        _, index, thread = k.args
        x, u, y, bias, residual, workspace = self._operands(k)
        group, first = index // plan.chunks, index % plan.chunks * plan.chunk
        rows = k.min(plan.tile_rows - first, plan.chunk)
        scratch = k.bytes_at(workspace, HEADER, self.real) + thread * plan.thread_size
        v = scratch + plan.scratch_size
        with k.loop(0, plan.c_blocks) as block:
            k.call(self.input, x, v, scratch, first, rows, group, block)
        with k.loop(0, plan.k_blocks) as block:
            k.call(self.output, v, u, scratch, y, bias, residual, first, rows, group, block)
        run = self.function("apart", CONTEXT)
        launch(run, run.args[0], k, plan.correlation.groups * plan.chunks)
        return run

    def _run_together(self) -> Function:
        """All threads transform the input of some chunks; then each takes blocks of filters of a chunk."""
        plan = self.plan
        tasks = []
        for name in ("inputs", "outputs"):
            k = self.function(name, *TASK)
            _, index, thread = k.args
            x, u, y, bias, residual, workspace = self._operands(k)
            header = k.bits(workspace, ptr(i64))
            group, start = k.load(header), k.load(header + 1)
            shared = k.bytes_at(workspace, HEADER, self.real)
            scratch = shared + plan.shared_size + thread * plan.thread_size
            if name == "inputs":
                chunk, block = index // plan.c_blocks, index % plan.c_blocks
            else:
                together = k.min(plan.chunks - start, plan.share)
                chunk, block = index % together, index // together
            v = shared + chunk * plan.v_size
            first = (start + chunk) * plan.chunk
            rows = k.min(plan.tile_rows - first, plan.chunk)
            if name == "inputs":
                k.call(self.input, x, v, scratch, first, rows, group, block)
            else:
                k.call(self.output, v, u, scratch, y, bias, residual, first, rows, group, block)
            tasks.append(k)
        k = self.function("together", CONTEXT)
        workspace = self._operands(k)[-1]
        header = k.bits(workspace, ptr(i64))
        with k.loop(0, plan.correlation.groups) as group, k.loop(0, plan.chunks, plan.share) as start:
            k.store(group, header)
            k.store(start, header + 1)
            together = k.min(plan.chunks - start, plan.share)
            launch(k, k.args[0], tasks[0], together * plan.c_blocks)
            launch(k, k.args[0], tasks[1], together * plan.k_blocks)
        return k

    # The product.

    def _product_of(self, size: int) -> Function:
        """The register tile: one point of `size` tiles by a block of filters, summed over channels.

        It fetches its share of the next point's filters into the second cache: they come from the last one,
        whose latency no queue of loads hides. The smallest tiles read them as fast as they come, in one
        stream that the processor foresees.
        """
        plan, lanes, KB = self.plan, self.plan.lanes, self.plan.KB
        k = self.function(f"product_of_{size}_", *[ptr(self.real)] * 4)
        v, u, following, out = k.args
        acc = [[k.var(k.zero(self.real, lanes)) for _ in range(plan.vectors)] for _ in range(size)]
        line = LINE // plan.itemsize
        lines = -(-lanes * KB // (line * self.register_tiles)) if size >= FEWEST_TO_FETCH else 0

        def terms(block: Value, count: int) -> None:
            source, filters = v + block * (plan.chunk_tiles * lanes), u + block * (lanes * KB)
            for n in range(lines):
                k.prefetch(following + (block * lines + n) * line, locality=2)
            together = math.gcd(self.m.terms, count)
            with k.loop(0, count, together) as start:
                for c in (start + i for i in range(together)):
                    ws = [k.load(filters + (c * KB + n * lanes), lanes) for n in range(plan.vectors)]
                    for p in range(size):
                        x = k.broadcast(source + c + p * lanes, lanes)
                        for n in range(plan.vectors):
                            acc[p][n].fma(x, ws[n])

        whole, rest = divmod(plan.depth, lanes)
        if whole:
            with k.loop(0, whole) as block:
                terms(block, lanes)
        if rest:
            terms(k.i64(whole), rest)
        for p in range(size):
            for n in range(plan.vectors):
                k.store(acc[p][n].get(), out + (p * KB + n * lanes))
        return k

    def _product(self, rows: int, split: Sequence[tuple[int, int]]) -> Function:
        """All points of all tiles of a chunk by a block of filters."""
        plan = self.plan
        k = self.function(f"product_{rows}_", *[ptr(self.real)] * 3)
        v, u, out = k.args
        size_of_point = plan.depth * plan.KB
        with k.loop(0, plan.points) as point:
            first = number = 0
            for count, size in split:
                with k.loop(0, count) as n:
                    tile = n * size + first
                    source = v + (point * plan.v_stride + tile * plan.lanes)
                    target = out + (point * plan.m_stride + tile * plan.KB)
                    filters = u + point * size_of_point
                    following = filters + (n + number) * -(-size_of_point // self.register_tiles) + size_of_point
                    k.call(self.registers[size], source, filters, following, target)
                first += count * size
                number += count
        return k

    # The output's side.

    def _output(self) -> Function:
        """Multiply a chunk by a block of filters, transform back and store."""
        plan, c, real, stored = self.plan, self.plan.correlation, ptr(self.real), ptr(self.stored)
        k = self.function("output", real, real, real, stored, stored, stored, i64, i64, i64, i64)
        v, u, products, y, bias, residual, first, rows, group, block = k.args
        u = u + (self.packed + (group * plan.k_blocks + block) * plan.u_size)
        if plan.last_chunk == plan.chunk:
            k.call(self.products[plan.chunk], v, u, products)
        else:
            with k.if_(rows.eq(plan.chunk)):
                k.call(self.products[plan.chunk], v, u, products)
            with k.else_():
                k.call(self.products[plan.last_chunk], v, u, products)
        strip = products + plan.points * plan.m_stride
        side = plan.rows
        with k.loop(0, rows) as t:
            image, row = (first + t) // side.tiles, (first + t) % side.tiles
            grid, n = image // c.N, image % c.N
            down, across = grid // plan.columns.grids, grid % plan.columns.grids
            columns = (plan.columns.axis.count - across + (plan.columns.grids - 1)) // plan.columns.grids
            place = across * plan.columns.axis.output_stride + plan.columns.axis.output_start
            corner = n * c.output.image + group * c.output.group + place * c.output.column
            with k.loop(0, plan.vectors) as vector:
                channel = block * plan.KB + vector * plan.lanes
                live = c.K - channel
                with k.if_(live > 0):
                    k.call(
                        self.inverse,
                        products + (t * (plan.columns.tiles * plan.KB) + vector * plan.lanes),
                        strip,
                    )
                    with k.loop(0, side.m) as i:
                        p = (row * side.m + i) * side.grids + down
                        with k.if_(p < side.axis.count):
                            h = p * side.axis.output_stride + side.axis.output_start
                            at = corner + h * c.output.row + channel * c.output.channel
                            source = strip + i * (plan.out_pitch * plan.lanes)
                            past = y + at, residual + at, bias + (group * c.K + channel)
                            k.call(self.unpack, source, *past, live, columns)
        return k

    def _inverse(self) -> Function:
        """`AT` and `A` on a row of tiles, for one vector of filters."""
        plan, lanes = self.plan, self.plan.lanes
        rows, columns = plan.rows, plan.columns
        k = self.function("inverse", ptr(self.real), ptr(self.real))
        products, strip = k.args
        half = k.scratch(self.real, rows.m * columns.tile * lanes)
        with k.loop(0, columns.tiles) as t:
            with k.loop(0, columns.tile) as j:
                source = products + (t * plan.KB + j * plan.m_stride)
                xs = [k.load(source + i * (columns.tile * plan.m_stride), lanes) for i in range(rows.tile)]
                values = linear(k, rows.transforms.AT, xs) if rows.tile > 1 else xs
                for n, value in enumerate(values):
                    k.store(value, half + (j * lanes + n * (columns.tile * lanes)))
            with k.loop(0, rows.m) as i:
                source = half + i * (columns.tile * lanes)
                xs = [k.load(source + j * lanes, lanes) for j in range(columns.tile)]
                values = linear(k, columns.transforms.AT, xs) if columns.tile > 1 else xs
                target = strip + (i * plan.out_pitch + t * columns.m) * lanes
                for n, value in enumerate(values):
                    k.store(value, target + n * lanes)
        return k

    def _unpack(self) -> Function:
        """Store one row of output of one vector of filters, with the epilogue."""
        plan, lanes, stored = self.plan, self.plan.lanes, ptr(self.stored)
        k = self.function("unpack", ptr(self.real), stored, stored, stored, i64, i64)
        source, y, residual, bias, live, columns = k.args
        strides, side = plan.correlation.output, plan.columns
        step = side.grids * side.axis.output_stride * strides.column

        def finish(v: Value, b: Value | None, r: Value | None) -> Value:
            v = v if b is None else v + b
            v = v if r is None else v + r
            return k.relu(v) if self.epilogue.relu else v

        if self.channels_last:
            mask = k.mask(live, lanes) if plan.correlation.K % lanes else None
            b = k.load(bias, lanes, mask=mask) if self.epilogue.bias else None
            with k.loop(0, columns) as j:
                r = k.load(residual + j * step, lanes, mask=mask) if self.epilogue.residual else None
                k.store(finish(k.load(source + j * lanes, lanes), b, r), y + j * step, mask=mask)
            return k

        below = (
            plan.rows.grids * plan.rows.axis.output_stride * strides.row
        )  # the row to store next, in the same columns

        def each_channel(j: Value, store: Callable[[Value, Value, Value], None]) -> None:
            """`store(values, place, bias)` for every channel that exists, of a vector of columns from `j` on."""
            block = k.transpose([k.load(source + (j + lane) * lanes, lanes) for lane in range(lanes)])
            for channel, v in enumerate(block):
                at = j * step + channel * strides.channel
                k.prefetch(y + (at + below), write=True)
                if self.epilogue.residual:
                    k.prefetch(residual + (at + below))
                with k.if_(live > channel):
                    store(v, at, bias + channel)

        def store_neighbours(width: int, v: Value, at: Value, b: Value) -> None:
            r = k.load(residual + at, lanes, mask=k.mask(width, lanes)) if self.epilogue.residual else None
            v = finish(v, k.broadcast(b, lanes) if self.epilogue.bias else None, r)
            store_range(k, v, y + at, 0, width)

        def store_spread(masks: Sequence[Value], v: Value, at: Value, b: Value) -> None:
            places, r = [at + q * lanes for q in range(step)], None
            if self.epilogue.residual:
                parts = [k.load(residual + p, lanes, mask=m) for p, m in zip(places, masks, strict=True)]
                r = every_nth(k, parts, lanes)
            v = finish(v, k.broadcast(b, lanes) if self.epilogue.bias else None, r)
            for q, (place, mask) in enumerate(zip(places, masks, strict=True)):
                picks = [(q * lanes + lane) // step for lane in range(lanes)]
                k.store(k.shuffle(v, v, picks), y + place, mask=mask)

        def store_singly(count: Value, v: Value, at: Value, b: Value) -> None:
            for lane in range(lanes):
                with k.if_(count > lane):
                    r = k.load(residual + (at + lane * step)) if self.epilogue.residual else None
                    one = finish(k.extract(v, lane), k.load(b) if self.epilogue.bias else None, r)
                    k.store(one, y + (at + lane * step))

        if step > 1:
            with k.loop(0, columns, lanes) as j:
                masks = self._masks(k, columns - j, step)
                spread = (
                    functools.partial(store_spread, masks) if masks else functools.partial(store_singly, columns - j)
                )
                each_channel(j, spread)
            return k
        whole, rest = side.axis.count // lanes * lanes, side.axis.count % lanes
        if whole:
            with k.loop(0, whole, lanes) as j:
                each_channel(j, functools.partial(store_neighbours, lanes))
        if rest:
            each_channel(k.i64(whole), functools.partial(store_neighbours, rest))
        return k

    def _masks(self, k: Function, columns: Value, step: int) -> list[Value]:
        """Where outputs `step` apart lie in vectors that follow one another; empty where masks are no gain."""
        lanes = self.plan.lanes
        if self.m.instruction_set != "avx512" or step > WIDEST_SPREAD:
            return []
        masks = []
        for q in range(step):
            there = k.iota(i32, lanes) < k.splat(k.cast(k.min(columns, lanes) * step - q * lanes, i32), lanes)
            bits = ", ".join(f"i1 {'false' if (q * lanes + lane) % step else 'true'}" for lane in range(lanes))
            masks.append(there & k.value(there.type, f"<{bits}>"))
        return masks
