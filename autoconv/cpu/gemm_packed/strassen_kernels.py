"""The kernels of `gemm.strassen`: sums of parts of pixels and of filters, and products added to blocks of outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, Value, Var, f64, i32, i64, ptr, vec, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.lanes import deinterleaved
from autoconv.cpu.common.packing import emit_pack
from autoconv.cpu.gemm_packed.geometry import (
    PackedGemmBlocking,
    block_size,
    blocks_of,
    half_or_all,
    packed_blocks,
    pixels_of,
    product,
)
from autoconv.cpu.gemm_packed.kernels import TaskWriter, emit_run
from autoconv.layer import ConvLayer

TOGETHER = 4  # channels of a half copied at a time, each from its own plane
PARTS = tuple(itertools.product((0, 1), repeat=2))  # rows and columns of operands and outputs, half by half

Factors = tuple[int, int, int, int]  # 1, -1 or 0 for each of four parts


class StrassenProduct(NamedTuple):
    """A sum of parts of `pixels` times one of parts of `filters`, which is added to parts of the `outputs`.

    The rows of the pixels and outputs are halves of a plane, their columns are channels; those of the filters are
    channels of the sum and outputs' channels. An output to which it is added comes before one it is taken from.
    """

    pixels: Factors
    filters: Factors
    outputs: Factors

    @property
    def targets(self) -> list[tuple[int, int]]:
        """Which parts of the outputs it goes to, and by which factor: the first one is 1."""
        return sorted(((n, factor) for n, factor in enumerate(self.outputs) if factor), key=lambda t: -t[1])


PRODUCTS = (  # Strassen's I to VII, in the order in which they are in his paper
    StrassenProduct((1, 0, 0, 1), (1, 0, 0, 1), (1, 0, 0, 1)),
    StrassenProduct((0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 1, -1)),
    StrassenProduct((1, 0, 0, 0), (0, 1, 0, -1), (0, 1, 0, 1)),
    StrassenProduct((0, 0, 0, 1), (-1, 0, 1, 0), (1, 0, 1, 0)),
    StrassenProduct((1, 1, 0, 0), (0, 0, 0, 1), (-1, 1, 0, 0)),
    StrassenProduct((-1, 0, 1, 0), (1, 1, 0, 0), (0, 0, 0, 1)),
    StrassenProduct((0, 1, 0, -1), (0, 0, 1, 1), (1, 0, 0, 0)),
)


def _summed(factors: Factors, parts: Sequence[Value]) -> Value:
    """The sum of the parts that count, those that are subtracted last."""
    first, *others = sorted(((f, part) for f, part in zip(factors, parts, strict=True) if f), key=lambda t: -t[0])
    found = first[1]
    for factor, part in others:
        found = found + part if factor > 0 else found - part
    return found


class StrassenWriter(TaskWriter):
    """Writes the task: its tiles are pairs, one of each half of a plane, and its blocks pairs of blocks of filters."""

    def __init__(self, m: Module, layer: ConvLayer, blocking: PackedGemmBlocking) -> None:
        super().__init__(m, layer, blocking)
        self.half = half_or_all(pixels_of(self.problem), True)
        self.odd = pixels_of(self.problem) % 2 == 1  # then the second half's last pixel is none
        self.apart = blocks_of(self.problem, blocking.TK, True) * blocking.TK  # filters from one half to the other

    def task(self) -> tuple[Function, int]:
        length = self.plane_tiles.length
        self.short = self._emit_store(length - 1, length) if self.odd and length > 1 else None
        return super().task()

    def _room(self) -> Value:
        return self.behind

    def _block(self, channel: Value) -> None:
        k, blocking, number, tile = self.k, self.blocking, self.number, self.tile_size
        self.channel = channel
        with k.loop(0, number * (len(PARTS) * tile), self.lanes) as i:
            k.store(k.zero(self.wide, self.lanes), self.sums + i)
        for n in range(len(PRODUCTS)):
            with k.loop(0, math.ceil(self.depth / blocking.BC)) as part, k.loop(0, number) as t:
                self._multiply(n, t, part)
        with k.loop(0, number) as t:
            for n in range(len(PARTS)):
                self._store_part(t, n)

    def _place_of(self, t: Value, n: int) -> Value:
        """Where one part of a pair's outputs lies, from the first output on."""
        k, o, (row, column) = self.k, self.problem.output, PARTS[n]
        plane = self.group * o.group + (self.channel + column * self.apart) * o.channel
        return plane + k.load(self.images + t) * o.image + k.load(self.pixels + t) + row * self.half

    def _multiply(self, n: int, t: Value, part: Value) -> None:
        """A part of one product's channels for a pair of tiles; the last four fetch where the outputs go."""
        k, blocking = self.k, self.blocking
        number = n - (len(PRODUCTS) - len(PARTS))
        start = part * blocking.BC
        count = k.min(self.depth - start, blocking.BC)
        micropanel = self.micropanels + (t * len(PRODUCTS) + n) * self.pitch + start * blocking.TQ
        filters = self.filters + (start + n * self.depth) * blocking.TK
        following = filters + (blocking.BC * blocking.TK + t * self._share(blocking.BC))
        (first, _), *second = PRODUCTS[n].targets
        other, factor = second[0] if second else (first, 0)
        sums = [self.sums + (t * len(PARTS) + target) * self.tile_size for target in (first, other)]
        ahead = self._ahead(self._place_of(t, max(number, 0)), part, wanted=number >= 0)
        self._call(self.micros, t, micropanel, filters, following, *sums, k.const(self.wide, factor), count, *ahead)

    def _store_part(self, t: Value, n: int) -> None:
        """A tile's sums with their epilogue; the second half's last tile is a pixel shorter in an odd plane."""
        k, (row, column) = self.k, PARTS[n]
        there, first = self._place_of(t, n), self.channel + column * self.apart
        sums = self.sums + (t * len(PARTS) + n) * self.tile_size
        left, bias = k.i64(self.problem.K) - first, self.bias + self.group * self.problem.K + first
        arguments = sums, self.out + there, self.residual + there, bias, left
        with k.if_(left > 0):  # the last block of an odd number has none beside it
            if not (self.odd and row):
                self._call(self.stores, t, *arguments)
                return
            with k.if_(k.load(self.pixels + t).eq(self.half - self.plane_tiles.length)):
                if self.short is not None:
                    k.call(self.short, *arguments)
            with k.else_():
                self._call(self.stores, t, *arguments)

    def _copy(self, x: Value) -> None:
        """The sums of parts of a panel's pixels: both halves of planes, of some channels of either half at a time.

        Whole vectors where the pixels of a tile lie next to one another, or a few apart in a row; nothing beyond the
        operand is read.
        """
        k, problem, TQ, lanes, plane = self.k, self.problem, self.blocking.TQ, self.lanes, self.problem.input.channel
        longest, stride = self.plane_tiles.lengths[0], problem.columns.stride
        vectors = math.ceil(longest / lanes) * lanes  # more than the tile's pixels are read, and written over
        beyond = math.ceil(vectors * stride / plane)
        scales = self.packed + packed_blocks(problem, self.blocking) + self.group * (2 * self.depth)
        whole = self.in_place or self.in_rows
        ample = max(0, (problem.C - self.depth - beyond) // TOGETHER) * TOGETHER if whole else 0

        def write(parts: Sequence[Value], channel: Value, target: Value) -> None:
            factors = [k.broadcast(scales + channel + column * self.depth, lanes) for column in (0, 1)]
            scaled = [part * factors[column] for part, (_, column) in zip(parts, PARTS, strict=True)]
            for n, each in enumerate(PRODUCTS):
                k.store(_summed(each.pixels, scaled), target + n * self.pitch)

        if ample:
            with k.loop(0, ample, TOGETHER) as start, k.loop(0, self.number) as t:
                first = k.load(self.pixels + t)
                image = x + k.load(self.images + t) * problem.input.image
                if self.in_place:
                    halves = [image + first + start * plane] * 2
                else:
                    planes = image + start * plane
                    halves = [planes + self._input(first + row * self.half) for row in (0, 1)]
                target = self.micropanels + t * (len(PRODUCTS) * self.pitch) + start * TQ
                for c, v in itertools.product(range(TOGETHER), range(0, vectors, lanes)):
                    parts = []
                    for row, column in PARTS:
                        within = row * self.half if self.in_place else 0
                        place = halves[row] + ((c + column * self.depth) * plane + within + v * stride)
                        for line in range(0, lanes * stride, LINE // self.element.bytes):
                            if (v * stride + line) * self.element.bytes % LINE == 0:
                                k.prefetch(place + (TOGETHER * plane + line))
                        some = pixels_of(problem) - self.half - first - v  # of the second half
                        mask = k.mask(some, lanes) if self.odd and row else None
                        value = deinterleaved(k, [k.load(place + n * lanes, lanes) for n in range(stride)], stride, 0)
                        parts.append(value if mask is None else k.select(mask, value, k.zero(self.wide, lanes)))
                    write(parts, start + c, target + (c * TQ + v))
        gathered = k.scratch(self.wide, len(PARTS) * TOGETHER * vectors)
        with k.loop(ample, self.depth, TOGETHER) as start, k.loop(0, self.number) as t:
            first = k.load(self.pixels + t)
            source = x + k.load(self.images + t) * problem.input.image
            target = self.micropanels + t * (len(PRODUCTS) * self.pitch)
            end = k.min(start + TOGETHER, self.depth)
            for row in (0, 1):
                offsets = [self._offset(first + (row * self.half + n)) for n in range(longest)]
                with k.loop(start, end) as channel:
                    for column in (0, 1):
                        own = channel + column * self.depth
                        here = source + k.min(own, problem.C - 1) * plane
                        there = gathered + ((channel - start) * len(PARTS) + PARTS.index((row, column))) * vectors
                        for n, offset in enumerate(offsets):
                            value = k.load(here + offset)
                            some = k.select(own < problem.C, value, k.zero(self.wide)) if problem.C % 2 else value
                            k.store(some, there + n)
            with k.loop(start, end) as channel:
                for v in range(0, vectors, lanes):
                    there = gathered + (channel - start) * (len(PARTS) * vectors) + v
                    parts = [k.load(there + n * vectors, lanes) for n in range(len(PARTS))]
                    write(parts, channel, target + channel * TQ + v)

    def _micro(self, length: int) -> Function:
        """`function(micropanel, filters, following, first, second, factor, channels, ...)`: multiply so many channels.

        The product is added to the first sums and, times the factor, to the second ones. Of the filters that follow it
        fetches a share, and so it does of the lines that outputs go to, as the last arguments say.
        """
        data, stored = ptr(self.wide), ptr(self.element)
        types = *[data] * 5, self.wide, i64, stored, stored, i64
        k = self.m.function(f"micro_{length}", *types, internal=True)
        micropanel, filters, following, first, second, factor, channels, *ahead = k.args

        def visit(acc: list[list[Var]], sums: Value, times: Value | None) -> None:
            for n, row in enumerate(acc):
                for v, a in enumerate(row):
                    place = sums + (v * length + n) * self.lanes
                    before = k.load(place, self.lanes)
                    k.store(before + a.get() if times is None else k.fma(a.get(), times, before), place)

        with self._sums(k, length, micropanel, filters, following, channels, ahead) as acc:
            visit(acc, first, None)
            with k.if_(factor.ne(0)):
                visit(acc, second, k.splat(factor, self.lanes))
        return k


def _format(wide: Type) -> tuple[Type, int, int]:
    """IEEE 754's binary32 or binary64: their word, the bits of its fraction, the largest exponent."""
    return (i64, 52, 2047) if wide == f64 else (i32, 23, 255)


def _emit_scales(m: Module, layer: ConvLayer, blocking: PackedGemmBlocking) -> tuple[Function, int]:
    """The task that finds the scale of a channel of a group, and how many there are.

    It is the power of two that the largest of the packed filters in the channel is 1 to 2 times, within what has a
    normal reciprocal; 1 where that filter is not finite.
    """
    problem, TK, depth, size = product(layer), blocking.TK, _depth(layer), block_size(product(layer), blocking)
    wide, lanes = widened(DTYPES[layer.dtype]), m.lanes(DTYPES[layer.dtype])
    word, digits, largest = _format(wide)
    pairs = blocks_of(problem, TK, True)
    k = m.function("scales", *TASK, internal=True)
    context, index, _ = k.args
    packed = operands(k, context, wide)[2]
    group, c = index // (2 * depth), index % (2 * depth)
    most = k.var(k.zero(word, lanes))
    with k.loop(0, pairs) as pair, k.loop(0, 2) as block, k.loop(0, TK, lanes) as v:
        place = packed + (group * pairs + pair) * size + block * (2 * depth * TK) + c * TK + v
        bits = k.bits(k.load(place, lanes), vec(word, lanes))
        most.set(k.max(most.get(), bits & ((1 << (wide.bits - 1)) - 1)))
    found = k.extract(most.get(), 0)
    for lane in range(1, lanes):
        found = k.max(found, k.extract(most.get(), lane))
    exponent = found >> digits
    exponent = k.select(exponent.eq(largest), k.const(word, largest // 2), exponent)
    exponent = k.min(k.max(exponent, 1), largest - 2)
    k.store(k.bits(exponent << digits, wide), packed + packed_blocks(problem, blocking) + group * (2 * depth) + c)
    return k, problem.groups * 2 * depth


def _emit_sums(m: Module, layer: ConvLayer, blocking: PackedGemmBlocking) -> tuple[Function, int]:
    """The task that makes sums of a pair of packed blocks, in place and over the scales, and how many there are."""
    problem, TK, depth, size = product(layer), blocking.TK, _depth(layer), block_size(product(layer), blocking)
    wide, lanes = widened(DTYPES[layer.dtype]), m.lanes(DTYPES[layer.dtype])
    k = m.function("sums", *TASK, internal=True)
    context, index, _ = k.args
    word, digits, largest = _format(wide)
    packed, pairs = operands(k, context, wide)[2], blocks_of(problem, TK, True)
    scales = packed + packed_blocks(problem, blocking) + index // pairs * (2 * depth)
    with k.loop(0, depth) as c:
        exponents = [k.bits(k.load(scales + c + row * depth), word) for row in (0, 1)]
        factors = [k.bits(((largest - 1) << digits) - e, wide) for e in exponents]  # reciprocals of powers of two
        with k.loop(0, TK, lanes) as v:
            place = packed + index * size + c * TK + v
            parts = [k.load(place + (column * 2 + row) * (depth * TK), lanes) for row, column in PARTS]
            parts = [part * k.splat(factors[row], lanes) for part, (row, _) in zip(parts, PARTS, strict=True)]
            if problem.C % 2:  # the last channel of the second half is none
                there, zero = k.splat(c < problem.C - depth, lanes), k.zero(wide, lanes)
                parts[2:] = [k.select(there, part, zero) for part in parts[2:]]
            for n, each in enumerate(PRODUCTS):
                k.store(_summed(each.filters, parts), place + n * (depth * TK))
    return k, problem.groups * pairs


def _depth(layer: ConvLayer) -> int:
    return half_or_all(product(layer).C, True)


def emit(instruction_set: str, layer: ConvLayer, blocking: PackedGemmBlocking) -> Module:
    """`run` and `pack`: the blocks of a pair are packed one behind the other, and then made into sums there."""
    m = Module(instruction_set)
    problem, TK = product(layer), blocking.TK
    emit_run(m, layer, StrassenWriter(m, layer, blocking))
    pairs = blocks_of(problem, TK, True)

    def place(index: Value) -> Value:
        group, block = index // (2 * pairs), index % (2 * pairs)
        pair = (group * pairs + block % pairs) * block_size(problem, blocking)
        return pair + block // pairs * (2 * _depth(layer) * TK)

    pack = m.function("pack", *RUN)
    launch(pack, pack.args[0], *emit_pack(m, problem, TK, DTYPES[layer.dtype], 0, 2 * pairs, place))
    launch(pack, pack.args[0], *_emit_scales(m, layer, blocking))
    launch(pack, pack.args[0], *_emit_sums(m, layer, blocking))
    return m
