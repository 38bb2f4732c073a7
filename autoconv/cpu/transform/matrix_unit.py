"""The pipeline's product on the tiles of a matrix unit, for families whose transforms are computed in float32.

Numbers are split where they are transformed: a vector of channels becomes a piece of a line of 32 for each part, in the
order of the channels, so that nothing is shuffled. The product of a point is that of 32 tiles of the image by 32
filters, in four tiles of the unit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoconv.cpu.codegen.ir import LINE, Function, Value, i16, i32, i64, ptr
from autoconv.cpu.codegen.tiles import TILE_BYTES, TILE_FLOPS, TILE_ROWS, WORDS
from autoconv.cpu.common.tiles.products import DEPTH, PRODUCTS, emit_step, parts_of, sums_of
from autoconv.cpu.common.tiles.split import split, split_pairs
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.filters import FilterStage
from autoconv.cpu.transform.geometry import EVEN, Tiling, odd
from autoconv.cpu.transform.input import InputStage
from autoconv.cpu.transform.kernels import TransformWriter, each_register_tile

MOST_TILES = 2 * TILE_ROWS  # of the image, and filters, that a product multiplies
MOST_ABREAST = 4  # blocks of filters, whose products the second cache is to hold


@dataclass(frozen=True)
class MatrixTiling(Tiling):
    """A correlation whose points are multiplied by a unit, `products` of parts for each of numbers.

    V[point][part][32 channels][tile][channel], M[point][tile][filter], and U[group][k block][point][32 channels][part]
    of one tile of filters in pairs of channels, or of two.
    """

    matrix_unit: str
    products: int

    @functools.cached_property
    def parts(self) -> int:
        """Of each number."""
        return parts_of(self.products)

    @functools.cached_property
    def filter_tiles(self) -> int:
        """Of the unit, in a block of filters."""
        return min(MOST_TILES // TILE_ROWS, -(-self.correlation.K // TILE_ROWS))

    @functools.cached_property
    def vectors(self) -> int:
        return self.filter_tiles * TILE_ROWS // self.lanes

    @functools.cached_property
    def most_tiles(self) -> int:
        return MOST_TILES

    @functools.cached_property
    def abreast(self) -> int:
        """The more, the less often an image comes from the LLC; but threads that share one have equal work."""
        most, share = min(MOST_ABREAST, self.k_blocks), self.k_blocks * self.batch / self.threads
        if not self.coop:
            return most
        longest = {n: -(-self.batch * -(-self.k_blocks // n) // self.threads) * n for n in range(most, 1, -1)}
        return next((n for n, blocks in longest.items() if blocks <= EVEN * share), 1)

    @functools.cached_property
    def steps(self) -> int:
        """Lines of 32 channels of the sum."""
        return -(-self.depth // DEPTH)

    @functools.cached_property
    def packed_depth(self) -> int:
        return self.steps * DEPTH

    @functools.cached_property
    def rounded_tiles(self) -> int:
        """Tiles of a chunk, in whole tiles of the unit."""
        return -(-self.chunk_tiles // TILE_ROWS) * TILE_ROWS

    @functools.cached_property
    def v_tile(self) -> int:
        return WORDS

    @functools.cached_property
    def v_part(self) -> int:
        """From part to part of a point."""
        return self.steps * self.rounded_tiles * WORDS

    @functools.cached_property
    def v_stride(self) -> int:
        return odd(self.parts * self.steps * self.rounded_tiles) * WORDS

    @functools.cached_property
    def m_tile(self) -> int:
        return self.TK

    @functools.cached_property
    def m_vector(self) -> int:
        return self.lanes

    @functools.cached_property
    def m_stride(self) -> int:
        return odd(self.rounded_tiles * self.filter_tiles) * TILE_ROWS

    @functools.cached_property
    def u_stride(self) -> int:
        return self.steps * self.parts * self.filter_tiles * (TILE_BYTES // 4)


M = TypeVar("M", bound=MatrixTiling)


class MatrixInput(InputStage[M]):
    """Writes the transformed input in parts."""

    def emit(self, in_turn: bool = False) -> Function:
        """The same; what the last vector of channels leaves of a line is cleared, as the product reads it."""
        transform = super().emit(in_turn)
        tiling = self.tiling
        filled = tiling.c_blocks * tiling.lanes % DEPTH
        if not filled:
            return transform
        k = self.function("input_of_lines", *transform.types)
        *_, rows, _, block = k.args
        k.call(transform, *k.args)
        with k.if_(block.eq(tiling.c_blocks - 1)):
            v = k.args[1] + self.place(block - (tiling.c_blocks - 1) % (DEPTH // tiling.lanes))
            with (
                k.loop(0, tiling.points) as point,
                k.loop(0, tiling.parts) as part,
                k.loop(0, rows * tiling.columns.tiles) as tile,
                k.loop(filled // 2, WORDS, tiling.lanes // 2) as word,
            ):
                there = v + (point * tiling.v_stride + part * tiling.v_part) + (tile * tiling.v_tile + word)
                k.store(k.zero(i16, tiling.lanes), k.bits(there, ptr(i16)))
        return k

    def place(self, block: Value) -> Value:
        per_line = DEPTH // self.tiling.lanes
        line = block // per_line * (self.tiling.rounded_tiles * WORDS)
        return line + block % per_line * (self.tiling.lanes // 2)

    def keep(self, k: Function, v: Value, p: Value) -> None:
        for part, bits in enumerate(split(k, v, self.tiling.parts)):
            k.store(bits, k.bits(p + part * self.tiling.v_part, ptr(i16)))


class MatrixFilters(FilterStage[M]):
    """Writes the transformed filters in parts, in pairs of channels; channels that do not exist are zero."""

    def write(self, k: Function, points: Value, u: Value, start: Value, terms: Value) -> None:
        tiling, lanes, TK = self.tiling, self.tiling.lanes, self.tiling.TK
        with k.loop(0, tiling.points) as point, k.loop(0, terms, 2) as n, k.loop(0, TK, lanes) as first:
            even, odd_ = (k.load(points + point * self.apart + (n + i) * TK + first, lanes) for i in range(2))
            term = start + n
            step = term // DEPTH * (tiling.parts * TK * WORDS) + term % DEPTH // 2 * TILE_ROWS
            there = u + (point * tiling.u_stride + step) + (first // TILE_ROWS * (TILE_BYTES // 4) + first % TILE_ROWS)
            for part, pairs in enumerate(split_pairs(k, even, odd_, tiling.parts)):
                k.store(pairs, k.bits(there, ptr(i32)) + part * (TK * WORDS), nontemporal=self.streamed)


class MatrixWriter(TransformWriter[M]):
    """Writes the products of points, tile by tile of the unit."""

    def split(self, tiles: int) -> list[tuple[int, int]]:
        pairs, single = divmod(-(-tiles // TILE_ROWS), 2)
        return [(n, size) for n, size in ((pairs, MOST_TILES), (single, TILE_ROWS)) if n]

    def product_of(self, size: int) -> Function:
        """One or two tiles of the unit by as many of filters: one point, summed over channels.

        `(v, u, filters, image, products)`: `filters` and `image` are parts of what is multiplied next, which it fetches
        into L2 meanwhile: they come from the LLC, and products of tiles have too few loads under way to wait for them.
        """
        tiling, filters = self.tiling, self.tiling.filter_tiles
        k = self.function(f"product_of_{size}_", *[ptr(self.real)] * 5)
        v, u, *following, out = k.args
        tiles = size // TILE_ROWS, filters
        sums = sums_of(tiles)
        for tile in sums.values():
            k.tile_zero(tile)
        with k.loop(0, tiling.steps) as step:
            for first, lines in zip(following, self.fetched, strict=True):
                for n in range(lines):
                    k.prefetch(first + (step * lines + n) * WORDS, locality=2)
            line = v + step * (tiling.rounded_tiles * WORDS)
            block = u + step * (tiling.parts * tiling.TK * WORDS)
            emit_step(
                k,
                PRODUCTS[tiling.products],
                tiles,
                lambda part, t: line + (part * tiling.v_part + t * (TILE_ROWS * WORDS)),
                lambda part, f: block + (part * filters + f) * (TILE_BYTES // 4),
                (LINE, LINE),
            )
        for (t, f), tile in sums.items():
            k.tile_store(tile, out + (t * (TILE_ROWS * tiling.TK) + f * TILE_ROWS), tiling.TK * 4)
        return k

    @property
    def fetched(self) -> tuple[int, int]:
        """Lines of filters, and of the image, that a register tile fetches with every 32 channels: its share."""
        tiling, tiles = self.tiling, self.register_tiles
        image = tiling.parts * tiling.rounded_tiles
        return -(-tiling.parts * tiling.TK // tiles), -(-image // (tiles * tiling.abreast))

    def product(self, rows: int, split: Sequence[tuple[int, int]]) -> Function:
        """Every point; the thread has tiles for so long."""
        tiling, several = self.tiling, [i64] * (self.tiling.abreast > 1)
        k = self.function(f"product_{rows}_", *[ptr(self.real)] * 3, *several)
        v, u, out, *number = k.args
        blocks = number[0] if number else k.i64(1)
        filters, image = (lines * tiling.steps * WORDS for lines in self.fetched)
        tiles = sum(count for count, _ in split)
        k.configure_tiles()
        with k.loop(0, tiling.points) as point, k.loop(0, blocks) as block:
            here = u + (block * tiling.u_size + point * tiling.u_stride)
            following = k.select(block + 1 < blocks, here + tiling.u_size, u + (point + 1) * tiling.u_stride)
            ahead = v + ((point + 1) * tiling.v_stride + block * (tiles * image))
            for size, tile, part in each_register_tile(k, split):
                source = v + (point * tiling.v_stride + tile * tiling.v_tile)
                target = out + (block * tiling.m_size + point * tiling.m_stride + tile * tiling.TK)
                k.call(self.registers[size], source, here, following + part * filters, ahead + part * image, target)
        k.release_tiles()
        return k


def splitting(tiling: MatrixTiling) -> float:
    """What it takes to split the transformed input, in vectors of the machine's probe.

    A part takes about as many instructions as those do into which five go.

    Parameters
    ----------
    tiling : MatrixTiling

    Returns
    -------
    float
    """
    tiles = tiling.correlation.groups * tiling.tile_rows * tiling.columns.tiles
    return tiles * tiling.points * tiling.c_blocks * tiling.parts


def multiplied(tiling: MatrixTiling, machine: Machine) -> float:
    """Seconds of one thread that did all products of tiles.

    Parameters
    ----------
    tiling : MatrixTiling
    machine : Machine

    Returns
    -------
    float
    """
    of_unit = sum(number * math.ceil(rows * tiling.columns.tiles / TILE_ROWS) for number, rows in tiling.chunk_sizes)
    blocks = tiling.correlation.groups * tiling.k_blocks * tiling.filter_tiles
    steps = of_unit * blocks * tiling.points * tiling.steps * tiling.products
    return TILE_FLOPS["bfloat16"] * steps * machine.threads / machine.tiles(tiling.matrix_unit, "bfloat16")
