"""Contestants of a race on a scripted clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

from autoconv.algorithm import Candidate
from autoconv.tuning.timing.contestant import Contestant, Timing
from autoconv.tuning.timing.race import Heat


class Machine:
    """A clock that only runs advance, and a log of what ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spinning = 0.0
        self.log: list[tuple[str, str]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.log.append(("", "sleep"))
        self.now += seconds

    def busy(self) -> float:
        """Of threads that spin until `spinning`."""
        return min(self.now, self.spinning)

    def runs(self, name: str, kind: str, script: Iterable[float | Exception]) -> Callable[[], float]:
        seconds: Iterator[float | Exception] = iter(script)

        def run() -> float:
            self.log.append((name, kind))
            value = next(seconds)
            if isinstance(value, Exception):
                raise value
            self.now += max(value, 0.0)
            return value

        return run

    def contestant(
        self, name: str, cold: float | Iterable[Any], hot: Any = None, pack: Any = None, **changes: Any
    ) -> Contestant:
        def script(value: Any) -> Iterable[Any]:
            return repeat(value) if isinstance(value, int | float) else value

        # The first hot run is the warm-up.
        warm = cold if isinstance(cold, int | float) else 1e-3
        hot = repeat(warm) if hot is None else script(hot)
        packed = None if pack is None else self.runs(name, "pack", script(pack))
        entrant = Contestant(
            Candidate(name), self.runs(name, "cold", script(cold)), self.runs(name, "hot", hot), packed
        )
        return replace(entrant, **changes)

    def race(self, *contestants: Contestant, **options: Any) -> dict[str, Timing | str]:
        return self.heats(contestants, **options)

    def heats(self, *entering: Iterable[Contestant], **options: Any) -> dict[str, Timing | str]:
        heat = Heat(options.pop("budget", None), clock=self.clock, sleep=self.sleep, busy=self.busy, **options)
        for contestants in entering:
            heat.enter([*contestants])
        found = heat.finish()
        return {str(candidate): result for candidate, result in found.items()}

    def samples(self, name: str, kind: str = "cold") -> int:
        return self.log.count((name, kind))


def timing(result: Timing | str) -> Timing:
    assert isinstance(result, Timing)
    return result
