"""Direct convolution: lanes are output channels, pixels are broadcast; the input is read in place.

A microkernel keeps a tile of `BP` x `BQ` output pixels times `BK` channels in registers over the whole sum,
as Georganas et al. do (arXiv:1808.05567), but without blocking the input: in every step one pixel is
broadcast from wherever the layout has it and multiplied with a vector of packed filters. Padding is never
read and never multiplied: tiles at the border are compiled for the taps that each of their pixels sees.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autoconv.algorithm import Algorithm, Kernel, Params, bound_for
from autoconv.cpu import compiler
from autoconv.cpu.device import CPU
from autoconv.cpu.direct_pack import emit_pack, packed_size, tap_place
from autoconv.cpu.direct_wgrad import emit_wgrad, forward, wgrad_blocking, wgrad_candidates
from autoconv.cpu.direct_wgrad_packed import emit_wgrad_packed, packed_blocking
from autoconv.cpu.ir import DTYPES, Function, Module, Type, Value, i64, ptr, widened
from autoconv.cpu.pieces import Axis, Correlation, Tail, correlations, store_tile
from autoconv.cpu.pool import RUN, TASK, GeneratedKernel, launch, operands
from autoconv.device import Device
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class Blocking:
    """How one correlation is cut: `BK` filters by `BP` x `BQ` pixels in registers, `rows` of them in a task."""

    BK: int
    BP: int
    BQ: int
    packed: bool
    rows: int = 1
    filters_outside: bool = False  # tasks go through all images before the next block of filters


@dataclass(frozen=True)
class Run:
    """Neighbouring tiles of one axis that the same code serves; `pattern` None: the tap range is computed."""

    start: int
    tiles: int
    length: int
    pattern: tuple[tuple[bool, ...], ...] | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides its code."""
        return self.length, self.pattern


