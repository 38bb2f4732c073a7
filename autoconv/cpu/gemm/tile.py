"""One register tile of `gemm`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Type, Value, ptr, widened
from autoconv.cpu.codegen.lines import TileLines
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import load_range, store_range
from autoconv.cpu.common.sums import channels_of_sum, sums_of
from autoconv.cpu.gemm.geometry import ChannelRange, PixelTiles, blocks_of
from autoconv.layer import ConvLayer


class GemmTile(NamedTuple):
    """One register tile: `blocks` blocks of `TK` channels of `pixels` pixels, `odd` of them single ones.

    Filters of blocks lie `block_pitch` elements apart, channels of the input `pitch`, `R` rows of taps `row_pitch`, and
    `taps` are the places of the taps in a row. Channels of the output lie `out_pitch` apart. The sums are those of a
    range of the channels: to them those in memory are added unless the range is the first, and they go there unless it
    is the last. So do those of a part of it where it is long. The last pixels are read with what follows them where
    `whole` vectors of the input may be read.

    While it sums, a tile fetches what it will store and add, if that lies `outside` the caches, and its share of the
    same pixels of other channels, where `shares` blocks share them.
    """

    TK: int
    channels: ChannelRange
    pitch: int
    out_pitch: int = 0
    block_pitch: int = 0
    R: int = 1
    row_pitch: int = 0
    taps: tuple[int, ...] = (0,)
    nt: bool = False
    blocks: int = 1
    pixels: int = 0
    odd: int = 0
    whole: bool = False
    outside: bool = False
    shares: int = 0


def tiles_of(
    m: Module, name: str, layer: ConvLayer, source: Type, K: int, tiles: Sequence[PixelTiles], tile: GemmTile
) -> dict[tuple[int, int, int], Function]:
    """Functions for tiles of so many pixels, channels of a block, and blocks; `tile` says the rest."""
    functions = {}
    for of_pixels in tiles:
        for TK, count in blocks_of(K, tile.TK):
            whole = TK == tile.TK
            for blocks in sorted({1, of_pixels.blocks if whole and of_pixels.blocks <= count else 1}):
                odd = of_pixels.odd if whole else 0
                one = tile._replace(TK=TK, blocks=blocks, pixels=of_pixels.pixels, odd=odd)
                writer = _TileWriter(m, f"{name}_{one.pixels}x{TK * blocks}", layer, source, one)
                functions[one.pixels, TK, blocks] = writer.emit()
    return functions


def each_block(
    k: Function, K: int, TK: int, first: Value, last: Value, together: int, visit: Callable[[Value, int, int], None]
) -> None:
    """`visit(block, channels, blocks)` for blocks first .. last - 1, so many together and then one by one.

    The very last may have fewer than TK channels.
    """
    if K >= TK:
        whole = k.min(last, K // TK)
        if 1 < together <= K // TK:
            several = first + (whole - first) // together * together
            with k.loop(first, several, together) as block:
                visit(block, TK, together)
            first = several
        with k.loop(first, whole) as block:
            visit(block, TK, 1)
    if K % TK:
        with k.if_(last.eq(K // TK + 1)):
            visit(k.i64(K // TK), K % TK, 1)


def sums_elements(tiles: Sequence[PixelTiles], lanes: int, TK: int) -> int:
    """Elements of the memory in which the largest of some tiles keeps its sums."""
    return max(tile.blocks * -(-tile.pixels // lanes) for tile in tiles) * lanes * TK


class _TileWriter:
    """Writes `function(x, w, following, out, residual, bias, sums)`, each pointing at the tile's first element.

    `following` is the first channel of the tile's share of what it fetches.
    """

    def __init__(self, m: Module, name: str, layer: ConvLayer, source: Type, tile: GemmTile) -> None:
        self.layer, self.tile = layer, tile
        element = DTYPES[layer.dtype]
        wide = widened(element)
        lanes = self.lanes = m.lanes(element)
        types = ptr(source), ptr(wide), ptr(source), *[ptr(element)] * 3, ptr(wide)
        k = self.k = m.function(name, *types, internal=True)
        x, w, *_, sums = k.args
        together = tile.pixels - tile.odd
        self.widths = [min(lanes, together - first) for first in range(0, together, lanes)]
        vectors, channels = len(self.widths), tile.blocks * tile.TK
        places = [[sums + (i * vectors + v) * lanes for v in range(vectors)] for i in range(channels)]
        odd_sums = sums + channels * vectors * lanes
        odd_places = [[odd_sums + (b * tile.odd + n) * tile.TK for n in range(tile.odd)] for b in range(tile.blocks)]
        self.acc = [[k.var(k.zero(wide, lanes)) for _ in row] for row in places]
        self.singles = [[k.var(k.zero(wide, tile.TK)) for _ in block] for block in odd_places]
        every = itertools.chain(*self.acc, *self.singles), itertools.chain(*places, *odd_places)
        self.kept = list(zip(*every, strict=True))
        self.source, self.filters = k.var(x), k.var(w)
        self.outputs = TileLines.of_tile(channels, (1, tile.pixels), (tile.out_pitch, 0, 1), element.bytes)
        shared = math.ceil(tile.blocks * tile.channels.C / tile.shares) if tile.shares else 0
        self.inputs = TileLines.of_tile(shared, (1, tile.pixels), (tile.pitch, 0, 1), source.bytes)

    def emit(self) -> Function:
        """The sums of a range of channels, kept in memory or stored."""
        tile = self.tile
        C, begins = tile.channels.C, tile.channels.begins
        self.unroll = 1 if tile.R > 1 else min(C, max(1, 4 // len(tile.taps)))
        each = channels_of_sum(tile.R * len(tile.taps), self.unroll)
        parts = sums_of(C, each)
        if parts == 1:
            self._rounds(C // self.unroll, C // self.unroll)
        else:
            if begins:
                self._keep()
            self._sum_of_parts(parts, each)
        if C % self.unroll:
            self._rows(C % self.unroll)
        if not (begins and parts == 1):
            self._add_kept()
        if tile.channels.ends:
            self._store()
        else:
            self._keep()
        return self.k

    def _sum_of_parts(self, parts: int, each: int) -> None:
        """Sums of so many channels each, of which the last stays in registers."""
        k, C = self.k, self.tile.channels.C
        number, fewest = k.var(k.i64(0)), (C - (parts - 1) * each) // self.unroll
        with k.forever() as leave_if:
            last = number.get().eq(parts - 1)
            self._rounds(k.select(last, k.i64(fewest), k.i64(each // self.unroll)), fewest, last)
            leave_if(last)
            self._add_kept()
            self._keep()
            for a, _ in self.kept:
                a.set(0)
            number.add(1)

    def _rounds(self, count: int | Value, fewest: int, last: Value | None = None) -> None:
        """So many times `unroll` channels, the last ones where nothing else is said: what these fetch is used next."""
        k, tile, source = self.k, self.tile, self.source
        with k.loop(0, count) as n:
            if tile.R > 1:
                with k.loop(0, tile.R) as row:
                    with k.if_(last) if last is not None else nullcontext():
                        self._fetch(n * tile.R + row, fewest * tile.R)
                    self._rows(1)
                source.set(source.get() + (tile.pitch - tile.R * tile.row_pitch))
            else:
                with k.if_(last) if last is not None else nullcontext():
                    self._fetch(n, fewest)
                self._rows(self.unroll)

    def _fetch(self, number: Value, rounds: int) -> None:
        """What a round, of at least so many, fetches."""
        k, tile = self.k, self.tile
        _, _, following, out, residual, *_ = k.args
        if tile.shares:
            self.inputs.fetch(k, number, rounds, None, following)
        if tile.outside and tile.channels.ends:
            self.outputs.fetch(k, number, rounds, None if tile.nt else out, residual if self.layer.residual else None)

    def _rows(self, count: int) -> None:
        """The next rows of taps, `count` channels' single ones or one of several."""
        tile, source, filters = self.tile, self.source, self.filters
        for c in range(count):
            for n, tap in enumerate(tile.taps):
                f = filters.get() + (c * len(tile.taps) + n) * tile.TK
                self._multiply(source.get() + (c * tile.pitch + tap), f)
        source.set(source.get() + (count * tile.pitch if tile.R == 1 else tile.row_pitch))
        filters.set(filters.get() + count * len(tile.taps) * tile.TK)

    def _multiply(self, p: Value, f: Value) -> None:
        """One tap of one channel: outer product of pixels and filters."""
        k, tile, lanes = self.k, self.tile, self.lanes
        seen = [lanes if tile.whole else width for width in self.widths]
        pixels = [load_range(k, p + v * lanes, lanes, 0, width) for v, width in enumerate(seen)]
        if pixels:
            for i, row in enumerate(self.acc):
                block, channel = divmod(i, tile.TK)
                one = k.broadcast(f + (block * tile.block_pitch + channel), lanes)
                for a, v in zip(row, pixels, strict=True):
                    a.fma(v, one)
        odd = [k.broadcast(p + sum(self.widths) + n, tile.TK) for n in range(tile.odd)]
        for block, row in enumerate(self.singles if odd else ()):
            several = k.load(f + block * tile.block_pitch, tile.TK)
            for single, pixel in zip(row, odd, strict=True):
                single.fma(several, pixel)

    def _add_kept(self) -> None:
        """Add what is in memory to the sums."""
        for a, p in self.kept:
            a.add(self.k.load(p, max(1, a.type.lanes)))

    def _keep(self) -> None:
        """Write the sums to memory."""
        for a, p in self.kept:
            self.k.store(a.get(), p)

    def _store(self) -> None:
        """Write the outputs, with the epilogue."""
        k, tile, lanes, epilogue = self.k, self.tile, self.lanes, Epilogue.of(self.layer)
        *_, out, residual, bias, _ = k.args
        for i, row in enumerate(self.acc):
            b = epilogue.of_channels(k.load, bias + i)
            bs = epilogue.of_channels(lambda place: k.broadcast(place, lanes), bias + i)
            for v, (a, width) in enumerate(zip(row, self.widths, strict=True)):
                place = i * tile.out_pitch + v * lanes
                r = load_range(k, residual + place, lanes, 0, width) if epilogue.residual else None
                result = epilogue.apply(k, a.get(), bs, r)
                if tile.nt:
                    k.store(result, out + place, nontemporal=True)
                else:
                    store_range(k, result, out + place, 0, width)
            for n, single in enumerate(self.singles[i // tile.TK]):
                place = i * tile.out_pitch + tile.pixels - tile.odd + n
                r = k.load(residual + place) if epilogue.residual else None
                one = k.extract(single.get(), i % tile.TK) if tile.TK > 1 else single.get()
                k.store(epilogue.apply(k, one, b, r), out + place)
