"""Winograd convolution that transforms its filters as it goes, from taps that are packed as they are.

Transformed filters are several times the size of the filters, and where there are few tiles to multiply each with, a
layer waits for them to come from memory. Here a thread transforms a piece of a block of filters, some terms of the sum,
into its own cache, multiplies all tiles of a chunk with it, and goes on to the next piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoconv.algorithm import Params
from autoconv.common.winograd_math import Transforms
from autoconv.cpu.codegen.ir import LINE, Function, Module, Value, i64, ptr
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.estimate import PAGE
from autoconv.cpu.common.sums import WINOGRAD_TERMS
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform import kernels
from autoconv.cpu.transform.estimate import Counts
from autoconv.cpu.transform.geometry import odd
from autoconv.cpu.winograd.algorithm import Cut, Winograd, outputs
from autoconv.cpu.winograd.estimate import counts, effort
from autoconv.cpu.winograd.geometry import WinogradAxis, WinogradTiling
from autoconv.cpu.winograd.kernels import WinogradFilters, WinogradInput, WinogradWriter
from autoconv.cpu.winograd.matrix import matrix_vector
from autoconv.layer import ConvLayer

FEWEST_TILES = 4  # of a chunk: with fewer, transforming a filter takes as long as all its products
MOST_TILES = 48  # of all: with more, transforming filters beforehand takes little beside the products


@dataclass(frozen=True)
class CompactAxis(WinogradAxis):
    """One axis whose filters are transformed in few operations, and its products back in some more."""

    @functools.cached_property
    def transforms(self) -> Transforms:
        """Of F(m, r), each row of `G` divided by its first factor, by which the column of `AT` is multiplied."""
        of = super().transforms
        first = [next(filter(None, row)) for row in of.G]
        G = tuple(tuple(g / f for g in row) for row, f in zip(of.G, first, strict=True))
        AT = tuple(tuple(a * f for a, f in zip(row, first, strict=True)) for row in of.AT)
        return replace(of, AT=AT, G=G)


@dataclass(frozen=True)
class CompactTiling(WinogradTiling):
    """One correlation in tiles of m x m outputs, its filters transformed `terms` of the sum at a time."""

    @functools.cached_property
    def rows(self) -> CompactAxis:
        return _axis(super().rows)

    @functools.cached_property
    def columns(self) -> CompactAxis:
        return _axis(super().columns)

    @functools.cached_property
    def packed_depth(self) -> int:
        return self.c_blocks * self.lanes

    @functools.cached_property
    def piece(self) -> int:
        """Terms that are transformed at a time, whole vectors of channels; the last ones may be fewer."""
        return min(-(-self.terms // self.lanes) * self.lanes, self.packed_depth)

    @functools.cached_property
    def piece_stride(self) -> int:
        """From point to point of a row of points of a transformed piece."""
        return odd(self.piece * self.vectors) * self.lanes

    @functools.cached_property
    def taps(self) -> int:
        """Taps of one term of a block of filters."""
        rows, columns = self.filter_axes
        return rows.r * columns.r * self.TK

    @functools.cached_property
    def u_size(self) -> int:
        return self.packed_depth * self.taps

    @functools.cached_property
    def scratch_size(self) -> int:
        """As ever, and a row of points behind the output.

        The next thread's begins a page further on: what a processor fetches ahead of the row's stores, piece after
        piece, would be lines that the other thread writes.
        """
        behind = self.columns.tile * self.piece_stride + PAGE // self.itemsize
        return max(super().scratch_size, self.output_size + behind)


@functools.lru_cache(1024)
def _axis(axis: WinogradAxis) -> CompactAxis:
    return CompactAxis(axis.axis, axis.m)


class CompactFilters(WinogradFilters[CompactTiling]):
    """Writes taps as they are, those of a term together."""

    def lay_out(self, k: Function, gather: Callable[[Value, Value], None], u: Value, first: Value, last: Value) -> None:
        with k.loop(first, last) as d:
            gather(d, u + d * self.tiling.taps)


class CompactWriter(WinogradWriter[CompactTiling]):
    """Writes the functions of one correlation: filters transformed and multiplied piece by piece, and `AT M A`."""

    input_stage = WinogradInput
    filter_stage = CompactFilters

    def emit(self) -> Function:
        self.transforms = [self.transform_filters(row) for row in range(self.tiling.rows.tile)]
        return super().emit()

    def transform_filters(self, row: int) -> Function:
        """`(taps, u, terms)`: a row of the points `G w GT` of some terms; the first and last often have few taps in."""
        tiling, lanes, TK = self.tiling, self.tiling.lanes, self.tiling.TK
        rows, columns = tiling.rows, tiling.columns
        k = self.function(f"transform_filters_{row}_", ptr(self.real), ptr(self.real), i64)
        taps, u, terms = k.args
        with k.loop(0, terms) as term, k.loop(0, TK, lanes) as first:
            source, target = taps + (term * tiling.taps + first), u + (term * TK + first)
            half = []
            for j in range(columns.r):
                xs = [k.load(source + (i * columns.r + j) * TK, lanes) for i in range(rows.r)]
                half += matrix_vector(k, [rows.transforms.G[row]], xs)
            for n, v in enumerate(matrix_vector(k, columns.transforms.G, half)):
                k.store(v, target + n * tiling.piece_stride)
        return k

    def product_of(self, size: int) -> Function:
        """The register tile: one point of `size` tiles by a block of filters, summed over a piece's terms.

        `(v, u, following, products, blocks, more)`: vectors of terms, and whether to add to what products there are.
        It fetches its part of the next piece's taps.
        """
        tiling, lanes = self.tiling, self.tiling.lanes
        k = self.function(f"product_of_{size}_", *[ptr(self.real)] * 4, i64, i64)
        v, u, following, out, blocks, more = k.args
        sums = [[k.var(k.zero(self.real, lanes)) for _ in range(tiling.vectors)] for _ in range(size)]
        line = LINE // tiling.itemsize
        with k.loop(0, blocks) as block:
            source, filters = v + block * (tiling.chunk_tiles * lanes), u + block * (lanes * tiling.TK)
            self.multiply(k, source, filters, sums, lanes, (following + block * (self.lines * line), self.lines))
        with k.if_(more > 0):
            self.keep_sums(k, sums, out, added=True)
        with k.else_():
            self.keep_sums(k, sums, out, added=False)
        return k

    @property
    def lines(self) -> int:
        """Cache lines of taps that each vector of terms of a register tile fetches."""
        tiling = self.tiling
        return -(-tiling.lanes * tiling.taps * tiling.itemsize // (LINE * tiling.points * self.register_tiles))

    def product(self, rows: int, split: Sequence[tuple[int, int]]) -> Function:
        """All points of all tiles of a chunk by a block of filters, piece by piece; a piece lies behind the output."""
        tiling, lanes, line = self.tiling, self.tiling.lanes, LINE // self.tiling.itemsize
        k = self.function(f"product_{rows}_", *[ptr(self.real)] * 3)
        v, u, out = k.args
        piece = out + tiling.output_size
        with k.loop(0, tiling.packed_depth, tiling.piece) as start:
            terms = k.min(tiling.packed_depth - start, tiling.piece)
            taps, blocks = u + start * tiling.taps, terms // lanes
            following = taps + terms * tiling.taps
            for row, transform in enumerate(self.transforms):
                k.call(transform, taps, piece, terms)
                with k.loop(0, tiling.columns.tile) as column:
                    point = column + row * tiling.columns.tile
                    source = v + (start * tiling.chunk_tiles + point * tiling.v_stride)
                    filters, target = piece + column * tiling.piece_stride, out + point * tiling.m_stride
                    share = following + point * blocks * (self.register_tiles * self.lines * line)
                    for size, tile, number in kernels.each_register_tile(k, split):
                        ahead = share + number * blocks * (self.lines * line)
                        places = source + tile * lanes, filters, ahead, target + tile * tiling.m_tile
                        k.call(self.registers[size], *places, blocks, start)
        return k


def emit(instruction_set: str, layer: ConvLayer, tilings: tuple[CompactTiling, ...]) -> Module:
    """`run` and `pack` for the correlations of a layer."""
    return kernels.emit(CompactWriter, instruction_set, layer, tilings)


class WinogradCompact(Winograd):
    """`winograd` whose packed filters are as large as the filters, and transformed by every run.

    Parameters as there, and `terms` of the sum whose filters a thread transforms at a time.
    """

    name = "winograd.compact"
    emitter = staticmethod(emit)

    def tiling(self, layer: ConvLayer, device: CPU, c: Correlation, m: tuple[int, int], cut: Cut) -> CompactTiling:
        where = device.instruction_set, layer.accumulator.itemsize, device.threads
        return CompactTiling(c, *where, m, cut.rows, cut.coop, terms=cut.terms)

    def worth_listing(self, tiling: WinogradTiling) -> bool:
        return tiling.tile_rows * tiling.columns.tiles <= MOST_TILES

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterator[Params]:
        """Chunks of some tiles of few; pieces whose taps and rows of points fit into the first cache together."""
        main = max(correlations(layer), key=lambda c: c.macs)
        for params in super().candidates(layer, device):
            rows, coop = int(params["rows"]), int(params["coop"])
            tiling = self.tiling(layer, device, main, outputs(params), Cut(rows, coop))
            if tiling.chunk_tiles < FEWEST_TILES:
                continue
            term = tiling.itemsize * (tiling.taps + tiling.columns.tile * tiling.TK)
            fitting = min(device.machine.caches[0] // term, WINOGRAD_TERMS) // tiling.lanes
            pieces = -(-tiling.c_blocks // max(fitting, 1))
            yield {**params, "terms": -(-tiling.c_blocks // pieces) * tiling.lanes}

    def counts(self, tiling: WinogradTiling, machine: Machine) -> Counts:
        assert isinstance(tiling, CompactTiling)
        found = counts(tiling, machine)
        rows, columns = tiling.filter_axes
        down, across = columns.r * rows.tile * effort(rows.r), tiling.points * effort(columns.r)
        blocks = tiling.correlation.groups * tiling.chunks * tiling.k_blocks
        terms = blocks * tiling.vectors * tiling.depth
        moved = blocks * self._moved(tiling, machine)
        return found._replace(
            inverse=found.inverse + terms * (down + across), computed=found.computed + moved * machine.threads
        )

    def _moved(self, tiling: CompactTiling, machine: Machine) -> float:
        """Seconds in which all threads together move what the products with a block of filters make on their way.

        For every row of points the taps of a piece are read and its points written; every piece adds to what the
        products came to.
        """
        size, depth = tiling.itemsize, tiling.packed_depth
        taps, points = size * depth * tiling.taps, size * depth * tiling.points * tiling.TK
        products = size * tiling.points * tiling.m_stride
        pieces = -(-depth // tiling.piece)
        piece = size * tiling.piece * (tiling.taps + tiling.columns.tile * tiling.TK)  # its taps, and a row of points
        transformed = machine.reading(tiling.rows.tile * taps, piece) + machine.writing(points, piece)
        home = products + piece
        return transformed + machine.reading(pieces * products, home) + machine.writing(pieces * products, home)
