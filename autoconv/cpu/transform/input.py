"""The input's side of the pipeline: channels laid out in lanes, zeros for padding, and every tile transformed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from autoconv.cpu.codegen.ir import LINE, Function, Value, i1, i64, ptr, vec
from autoconv.cpu.common.lanes import every_nth, within
from autoconv.cpu.transform.geometry import TiledAxis
from autoconv.cpu.transform.stage import Stage, T


class InputStage(Stage[T], ABC):
    """Writes what transforms the input of one correlation."""

    @abstractmethod
    def transform_columns(self) -> Function:
        """`(raw, half)`: every column of a row of tiles transformed."""

    @abstractmethod
    def transform_rows(self) -> Function:
        """`(half, v)`: every row of every tile transformed, to where the product wants its points."""

    def emit(self, in_turn: bool = False) -> Function:
        """`input(x, v, buffer, first, rows, group, block)`: a vector of channels of some rows of tiles, transformed.

        Where a thread transforms one vector after the other, `in_turn`, it fetches the next one's rows meanwhile: they
        begin too far from this one's for the processor to foresee them.
        """
        self.in_turn = in_turn
        tiling, real = self.tiling, ptr(self.real)
        gather = self._gather()
        transform_columns = self.transform_columns() if tiling.rows.tile > 1 else None
        transform_rows = self.transform_rows()
        k = self.function("input", ptr(self.stored), real, real, i64, i64, i64, i64)
        x, v, raw, first, rows, group, block = k.args
        vertical, lanes = tiling.rows, tiling.lanes
        half = raw + tiling.raw_size
        v = v + self.place(block)
        done = k.var(k.i64(0))
        with k.forever() as leave_if:
            leave_if(done.get() >= rows)
            image, row = (first + done.get()) // vertical.tiles, (first + done.get()) % vertical.tiles
            segment = k.min(rows - done.get(), vertical.tiles - row)
            top, height = row * vertical.m, segment * vertical.m + (vertical.r - 1)
            k.call(gather, x, raw, image, group, block, top, height)
            with k.loop(0, segment) as t:
                source = raw + t * (vertical.m * tiling.pitch * lanes)
                if transform_columns is not None:
                    k.call(transform_columns, source, half)
                    source = half
                k.call(transform_rows, source, v + (done.get() + t) * (tiling.columns.tiles * tiling.v_tile))
            done.add(segment)
        return k

    def place(self, block: Value) -> Value:
        """Where a vector of channels begins, in a point of the transformed input."""
        return block * (self.tiling.chunk_tiles * self.tiling.lanes)

    def keep(self, k: Function, v: Value, p: Value) -> None:
        """Store a transformed vector of channels."""
        k.store(v, p)

    def _gather(self) -> Function:
        """Rows of input with channels in lanes and zeros for padding."""
        tiling, c = self.tiling, self.tiling.correlation
        k = self.function("gather", ptr(self.stored), ptr(self.real), i64, i64, i64, i64, i64)
        x, raw, image, group, block, top, count = k.args
        residue, n = image // c.N, image % c.N
        x = x + (n * c.input.image + group * c.input.group)
        residues = residue // tiling.columns.residues, residue % tiling.columns.residues
        with k.loop(0, count) as i:
            target = raw + i * (tiling.pitch * tiling.lanes)
            if tiling.mixed:
                for number in range(tiling.c_blocks):
                    with k.if_(block.eq(number)):
                        self._gather_mixed(k, x, target, number, top + i, residues)
            else:
                self._gather_plain(k, x, target, block, top + i, residues)
        return k

    def _gather_plain(
        self, k: Function, x: Value, target: Value, block: Value, row: Value, residues: tuple[Value, Value]
    ) -> None:
        """A row of channels that all belong to one subfilter."""
        tiling, c, lanes = self.tiling, self.tiling.correlation, self.tiling.lanes
        blocks = -(-c.C // lanes)
        subfilter, channels = block // blocks, block % blocks
        subfilters = subfilter // tiling.columns.subfilters, subfilter % tiling.columns.subfilters
        h, place = (
            _place(k, *which) for which in zip((tiling.rows, tiling.columns), residues, subfilters, strict=True)
        )
        h, row_inside, limit = self._row(k, row * tiling.rows.period + h)
        source = x + (h * c.input.row + channels * (lanes * c.input.channel))
        live = k.min(c.C - channels * lanes, lanes)
        if self.channels_last:
            with k.loop(0, tiling.columns.span) as j:
                w = j * tiling.columns.period + place
                inside = (w >= 0) & (w < limit)
                mask = k.mask(k.select(inside, live, k.i64(0)), lanes)
                k.store(k.load(source + w * c.input.column, lanes, mask=mask), target + j * lanes)
            return
        if self._neighbours():
            self._gather_neighbours(k, source, target, live, row_inside)
            return
        with k.loop(0, tiling.pitch, lanes) as j:
            w = j * tiling.columns.period + place
            masks = [within(k, w + q * lanes, lanes, limit) for q in range(tiling.columns.period)]
            here, there = k.launder(source + w), k.launder(target + j * lanes)
            self._each_channel(k, live, lambda channels: self._transpose(k, here, there, channels, masks))

    def _row(self, k: Function, h: Value) -> tuple[Value, Value, Value]:
        """The row to read for row h, whether the image has that one, and how many of its columns there are.

        Where the image has none, masks leave out all of a row from its middle. Reading on past its ends would cost
        150 ns a vector, as measured, where the process has no memory, though no lane is wanted: it looks for faults.
        """
        axis = self.tiling.rows.axis
        inside = (h >= 0) & (h < axis.size)
        return (
            k.select(inside, h, k.i64(axis.size // 2)),
            inside,
            k.select(inside, k.i64(self.tiling.columns.axis.size), k.i64(0)),
        )

    def _neighbours(self) -> bool:
        """Whether the columns of a row are neighbours in the image from a known place on, and fill a vector there."""
        columns = self.tiling.columns
        first, last = self._inside()
        return columns.period == columns.subfilters == 1 and last - first >= self.tiling.lanes

    def _inside(self) -> tuple[int, int]:
        """The first column that the image has, of a row of neighbours, and the one after the last."""
        columns = self.tiling.columns
        return max(0, columns.axis.offset), min(columns.axis.size, columns.axis.offset + columns.span)

    def _gather_neighbours(self, k: Function, source: Value, target: Value, live: Value, inside: Value) -> None:
        """A row of neighbouring columns: whole vectors from where the image's own begin, and zeros beside them.

        The image's rows often begin on a cache line. Vectors of it, unlike those of the padded row, cross none then.
        """
        tiling, lanes = self.tiling, self.tiling.lanes
        offset, span = tiling.columns.axis.offset, tiling.columns.span
        first, last = self._inside()

        def clear(start: int, end: int) -> None:
            if start < end:
                with k.loop(start, end) as j:
                    k.store(k.zero(self.real, lanes), target + j * lanes)

        def all_columns(channels: int) -> None:
            def transpose(column: Value | int, fetch: bool) -> None:
                here, there = k.launder(source + column), k.launder(target + (column - offset) * lanes)
                self._transpose(k, here, there, channels, fetch=fetch)

            vectors = max(1, LINE // (lanes * self.stored.bytes))  # of a cache line
            rest = (last - first) % (vectors * lanes)
            if first < last - rest:
                with k.loop(first, last - rest, vectors * lanes) as column:
                    for n in range(vectors):
                        transpose(column + n * lanes, fetch=n == 0)
            for start in range(last - rest, last, lanes):
                transpose(min(start, last - lanes), fetch=start == last - rest)  # some of the last vector once more

        with k.if_(inside):
            clear(0, first - offset)
            self._each_channel(k, live, all_columns)
            clear(last - offset, span)
        with k.else_():
            clear(0, span)

    def _each_channel(self, k: Function, live: Value, gather: Callable[[int], None]) -> None:
        """`gather` a vector of channels, all of them or as many as the last one has."""
        lanes, rest = self.tiling.lanes, self.tiling.correlation.C % self.tiling.lanes
        with k.if_(live.eq(lanes)):
            if self.tiling.correlation.C // lanes:
                gather(lanes)
        with k.else_():
            if rest:
                gather(rest)

    def _transpose(
        self,
        k: Function,
        here: Value,
        there: Value,
        channels: int,
        masks: Sequence[Value | None] = (None,),
        fetch: bool = True,
    ) -> None:
        """A vector of columns of some channels, channel by channel, to channels in lanes, column by column.

        If that is asked for, and a thread transforms the next channels next, their lines are fetched meanwhile.
        """
        lanes, apart = self.tiling.lanes, self.tiling.correlation.input.channel
        fetch = fetch and self.in_turn and channels == lanes < self.tiling.correlation.C

        def load(lane: int) -> Value:
            if fetch:
                k.prefetch(here + (lane + lanes) * apart, locality=2)
            return self._columns(k, here + lane * apart, masks)

        zero = k.zero(self.real, lanes)
        values = [load(lane) if lane < channels else zero for lane in range(lanes)]
        for lane, v in enumerate(k.transpose(values)):
            k.store(v, there + lane * lanes)

    def _columns(self, k: Function, source: Value, masks: Sequence[Value | None]) -> Value:
        """As many columns as lanes, as far apart as there are masks; those beyond a row's last hold anything."""
        lanes, columns = self.tiling.lanes, self.tiling.columns
        places = range(min(lanes, columns.span) if self.tiling.pitch == lanes else lanes)
        held = {place * len(masks) // lanes for place in places}
        loads = (k.load(source + q * lanes, lanes, mask=mask) if q in held else None for q, mask in enumerate(masks))
        return every_nth(k, list(loads), lanes)

    def _gather_mixed(
        self, k: Function, x: Value, target: Value, number: int, row: Value, residues: tuple[Value, Value]
    ) -> None:
        """A row of the channels of several subfilters, in their order."""
        tiling, c, lanes = self.tiling, self.tiling.correlation, self.tiling.lanes
        numbers = range(number * lanes, min((number + 1) * lanes, tiling.depth))
        subfilters = {d // c.C: divmod(d // c.C, tiling.columns.subfilters) for d in numbers}
        rows, limits, places = {}, {}, {}
        for subfilter, (r, s) in subfilters.items():
            h, _, limits[subfilter] = self._row(k, row * tiling.rows.period + _place(k, tiling.rows, residues[0], r))
            rows[subfilter] = x + h * c.input.row
            places[subfilter] = _place(k, tiling.columns, residues[1], s)
        if self.channels_last:
            with k.loop(0, tiling.columns.span) as j:
                total = k.zero(self.real, lanes)
                for subfilter in subfilters:
                    first = subfilter * c.C - number * lanes  # lane of the subfilter's first channel
                    some = k.mask(min(first + c.C, lanes), lanes, max(first, 0))
                    some = k.const(vec(i1, lanes), 1) if some is None else some
                    w = j * tiling.columns.period + places[subfilter]
                    inside = (w >= 0) & (w < limits[subfilter])
                    mask = k.select(inside, some, k.const(some.type, 0))
                    total = total + k.load(rows[subfilter] + (w * c.input.column - first), lanes, mask=mask)
                k.store(total, target + j * lanes)
            return
        with k.loop(0, tiling.pitch, lanes) as j:
            starts = {n: j * tiling.columns.period + places[n] for n in subfilters}
            masks = {
                n: [within(k, starts[n] + q * lanes, lanes, limits[n]) for q in range(tiling.columns.period)]
                for n in subfilters
            }
            values = [k.zero(self.real, lanes)] * lanes
            here = {n: k.launder(rows[n] + starts[n]) for n in subfilters}
            there = k.launder(target + j * lanes)
            for lane, d in enumerate(numbers):
                subfilter, channel = divmod(d, c.C)
                values[lane] = self._columns(k, here[subfilter] + channel * c.input.channel, masks[subfilter])
            for lane, v in enumerate(k.transpose(values)):
                k.store(v, there + lane * lanes)


def _place(k: Function, tiled: TiledAxis, residue: Value, subfilter: Value | int) -> Value:
    """The first input of a residue class and a subfilter."""
    block, component = k.i64(subfilter) // tiled.components, k.i64(subfilter) % tiled.components
    first = residue * tiled.axis.stride + block * (tiled.r * tiled.period)
    return first + component * tiled.dilation + tiled.axis.offset
