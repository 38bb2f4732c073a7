"""The kernels of a Winograd convolution: `y = AT ((G w GT) * (BT x B)) A`, tile by tile, lanes as channels.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

from autoconv.cpu.codegen.ir import LINE, Function, Module, Type, Value, Var, i64, ptr
from autoconv.cpu.transform import kernels
from autoconv.cpu.transform.ahead import fetch_part, input_region, new_input, output, output_region
from autoconv.cpu.transform.filters import FilterStage
from autoconv.cpu.transform.input import InputStage
from autoconv.cpu.winograd.geometry import WinogradTiling
from autoconv.cpu.winograd.matrix import matrix_vector
from autoconv.layer import ConvLayer

W = TypeVar("W", bound=WinogradTiling)
FEWEST_TO_FETCH = 4  # tiles of a register tile that has the time to fetch filters


def emit(instruction_set: str, layer: ConvLayer, tilings: tuple[WinogradTiling, ...]) -> Module:
    """`run` and `pack` for the correlations of a layer."""
    return kernels.emit(WinogradWriter, instruction_set, layer, tilings)


class WinogradInput(InputStage[W]):
    """Writes `BT x B` of the input of one correlation."""

    def transform_columns(self) -> Function:
        tiling, vertical, lanes = self.tiling, self.tiling.rows, self.tiling.lanes
        k = self.function("transform_columns", ptr(self.real), ptr(self.real))
        raw, half = k.args
        row = tiling.pitch * lanes
        with k.loop(0, tiling.columns.span) as j:
            xs = [k.load(raw + (j * lanes + i * row), lanes) for i in range(vertical.tile)]
            for i, v in enumerate(matrix_vector(k, vertical.transforms.BT, xs)):
                k.store(v, half + (j * lanes + i * row))
        return k

    def transform_rows(self) -> Function:
        tiling, horizontal, lanes = self.tiling, self.tiling.columns, self.tiling.lanes
        k = self.function("transform_rows", ptr(self.real), ptr(self.real))
        half, v = k.args
        with k.loop(0, horizontal.tiles) as t, k.loop(0, tiling.rows.tile) as i:
            source = half + (i * tiling.pitch + t * horizontal.m) * lanes
            target = v + (i * (horizontal.tile * tiling.v_stride) + t * tiling.v_tile)
            xs = [k.load(source + j * lanes, lanes) for j in range(horizontal.tile)]
            values = matrix_vector(k, horizontal.transforms.BT, xs) if horizontal.tile > 1 else xs
            for j, value in enumerate(values):
                self.keep(k, value, target + j * tiling.v_stride)
        return k


class WinogradFilters(FilterStage[W]):
    """Writes `U = G w GT` of the filters of one correlation."""

    def transform(self) -> Function:
        tiling, lanes, TK = self.tiling, self.tiling.lanes, self.tiling.TK
        rows, columns = tiling.rows, tiling.columns
        k = self.function("transform_filters", ptr(self.real), ptr(self.real))
        taps, u = k.args
        half = k.scratch(self.real, rows.tile * columns.r * lanes)
        with k.loop(0, tiling.vectors) as vector:
            with k.loop(0, columns.r) as j:
                source = taps + (j * TK + vector * lanes)
                xs = [k.load(source + i * (columns.r * TK), lanes) for i in range(rows.r)]
                for n, v in enumerate(matrix_vector(k, rows.transforms.G, xs)):
                    k.store(v, half + (j + n * columns.r) * lanes)
            with k.loop(0, rows.tile) as i:
                xs = [k.load(half + (i * columns.r + j) * lanes, lanes) for j in range(columns.r)]
                target = u + (i * (columns.tile * self.apart) + vector * lanes)
                for n, v in enumerate(matrix_vector(k, columns.transforms.G, xs)):
                    k.store(v, target + n * self.apart)
        return k


class WinogradWriter(kernels.TransformWriter[W]):
    """Writes the functions of one correlation: products point by point, and `AT M A`."""

    input_stage = WinogradInput
    filter_stage = WinogradFilters

    def product_of(self, size: int) -> Function:
        """The register tile: one point of `size` tiles by a block of filters, summed over channels.

        Sums of some channels are added to what those before came to: a sum of all of them, one after the other, would
        err more than all the rest of the algorithm where there are many.

        It fetches its part of the next point's filters into L2: they come from the LLC, whose latency no queue of
        loads hides. The smallest tiles read them as fast as they come, in one stream that the processor foresees.
        """
        tiling, lanes, TK = self.tiling, self.tiling.lanes, self.tiling.TK
        k = self.function(f"product_of_{size}_", *[ptr(self.real)] * 4)
        v, u, following, out = k.args
        sums = [[k.var(k.zero(self.real, lanes)) for _ in range(tiling.vectors)] for _ in range(size)]
        line = LINE // tiling.itemsize
        lines = -(-lanes * TK // (line * self.register_tiles)) if size >= FEWEST_TO_FETCH else 0

        def terms(block: Value, count: int) -> None:
            source, filters = v + block * (tiling.chunk_tiles * lanes), u + block * (lanes * TK)
            self.multiply(k, source, filters, sums, count, (following + block * (lines * line), lines))

        whole, rest = divmod(tiling.depth, lanes)
        blocks = max(1, tiling.terms // lanes)
        parted = whole > blocks
        if parted:
            nothing = k.zero(self.real, lanes)
            with k.loop(0, whole, blocks) as start:
                with k.loop(start, k.min(start + blocks, whole)) as block:
                    terms(block, lanes)
                with k.if_(start > 0):
                    self.keep_sums(k, sums, out, added=True)
                with k.else_():
                    self.keep_sums(k, sums, out, added=False)
                for var in itertools.chain.from_iterable(sums):
                    var.set(nothing)
        elif whole:
            with k.loop(0, whole) as block:
                terms(block, lanes)
        if rest:
            terms(k.i64(whole), rest)
        if rest or not parted:
            self.keep_sums(k, sums, out, added=parted)
        return k

    def multiply(
        self,
        k: Function,
        v: Value,
        u: Value,
        sums: Sequence[Sequence[Var]],
        count: int,
        following: tuple[Value, int],
    ) -> None:
        """Add the products of some terms, at most a vector of them, to the sums of a register tile.

        Meanwhile as many lines of what follows as are given with it are fetched into L2, and what the next vector of
        terms reads into L1: a little with every round of terms, so that loads do not wait behind many lines at once.
        """
        tiling, lanes, TK, line = self.tiling, self.tiling.lanes, self.tiling.TK, LINE // self.tiling.itemsize
        together = math.gcd(self.m.terms, count)
        fetched = [(*following, 2)]
        if len(sums) >= FEWEST_TO_FETCH:
            if line < TK:  # a line a term comes as fast by itself, and a fetch more takes a load's place
                fetched.append((u + lanes * TK, lanes * TK // line, 3))
            fetched.append((v + tiling.chunk_tiles * lanes, -(-len(sums) * lanes // line), 3))
        with k.loop(0, count, together) as start:
            for first, lines, level in fetched:
                each = -(-lines * together // lanes)
                for n in range(each):
                    k.prefetch(first + (start // together * each + n) * line, locality=level)
            for c in (start + i for i in range(together)):
                ws = [k.load(u + (c * TK + n * lanes), lanes) for n in range(tiling.vectors)]
                for p, row in enumerate(sums):
                    x = k.broadcast(v + c + p * lanes, lanes)
                    for total, w in zip(row, ws, strict=True):
                        total.fma(x, w)

    def keep_sums(self, k: Function, sums: Sequence[Sequence[Var]], out: Value, added: bool) -> None:
        """Store the sums of a register tile, or what they make with the products that are there."""
        tiling, lanes = self.tiling, self.tiling.lanes
        for p, row in enumerate(sums):
            for n, total in enumerate(row):
                place = out + (p * tiling.m_tile + n * tiling.m_vector)
                k.store(k.load(place, lanes) + total.get() if added else total.get(), place)

    def product(self, rows: int, split: Sequence[tuple[int, int]]) -> Function:
        tiling = self.tiling
        types: list[Type] = [ptr(self.stored), ptr(self.stored), i64, i64] if tiling.ahead else []
        k = self.function(f"product_{rows}_", *[ptr(self.real)] * 3, *types)
        v, u, out, *images = k.args
        size_of_point, tiles = tiling.depth * tiling.TK, sum(count for count, _ in split)
        with k.loop(0, tiling.points) as point:
            for size, tile, number in kernels.each_register_tile(k, split):
                source = v + (point * tiling.v_stride + tile * tiling.lanes)
                target = out + (point * tiling.m_stride + tile * tiling.m_tile)
                filters = u + point * size_of_point
                following = filters + number * -(-size_of_point // self.register_tiles) + size_of_point
                if tiling.ahead:
                    self.fetch_images(k, images, rows, point * tiles + number, tiling.points * tiles)
                k.call(self.registers[size], source, filters, following, target)
        return k

    def fetch_images(self, k: Function, images: Sequence[Value], rows: int, number: Value, numbers: int) -> None:
        """One of so many register tiles' part of the output to come, and of the input of a thread's next chunk.

        Every block of filters takes its share of the latter.
        """
        tiling, last, line = self.tiling, self.channels_last, LINE // self.stored.bytes
        x, y, first, block = images
        each = max(1, numbers // rows)  # parts of a row of tiles
        row = number // each
        with k.if_(row < rows):
            start = output(tiling, y, first + row, block)
            fetch_part(k, start, output_region(tiling, last), number % each, each, line, write=True)
        number, each = block * numbers + number, max(1, tiling.k_blocks * numbers // rows)
        row = number // each + rows * (tiling.batch or 1)
        with k.if_((number // each < rows) & (first + row < tiling.tile_rows)):
            start = new_input(tiling, x, first + row)
            fetch_part(k, start, input_region(tiling, last), number % each, each, line, write=False)

    def inverse_transform(self) -> Function:
        tiling, lanes = self.tiling, self.tiling.lanes
        rows, columns = tiling.rows, tiling.columns
        k = self.function("inverse", ptr(self.real), ptr(self.real))
        products, strip = k.args
        half = k.scratch(self.real, rows.m * columns.tile * lanes)
        with k.loop(0, columns.tiles) as t:
            with k.loop(0, columns.tile) as j:
                source = products + (t * tiling.m_tile + j * tiling.m_stride)
                below = columns.tile * tiling.m_stride
                for point in range(rows.tile):  # more streams than a processor foresees, out of L2
                    k.prefetch(source + (point * below + 2 * tiling.m_tile))
                xs = [k.load(source + point * below, lanes) for point in range(rows.tile)]
                values = matrix_vector(k, rows.transforms.AT, xs) if rows.tile > 1 else xs
                for n, value in enumerate(values):
                    k.store(value, half + (j * lanes + n * (columns.tile * lanes)))
            with k.loop(0, rows.m) as i:
                source = half + i * (columns.tile * lanes)
                xs = [k.load(source + j * lanes, lanes) for j in range(columns.tile)]
                values = matrix_vector(k, columns.transforms.AT, xs) if columns.tile > 1 else xs
                target = strip + (i * tiling.out_pitch + t * columns.m) * lanes
                for n, value in enumerate(values):
                    k.store(value, target + n * lanes)
        return k
