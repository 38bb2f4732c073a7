"""`Curve`: a rate by working set, as it was measured at some of them."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Bytes, or loads, per second by working set.

    Attributes
    ----------
    points : tuple of (int, float)
        Bytes of the working set, ascending, and the rate measured.
    """

    points: tuple[tuple[int, float], ...]

    def rate(self, nbytes: float) -> float:
        """The rate of a working set: between two that were measured on a line of logarithms, outside as at the end.

        Parameters
        ----------
        nbytes : float
            Of the working set.

        Returns
        -------
        float
            As the points have it.

        Examples
        --------
        >>> curve = Curve(((1024, 8e9), (4096, 2e9)))
        >>> curve.rate(512), round(curve.rate(2048)), curve.rate(1 << 20)
        (8000000000.0, 4000000000, 2000000000.0)
        """
        right = bisect.bisect_left(self._sizes, nbytes)
        if right in (0, len(self.points)):
            return self.points[min(right, len(self.points) - 1)][1]
        (below, slow), (above, fast) = self.points[right - 1 : right + 1]
        share = math.log(nbytes / below) / math.log(above / below)
        return slow * math.exp(share * math.log(fast / slow))

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [size for size, _ in self.points]

    def end(self, begin: int, factor: float) -> int:
        """Where the level of a memory ends that holds the working set `begin`: the next one is that much slower.

        Parameters
        ----------
        begin : int
            Bytes.
        factor : float

        Returns
        -------
        int
            Bytes of the largest working set that is not slower by the factor.

        Examples
        --------
        >>> curve = Curve(((16, 8.0), (32, 7.0), (64, 3.0), (128, 3.0), (256, 1.0)))
        >>> curve.end(16, 2.0), curve.end(64, 2.0), curve.end(512, 2.0)
        (32, 128, 256)
        """
        least = self.rate(begin) / factor
        return next(
            (a for (a, _), (b, rate) in itertools.pairwise(self.points) if b > begin and rate < least), self.last
        )

    @property
    def last(self) -> int:
        """The largest working set, in bytes."""
        return self.points[-1][0]


def falling(points: Sequence[tuple[int, float]]) -> Curve:
    """The curve of what was measured: no working set is slower than a larger one, but for a disturbance.

    Parameters
    ----------
    points : sequence of (int, float)
        Bytes, ascending, and bytes per second.

    Returns
    -------
    Curve

    Examples
    --------
    >>> falling([(1, 9.0), (2, 5.0), (4, 7.0), (8, 1.0)]).points
    ((1, 9.0), (2, 7.0), (4, 7.0), (8, 1.0))
    """
    best, found = 0.0, []
    for size, rate in reversed(points):
        best = max(best, rate)
        found.append((size, best))
    return Curve(tuple(reversed(found)))


def levels(reading: Curve, chase: Curve) -> tuple[int, int, int]:
    """Bytes of the levels of memory that one thread finds.

    Latency tells the first two apart, which reading ahead hides; the last is told by reading, as a chain through so
    much memory rather shows how addresses are translated.

    Parameters
    ----------
    reading, chase : Curve
        As `Machine.read_one` and `Machine.chase`.

    Returns
    -------
    tuple of int
    """
    first = chase.end(chase.points[0][0], 2.0)
    second = max(chase.end(2 * first, 2.0), first)
    return first, second, max(reading.end(4 * second, 1.5), second)
