"""Ratios of times: their medians, 95 % intervals and geometric means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_ROUNDS = 6  # fewer have no 95 % interval of the median
RESAMPLES = 2000
BEHIND = 0.97  # a ratio that is surely below this is a loss


@dataclass(frozen=True)
class Ratio:
    """A median with its 95 % interval.

    >>> print(Ratio(1.25, 1.19, 1.304))
    1.25 [1.19 1.30]
    """

    median: float
    low: float
    high: float

    @property
    def behind(self) -> bool:
        """Whether all of the interval is a loss."""
        return self.high < BEHIND

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f} {self.high:.2f}]"


def interval(samples: Sequence[float]) -> Ratio:
    """The median, between the closest order statistics that hold the true one in 95 of 100 cases.

    That the k-th least of n lies above the true median, or the k-th largest below, has the probability
    2 P(fewer than k heads in n throws). Fewer than 6 samples are too few: their extremes are given.

    >>> interval([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0, 7.0, 6.0])
    Ratio(median=5.0, low=2.0, high=8.0)
    """
    n, ordered = len(samples), sorted(samples)
    outside, rank = 2.0 * 0.5**n, 0
    while outside <= 0.05:
        rank += 1
        outside += 2.0 * math.comb(n, rank) * 0.5**n
    rank = max(rank, 1)
    return Ratio(statistics.median(ordered), ordered[rank - 1], ordered[n - rank])


def ratios(baseline: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Round by round, the baseline's seconds divided by ours: above 1 ours is faster."""
    return [theirs / our for theirs, our in zip(baseline, ours, strict=True)]


def geometric_mean(layers: Sequence[Sequence[float] | None]) -> Ratio | None:
    """Of the layers' median ratios; the interval by bootstrap, drawing every layer's rounds anew.

    It covers the noise of the clock, not the choice of layers. None where there is no layer, or one without ratios.
    """
    known = [rounds for rounds in layers if rounds is not None]
    if not known or len(known) < len(layers):
        return None
    generator = np.random.default_rng(0)
    logs = np.zeros(RESAMPLES)
    for rounds in known:
        drawn = generator.choice(np.asarray(rounds), (RESAMPLES, len(rounds)))
        logs += np.log(np.median(drawn, axis=1))
    low, high = np.exp(np.quantile(logs / len(known), (0.025, 0.975)))
    middle = statistics.geometric_mean([statistics.median(rounds) for rounds in known])
    return Ratio(middle, min(float(low), middle), max(float(high), middle))
