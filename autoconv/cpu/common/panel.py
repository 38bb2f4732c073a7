"""Packed panels of input rows, and rows of pixels cut into tiles, for the families whose lanes are pixels.

A panel is some rows of one image, copied so that kernels need no borders and no strides: widened to the type of the
sums, padded by zeros, and deinterleaved into its polyphase components, one run of pixels for each residue of the column
modulo the stride. Output q then sees, through tap s, `panel[row, component(s)][q + offset(s)]`, for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autoconv.cpu.codegen.ir import Function, Value
from autoconv.cpu.common.correlation import CorrelationAxis
from autoconv.cpu.common.lanes import deinterleaved


@dataclass(frozen=True)
class PanelRow:
    """Where the columns of an axis lie in a row of a panel made for vectors of `lanes`."""

    columns: CorrelationAxis
    lanes: int

    def offset(self, tap: int) -> int:
        """Elements from the start of the row to what output 0 sees through a tap."""
        whole, residue = divmod(self.columns.dilation * tap, self.columns.stride)
        return residue * self.component_pitch + whole

    @property
    def _reach(self) -> int:
        """The farthest any tap sees beyond the output's own position."""
        return self.columns.dilation * max(0, len(self.columns.taps) - 1) // self.columns.stride

    @property
    def component_pitch(self) -> int:
        """Elements of one component: whole vectors of outputs can be read through every tap."""
        vectors = -(-self.columns.count // self.lanes)
        return -(-(vectors * self.lanes + self._reach) // self.lanes) * self.lanes

    @property
    def pitch(self) -> int:
        """Elements of one row."""
        return self.component_pitch * (max(self._residues, default=0) + 1)

    @property
    def _residues(self) -> list[int]:
        """The components that some tap sees."""
        return sorted({self.columns.dilation * tap % self.columns.stride for tap in range(len(self.columns.taps))})

    def fill(self, k: Function, row: Value, out: Value) -> None:
        """Copy one row of the image, whose first element is `row`, to a row of the panel."""
        assert out.type.to is not None
        axis, lanes = self.columns, self.lanes
        for j in range(-(-(axis.count + self._reach) // lanes)):
            vectors = []
            for part in range(axis.stride):
                column = axis.offset + (j * axis.stride + part) * lanes
                low, high = max(0, -column), min(lanes, axis.size - column)
                if low >= high:
                    vectors.append(k.zero(out.type.to, lanes))
                else:
                    vectors.append(k.load(row + column, lanes, mask=k.mask(high, lanes, low)))
            for residue in self._residues:
                one = deinterleaved(k, vectors, axis.stride, residue)
                k.store(one, out + (residue * self.component_pitch + j * lanes))

    def clear(self, k: Function, out: Value) -> None:
        """A row of the panel that lies outside the image."""
        assert out.type.to is not None
        for j in range(0, self.pitch, self.lanes):
            k.store(k.zero(out.type.to, self.lanes), out + j)


class Segment(NamedTuple):
    """`times` tiles of `pixels` each, from pixel `start` on."""

    start: int
    times: int
    pixels: int


def segments_of(pixels: int, lanes: int, vectors: int, odd: int) -> list[Segment]:
    """Cut a row of pixels into tiles of up to `vectors` vectors and `odd` single pixels.

    The remainder after whole tiles is shared out among them as single pixels where they can take it; so the
    49 pixels of a 7x7 image are one tile, and the 196 of a 14x14 image four, at the cost of 48 and 192.
    """
    whole = vectors * lanes
    count, rest = divmod(pixels, whole)
    if count and rest % lanes and rest <= count * odd:
        more, longer = divmod(rest, count)
        first = whole + more + 1
        segments = [Segment(0, longer, first), Segment(longer * first, count - longer, whole + more)]
    else:
        segments = [Segment(0, count, whole), Segment(count * whole, 1, rest)]
    return [segment for segment in segments if segment.times and segment.pixels]


def in_lines(elements: int) -> int:
    """The least number of elements, of four bytes or eight, that are whole cache lines and hold so many."""
    return -(-elements // 16) * 16


def pitch_of(elements: int) -> int:
    """Elements from one run of so many to the next: not a power of two, which would share few sets of a cache."""
    return in_lines(elements) + 16
