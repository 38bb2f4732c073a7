"""One register tile of `gemm`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Type, Value, Var, ptr, widened
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
    is the last. So do those of a part of it where it is long.
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
                function = _tile(m, f"{name}_{one.pixels}x{TK * blocks}", layer, source, one)
                functions[one.pixels, TK, blocks] = function
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


def _tile(m: Module, name: str, layer: ConvLayer, source_type: Type, tile: GemmTile) -> Function:
    """`function(x, w, out, residual, bias, sums)`, each pointing at the tile's first element."""
    element = DTYPES[layer.dtype]
    wide = widened(element)
    lanes = m.lanes(element)
    k = m.function(name, ptr(source_type), ptr(wide), *[ptr(element)] * 3, ptr(wide), internal=True)
    x, w, out, residual, bias, sums = k.args
    together = tile.pixels - tile.odd
    widths = [min(lanes, together - first) for first in range(0, together, lanes)]
    channels = tile.blocks * tile.TK
    places = [[sums + (i * len(widths) + v) * lanes for v in range(len(widths))] for i in range(channels)]
    odd_sums = sums + channels * len(widths) * lanes
    odd_places = [[odd_sums + (b * tile.odd + n) * tile.TK for n in range(tile.odd)] for b in range(tile.blocks)]

    def zeros(number: int, n: int) -> list[Var]:
        return [k.var(k.zero(wide, n)) for _ in range(number)]

    acc = [zeros(len(row), lanes) for row in places]
    singles = [zeros(len(block), tile.TK) for block in odd_places]
    kept = list(zip(itertools.chain(*acc, *singles), itertools.chain(*places, *odd_places), strict=True))
    source, filters = k.var(x), k.var(w)

    def rows(count: int) -> None:
        """The next rows of taps, `count` channels' single ones or one of several."""
        for c in range(count):
            for n, tap in enumerate(tile.taps):
                f = filters.get() + (c * len(tile.taps) + n) * tile.TK
                _multiply(k, tile, acc, singles, widths, source.get() + (c * tile.pitch + tap), f)
        source.set(source.get() + (count * tile.pitch if tile.R == 1 else tile.row_pitch))
        filters.set(filters.get() + count * len(tile.taps) * tile.TK)

    C = tile.channels.C
    unroll = 1 if tile.R > 1 else min(C, max(1, 4 // len(tile.taps)))

    def rounds(count: int | Value) -> None:
        """So many times `unroll` channels."""
        with k.loop(0, count):
            if tile.R > 1:
                with k.loop(0, tile.R):
                    rows(1)
                source.set(source.get() + (tile.pitch - tile.R * tile.row_pitch))
            else:
                rows(unroll)

    def add_kept() -> None:
        for a, p in kept:
            a.add(k.load(p, max(1, a.type.lanes)))

    def keep() -> None:
        for a, p in kept:
            k.store(a.get(), p)

    each = channels_of_sum(tile.R * len(tile.taps), unroll)
    parts = sums_of(C, each)
    if parts == 1:
        rounds(C // unroll)
    else:
        if tile.channels.begins:
            keep()
        number = k.var(k.i64(0))
        with k.forever() as leave_if:
            last = number.get().eq(parts - 1)
            rounds(k.select(last, k.i64((C - (parts - 1) * each) // unroll), k.i64(each // unroll)))
            leave_if(last)
            add_kept()
            keep()
            for a, _ in kept:
                a.set(0)
            number.add(1)
    if C % unroll:
        rows(C % unroll)
    if not (tile.channels.begins and parts == 1):
        add_kept()
    if not tile.channels.ends:
        keep()
        return k
    epilogue = Epilogue.of(layer)
    for i, row in enumerate(acc):
        b = epilogue.of_channels(k.load, bias + i)
        bs = epilogue.of_channels(lambda place: k.broadcast(place, lanes), bias + i)
        for v, a in enumerate(row):
            place = i * tile.out_pitch + v * lanes
            r = load_range(k, residual + place, lanes, 0, widths[v]) if epilogue.residual else None
            result = epilogue.apply(k, a.get(), bs, r)
            if tile.nt:
                k.store(result, out + place, nontemporal=True)
            else:
                store_range(k, result, out + place, 0, widths[v])
        for n, single in enumerate(singles[i // tile.TK]):
            place = i * tile.out_pitch + tile.pixels - tile.odd + n
            r = k.load(residual + place) if epilogue.residual else None
            one = k.extract(single.get(), i % tile.TK) if tile.TK > 1 else single.get()
            k.store(epilogue.apply(k, one, b, r), out + place)
    return k


def _multiply(
    k: Function,
    tile: GemmTile,
    acc: Sequence[Sequence[Var]],
    singles: Sequence[Sequence[Var]],
    widths: Sequence[int],
    p: Value,
    f: Value,
) -> None:
    """One tap of one channel: outer product of pixels and filters."""
    lanes = k.module.lanes(p.type.to) if p.type.to else 0
    pixels = [load_range(k, p + v * lanes, lanes, 0, width) for v, width in enumerate(widths)]
    if pixels:
        for i, row in enumerate(acc):
            block, channel = divmod(i, tile.TK)
            one = k.broadcast(f + (block * tile.block_pitch + channel), lanes)
            for a, v in zip(row, pixels, strict=True):
                a.fma(v, one)
    odd = [k.broadcast(p + sum(widths) + n, tile.TK) for n in range(tile.odd)]
    for block, row in enumerate(singles if odd else ()):
        several = k.load(f + block * tile.block_pitch, tile.TK)
        for single, pixel in zip(row, odd, strict=True):
            single.fma(several, pixel)
