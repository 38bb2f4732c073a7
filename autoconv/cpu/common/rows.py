"""What the engines with pixels as lanes share: strips, tiles of a row, stores past the caches.

A strip is some rows of one image, copied so that kernels need no borders and no strides: widened to the type of
the sums, padded by zeros, and dealt out into one run of pixels per residue of the column modulo the stride: output
q, tap s then sees `strip[row, phase(s)][q + offset(s)]`, for every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from autoconv.cpu.codegen.ir import LINE, VECTOR_BYTES, Function, Value, i64
from autoconv.cpu.common.correlation import CorrelationAxis
from autoconv.cpu.common.lanes import deinterleaved
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cpu.device import CPU


@dataclass(frozen=True)
class Strip:
    """Where the columns of an axis lie in a strip made for vectors of `lanes`."""

    columns: CorrelationAxis
    lanes: int

    def offset(self, tap: int) -> int:
        """Elements from a strip's row to what output 0 sees through a tap."""
        whole, phase = divmod(self.columns.dilation * tap, self.columns.stride)
        return phase * self.phase_pitch + whole

    @property
    def _reach(self) -> int:
        """The farthest any tap sees beyond the output's own position."""
        return self.columns.dilation * max(0, len(self.columns.taps) - 1) // self.columns.stride

    @property
    def phase_pitch(self) -> int:
        """Elements of one phase: whole vectors of outputs can be read through every tap."""
        vectors = -(-self.columns.count // self.lanes)
        return -(-(vectors * self.lanes + self._reach) // self.lanes) * self.lanes

    @property
    def pitch(self) -> int:
        """Elements of one row."""
        phases = {self.columns.dilation * tap % self.columns.stride for tap in range(len(self.columns.taps))}
        return self.phase_pitch * (max(phases, default=0) + 1)

    def fill(self, k: Function, row: Value, out: Value) -> None:
        """Copy one row of the image, whose first element is `row`, to a row of the strip."""
        axis, lanes = self.columns, self.lanes
        phases = sorted({axis.dilation * tap % axis.stride for tap in range(len(axis.taps))})
        for j in range(-(-(axis.count + self._reach) // lanes)):
            vectors = []
            for part in range(axis.stride):
                column = axis.offset + (j * axis.stride + part) * lanes
                low, high = max(0, -column), min(lanes, axis.size - column)
                if low >= high:
                    vectors.append(k.zero(out.type.to, lanes) if out.type.to else row)
                else:
                    vectors.append(k.load(row + column, lanes, mask=k.mask(high, lanes, low)))
            for phase in phases:
                k.store(deinterleaved(k, vectors, axis.stride, phase), out + (phase * self.phase_pitch + j * lanes))

    def clear(self, k: Function, out: Value) -> None:
        """A row of the strip outside the image."""
        assert out.type.to is not None
        for j in range(0, self.pitch, self.lanes):
            k.store(k.zero(out.type.to, self.lanes), out + j)


class Run(NamedTuple):
    """`times` tiles of `pixels` each, from pixel `start` on."""

    start: int
    times: int
    pixels: int


def split(pixels: int, lanes: int, vectors: int, odd: int) -> list[Run]:
    """Cut a row of pixels into tiles of up to `vectors` vectors and `odd` single pixels.

    What is left over after whole tiles is dealt out to them as single pixels where they can take it; so the
    49 pixels of a 7x7 image are one tile, and the 196 of a 14x14 image four, at the cost of 48 and 192.
    """
    whole = vectors * lanes
    count, rest = divmod(pixels, whole)
    if count and rest % lanes and rest <= count * odd:
        more, longer = divmod(rest, count)
        first = whole + more + 1
        runs = [Run(0, longer, first), Run(longer * first, count - longer, whole + more)]
    else:
        runs = [Run(0, count, whole), Run(count * whole, 1, rest)]
    return [run for run in runs if run.times and run.pixels]


def no_streaming(layer: ConvLayer, device: CPU) -> list[str]:
    """Reasons against non-temporal stores."""
    reasons = []
    if layer.itemsize < 4:
        reasons.append(f"nt=1: {layer.dtype} is rounded on the way, and its vectors are not whole ones")
    if math.prod(layer.output_shape) * layer.itemsize < device.facts["l2_bytes"]:
        reasons.append("nt=1: the output stays in the second-level cache")
    return reasons


def in_lines(elements: int) -> int:
    """The least number of elements, of four bytes or eight, that are whole cache lines and hold so many."""
    return -(-elements // 16) * 16


def stream(k: Function, source: Value, out: Value, count: Value) -> None:
    """Copy so many elements, whole cache lines past the caches; what sticks out at the ends, as usual.

    A line written in both ways would cost a read of memory, and more.
    """
    assert source.type.to is not None
    lanes = k.module.lanes(source.type.to)
    size = source.type.to.bytes
    line = LINE // size
    head = k.min((-k.bits(out, i64) & (LINE - 1)) // size, count)
    whole = head + (count - head) // line * line

    def rest(first: int | Value, last: Value) -> None:
        with k.loop(first, last, lanes) as i:
            mask = k.mask(last - i, lanes)
            k.store(k.load(source + i, lanes, mask=mask), out + i, mask=mask)

    rest(0, head)
    with k.loop(head, whole, lanes) as i:
        k.store(k.load(source + i, lanes), out + i, nontemporal=True)
    rest(whole, count)


def launch_streaming(run: Function, out: Value, emit: Callable[[bool], None]) -> None:
    """`emit(True)` where the output is aligned for non-temporal stores, `emit(False)` where it is not."""
    with run.if_((run.bits(out, i64) & (VECTOR_BYTES[run.module.instruction_set] - 1)).eq(0)):
        emit(True)
    with run.else_():
        emit(False)
