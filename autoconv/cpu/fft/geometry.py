"""The geometry of a tiled Fourier convolution: where tiles lie, and where their spectra lie in memory.

An overlap-save tile of T inputs gives `T - r + 1` outputs that the circular sum does not spoil. Strides, dilation and
gradients fall into sums of unit stride as `transform.geometry` says. Where one tile holds a whole axis, the ends of the
circle may share their padding: 64 outputs of 15 taps, padded by 7, need 71 inputs and not 78.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from autoconv.cpu.codegen.ir import LINE, VECTOR_REGISTERS
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, correlations
from autoconv.cpu.fft.dft import factors
from autoconv.cpu.transform.geometry import TiledAxis, Tiling
from autoconv.layer import ConvLayer

LENGTHS = tuple(n for n in range(2, 101, 2) if factors(n, "a") and factors(n, "b"))
# Tiles of the product's register tile, by registers: three sums each.
_REGISTER_TILES = {32: 9, 16: 3}


@dataclass(frozen=True)
class CircularAxis(TiledAxis):
    """One axis of a correlation in tiles of `length` inputs and m outputs."""

    length: int

    @functools.cached_property
    def r(self) -> int:
        """Taps of a filter that fills a tile; the missing ones are zeros."""
        return self.length - self.m + 1


@functools.lru_cache(1024)  # asked of every candidate of a grid
def circular(axis: CorrelationAxis, length: int, pairs: bool = False) -> CircularAxis | None:
    """The axis in tiles of a length, or None where its taps are too many; `pairs` asks for tiles an even step apart."""
    one = TiledAxis(axis, 1)
    if length >= one.count + one.r - 1 or _wraps(axis, length):
        return CircularAxis(axis, one.count, length)
    step = 2 if pairs else 1
    m = (length - one.r + 1) // step * step
    if m < 1:
        return None
    tiles = -(-one.count // m)
    return CircularAxis(axis, -(-one.count // tiles // step) * step, length)


def _wraps(axis: CorrelationAxis, length: int) -> bool:
    """Whether one tile will do, since whatever meets at the ends of its circle is padding on both sides."""
    one = TiledAxis(axis, 1)
    span = one.count + one.r - 1

    def padding(place: int) -> bool:
        firsts = (
            residue * axis.stride + component * one.dilation + axis.offset
            for residue in range(one.residues)
            for component in range(one.components)
        )
        return all(not 0 <= one.period * place + first < axis.size for first in firsts)

    return length >= max(one.count, one.r) and all(
        padding(place) and padding(place - length) for place in range(length, span)
    )


def channelwise(layer: ConvLayer) -> bool:
    """Whether every channel has one filter of its own."""
    return layer.depthwise and layer.K == layer.C


def fourier_correlations(layer: ConvLayer) -> tuple[Correlation, ...]:
    """A layer's correlations; of a channelwise one with all channels in one group, whose lanes they can fill."""
    found = correlations(layer)
    return tuple(map(_one_group, found)) if channelwise(layer) else found


def _one_group(c: Correlation) -> Correlation:
    x, y = (strides._replace(channel=strides.group) for strides in (c.input, c.output))
    filters = c.filters._replace(k=c.filters.group, c=0)
    return dataclasses.replace(c, C=c.groups, K=c.groups, groups=1, input=x, output=y, filters=filters)


@dataclass(frozen=True)
class FourierTiling(Tiling):
    """One correlation cut into tiles of `lengths` inputs, whose spectra are multiplied frequency by frequency.

    Where it is `channelwise`, every channel has a filter of its own, and a block of channels goes all the way by
    itself; else products are summed over channels.

    The spectrum of a tile of real numbers is known by half of its frequencies. Rows of it, vertical
    frequencies 1 to `T / 2 - 1`, are whole; of frequencies 0 and `T / 2`, spectra of real sequences
    themselves, half is kept. Real and imaginary parts are points of their own in memory.
    """

    lengths: tuple[int, int]
    channelwise: bool

    @functools.cached_property
    def rows(self) -> CircularAxis:
        return CircularAxis(self.correlation.rows, self.m[0], self.lengths[0])

    @functools.cached_property
    def columns(self) -> CircularAxis:
        return CircularAxis(self.correlation.columns, self.m[1], self.lengths[1])

    @functools.cached_property
    def filter_axes(self) -> tuple[TiledAxis, TiledAxis]:
        """Both axes with their true number of taps."""
        return TiledAxis(self.correlation.rows, self.m[0]), TiledAxis(self.correlation.columns, self.m[1])

    def resized(self, rows: int, coop: int) -> FourierTiling:
        """The same with other chunks."""
        return dataclasses.replace(self, chunk_rows=rows, coop=coop)

    @functools.cached_property
    def frequencies(self) -> int:
        """Complex numbers of a tile."""
        return self.lengths[0] * self.lengths[1] // 2 + 2

    @functools.cached_property
    def product_planes(self) -> int:
        """Parts of a number of the filters and of the products: real and imaginary."""
        return 2

    @functools.cached_property
    def points(self) -> int:
        """Parts of all numbers."""
        return self.product_planes * self.frequencies

    @functools.cached_property
    def depth(self) -> int:
        return 1 if self.channelwise else super().depth

    @functools.cached_property
    def vectors(self) -> int:
        return 1

    @functools.cached_property
    def tasks(self) -> int:
        return self.chunks * self.k_blocks if self.channelwise else super().tasks

    @functools.cached_property
    def most_tiles(self) -> int:
        return _REGISTER_TILES[VECTOR_REGISTERS[self.instruction_set]]

    @functools.cached_property
    def planes(self) -> int:
        """Parts of a number of the transformed input: real, imaginary and, for the product, their sum."""
        return 2 if self.channelwise else 3

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
        R, S = (axis.r for axis in self.filter_axes)
        return self.itemsize * self.lanes * (R * S + self.lengths[0] * (S + S % 2))

    @functools.cached_property
    def scratch_size(self) -> int:
        inputs = self.raw_size + self.rows.tile * self.pitch * self.lanes
        return max(inputs, self.output_size + self.half_size)

    def workspace_bytes(self) -> int:
        return -(-super().workspace_bytes() // LINE) * LINE
