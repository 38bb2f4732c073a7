"""One clock for the times of several races."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from autoconv.algorithm import Candidate

if TYPE_CHECKING:
    from autoconv.records.schema import Facts, Race

Counts = Callable[[Candidate, "Facts"], bool]  # whether facts say something of a candidate as it is today


def clocks(races: Sequence[Race], counts: Counts) -> list[float | None]:
    """By what to multiply each race's times to put them on the clock of the first with times that count, or with any.

    Who ran in two races at the same version tells how they compare; where nobody did, who ran in both at any: else a
    race of those that have changed since, and of one that has not, would hide what others know of those as they are.

    Parameters
    ----------
    races : sequence of Race
        In the order in which they are to be believed.
    counts : callable

    Returns
    -------
    list of float or None
        None for a race that is not comparable.
    """
    counted = [any(facts.timed and counts(c, facts) for c, facts in race.facts.items()) for race in races]
    timed = [{(c, facts.version): facts.time for c, facts in race.facts.items() if facts.timed} for race in races]
    first = max(range(len(races)), key=lambda i: (counted[i], bool(timed[i])), default=0)
    found = [1.0 if i == first else None for i in range(len(races))]
    common = dict(timed[first]) if races else {}
    while True:
        left = [i for i, clock in enumerate(found) if clock is None]
        named = {candidate: time for (candidate, _), time in common.items()}
        alike = ((i, [common[key] / time for key, time in timed[i].items() if key in common]) for i in left)
        akin = ((i, [named[c] / time for (c, _), time in timed[i].items() if c in named]) for i in left)
        link = next(((i, shared) for i, shared in itertools.chain(alike, akin) if shared), None)
        if link is None:
            return found
        i, shared = link
        factor = found[i] = median(shared)
        common = {key: time * factor for key, time in timed[i].items()} | common  # which may join earlier ones
