"""Several measurements of one machine: what they say together, and whether they agree."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoconv.cpu.machine.curve import Curve, falling, levels
from autoconv.cpu.machine.model import BUSY, CURVES, Machine

AGREED = 0.1  # the share by which a peak may fall short of another measurement's


def settled(found: Sequence[Machine]) -> bool:
    """Whether no further measurement is asked for: two agree, and one of them had the processor to itself."""
    return disagreement(found) <= AGREED and min(machine.busy for machine in found) <= BUSY


def disagreement(found: Sequence[Machine]) -> float:
    """The share by which the best of some measurements exceeds the next best, of the peak on which they differ most.

    Whatever disturbs a measurement makes it slower: two that were not disturbed are alike, and the best is one of them.

    Parameters
    ----------
    found : sequence of Machine
        Two at least.

    Returns
    -------
    float
    """
    types = [(unit, dtype) for unit, rates in found[0].peaks.items() for dtype in rates]
    ranked = (sorted(machine.peaks[unit][dtype] for machine in found) for unit, dtype in types)
    return max(1 - rates[-2] / rates[-1] for rates in ranked)


def merged(found: Sequence[Machine]) -> Machine:
    """What some measurements say together: the best of each rate, and of waits, which vary, the median.

    Parameters
    ----------
    found : sequence of Machine
        Two at least, of the same quantities at the same working sets.

    Returns
    -------
    Machine
        Marked as busy where no two of them agree, or none had the processor to itself.
    """

    def each(name: str) -> list[Any]:
        return [getattr(machine, name) for machine in found]

    curves: dict[str, Any] = {name: _best(each(name)) for name in CURVES}
    apart = disagreement(found)
    return replace(
        found[0],
        peaks={
            unit: {dtype: max(peaks[unit][dtype] for peaks in each("peaks")) for dtype in rates}
            for unit, rates in found[0].peaks.items()
        },
        transform=max(each("transform")),
        call=min(each("call")),
        barrier=statistics.median(each("barrier")),
        wake=statistics.median(each("wake")),
        caches=levels(curves["read_one"], curves["chase"]),
        busy=max(min(each("busy")), apart if apart > AGREED else 0.0),
        **curves,
    )


def _best(curves: Sequence[Curve]) -> Curve:
    """The curve of the best rate at every working set."""
    columns = zip(*(curve.points for curve in curves), strict=True)
    return falling([(same[0][0], max(rate for _, rate in same)) for same in columns])
