"""The input's side of Winograd: channels laid out in lanes, zeros for padding, and `BT x B` of every tile."""

from __future__ import annotations

from collections.abc import Sequence

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Type, Value, i1, i64, ptr, vec, widened
from autoconv.cpu.common.lanes import every_nth, within
from autoconv.cpu.transform.geometry import Plan, Side
from autoconv.cpu.transform.matrix import linear
from autoconv.layer import ConvLayer


class InputWriter:
    """Writes what transforms the input of one correlation."""

    def __init__(self, m: Module, layer: ConvLayer, plan: Plan, number: int) -> None:
        self.m, self.plan, self.number = m, plan, number
        self.stored = DTYPES[layer.dtype]
        self.real = widened(self.stored)
        self.channels_last = layer.layout == "NHWC"

    def function(self, name: str, *types: Type) -> Function:
        """An internal function of this correlation."""
        return self.m.function(f"{name}{self.number}", *types, internal=True)

    def write_input(self) -> Function:
        """`input(x, v, buffer, first, rows, group, block)`: a vector of channels of some rows of tiles, transformed."""
        plan, real = self.plan, ptr(self.real)
        gather = self._gather()
        transform_columns = self._transform_columns() if plan.rows.tile > 1 else None
        transform_rows = self._transform_rows()
        k = self.function("input", ptr(self.stored), real, real, i64, i64, i64, i64)
        x, v, raw, first, rows, group, block = k.args
        side, lanes = plan.rows, plan.lanes
        half = raw + plan.raw_size
        v = v + block * (plan.chunk_tiles * lanes)
        done = k.var(k.i64(0))
        with k.forever() as leave_if:
            leave_if(done.get() >= rows)
            image, row = (first + done.get()) // side.tiles, (first + done.get()) % side.tiles
            segment = k.min(rows - done.get(), side.tiles - row)
            k.call(gather, x, raw, image, group, block, row * side.m, segment * side.m + (side.r - 1))
            with k.loop(0, segment) as t:
                source = raw + t * (side.m * plan.pitch * lanes)
                if transform_columns is not None:
                    k.call(transform_columns, source, half)
                    source = half
                k.call(transform_rows, source, v + (done.get() + t) * (plan.columns.tiles * lanes))
            done.add(segment)
        return k

    def _gather(self) -> Function:
        """Rows of input with channels in lanes and zeros for padding."""
        plan, c = self.plan, self.plan.correlation
        k = self.function("gather", ptr(self.stored), ptr(self.real), i64, i64, i64, i64, i64)
        x, raw, image, group, block, top, count = k.args
        grid, n = image // c.N, image % c.N
        x = x + (n * c.input.image + group * c.input.group)
        grids = grid // plan.columns.grids, grid % plan.columns.grids
        with k.loop(0, count) as i:
            target = raw + i * (plan.pitch * plan.lanes)
            if plan.mixed:
                for number in range(plan.c_blocks):
                    with k.if_(block.eq(number)):
                        self._gather_mixed(k, x, target, number, top + i, grids)
            else:
                self._gather_plain(k, x, target, block, top + i, grids)
        return k

    def _gather_plain(
        self, k: Function, x: Value, target: Value, block: Value, row: Value, grids: tuple[Value, Value]
    ) -> None:
        """A row of channels that all belong to one part."""
        plan, c, lanes = self.plan, self.plan.correlation, self.plan.lanes
        blocks = -(-c.C // lanes)
        part, channels = block // blocks, block % blocks
        parts = part // plan.columns.parts, part % plan.columns.parts
        h, place = (_place(k, s, g, p) for s, g, p in zip((plan.rows, plan.columns), grids, parts, strict=True))
        h = row * plan.rows.period + h
        limit = k.select((h >= 0) & (h < plan.rows.axis.size), k.i64(plan.columns.axis.size), k.i64(0))
        source = x + (h * c.input.row + channels * (lanes * c.input.channel))
        live = k.min(c.C - channels * lanes, lanes)
        if self.channels_last:
            with k.loop(0, plan.columns.span) as j:
                w = j * plan.columns.period + place
                inside = (w >= 0) & (w < limit)
                mask = k.mask(k.select(inside, live, k.i64(0)), lanes)
                k.store(k.load(source + w * c.input.column, lanes, mask=mask), target + j * lanes)
            return
        with k.loop(0, plan.pitch, lanes) as j:
            w = j * plan.columns.period + place
            masks = [within(k, w + q * lanes, lanes, limit) for q in range(plan.columns.period)]
            here, there = k.launder(source + w), k.launder(target + j * lanes)

            def load(lane: int) -> Value:
                return self._columns(k, here + lane * c.input.channel, masks)

            def store(values: Sequence[Value]) -> None:
                for lane, v in enumerate(k.transpose(values)):
                    k.store(v, there + lane * lanes)

            with k.if_(live.eq(lanes)):
                if c.C // lanes:
                    store([load(lane) for lane in range(lanes)])
            with k.else_():
                rest, zero = c.C % lanes, k.zero(self.real, lanes)
                if rest:
                    store([load(lane) if lane < rest else zero for lane in range(lanes)])

    def _columns(self, k: Function, source: Value, masks: Sequence[Value]) -> Value:
        """As many columns as lanes, as far apart as there are masks."""
        lanes = self.plan.lanes
        vectors = [k.load(source + q * lanes, lanes, mask=mask) for q, mask in enumerate(masks)]
        return every_nth(k, vectors, lanes)

    def _gather_mixed(
        self, k: Function, x: Value, target: Value, number: int, row: Value, grids: tuple[Value, Value]
    ) -> None:
        """A row of the channels of several parts, in the order of parts."""
        plan, c, lanes = self.plan, self.plan.correlation, self.plan.lanes
        numbers = range(number * lanes, min((number + 1) * lanes, plan.depth))
        parts = {d // c.C: divmod(d // c.C, plan.columns.parts) for d in numbers}
        rows, limits, places = {}, {}, {}
        for part, (r, s) in parts.items():
            h = row * plan.rows.period + _place(k, plan.rows, grids[0], r)
            rows[part] = x + h * c.input.row
            inside = (h >= 0) & (h < plan.rows.axis.size)
            limits[part] = k.select(inside, k.i64(plan.columns.axis.size), k.i64(0))
            places[part] = _place(k, plan.columns, grids[1], s)
        if self.channels_last:
            with k.loop(0, plan.columns.span) as j:
                total = k.zero(self.real, lanes)
                for part in parts:
                    first = part * c.C - number * lanes  # lane of the part's first channel
                    some = k.mask(min(first + c.C, lanes), lanes, max(first, 0))
                    some = k.const(vec(i1, lanes), 1) if some is None else some
                    w = j * plan.columns.period + places[part]
                    inside = (w >= 0) & (w < limits[part])
                    mask = k.select(inside, some, k.const(some.type, 0))
                    total = total + k.load(rows[part] + (w * c.input.column - first), lanes, mask=mask)
                k.store(total, target + j * lanes)
            return
        with k.loop(0, plan.pitch, lanes) as j:
            starts = {part: j * plan.columns.period + places[part] for part in parts}
            masks = {
                part: [within(k, starts[part] + q * lanes, lanes, limits[part]) for q in range(plan.columns.period)]
                for part in parts
            }
            values = [k.zero(self.real, lanes)] * lanes
            here, there = {part: k.launder(rows[part] + starts[part]) for part in parts}, k.launder(target + j * lanes)
            for lane, d in enumerate(numbers):
                part, channel = divmod(d, c.C)
                values[lane] = self._columns(k, here[part] + channel * c.input.channel, masks[part])
            for lane, v in enumerate(k.transpose(values)):
                k.store(v, there + lane * lanes)

    def _transform_columns(self) -> Function:
        """`BT` along every column of a row of tiles."""
        plan, side, lanes = self.plan, self.plan.rows, self.plan.lanes
        k = self.function("transform_columns", ptr(self.real), ptr(self.real))
        raw, half = k.args
        row = plan.pitch * lanes
        with k.loop(0, plan.columns.span) as j:
            xs = [k.load(raw + (j * lanes + i * row), lanes) for i in range(side.tile)]
            for i, v in enumerate(linear(k, side.transforms.BT, xs)):
                k.store(v, half + (j * lanes + i * row))
        return k

    def _transform_rows(self) -> Function:
        """`B` along every row of every tile, to where the product wants its points."""
        plan, side, lanes = self.plan, self.plan.columns, self.plan.lanes
        k = self.function("transform_rows", ptr(self.real), ptr(self.real))
        half, v = k.args
        with k.loop(0, side.tiles) as t, k.loop(0, plan.rows.tile) as i:
            source = half + (i * plan.pitch + t * side.m) * lanes
            target = v + (i * (side.tile * plan.v_stride) + t * lanes)
            xs = [k.load(source + j * lanes, lanes) for j in range(side.tile)]
            values = linear(k, side.transforms.BT, xs) if side.tile > 1 else xs
            for j, value in enumerate(values):
                k.store(value, target + j * plan.v_stride)
        return k


def _place(k: Function, side: Side, grid: Value, part: Value | int) -> Value:
    """The first input of a grid and a part."""
    block, phase = k.i64(part) // side.phases, k.i64(part) % side.phases
    return grid * side.axis.stride + block * (side.r * side.period) + phase * side.gap + side.axis.offset
