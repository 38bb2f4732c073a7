"""The cache lines of rows, and of a register tile in an image, fetched while another tile, or this one, sums.

A store waits for its line, which may lie in another core's cache or beyond, and so does the load of a residual.
Fetched all at once, lines fill the few places in which a core awaits any, and the loads of operands wait as well. So
every round of a sum fetches a few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoconv.cpu.codegen.ir import LINE, Function, Value

WRITTEN_OUT = 64  # lines that are fetched without a loop


def line_places(first: int, count: int, apart: int, itemsize: int) -> list[int]:
    """Of `count` elements so far apart, from the place `first` on: enough that no line of theirs is left out."""
    step = max(1, LINE // max(1, apart * itemsize))
    return [first + apart * n for n in sorted({*range(0, count, step), count - 1})]


def fetch_lines(k: Function, first: Value, count: int) -> None:
    """Fetch the lines of `count` elements on end, from `first` on; no processor looks beyond a page by itself."""
    assert first.type.to is not None
    step = LINE // first.type.to.bytes
    if count <= WRITTEN_OUT * step:
        for place in range(0, count, step):
            k.prefetch(first + place)
    else:
        with k.loop(0, count, step) as there:
            k.prefetch(first + there)


@dataclass(frozen=True)
class TileLines:
    """`items` channels or pixels of a tile, `apart` elements from one to the next, each with lines at `places`."""

    items: int
    apart: int
    places: tuple[int, ...]

    @classmethod
    def of_tile(cls, channels: int, shape: tuple[int, int], strides: tuple[int, int, int], itemsize: int) -> TileLines:
        """Of so many channels of rows and columns of pixels, `strides` elements apart (channels, rows, columns)."""
        (height, width), (channel, row, column) = shape, strides
        if channel > column:
            spots = [place for n in range(height) for place in line_places(n * row, width, column, itemsize)]
            return cls(channels, channel, tuple(spots))
        several, (few, between) = sorted(((height, row), (width, column)), reverse=True)
        spots = [place for n in range(few) for place in line_places(n * between, channels, channel, itemsize)]
        return cls(*several, tuple(spots))

    def fetch(self, k: Function, number: Value, rounds: int, written: Value | None, read: Value | None) -> None:
        """The share of round `number`, of so many at least: what comes later is fetched in none.

        Where there are fewer items than rounds, some fetch what was fetched: that costs less than a branch.
        """
        each = math.ceil(self.items / rounds)
        for n in range(each):
            item = number * each + n if each > 1 else number * self.items // rounds
            for place in self.places:
                if read is not None:
                    k.prefetch(read + (item * self.apart + place))
                if written is not None:
                    k.prefetch(written + (item * self.apart + place), write=True)
