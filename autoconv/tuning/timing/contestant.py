"""Who takes part in a race, and what it finds of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoconv.algorithm import Candidate


@dataclass(frozen=True)
class Contestant:
    """A candidate that was built and verified, and what counts in comparing it with others.

    Attributes
    ----------
    candidate : Candidate
    cold, hot : callable
        Run it once and give the seconds, as in `Stopwatch`.
    pack : callable or None
        The same for packing the filters, where they are packed.
    workspace, packed : int
        Bytes of scratch memory of a run, and of the packed filters.
    error, deterministic, tf32
        As in `Facts`.
    exact, keeps_denormals : bool
        As its algorithm has them.
    pool : str
        The thread pool that it runs on.
    vendor : str or None
        The library that it calls.
    """

    candidate: Candidate
    cold: Callable[[], float]
    hot: Callable[[], float]
    pack: Callable[[], float] | None = None
    workspace: int = 0
    packed: int = 0
    error: float = 0.0
    deterministic: bool = True
    tf32: bool = False
    exact: bool = False
    keeps_denormals: bool = True
    pool: str = ""
    vendor: str | None = None

    def retired(self) -> Contestant:
        """The same without what runs it, so that its kernel and packed filters need no memory any more."""
        return replace(self, cold=_gone, hot=_gone, pack=None)

    def undercuts(self, other: Contestant) -> bool:
        """Whether no limit a caller may set allows `other` and refuses this one."""
        return (
            self.workspace <= other.workspace
            and self.workspace + self.packed <= other.workspace + other.packed
            and self.error <= other.error
            and self.deterministic >= other.deterministic
            and self.tf32 <= other.tf32
            and self.exact >= other.exact
            and self.keeps_denormals >= other.keeps_denormals
            and self.vendor in (None, other.vendor)
        )


@dataclass(frozen=True)
class Timing:
    """What a race found of one contestant.

    Attributes
    ----------
    time : float
        Seconds: of who raced in the final the median of its samples there, of the others the least at the final's pace.
    hot, pack : float
        The least of their samples, in seconds; `hot` is None where it was not taken.
    spread : float
        Half the interquartile range of `time`'s samples over their median.
    samples : int
        How many `time` is of.
    dropped_by : Candidate or None
        The rival against which it cannot win under any limits, where that ended its timing early.
    """

    time: float
    hot: float | None
    pack: float
    spread: float
    samples: int
    dropped_by: Candidate | None = None


def _gone() -> float:
    raise RuntimeError("a retired contestant does not run")
