"""One register tile of `gemm`, and how channels and filters are cut into what its loops hold in cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, VECTOR_REGISTERS, Function, Module, Type, Value, Var, ptr, widened
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import load_range, store_range
from autoconv.cpu.common.rows import Run
from autoconv.layer import ConvLayer

PART = 64  # channels of a sum at a time: pixels of a tile stay in the first-level cache for all blocks of filters


class Shape(NamedTuple):
    """How the work is cut: KB channels by NV vectors in registers; filters of half the second-level cache."""

    KB: int
    NV: int
    nt: bool
    threads: int
    l2_bytes: int


class Part(NamedTuple):
    """Channels of a sum that are added in one go, and whether they are the first and the last of it."""

    C: int
    begins: bool = True
    ends: bool = True

    @classmethod
    def all(cls, C: int) -> list[Part]:
        """About `PART` channels each, all but the last as many; one of twice as many costs less than two."""
        each = math.ceil(C / (C // PART if C > 2 * PART else 1))
        starts = range(0, C, each)
        return [cls(min(each, C - c), c == 0, c == starts[-1]) for c in starts]


class Tile(NamedTuple):
    """One register tile: `KB` channels of `pixels` pixels, `odd` of them single ones.

    Channels of the input lie `pitch` elements apart, rows of taps `row_pitch`, and `taps` are the places of
    the taps in a row. Channels of the output lie `out_pitch` apart. The sums are those of a part of the channels:
    they go on from memory unless the part is the first, and back to it unless it is the last.
    """

    KB: int
    pixels: int
    odd: int
    R: int
    pitch: int
    row_pitch: int
    taps: tuple[int, ...]
    out_pitch: int
    nt: bool
    part: Part


def odd_pixels(instruction_set: str, KB: int, NV: int) -> int:
    """How many single pixels a tile can hold besides its vectors: a register each, with channels as lanes."""
    return max(0, min(4, VECTOR_REGISTERS[instruction_set] - KB * NV - NV - 2)) if KB & (KB - 1) == 0 else 0


def tiles_of(
    m: Module, name: str, layer: ConvLayer, source: Type, K: int, runs: Sequence[Run], tile: Tile
) -> dict[tuple[int, int], Function]:
    """Functions for tiles of so many pixels and channels; `tile` says the rest, and how many single pixels it takes."""
    lanes = m.lanes(DTYPES[layer.dtype])
    functions = {}
    for _, _, pixels in runs:
        for KB, _ in blocks_of(K, tile.KB):
            rest = pixels % lanes
            odd = rest if rest <= tile.odd and tile.KB == KB and pixels > lanes else 0
            one = tile._replace(KB=KB, pixels=pixels, odd=odd)
            functions[pixels, KB] = _tile(m, f"{name}_{pixels}x{KB}", layer, source, one)
    return functions


def blocks_of(K: int, KB: int) -> list[tuple[int, int]]:
    """Channel blocks as (channels, how many)."""
    return [(width, count) for width, count in ((KB, K // KB), (K % KB, 1)) if width and count]


def each_block(k: Function, K: int, KB: int, first: Value, last: Value, visit: Callable[[Value, int], None]) -> None:
    """`visit(block, channels)` for blocks first .. last - 1, of which the very last may have fewer than KB channels."""
    if K >= KB:
        with k.loop(first, k.min(last, K // KB)) as block:
            visit(block, KB)
    if K % KB:
        with k.if_(last.eq(K // KB + 1)):
            visit(k.i64(K // KB), K % KB)


def chunks_of(problem: Correlation, shape: Shape, itemsize: int, most: int) -> tuple[int, int]:
    """Blocks of KB channels, at most so many, whose filters fill half of the second-level cache; how many chunks."""
    blocks = -(-problem.K // shape.KB)
    taps = len(problem.rows.taps) * len(problem.columns.taps)
    kept = max(1, min(most, shape.l2_bytes // 2 // (shape.KB * problem.C * taps * itemsize)))
    chunks = -(-blocks // kept)
    return -(-blocks // chunks), chunks


def _tile(m: Module, name: str, layer: ConvLayer, source_type: Type, tile: Tile) -> Function:
    """`function(x, w, out, residual, bias, sums)`, each pointing at the tile's first element."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    k = m.function(name, ptr(source_type), ptr(wide), *[ptr(element)] * 3, ptr(wide), internal=True)
    x, w, out, residual, bias, sums = k.args
    together = tile.pixels - tile.odd
    widths = [min(lanes, together - first) for first in range(0, together, lanes)]
    places = [[sums + (i * len(widths) + v) * lanes for v in range(len(widths))] for i in range(tile.KB)]
    odd_places = [sums + (tile.KB * len(widths) * lanes + n * tile.KB) for n in range(tile.odd)]

    def begun(p: Value, n: int) -> Var:
        return k.var(k.zero(wide, n) if tile.part.begins else k.load(p, n))

    acc = [[begun(p, lanes) for p in row] for row in places]
    singles = [begun(p, tile.KB) for p in odd_places]
    source, filters = k.var(x), k.var(w)

    def rows(count: int) -> None:
        """The next rows of taps, `count` channels' single ones or one of several."""
        for c in range(count):
            for n, tap in enumerate(tile.taps):
                f = filters.get() + (c * len(tile.taps) + n) * tile.KB
                _multiply(k, acc, singles, widths, source.get() + (c * tile.pitch + tap), f)
        source.set(source.get() + (count * tile.pitch if tile.R == 1 else tile.row_pitch))
        filters.set(filters.get() + count * len(tile.taps) * tile.KB)

    if tile.R > 1:
        with k.loop(0, tile.part.C):
            with k.loop(0, tile.R):
                rows(1)
            source.set(source.get() + (tile.pitch - tile.R * tile.row_pitch))
    else:
        unroll = min(tile.part.C, max(1, 4 // len(tile.taps)))
        with k.loop(0, tile.part.C // unroll):
            rows(unroll)
        if tile.part.C % unroll:
            rows(tile.part.C % unroll)
    if not tile.part.ends:
        for variables, there in zip([*acc, singles], [*places, odd_places], strict=True):
            for a, p in zip(variables, there, strict=True):
                k.store(a.get(), p)
        return k
    epilogue = Epilogue.of(layer)
    for i, row in enumerate(acc):
        b = k.load(bias + i) if epilogue.bias else None
        bs = None if b is None else k.splat(b, lanes)
        for v, a in enumerate(row):
            place = i * tile.out_pitch + v * lanes
            r = load_range(k, residual + place, lanes, 0, widths[v]) if epilogue.residual else None
            result = epilogue.apply(k, a.get(), bs, r)
            if tile.nt:
                k.store(result, out + place, nontemporal=True)
            else:
                store_range(k, result, out + place, 0, widths[v])
        for n, single in enumerate(singles):
            place = i * tile.out_pitch + tile.pixels - tile.odd + n
            r = k.load(residual + place) if epilogue.residual else None
            one = k.extract(single.get(), i) if tile.KB > 1 else single.get()
            k.store(epilogue.apply(k, one, b, r), out + place)
    return k


def _multiply(
    k: Function, acc: Sequence[Sequence[Var]], singles: Sequence[Var], widths: Sequence[int], p: Value, f: Value
) -> None:
    """One tap of one channel: outer product of pixels and filters."""
    lanes = k.module.lanes(p.type.to) if p.type.to else 0
    pixels = [load_range(k, p + v * lanes, lanes, 0, width) for v, width in enumerate(widths)]
    for i, row in enumerate(acc):
        one = k.broadcast(f + i, lanes)
        for a, v in zip(row, pixels, strict=True):
            a.fma(v, one)
    if singles:
        several = k.load(f, len(acc))
        first = sum(widths)
        for n, single in enumerate(singles):
            single.fma(several, k.broadcast(p + first + n, len(acc)))
