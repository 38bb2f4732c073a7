"""The geometry of a tiled Fourier convolution: where tiles lie, and where their spectra lie in memory.

An overlap-save tile of T inputs gives `T - r + 1` outputs that the circular sum does not spoil. Strides,
dilation and gradients fall into pieces of unit stride as they do for minimal filtering, whose grids, phases
and channel blocks serve here too. Where one tile holds a whole axis, the ends of the circle may share their
padding: 64 outputs of 15 taps, padded by 7, need 71 inputs and not 78.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, correlations
from autoconv.cpu.fft.dft import factors
from autoconv.cpu.transform.geometry import Plan, Side
from autoconv.layer import ConvLayer

LENGTHS = tuple(n for n in range(2, 101, 2) if factors(n, "a") and factors(n, "b"))
# Tiles of the product's register tile: three sums each.
_REGISTER_TILES = {"avx512": 9, "avx2": 3, "generic": 3}


@dataclass(frozen=True)
class Whole(Side):
    """One axis of a correlation, the taps of a phase all in one block."""

    @functools.cached_property
    def blocks(self) -> int:
        return 1

    @functools.cached_property
    def r(self) -> int:
        return -(-len(self.axis.taps) // self.phases)


@dataclass(frozen=True)
class Circle(Whole):
    """One axis of a correlation in tiles of `length` inputs and m outputs."""

    length: int

    @functools.cached_property
    def r(self) -> int:
        """Taps of a filter that fills a tile; the missing ones are zeros."""
        return self.length - self.m + 1


def circle(axis: CorrelationAxis, length: int, pairs: bool = False) -> Circle | None:
    """The axis in tiles of a length, or None where its taps are too many; `pairs` wants tiles an even step apart."""
    one = Whole(axis, 1)
    if length >= one.count + one.r - 1 or _wraps(axis, length):
        return Circle(axis, one.count, length)
    step = 2 if pairs else 1
    m = (length - one.r + 1) // step * step
    if m < 1:
        return None
    tiles = -(-one.count // m)
    return Circle(axis, -(-one.count // tiles // step) * step, length)


def _wraps(axis: CorrelationAxis, length: int) -> bool:
    """Whether one tile will do, since whatever meets at the ends of its circle is padding on both sides."""
    side = Whole(axis, 1)
    span = side.count + side.r - 1

    def padding(place: int) -> bool:
        firsts = (
            grid * axis.stride + phase * side.gap + axis.offset
            for grid in range(side.grids)
            for phase in range(side.phases)
        )
        return all(not 0 <= side.period * place + first < axis.size for first in firsts)

    return length >= max(side.count, side.r) and all(
        padding(place) and padding(place - length) for place in range(length, span)
    )


def pieces(layer: ConvLayer) -> tuple[Correlation, ...]:
    """A layer's correlations; of a depthwise one with all channels in one group, whose lanes they can fill."""
    found = correlations(layer)
    return tuple(map(_one_group, found)) if depthwise(layer) else found


def depthwise(layer: ConvLayer) -> bool:
    """Whether every channel has one filter of its own."""
    return layer.depthwise and layer.K == layer.C


def _one_group(c: Correlation) -> Correlation:
    x, y = (strides._replace(channel=strides.group) for strides in (c.input, c.output))
    filters = c.filters._replace(k=c.filters.group, c=0)
    return dataclasses.replace(c, C=c.groups, K=c.groups, groups=1, input=x, output=y, filters=filters)


@dataclass(frozen=True)
class Spectra(Plan):
    """One correlation cut into tiles of `lengths` inputs, whose spectra are multiplied frequency by frequency.

    Where it is `gemm.packed`, every channel has a filter of its own, and a block of channels goes all the way by
    itself; else products are summed over channels.

    The spectrum of a tile of real numbers is known by half of its frequencies. Rows of it, vertical
    frequencies 1 to `T / 2 - 1`, are whole; of frequencies 0 and `T / 2`, spectra of real sequences
    themselves, half is kept. Real and imaginary parts are points of their own in memory.
    """

    lengths: tuple[int, int]
    pointwise: bool

    @functools.cached_property
    def rows(self) -> Circle:
        return Circle(self.correlation.rows, self.m[0], self.lengths[0])

    @functools.cached_property
    def columns(self) -> Circle:
        return Circle(self.correlation.columns, self.m[1], self.lengths[1])

    @functools.cached_property
    def taps(self) -> Spectra:
        """The same with its true number of taps on either axis."""
        return _Taps(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    def resized(self, rows: int, share: int) -> Spectra:
        """The same with other chunks."""
        return dataclasses.replace(self, chunk_rows=rows, share=share)

    @functools.cached_property
    def frequencies(self) -> int:
        """Complex numbers of a tile."""
        return self.lengths[0] * self.lengths[1] // 2 + 2

    @functools.cached_property
    def points(self) -> int:
        """Their parts."""
        return 2 * self.frequencies

    @functools.cached_property
    def depth(self) -> int:
        return 1 if self.pointwise else super().depth

    @functools.cached_property
    def vectors(self) -> int:
        return 1

    @functools.cached_property
    def pixels(self) -> int:
        return _REGISTER_TILES[self.instruction_set]

    @functools.cached_property
    def planes(self) -> int:
        """Parts of a number of the transformed input: real, imaginary and, for the product, their sum."""
        return 2 if self.pointwise else 3

    @functools.cached_property
    def v_size(self) -> int:
        return self.frequencies * self.planes * self.v_stride

    @functools.cached_property
    def kept(self) -> int:
        """Columns of a tile's output, in pairs."""
        return self.columns.m + self.columns.m % 2

    @functools.cached_property
    def half_size(self) -> int:
        """A tile's output before the vertical transform."""
        return (self.lengths[0] // 2 + 1) * self.kept * 2 * self.lanes

    @functools.cached_property
    def pack_stack(self) -> int:
        """Bytes of the stack that a vector of filters takes while it is transformed."""
        R, S = self.taps.rows.r, self.taps.columns.r
        return self.itemsize * self.lanes * (R * S + self.lengths[0] * (S + S % 2))

    @functools.cached_property
    def scratch_size(self) -> int:
        inputs = self.raw_size + self.rows.tile * self.pitch * self.lanes
        outputs = self.points * self.m_stride + self.rows.m * self.out_pitch * self.lanes + self.half_size
        return max(inputs, outputs)

    def workspace_bytes(self, threads: int) -> int:
        return -(-super().workspace_bytes(threads) // 64) * 64  # whole cache lines


class _Taps(Spectra):
    @functools.cached_property
    def rows(self) -> Whole:  # type: ignore[override]
        return Whole(self.correlation.rows, self.m[0])

    @functools.cached_property
    def columns(self) -> Whole:  # type: ignore[override]
        return Whole(self.correlation.columns, self.m[1])
