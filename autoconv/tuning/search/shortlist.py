"""The shortlist: the few candidates among which the best one is expected, since estimates err.

Estimates of a family err together, those of candidates that are alike more so, and each by something of its own. Random
worlds are drawn in which they err so; the next on the list is always who makes the best of the list quicker by most, on
average over the worlds. That is nearly as good as any list of so many: the gain of one more only falls (Nemhauser,
Wolsey and Fisher, "An Analysis of Approximations for Maximizing Submodular Set Functions", 1978; for the quickest of
some that are timed side by side: Ginsbourger, Le Riche and Carraro, "Kriging Is Well-Suited to Parallelize
Optimization", 2010).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autoconv.algorithm import Candidate
from autoconv.tuning.search.surrogate import Space

# Standard deviations of the logarithm of measured to estimated seconds: of what a family has in common, of what those
# have that are near each other, and of what each has of its own. They lie between those found, of 27 layers, on two
# processors of different vectors (`docs/pages/how-it-chooses.md`). And of what those share that store past the caches,
# as what that gains depends on what else the memory does: of 25 pairs of a layer and a family, on five processors.
OF_FAMILY, OF_NEAR, OF_ONE, OF_STREAMS = 0.14, 0.10, 0.085, 0.12
GAIN = 0.002  # the share by which one more has to make the best quicker
FEWEST = 2  # on any list, as the first may fail
MOST_DRAWN = 96  # of the least estimates
WORLDS = 1024


def shortlist(estimates: Mapping[Candidate, float], most: int) -> list[Candidate]:
    """The candidates to time, the most promising first; the first is that of the least estimate.

    Parameters
    ----------
    estimates : mapping of Candidate to float
        Seconds.
    most : int
        No more than so many.

    Returns
    -------
    list of Candidate

    Examples
    --------
    >>> wide, wider, other = (Candidate(name, (("TK", n),)) for name, n in (("gemm", 32), ("gemm", 33), ("fft", 8)))
    >>> [str(candidate) for candidate in shortlist({wide: 1.0, wider: 1.01, other: 1.02}, 2)]
    ['gemm[TK=32]', 'fft[TK=8]']
    """
    ranked = sorted(estimates, key=estimates.__getitem__)[:MOST_DRAWN]
    if not ranked or not most:
        return []
    seconds = np.array([[estimates[candidate]] for candidate in ranked]) * np.exp(_errors(ranked))
    chosen, best = [0], seconds[0]
    while len(chosen) < min(most, len(ranked)):
        expected = np.minimum(seconds, best).mean(1)
        expected[chosen] = np.inf
        new = int(expected.argmin())
        if len(chosen) >= FEWEST and expected[new] > (1 - GAIN) * best.mean():
            break
        chosen.append(new)
        best = np.minimum(seconds[new], best)
    return [ranked[place] for place in chosen]


def _errors(candidates: list[Candidate]) -> Any:
    """By how much, as a logarithm, the estimate of each candidate errs in each world."""
    rng = np.random.default_rng(0)  # the same worlds in every process
    errors = OF_ONE * rng.standard_normal((len(candidates), WORLDS))
    for family in dict.fromkeys(candidate.algorithm for candidate in candidates):
        places = [place for place, candidate in enumerate(candidates) if candidate.algorithm == family]
        space = Space([candidates[place] for place in places])
        errors[places] += OF_FAMILY * rng.standard_normal(WORLDS) + OF_NEAR * space.functions(rng, WORLDS)
    streams = [place for place, candidate in enumerate(candidates) if candidate.params.get("nt")]
    errors[streams] += OF_STREAMS * rng.standard_normal(WORLDS)
    return errors
