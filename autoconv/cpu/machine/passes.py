"""Several measurements of one machine: what they say together, and whether they agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoconv.cpu.machine.checks import CURVES
from autoconv.cpu.machine.curve import Curve, falling, levels
from autoconv.cpu.machine.model import BUSY, Machine

AGREED = 0.1  # the share by which a peak may fall short of another measurement's
STEADY = 0.5  # ... and by which one wait, which varies, may exceed another
REPEATS = 2  # further samples of a wait that do not agree with an earlier pass's


def settled(found: Sequence[Machine]) -> bool:
    """Whether no further measurement is asked for: two agree, and one of them had the processor to itself."""
    return disturbance(found) <= BUSY


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


def steady(sample: Callable[[], float], earlier: list[float]) -> float:
    """A wait: the least of as many samples as it takes to agree with an earlier pass, or a few.

    Parameters
    ----------
    sample : callable
        Gives the seconds of a wait.
    earlier : list of float
        What earlier passes found; gets this one's.

    Returns
    -------
    float
    """
    found = sample()
    for _ in range(REPEATS):
        if not earlier or found * STEADY <= min(earlier):
            break
        found = min(found, sample())
    earlier.append(found)
    return found


def disturbance(found: Sequence[Machine]) -> float:
    """The share of the processor that some measurements lacked, as far as they tell.

    Parameters
    ----------
    found : sequence of Machine
        Two at least.

    Returns
    -------
    float
        That of the least busy; or the share by which no two of them agree, where that is more than chance.
    """
    peaks, waits = disagreement(found), unsteadiness(found)
    return max(
        min(machine.busy for machine in found), peaks if peaks > AGREED else 0.0, waits if waits > STEADY else 0.0
    )


def unsteadiness(found: Sequence[Machine]) -> float:
    """The share by which the next least wait of some measurements exceeds the least, of a region or of waking.

    Parameters
    ----------
    found : sequence of Machine
        Two at least.

    Returns
    -------
    float
    """
    regions = sorted((machine.call or 0.0) + (machine.barrier or 0.0) for machine in found)
    wakes = sorted(machine.wake or 0.0 for machine in found)
    return max(1 - least / following if following else 0.0 for least, following, *_ in (regions, wakes))


def merged(found: Sequence[Machine]) -> Machine:
    """What some measurements say together: the best of each quantity.

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

    def best(name: str, of: Callable[[list[Any]], Any]) -> Any:
        """None of what was not measured."""
        return None if None in each(name) else of(each(name))

    curves: dict[str, Any] = {name: best(name, _fastest if name == "handed" else _best) for name in CURVES}
    return replace(
        found[0],
        peaks={
            unit: {dtype: max(peaks[unit][dtype] for peaks in each("peaks")) for dtype in rates}
            for unit, rates in found[0].peaks.items()
        },
        transform=best("transform", max),
        call=best("call", min),
        barrier=best("barrier", min),
        wake=best("wake", min),
        caches=levels(curves["read_one"], curves["chase"] or curves["read_one"]),
        busy=disturbance(found),
        **curves,
    )


def _best(curves: Sequence[Curve]) -> Curve:
    """The curve of the best rate at every working set, none of which is slower than a larger one."""
    return falling(_fastest(curves).points)


def _fastest(curves: Sequence[Curve]) -> Curve:
    """The curve of the best rate at every working set."""
    columns = zip(*(curve.points for curve in curves), strict=True)
    return Curve(tuple((same[0][0], max(rate for _, rate in same)) for same in columns))
