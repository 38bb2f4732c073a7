"""The output's side of the pipeline: rows with channels in lanes, stored in the layer's layout with the epilogue."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from autoconv.cpu.codegen.ir import Function, Value, i32, i64, ptr
from autoconv.cpu.common.epilogue import Epilogue, OfChannels
from autoconv.cpu.common.lanes import every_nth, store_range
from autoconv.cpu.transform.stage import Stage, T

WIDEST_SPREAD = 4  # columns from output to output that masked stores are worth it for


class OutputStage(Stage[T]):
    """Writes what stores the output of one correlation."""

    def emit(self) -> Function:
        """`unpack(source, y, residual, bias, live, columns)`: one row of output of one vector of filters."""
        tiling, lanes, stored = self.tiling, self.tiling.lanes, ptr(self.stored)
        epilogue = Epilogue.of(self.layer)
        k = self.function("unpack", ptr(self.real), stored, stored, stored, i64, i64)
        source, y, residual, bias, live, columns = k.args
        strides, axis = tiling.correlation.output, tiling.columns.axis
        step = tiling.columns.residues * axis.output_stride * strides.column

        if self.channels_last:
            mask = k.mask(live, lanes) if tiling.correlation.K % lanes else None
            b = epilogue.of_channels(lambda place: k.load(place, lanes, mask=mask), bias)
            with k.loop(0, columns) as j:
                r = k.load(residual + j * step, lanes, mask=mask) if epilogue.residual else None
                k.store(epilogue.apply(k, k.load(source + j * lanes, lanes), b, r), y + j * step, mask=mask)
            return k

        # the row to store next, in the same columns
        below = tiling.rows.residues * tiling.rows.axis.output_stride * strides.row

        def each_channel(j: Value, store: Callable[[Value, Value, Value], None]) -> None:
            """`store(values, place, bias)` for every channel that exists, of a vector of columns from `j` on."""
            block = k.transpose([k.load(source + (j + lane) * lanes, lanes) for lane in range(lanes)])
            for channel, v in enumerate(block):
                at = j * step + channel * strides.channel
                k.prefetch(y + (at + below), write=True)
                if epilogue.residual:
                    k.prefetch(residual + (at + below))
                if tiling.correlation.K % lanes:
                    with k.if_(live > channel):
                        store(v, at, bias + channel)
                else:
                    store(v, at, bias + channel)

        def spread_out(b: Value) -> OfChannels:
            return epilogue.of_channels(lambda place: k.broadcast(place, lanes), b)

        def store_neighbours(width: int, v: Value, at: Value, b: Value) -> None:
            r = k.load(residual + at, lanes, mask=k.mask(width, lanes)) if epilogue.residual else None
            v = epilogue.apply(k, v, spread_out(b), r)
            store_range(k, v, y + at, 0, width)

        def store_spread(masks: Sequence[Value], v: Value, at: Value, b: Value) -> None:
            places, r = [at + q * lanes for q in range(step)], None
            if epilogue.residual:
                vectors = [k.load(residual + p, lanes, mask=m) for p, m in zip(places, masks, strict=True)]
                r = every_nth(k, vectors, lanes)
            v = epilogue.apply(k, v, spread_out(b), r)
            for q, (place, mask) in enumerate(zip(places, masks, strict=True)):
                picks = [(q * lanes + lane) // step for lane in range(lanes)]
                k.store(k.shuffle(v, v, picks), y + place, mask=mask)

        def store_singly(count: Value, v: Value, at: Value, b: Value) -> None:
            for lane in range(lanes):
                with k.if_(count > lane):
                    r = k.load(residual + (at + lane * step)) if epilogue.residual else None
                    one = epilogue.apply(k, k.extract(v, lane), epilogue.of_channels(k.load, b), r)
                    k.store(one, y + (at + lane * step))

        if step > 1:
            with k.loop(0, columns, lanes) as j:
                masks = self._masks(k, columns - j, step)
                spread = (
                    functools.partial(store_spread, masks) if masks else functools.partial(store_singly, columns - j)
                )
                each_channel(j, spread)
            return k
        whole, rest = axis.count // lanes * lanes, axis.count % lanes
        if whole:
            with k.loop(0, whole, lanes) as j:
                each_channel(j, functools.partial(store_neighbours, lanes))
        if rest:
            each_channel(k.i64(whole), functools.partial(store_neighbours, rest))
        return k

    def _masks(self, k: Function, columns: Value, step: int) -> list[Value]:
        """Where outputs `step` apart lie in vectors that follow one another; empty where masks gain nothing."""
        lanes = self.tiling.lanes
        if self.m.instruction_set != "avx512" or step > WIDEST_SPREAD:
            return []
        masks = []
        for q in range(step):
            there = k.iota(i32, lanes) < k.splat(k.cast(k.min(columns, lanes) * step - q * lanes, i32), lanes)
            bits = ", ".join(f"i1 {'false' if (q * lanes + lane) % step else 'true'}" for lane in range(lanes))
            masks.append(there & k.value(there.type, f"<{bits}>"))
        return masks
