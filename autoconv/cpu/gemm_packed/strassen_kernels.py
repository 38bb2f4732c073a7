"""proto"""

from __future__ import annotations

import itertools
import math

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, Value, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.epilogue import Epilogue, emit_store
from autoconv.cpu.common.packing import emit_pack
from autoconv.cpu.gemm_packed.geometry import PlaneTiles, pixels_of, product
from autoconv.cpu.gemm_packed.kernels import TaskWriter
from autoconv.cpu.gemm_packed.strassen_geometry import (
    B, blocks_of, micropanel_pitch, packed_size, products_of, share, thread_bytes, tiles_of,
)
from autoconv.layer import ConvLayer

TOGETHER = 4


def combined(coefficients, values):
    """sum of coefficient * value"""
    found = None
    for c, v in sorted(((c, v) for c, v in zip(coefficients, values, strict=True) if c), key=lambda x: -x[0]):
        found = v if found is None else found + v if c > 0 else found - v
    return found


def terms(coefs, values):
    pos = [v for c, v in zip(coefs, values, strict=True) if c > 0]
    neg = [v for c, v in zip(coefs, values, strict=True) if c < 0]
    v = pos[0]
    for p in pos[1:]:
        v = v + p
    for n in neg:
        v = v - n
    return v


class StrassenWriter(TaskWriter):
    def __init__(self, m: Module, layer: ConvLayer, blocking: B) -> None:
        self.m, self.blocking = m, blocking
        self.problem = product(layer)
        self.side = blocking.side
        self.products = products_of(blocking.levels)
        self.plane_tiles = tiles_of(self.problem, blocking.TQ, self.side)
        self.epilogue = Epilogue.of(layer)
        self.element = DTYPES[layer.dtype]
        self.wide = widened(self.element)
        self.lanes = m.lanes(self.element)
        self.pitch = micropanel_pitch(self.problem, blocking.TQ, self.side)
        self.tile_size = blocking.TK * blocking.TQ
        self.lines = range(0, blocking.TQ, LINE // self.element.bytes)
        self.spreads = False
        self.in_place = all((a.stride, a.count) == (1, a.size) for a in (self.problem.rows, self.problem.columns))
        self.pixels_share = share(pixels_of(self.problem), self.side)
        self.odd = pixels_of(self.problem) % self.side
        self.depth = share(self.problem.C, self.side)
        self.unroll = math.gcd(m.terms, self.depth)
        self.sets = blocks_of(self.problem, blocking.TK, self.side)
        tiles = self.problem.N * self.plane_tiles.tiles
        fewest = tiles // math.ceil(tiles / blocking.tiles)  # of a panel
        line = LINE // self.wide.bytes
        self.fetched = math.ceil(self.unroll * blocking.TK / (line * fewest)) if fewest >= 2 else 0

    def task(self):
        problem, blocking, plane_tiles = self.problem, self.blocking, self.plane_tiles
        self.micros = [self._micro(length) for length in plane_tiles.lengths]
        apart = problem.output.channel
        shapes = [((1, length), (apart, length, 1), length) for length in plane_tiles.lengths]
        self.stores = [emit_store(self.m, problem, self.epilogue, blocking.TK, self.element, *place) for place in shapes]
        if self.odd:
            length = plane_tiles.length
            self.short = emit_store(self.m, problem, self.epilogue, blocking.TK, self.element, (1, length - 1), (apart, length - 1, 1), length) if length > 1 else None
        k = self.k = self.m.function("task", *TASK, internal=True)
        context, index, thread = k.args
        types = (self.element, self.wide, *[self.element] * 3)
        x, w, self.out, self.bias, self.residual, workspace = operands(k, context, *types)
        tiles = problem.N * plane_tiles.tiles
        panels = math.ceil(tiles / blocking.tiles)
        chunk, rest = index % blocking.chunks, index // blocking.chunks
        panel, self.group = rest % panels, rest // panels
        first = panel * tiles // panels
        self._note(first, (panel + 1) * tiles // panels - first)
        own = workspace + thread * thread_bytes(problem, blocking, self.wide.bytes)
        self.micropanels, copied = k.bytes_at(own, LINE, self.wide), k.bytes_at(own, 0, i64)
        with k.if_(k.load(copied).ne(rest)):
            self._copy(x + self.group * problem.input.group)
            k.store(rest, copied)
        self.sums = self.micropanels + blocking.tiles * len(self.products) * self.pitch
        with k.loop(chunk * self.sets // blocking.chunks, (chunk + 1) * self.sets // blocking.chunks) as block:
            self.filters = w + (self.group * self.sets + block) * (len(self.products) * self.depth * blocking.TK)
            self._block(block * blocking.TK)
        return k, panels * blocking.chunks * problem.groups

    def _block(self, channel):
        k, o, blocking = self.k, self.problem.output, self.blocking
        quarters = self.side**2
        size = self.tile_size
        with k.loop(0, self.number * (size * quarters), self.lanes * 4) as i:
            for u in range(4):
                k.store(k.zero(self.wide, self.lanes), self.sums + i + u * self.lanes)
        cells = list(itertools.product(range(self.side), repeat=2))
        self.group_plane = self.group * o.group
        self.planes = [self.group_plane + (channel + col * self.sets * blocking.TK) * o.channel for col in range(self.side)]
        for n, p in enumerate(self.products):
            with k.loop(0, math.ceil(self.depth / blocking.BC)) as part, k.loop(0, self.number) as t:
                if n >= len(self.products) - quarters:
                    row, col = cells[n - len(self.products) + quarters]
                    there = self._target(t, row, col)
                    for c, line in itertools.product(range(blocking.TK), self.lines):
                        k.prefetch(self.out + there + (c * o.channel + line), write=True)
                        if self.epilogue.residual:
                            k.prefetch(self.residual + there + (c * o.channel + line))
                start = part * blocking.BC
                count = k.min(self.depth - start, blocking.BC)
                micropanel = self.micropanels + (t * len(self.products) + n) * self.pitch + start * blocking.TQ
                filters = self.filters + (start + n * self.depth) * blocking.TK
                share_ = math.ceil(blocking.BC / self.unroll) * self.fetched * (LINE // self.wide.bytes)
                targets = [(q, c) for q, c in enumerate(p.c) if c]
                targets = sorted(targets, key=lambda x: -x[1])
                assert targets[0][1] > 0
                args = []
                for i in range(self.side):
                    q, c = targets[i] if i < len(targets) else (0, 0)
                    args += [self.sums + (t * quarters + q) * size, k.const(self.wide, c)]
                self._call(self.micros, t, micropanel, filters, filters + (blocking.BC * blocking.TK + t * share_), count, *args)
        with k.loop(0, self.number) as t:
            for q, (row, col) in enumerate(cells):
                sums = self.sums + (t * quarters + q) * size
                there = self._target(t, row, col)
                first = channel + col * self.sets * blocking.TK
                left = k.i64(self.problem.K) - first
                bias = self.bias + self.group * self.problem.K + first
                args = (sums, self.out + there, self.residual + there, bias, left)
                with k.if_(left > 0):
                    if self.odd and row == self.side - 1:
                        last = k.load(self.pixels + t).eq(self.pixels_share - self.plane_tiles.length)
                        with k.if_(last):
                            if self.short is not None:
                                k.call(self.short, *args)
                        with k.else_():
                            self._call(self.stores, t, *args)
                    else:
                        self._call(self.stores, t, *args)

    def _target(self, t, row, col):
        pixel = self.k.load(self.pixels + t) + row * self.pixels_share
        return self.planes[col] + self.k.load(self.images + t) * self.problem.output.image + pixel

    def _copy(self, x):
        k, problem, TQ, lanes = self.k, self.problem, self.blocking.TQ, self.lanes
        micropanels, number, images, pixels = self.micropanels, self.number, self.images, self.pixels
        longest, plane = self.plane_tiles.lengths[0], problem.input.channel
        side, P, depth = self.side, len(self.products), self.depth
        vectors = math.ceil(longest / lanes) * lanes
        ample = max(0, (problem.C - (side - 1) * depth - math.ceil(vectors / plane)) // TOGETHER) * TOGETHER if self.in_place else 0
        cells = list(itertools.product(range(side), repeat=2))
        if ample:
            with k.loop(0, ample, TOGETHER) as start, k.loop(0, number) as t:
                pixel = k.load(pixels + t)
                source = x + k.load(images + t) * problem.input.image + pixel + start * plane
                target = micropanels + t * (P * self.pitch) + start * TQ
                for c in range(TOGETHER):
                    for v in range(0, vectors, lanes):
                        values = []
                        for row, col in cells:
                            here = source + ((c + col * depth) * plane + v + row * self.pixels_share)
                            if v == 0:
                                k.prefetch(here + TOGETHER * plane)
                            value = k.load(here, lanes)
                            if self.odd and row == side - 1:
                                value = k.select(k.mask(pixels_of(problem) - row * self.pixels_share - pixel - v, lanes), value, k.zero(self.wide, lanes))
                            values.append(value)
                        for n, p in enumerate(self.products):
                            k.store(terms(p.a, values), target + (n * self.pitch + c * TQ + v))
        with k.loop(ample, depth) as channel, k.loop(0, number) as t:
            pixel = k.load(pixels + t)
            source = x + k.load(images + t) * problem.input.image
            target = micropanels + t * (P * self.pitch) + channel * TQ
            for n in range(longest):
                values = []
                for row, col in cells:
                    ch = channel + col * depth
                    v = k.load(source + k.min(ch, problem.C - 1) * plane + self._offset(pixel + row * self.pixels_share + n))
                    zero = k.zero(self.wide)
                    if problem.C % side:
                        v = k.select(ch < problem.C, v, zero)
                    values.append(v)
                for i, p in enumerate(self.products):
                    k.store(terms(p.a, values), target + (i * self.pitch + n))

    def _micro(self, length):
        TK, TQ = self.blocking.TK, self.blocking.TQ
        data = ptr(self.wide)
        k = self.m.function(f"micro_{length}", data, data, data, i64, *[data, self.wide] * self.side, internal=True)
        micropanel, filters, following, channels, *targets = k.args
        vectors = TK // self.lanes
        zero = k.zero(self.wide, self.lanes)
        acc = [[k.var(zero) for v in range(vectors)] for n in range(length)]
        with k.loop(0, channels, self.unroll) as c:
            for n in range(self.fetched):
                line = c // self.unroll * self.fetched + n
                k.prefetch(following + line * (LINE // self.wide.bytes), locality=2)
            for u in range(self.unroll):
                w = filters + (c + u) * TK
                several = [k.load(w + v * self.lanes, self.lanes) for v in range(vectors)]
                for n, row in enumerate(acc):
                    pixel = k.broadcast(micropanel + (c + u) * TQ + n, self.lanes)
                    for a, vector in zip(row, several, strict=True):
                        a.fma(pixel, vector)
        for i in range(self.side):
            sums, sign = targets[2 * i : 2 * i + 2]

            def add():
                factor = k.splat(sign, self.lanes) if i else None
                for n, row in enumerate(acc):
                    for v, a in enumerate(row):
                        p = sums + (v * length + n) * self.lanes
                        old = k.load(p, self.lanes)
                        k.store(k.fma(a.get(), factor, old) if i else old + a.get(), p)

            if i:
                with k.if_(sign.ne(0)):
                    add()
            else:
                add()
        return k


def emit_combine(m: Module, problem, blocking: B):
    """in place"""
    k = m.function("combine", *TASK, internal=True)
    context, index, _ = k.args
    wide = f32
    side, depth, TK = blocking.side, share(problem.C, blocking.side), blocking.TK
    prods = products_of(blocking.levels)
    lanes = m.lanes(wide)
    packed = operands(k, context, wide)[2] + index * (len(prods) * depth * TK)
    with k.loop(0, depth) as c, k.loop(0, TK, lanes) as v:
        i = c * TK + v
        values = [k.load(packed + (col * side + row) * depth * TK + i, lanes) for row in range(side) for col in range(side)]
        if problem.C % side:
            for col in range(side):
                q = (side - 1) * side + col
                values[q] = k.select(k.splat(c < problem.C - (side - 1) * depth, lanes), values[q], k.zero(wide, lanes))
        for n, p in enumerate(prods):
            k.store(terms(p.b, values), packed + n * depth * TK + i)
    return k, problem.groups * blocks_of(problem, TK, side)


from autoconv.cpu.codegen.ir import f32


def emit(instruction_set: str, layer: ConvLayer, blocking: B) -> Module:
    m = Module(instruction_set)
    problem = product(layer)
    run = m.function("run", *RUN)
    *_, workspace = operands(run, run.args[0], DTYPES[layer.dtype])
    own = thread_bytes(problem, blocking, layer.accumulator.itemsize)
    with run.loop(0, blocking.threads) as thread:
        run.store(run.i64(-1), run.bytes_at(workspace, thread * own, i64))
    launch(run, run.args[0], *StrassenWriter(m, layer, blocking).task())
    pack = m.function("pack", *RUN)
    side = blocking.side
    sets = blocks_of(problem, blocking.TK, side)
    depth = share(problem.C, side)
    n = len(products_of(blocking.levels))

    def place(index):
        group, block = index // (sets * side), index % (sets * side)
        return ((group * sets + block % sets) * n + block // sets * side) * (depth * blocking.TK)

    launch(pack, pack.args[0], *emit_pack(m, 0, problem, blocking.TK, DTYPES[layer.dtype], 0, sets * side, place))
    launch(pack, pack.args[0], *emit_combine(m, problem, blocking))
    return m
