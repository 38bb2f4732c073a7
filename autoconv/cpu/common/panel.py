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
from autoconv.layer import ConvLayer

MOST_GROUPS = 16  # of vectors that are written out; more are a loop
MOST_STRIDE = 16  # of columns: a vector of every n-th pixel is picked from n of them


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
        axis, lanes = self.columns, self.lanes
        groups, step = -(-(axis.count + self._reach) // lanes), axis.stride * lanes
        first = min(max(0, -(axis.offset // step)), groups)  # of those that lie wholly in the image
        last = max(first, min((axis.size - axis.offset) // step, groups))
        looped = last - first > MOST_GROUPS
        for j in range(groups):
            if not (looped and first <= j < last):
                self._fill_group(k, row + (axis.offset + j * step), out + j * lanes, axis.offset + j * step)
        if looped:
            with k.loop(first, last) as number:
                self._fill_group(k, row + (number * step + axis.offset), out + number * lanes)

    def _fill_group(self, k: Function, source: Value, out: Value, column: int | None = None) -> None:
        """A vector of every component, of pixels from a column on; all inside the image unless the column is said."""
        assert out.type.to is not None
        lanes, stride, vectors = self.lanes, self.columns.stride, []
        for part in range(stride):
            low, high = 0, lanes
            if column is not None:
                low, high = max(0, -column - part * lanes), min(lanes, self.columns.size - column - part * lanes)
            if low >= high:
                vectors.append(k.zero(out.type.to, lanes))
            else:
                vectors.append(k.load(source + part * lanes, lanes, mask=k.mask(high, lanes, low)))
        for residue in self._residues:
            k.store(deinterleaved(k, vectors, stride, residue), out + residue * self.component_pitch)

    def clear(self, k: Function, out: Value) -> None:
        """A row of the panel that lies outside the image."""
        assert out.type.to is not None
        zero = k.zero(out.type.to, self.lanes)
        if self.pitch > MOST_GROUPS * self.lanes:
            with k.loop(0, self.pitch, self.lanes) as place:
                k.store(zero, out + place)
        else:
            for j in range(0, self.pitch, self.lanes):
                k.store(zero, out + j)


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


def strides_too_wide(layer: ConvLayer) -> list[str]:
    """The reason against columns of the image so far apart."""
    stride = layer.stride[1]
    return [f"stride: expected at most {MOST_STRIDE} columns, got {stride}"] if stride > MOST_STRIDE else []
