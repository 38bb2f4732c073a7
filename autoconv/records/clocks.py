"""One clock for the times of several races."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from autoconv.algorithm import Candidate

if TYPE_CHECKING:
    from autoconv.records.schema import Facts, Race

Counts = Callable[[Candidate, "Facts"], bool]  # whether facts say something of a candidate as it is today


def clocks(races: Sequence[Race], counts: Counts) -> list[float | None]:
    """By what to multiply each race's times to put them on the clock of the first with times that count, or with any.

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
        for i, times in enumerate(timed):
            shared = [common[key] / times[key] for key in times.keys() & common.keys()]
            if found[i] is None and shared:
                factor = found[i] = median(shared)
                common = {key: time * factor for key, time in times.items()} | common
                break  # earlier ones may have become comparable through this one
        else:
            return found