def tiles(axis: Axis, length: int) -> list[Run]:
    """An axis cut into tiles of almost equal length, at most `length`."""
    if length == 1:
        return [Run(0, axis.count, 1, None)]
    number = math.ceil(axis.count / length)
    edges = [axis.count * n // number for n in range(number + 1)]
    cut = [(a, b - a, axis.pattern(a, b - a)) for a, b in itertools.pairwise(edges)]
    runs = []
    for (size, pattern), same in itertools.groupby(cut, key=lambda t: t[1:]):
        first, *others = same
        runs.append(Run(first[0], 1 + len(others), size, pattern))
    return runs


def flattened(c: Correlation) -> Correlation:
    """A 1x1 correlation as one on a single long row."""
    h, w = c.rows, c.columns
    plain = all(a.taps == (0,) and (a.size, a.step, a.first, a.stride) == (a.count, 1, 0, 1) for a in (h, w))
    if not plain or any(t.row != w.size * t.column for t in (c.input, c.output)):
        return c
    return replace(c, rows=replace(h, size=1, count=1), columns=replace(w, size=h.size * w.size, count=h.size * w.size))


@functools.lru_cache(256)
def pieces_of(layer: ConvLayer) -> tuple[Correlation, ...]:
    """The correlations of a layer, flat where they can be."""
    return tuple(flattened(c) for c in correlations(layer))


def _emit_store(m: Module, c: Correlation, tail: Tail, b: Blocking, element: Type, shape: tuple[int, int]) -> Function:
    """Store a tile of sums, `[BK/lanes][pixels][lanes]` in memory: one text for all microkernels of this shape."""
    sums = widened(element)
    lanes = m.lanes(element)
    data = ptr(element)
    k = m.function(f"store_{len(m.functions)}", ptr(sums), data, data, data, i64, internal=True)
    tile, out, residual, bias, left = k.args
    o = c.output
    strides = (o.channel, o.row * c.rows.stride, o.column * c.columns.stride)
    pixels = shape[0] * shape[1]
    with k.loop(0, b.BK // lanes) as v:
        here = tile + v * (pixels * lanes)
        values = [[k.load(here + n * lanes, lanes)] for n in range(pixels)]
        place = v * (lanes * o.channel)
        some = lanes if c.K % b.BK == 0 else left - v * lanes
        store_tile(k, tail, values, shape, strides, out + place, residual + place, bias + v * lanes, some)
    return k


class Micro:
    """Writes one microkernel: a tile of pixels times BK channels, summed over channels and taps."""

    def __init__(self, m: Module, c: Correlation, b: Blocking, element: Type, rows: Run, columns: Run, store: Function):
        self.c, self.b, self.rows, self.columns = c, b, rows, columns
        lanes = self.lanes = m.lanes(element)
        self.vectors = b.BK // lanes
        sums = ptr(widened(element))
        data = ptr(element)
        #              x,    w,                        out,  residual, bias, channels left, tap ranges, one
        types = (data, sums if b.packed else data, data, data, data, i64, i64, i64, i64, i64, i64)
        k = self.k = m.function(f"micro_{len(m.functions)}", *types, internal=True)
        self.x, self.w, out, residual, bias, self.left, *self.ranges, self.one = k.args
        zero = k.zero(widened(element), lanes)
        pixels = rows.length * columns.length
        self.sums = [[k.var(zero) for _ in range(self.vectors)] for _ in range(pixels)]
        if c.rows.taps and c.columns.taps:
            self._sum()
        tile = k.scratch(widened(element), b.BK * pixels)
        for n, vectors in enumerate(self.sums):
            for v, acc in enumerate(vectors):
                k.store(acc.get(), tile + (v * pixels + n) * lanes)
        k.call(store, tile, out, residual, bias, self.left)

    def _sum(self) -> None:
        k, c = self.k, self.c
        R, S = len(c.rows.taps), len(c.columns.taps)
        unroll = next(u for u in (4, 2, 1) if c.C % u == 0 and (u == 1 or R * S == 1))
        offsets = [] if self.b.packed else self._filter_offsets()
        with k.loop(0, c.C, unroll) as channel:
            for u in range(unroll):
                x = self.x + (channel + u) * c.input.channel
                if self.b.packed:
                    w = self.w + (channel + u) * (R * S * self.b.BK)
                else:
                    w = self.w + (channel + u) * c.filters.c
                for r, row_pattern in self._taps(self.rows, c.rows, *self.ranges[:2]):
                    for s, column_pattern in self._taps(self.columns, c.columns, *self.ranges[2:]):
                        self._tap(x, w, offsets, r, s, row_pattern, column_pattern)

    def _taps(self, run: Run, axis: Axis, low: Value, high: Value) -> Iterator[tuple[int | Value, tuple[bool, ...]]]:
        """Taps to sum over, by loops over those that the same outputs of the tile see.

        Each is a loop, even of one tap (then up to `self.one`, which LLVM does not know to be 1), because
        what neighbouring taps load overlaps: unrolled, LLVM would keep it in registers and spill the sums.
        """
        n = len(axis.taps)
        if run.pattern is None:
            with self.k.loop(low, high) as t:
                yield t, (True,) * run.length
        elif n == 1:
            yield 0, run.pattern[0]
        else:
            for seen, same in itertools.groupby(range(n), key=run.pattern.__getitem__):
                first, *others = same
                if any(seen):
                    stop = first + 1 + len(others) if others else self.one + first
                    with self.k.loop(first, stop) as t:
                        yield t, seen

    def _tap(
        self,
        x: Value,
        w: Value,
        offsets: list[Value],
        r: int | Value,
        s: int | Value,
        rows: tuple[bool, ...],
        columns: tuple[bool, ...],
    ) -> None:
        k, c, i = self.k, self.c, self.c.input
        row, column = c.rows, c.columns
        x = x + r * (row.gap * i.row) + s * (column.gap * i.column) + (row.first * i.row + column.first * i.column)
        if self.b.packed:
            w = w + (r * len(column.taps) + s) * self.b.BK
            vectors = [k.load(w + v * self.lanes, self.lanes) for v in range(self.vectors)]
        else:
            w = w + tap_place(row.taps, r) * c.filters.r + tap_place(column.taps, s) * c.filters.s
            vectors = [self._gathered(w, offsets[v * self.lanes : (v + 1) * self.lanes]) for v in range(self.vectors)]
        for n, sums in enumerate(self.sums):
            p, q = divmod(n, self.columns.length)
            if rows[p] and columns[q]:
                pixel = k.broadcast(x + (p * row.step * i.row + q * column.step * i.column), self.lanes)
                for acc, vector in zip(sums, vectors, strict=True):
                    acc.fma(pixel, vector)

    def _filter_offsets(self) -> list[Value]:
        """Where each lane's filter starts; lanes beyond the last filter repeat it."""
        k, c = self.k, self.c
        return [k.min(k.i64(lane), self.left - 1) * c.filters.k for lane in range(self.b.BK)]

    def _gathered(self, w: Value, offsets: list[Value]) -> Value:
        k = self.k
        scalars = [k.load(w + offset) for offset in offsets]
        v = k.zero(scalars[0].type, self.lanes)
        for lane, scalar in enumerate(scalars):
            v = k.insert(v, scalar, lane) if self.lanes > 1 else scalar
        return v


def _tap_range(k: Function, axis: Axis, position: Value) -> tuple[Value, Value]:
    """First tap inside the input, and the one after the last, of one output position."""
    base = position * axis.step + axis.first
    low = (k.max(0 - base, 0) + (axis.gap - 1)) // axis.gap
    high = (k.max(axis.size - base, 0) + (axis.gap - 1)) // axis.gap
    return low, k.min(high, len(axis.taps))


def _emit_task(
    m: Module, n: int, c: Correlation, tail: Tail, b: Blocking, element: Type, packed_at: int
) -> tuple[Function, int]:
    """The task of one correlation, and how many there are."""
    blocks = math.ceil(c.K / b.BK)
    row_runs, column_runs = tiles(c.rows, b.BP), tiles(c.columns, b.BQ)
    kinds = {(r.kind, s.kind): (r, s) for r in row_runs for s in column_runs}
    shapes = {(r.length, s.length) for r in row_runs for s in column_runs}
    stores = {shape: _emit_store(m, c, tail, b, element, shape) for shape in sorted(shapes)}
    micros = {kind: Micro(m, c, b, element, r, s, stores[r.length, s.length]).k for kind, (r, s) in kinds.items()}
    k = m.function(f"task_{n}", *TASK, internal=True)
    ctx, index, _ = k.args
    sums = widened(element)
    a, w, out, bias, residual, _ = operands(k, ctx, element, sums if b.packed else element, element, element, element)

    positions = sum(r.tiles for r in row_runs)
    chunks = math.ceil(positions / b.rows)
    if b.filters_outside:
        block, strip = index // (c.N * c.groups * chunks), index % (c.N * c.groups * chunks)
    else:
        block, strip = index % blocks, index // blocks
    chunk, image = strip % chunks, strip // chunks
    group, image = image % c.groups, image // c.groups
    first = block * b.BK
    left = k.i64(c.K) - first
    a = a + image * c.input.image + group * c.input.group
    place = image * c.output.image + group * c.output.group + first * c.output.channel
    place = place + (c.rows.start * c.output.row + c.columns.start * c.output.column)
    out, residual = out + place, residual + place
    bias = bias + group * c.K + first
    if b.packed:
        w = w + packed_at + (group * blocks + block) * (packed_size(c, b.BK) // c.groups // blocks)
    else:
        w = w + group * c.filters.group + first * c.filters.k

    def tile(r: Run, position: Value) -> None:
        """All columns of one row of tiles, which starts at output row `position`."""
        zero = k.i64(0)
        rows = _tap_range(k, c.rows, position) if r.pattern is None else (zero, zero)
        for s in column_runs:
            with k.loop(0, s.tiles) as t:
                column = t * s.length + s.start
                columns = _tap_range(k, c.columns, column) if s.pattern is None else (zero, zero)
                here = a + position * (c.rows.step * c.input.row) + column * (c.columns.step * c.input.column)
                there = position * (c.rows.stride * c.output.row) + column * (c.columns.stride * c.output.column)
                k.call(micros[r.kind, s.kind], here, w, out + there, residual + there, bias, left, *rows, *columns, 1)

    start = chunk * b.rows
    begin = 0
    for r in row_runs:  # tiles begin .. begin + r.tiles - 1 are of this run
        low, high = k.max(start, begin), k.min(start + b.rows, begin + r.tiles)
        with k.loop(low, high) as t:
            tile(r, (t - begin) * r.length + r.start)
        begin += r.tiles
    return k, blocks * c.N * c.groups * chunks


def emit(instruction_set: str, layer: ConvLayer, blockings: tuple[Blocking, ...]) -> Module:
    """`run`, and `pack` where the filters are packed, of a forward pass or a gradient of the input."""
    m = Module(instruction_set)
    element = DTYPES[layer.dtype]
    tail = Tail.of(layer)
    run = m.function("run", *RUN)
    pack = m.function("pack", *RUN) if blockings[0].packed else None
    packed_at = 0
    for n, (c, b) in enumerate(zip(pieces_of(layer), blockings, strict=True)):
        task, count = _emit_task(m, n, c, tail, b, element, packed_at)
        launch(run, run.args[0], task, count)
        if pack is not None and packed_size(c, b.BK):
            task, count = emit_pack(m, n, c, b.BK, element, packed_at)
            launch(pack, pack.args[0], task, count)
            packed_at += packed_size(c, b.BK)
    return m


def blocked(layer: ConvLayer, device: CPU, params: Params) -> tuple[Blocking, ...]:
    """The blocking of each correlation: the tile asked for, and tasks whose input fits half the second cache."""
    chosen = []
    for c in pieces_of(layer):
        b = Blocking(int(params["BK"]), int(params["BP"]), int(params["BQ"]), params["filters"] == "packed")
        positions = sum(run.tiles for run in tiles(c.rows, b.BP))
        row_bytes = layer.itemsize * c.C * c.columns.size
        room = device.facts["l2_bytes"] // 2 // max(row_bytes, 1) - len(c.rows.taps)
        rows = min(max(room // (b.BP * c.rows.step), 1), positions)
        blocks = math.ceil(c.K / b.BK)
        others = c.N * c.groups * blocks
        while rows > 1 and others * math.ceil(positions / rows) < 6 * device.threads:
            rows = math.ceil(rows / 2)
        strips = c.N * math.ceil(positions / rows)
        images = c.N * c.rows.size * row_bytes
        filters = packed_size(c, b.BK) // c.groups * layer.itemsize
        outside = images * blocks + filters < images + filters * strips
        chosen.append(replace(b, rows=rows, filters_outside=outside))
    return tuple(chosen)


class Direct(Algorithm):
    """Direct convolution by a register-tiled microkernel; takes every layer."""

    name = "direct"
    exact = True

    @property
    def version(self) -> str:
        return compiler.version("direct", "direct_pack", "direct_wgrad", "direct_wgrad_packed", "pieces")

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        assert isinstance(device, CPU)
        if layer.direction == "wgrad":
            return wgrad_candidates(layer, device.instruction_set)
        c = max(pieces_of(layer), key=lambda c: c.macs)
        lanes = Module(device.instruction_set).lanes(DTYPES[layer.dtype])

        def tile(pixels: int, vectors: int, filters: str) -> Params:
            BQ = math.ceil(c.columns.count / math.ceil(c.columns.count / pixels))
            BK = lanes * min(vectors, math.ceil(c.K / lanes))
            return {"BK": BK, "BP": max(min(pixels // BQ, c.rows.count), 1), "BQ": BQ, "filters": filters}

        shapes = TILES[device.instruction_set]
        found = [tile(*shape, "packed") for shape in shapes] + [tile(*shapes[0], "strided")]
        found += [tile(1, 4, way) for way in ("packed", "strided") if self.why_not(layer, device, found[-1])]
        return list({tuple(params.values()): params for params in found}.values())

    def why_not(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        reasons = []
        if (reason := compiler.unavailable()) is not None:
            reasons.append(reason)
        if layer.direction != "wgrad" and (work := _unrolled(layer, device, params)) > UNROLLED:
            reasons.append(f"unrolls to {work} multiply-adds, more than {UNROLLED}")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        if layer.direction != "wgrad" or layer.layout == "NHWC" or params["lanes"] == "pixels":
            return 0
        assert isinstance(device, CPU)
        packed = packed_blocking(layer, device.threads, int(params["BK"]), int(params["BC"]))
        return device.threads * packed.thread_bytes(layer)

    def packed_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        if params.get("filters") != "packed":
            return 0
        size = sum(packed_size(c, int(params["BK"])) for c in pieces_of(layer))
        return size * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        """At peak, but for lanes that hold nothing and for what loading costs beside the multiply-adds."""
        assert isinstance(device, CPU)
        lanes = Module(device.instruction_set).lanes(DTYPES[layer.dtype])
        if layer.direction == "wgrad":
            pixels = params["lanes"] == "pixels"
            c = forward(layer)
            extent, block = (c.columns.count, lanes) if pixels else (c.C, int(params["BC"]))
            cost = (1.5 if pixels else 1.15) * _rounded(extent, block)
        else:
            cost = 1.4 if params["filters"] == "strided" else 1.1
            cost *= 1 + 1.5 / (int(params["BP"]) * int(params["BQ"]))
            cost *= max(_rounded(c.K, int(params["BK"])) for c in pieces_of(layer))
        return cost * layer.flops / device.peak_flops(layer.dtype) + layer.bytes / device.bandwidth() / 2

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, 2e-6)

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        assert isinstance(device, CPU)
        if layer.direction == "wgrad":
            BK, BC = int(params["BK"]), int(params["BC"])
            if needed := self.workspace_bytes(layer, device, params):
                packed = packed_blocking(layer, device.threads, BK, BC)
                program = compiler.build(emit_wgrad_packed, device.instruction_set, layer, packed)
                return GeneratedKernel(program, device.threads, needed)
            b = wgrad_blocking(layer, device.instruction_set, device.threads, BK, BC)
            return GeneratedKernel(compiler.build(emit_wgrad, device.instruction_set, layer, b), device.threads)
        program = compiler.build(emit, device.instruction_set, layer, blocked(layer, device, params))
        return GeneratedKernel(program, device.threads, 0, self.packed_bytes(layer, device, params))


UNROLLED = 8000  # multiply-adds of one program: LLVM takes a second for them
TILES = {  # pixels by vectors of filters; the first also reads filters where they are
    "avx512": ((28, 1), (14, 2), (6, 4)),
    "avx2": ((12, 1), (6, 2)),
    "generic": ((10, 1), (5, 2)),
}


def _rounded(extent: int, block: int) -> float:
    """How much more than the extent its whole blocks are."""
    return math.ceil(extent / block) * block / extent


def _unrolled(layer: ConvLayer, device: Device, params: Params) -> int:
    assert isinstance(device, CPU)
    vectors = int(params["BK"]) // Module(device.instruction_set).lanes(DTYPES[layer.dtype])
    total = 0
    for c in pieces_of(layer):
        for r in {r.kind: r for r in tiles(c.rows, int(params["BP"]))}.values():
            for s in {s.kind: s for s in tiles(c.columns, int(params["BQ"]))}.values():
                row, column = (len(list(itertools.groupby(run.pattern or (1,)))) for run in (r, s))
                total += row * column * r.length * s.length * vectors
    return total
