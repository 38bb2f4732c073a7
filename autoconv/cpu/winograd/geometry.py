"""The geometry of a Winograd convolution: points, tiles, the sizes of tiles worth trying, the errors allowed.

Minimal filtering F(m, r) takes filters of r neighbouring taps. Strides, dilation and filters too large for a tile
become sums of such as `transform.geometry` says: Huang et al., "DWM: A Decomposable Winograd Method for Convolution
Acceleration" (2020), for large filters and strides; Yepez and Ko, "Stride 2 1-D, 2-D, and 3-D Winograd for
Convolutional Neural Networks" (2020), for stride 2. Here subfilters are summed before the inverse transform, so that
there is one for all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar

from autoconv.common.winograd_math import Transforms, transforms
from autoconv.cpu.codegen.ir import VECTOR_REGISTERS
from autoconv.cpu.common.correlation import CorrelationAxis
from autoconv.cpu.common.sums import WINOGRAD_TERMS
from autoconv.cpu.transform.geometry import TiledAxis, Tiling
from autoconv.layer import ConvLayer

# Points by size of tile. In pairs of sign, so that transforms share half their work; of those, the ones with the
# smallest measured float32 errors whose products are short binary fractions: small on average, and for the outputs of a
# tile that err most, at its corners. (On the choice of points: Barabasz, Anderson, Soodhalter and Gregg, "Error
# Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks", 2020.)
_POINTS = {
    1: "",
    2: "0",
    3: "1 -1",
    4: "0 1 -1",
    5: "1/2 -1/2 5/4 -5/4",
    6: "0 11/16 -11/16 23/16 -23/16",
    7: "5/16 -5/16 7/8 -7/8 13/8 -13/8",
    8: "0 1/2 -1/2 1 -1 2 -2",
    9: "1/4 -1/4 11/16 -11/16 9/8 -9/8 2 -2",
}
LARGEST_TILE = max(_POINTS)
# Tiles by vectors of the product's register tile, by registers, when filters fill one vector and when they fill two.
_REGISTER_TILES = {32: {1: 28, 2: 14}, 16: {1: 12, 2: 6}}
FEWEST_TAPS = 4  # of a block, among the candidates
TRANSFORMED = 15  # terms of a sum, whose rounding errs as much as the transforms do
MOST_GATHERS = 16  # vectors of channels that several subfilters share: each has code of its own


@functools.cache
def minimal(m: int, r: int) -> Transforms:
    """The transforms of F(m, r) on these points."""
    return transforms(m, r, tuple(map(Fraction, _POINTS[m + r - 1].split())))


@dataclass(frozen=True)
class WinogradAxis(TiledAxis):
    """One axis of a correlation in tiles of m outputs, its filters decomposed where they are too large."""

    @functools.cached_property
    def blocks(self) -> int:
        return -(-len(self.axis.taps) // (self.components * max(LARGEST_TILE + 1 - self.m, 1)))

    @functools.cached_property
    def transforms(self) -> Transforms:
        """Of F(m, r)."""
        return minimal(self.m, self.r)


@functools.lru_cache(1024)
def winograd_axis(axis: CorrelationAxis, m: int) -> WinogradAxis:
    """An axis in tiles of m outputs, or of one where a single tap leaves nothing to save."""
    tiled = WinogradAxis(axis, m)
    return tiled if tiled.r > 1 else WinogradAxis(axis, 1)


@dataclass(frozen=True)
class WinogradTiling(Tiling):
    """One correlation cut into tiles of m x m outputs, `terms` of a point's products added one after the other."""

    terms: int = field(default=WINOGRAD_TERMS, kw_only=True)

    @functools.cached_property
    def rows(self) -> WinogradAxis:
        return winograd_axis(self.correlation.rows, self.m[0])

    @functools.cached_property
    def columns(self) -> WinogradAxis:
        return winograd_axis(self.correlation.columns, self.m[1])

    @functools.cached_property
    def points(self) -> int:
        return self.rows.tile * self.columns.tile

    @functools.cached_property
    def vectors(self) -> int:
        return min(2, -(-self.correlation.K // self.lanes))

    @functools.cached_property
    def most_tiles(self) -> int:
        return _REGISTER_TILES[VECTOR_REGISTERS[self.instruction_set]][self.vectors]


@dataclass(frozen=True)
class StreamedTiling(WinogradTiling):
    """One whose images only memory holds."""

    ahead: ClassVar[bool] = True


def sizes(axis: CorrelationAxis) -> range:
    """Sizes of tiles worth trying along an axis: blocks of few taps save little."""
    taps = -(-len(axis.taps) // TiledAxis(axis, 1).components)
    return range(2, LARGEST_TILE + 2 - min(taps, FEWEST_TAPS)) if taps > 1 else range(1, 2)


def single_channels(layer: ConvLayer) -> list[str]:
    """The reason against a layer whose groups have a single channel: transforms would serve a single product each."""
    C, K = layer.C // layer.groups, layer.K // layer.groups
    return [f"channels of a group: expected at least 2 of input and output, got {C} and {K}"] if min(C, K) < 2 else []


def refusals_of(m: tuple[int, int], tilings: Sequence[Tiling]) -> list[str]:
    """Every reason against correlations in tiles of m outputs, in whatever direction."""
    reasons = []
    if (largest := max(m)) >= LARGEST_TILE:
        reasons.append(f"m: expected less than {LARGEST_TILE}, the most points that keep errors small, got {largest}")
    if (gathers := max([tiling.c_blocks for tiling in tilings if tiling.mixed], default=0)) > MOST_GATHERS:
        reasons.append(
            f"vectors of channels that several subfilters share: expected at most {MOST_GATHERS}, got {gathers}"
        )
    return reasons


def cap(axes: Iterable[TiledAxis]) -> float:
    """Largest float32 error, some times what was measured on random tiles of two channels and more."""
    return max(map(_cap, axes))


def _cap(tiled: TiledAxis) -> float:
    if tiled.tile <= 6:
        return 4e-6
    return 1e-5 if tiled.tile == 7 or (tiled.tile == 8 and tiled.m <= 4) else 3e-5


def usual_error(rows: WinogradAxis, columns: WinogradAxis, terms: float, rms: bool = False) -> float:
    """What tiles usually err in float32, of so many terms of a sum, by the measure of records: at worst, or RMS.

    The unit roundoff, times the growth along either axis, over the fourth root of the terms. Of 3000 errors of
    `winograd` on record, half are 0.9 to 1.5 times that, and 98 % 0.45 to 3.6 times.
    """
    growth = _growth(rows.m, rows.r, rms) * _growth(columns.m, columns.r, rms)
    return 2.0**-24 * growth / math.pow(terms, 0.25)


def share_of_error(channels: int, terms: int) -> float:
    """What is left of that where so many terms of a point's sum are added one after the other, not `WINOGRAD_TERMS`.

    The square of a sum's relative error grows with the terms of a part and with the parts, which are added in the same
    way (Higham, "The Accuracy of Floating Point Summation", 1993); transforms add as much as `TRANSFORMED` terms. Of 64
    to 512 channels and tiles of 2x2 to 7x7 that is within 3 % of the RMS errors measured.
    """

    def square(part: int) -> float:
        return min(part, channels) + channels / min(part, channels) + TRANSFORMED

    return math.sqrt(square(terms) / square(WINOGRAD_TERMS))


@functools.cache
def _growth(m: int, r: int, rms: bool) -> float:
    """How much transforms enlarge independent errors of the products, for a tile's output that errs most, or RMS.

    The products of point p are as large as its rows of `BT` and `G`, and output o weighs them by `AT[o, p]`, so that
    the squares of errors add up to `sum_p AT[o, p]^2 |BT[p]|^2 |G[p]|^2`.
    """
    AT, G, BT = minimal(m, r).arrays()
    squares = (AT**2) @ ((BT**2).sum(1) * (G**2).sum(1))
    return math.sqrt(squares.mean() if rms else squares.max())
