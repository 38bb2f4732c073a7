"""The tuning record: measured facts of every candidate, race by race, and the JSON they are kept as.

Facts are kept, not verdicts: which candidate is best is asked at look-up, under the caller's limits, so a
smaller workspace or a tighter tolerance finds another winner without timing again. Candidates are text in JSON alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autoconv.algorithm import Candidate
from autoconv.errors import AutoconvError, RecordError
from autoconv.layer import ConvLayer
from autoconv.records.clocks import Counts, clocks
from autoconv.records.failures import is_killed, is_starved, is_unreached

SCHEMA = 1
MAX_RACES = 8  # of one record
MAX_CANDIDATES = 4096  # of one race
LONGEST = 500  # characters of any text in a record


@dataclass(frozen=True)
class Facts:
    """What was measured of one candidate in one race; seconds and bytes.

    Attributes
    ----------
    version : str
        `Algorithm.version` of what ran.
    failure : str or None
        Why it could not take part, in one line. `records.failures` has those that say nothing of it.
    time : float
        A run with cold filters, already packed, and a warm input, as `Timing.time`; inf where there is none.
    hot : float or None
        The quickest run with everything as the last run left it.
    pack : float
        Packing the filters.
    spread : float
        Half the interquartile range of `time`'s samples, relative to their median.
    samples : int
        How many samples `time` is of.
    workspace, packed : int
        Scratch of a run with packed filters, and the packed filters themselves.
    error : float
        As measured, by the measure of `Algorithm.bound`.
    deterministic, tf32 : bool
        Whether a second run gave the same bits, and whether it rounds operands to TF32.
    vendor : str or None
        The library it calls, if it is not our own.
    dropped_by : str or None
        The candidate that ended its timing after one or two samples: at least twice as fast, and no worse under any
        limits.

    Examples
    --------
    >>> Facts("1", time=2e-3, samples=9).timed
    True
    >>> Facts("1", failure="unreached: the budget of 1 s was spent").unreached
    True
    """

    version: str
    failure: str | None = None
    time: float = math.inf
    hot: float | None = None
    pack: float = 0.0
    spread: float = 0.0
    samples: int = 0
    workspace: int = 0
    packed: int = 0
    error: float = 0.0
    deterministic: bool = True
    tf32: bool = False
    vendor: str | None = None
    dropped_by: str | None = None

    def __post_init__(self) -> None:
        if self.failure is not None:  # often the text of an exception: any length, any characters
            words = " ".join(self.failure.split())[:LONGEST]
            object.__setattr__(self, "failure", "".join(c for c in words if c.isprintable()) or "unknown")

    @property
    def timed(self) -> bool:
        """Whether there is a time to compare."""
        return self.failure is None and 0 < self.time < math.inf

    @property
    def unreached(self) -> bool:
        """Whether nothing is known, because its turn never came."""
        return is_unreached(self.failure)

    @property
    def starved(self) -> bool:
        """Whether nothing is known for want of memory, of which there may be more the next time."""
        return is_starved(self.failure)

    @property
    def killed(self) -> bool:
        """Whether the system ended a worker for want of that memory."""
        return is_killed(self.failure)

    def scaled(self, factor: float) -> Facts:
        """The same facts on a clock that runs `factor` times as fast."""
        hot = None if self.hot is None else self.hot * factor
        return replace(self, time=self.time * factor, hot=hot, pack=self.pack * factor)

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    @classmethod
    def from_json(cls, data: object) -> Facts:
        """The facts a plain dict describes.

        Parameters
        ----------
        data : dict
            As `to_json` gives it.

        Returns
        -------
        Facts

        Raises
        ------
        RecordError
            When a field is missing, unknown, of a wrong type, out of bounds, or makes no sense.
        """
        facts = cls(**_checked(data, _FACTS, required=("version",)))
        if facts.failure is None and not facts.timed:
            raise RecordError("facts: expected a time or a failure, got neither")
        return facts


@dataclass(frozen=True)
class Race:
    """One uninterrupted run on one device, whose times can be compared with each other.

    Attributes
    ----------
    id : str
        A uuid4 in hex.
    when : str
        Its start in UTC, as `2026-11-20T12:00:00+00:00`.
    versions : dict of str
        The software of the device that times depend on, LLVM or NVRTC among it: `Device.versions`.
    isolated : bool
        Whether a worker process ran it.
    budget : float or None
        Seconds that it might take.
    facts : dict of Candidate to Facts
        What was found of every candidate that took part.
    covers : str
        Notes of the algorithms of which nothing was left to time after this race (`tuning.staleness`); or empty.
    """

    id: str
    when: str
    versions: dict[str, str]
    isolated: bool
    budget: float | None
    facts: dict[Candidate, Facts]
    covers: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return data | {"facts": {str(candidate): facts.to_json() for candidate, facts in self.facts.items()}}

    @classmethod
    def from_json(cls, data: object) -> Race:
        """The race a plain dict describes.

        Parameters
        ----------
        data : dict
            As `to_json` gives it.

        Returns
        -------
        Race

        Raises
        ------
        RecordError
            When a field is missing, unknown, of a wrong type, out of bounds, or makes no sense.
        """
        values = _checked(data, _RACE, required=_RACE)
        return cls(**values | {"facts": {_candidate(n): Facts.from_json(f) for n, f in values["facts"].items()}})


@dataclass(frozen=True)
class Record:
    """All that is known of one layer on one device.

    Attributes
    ----------
    layer, device : str
        `ConvLayer.key()` and `Device.key`.
    races : tuple of Race
        Oldest first.
    """

    layer: str
    device: str
    races: tuple[Race, ...] = ()

    def facts(self, counts: Counts = lambda candidate, facts: True) -> dict[Candidate, Facts]:
        """Every candidate's newest facts, those that count before all others, with all times on one clock.

        It is the clock of the newest race with times that count. Times of two races are compared only through
        candidates that ran in both, at the same version where there are such: another race is scaled by the median
        ratio of those it shares with the races already on the common clock. A race that no chain of shared candidates
        joins to that one cannot be compared; its times are left out, and only its failures count. A candidate that a
        newer race did not reach keeps its older facts.

        Parameters
        ----------
        counts : callable
            Whether facts of a candidate say something of it as it is today; all do unless given.

        Returns
        -------
        dict of Candidate to Facts
        """
        newest_first = self.races[::-1]
        believed = list(zip(newest_first, clocks(newest_first, counts), strict=True))
        found: dict[Candidate, Facts] = {}
        for counted, (race, clock) in itertools.product((True, False), believed):
            for candidate, facts in race.facts.items():
                known = found.get(candidate)
                if known is not None and not (known.unreached and facts.version == known.version):
                    continue
                if counts(candidate, facts) is not counted:
                    continue
                if facts.timed and clock is not None:
                    found[candidate] = facts if clock == 1.0 else facts.scaled(clock)
                elif not facts.timed and known is None:
                    found[candidate] = facts
        return found

    def with_race(self, race: Race, *, newest: bool = True) -> Record:
        """This record with one more race, the newest or the oldest; one with the id of a known race takes its place."""
        if race.id in {known.id for known in self.races}:
            return self._with([race if known.id == race.id else known for known in self.races])
        return self._with([*self.races, race] if newest else [race, *self.races])

    def over(self, older: Record) -> Record:
        """The races of both, all of them, this record's taken as newer; what both have is as old as it is there."""
        own = {race.id: race for race in self.races}
        both = [own.pop(race.id, race) for race in older.races]
        return replace(self, races=(*both, *own.values()))

    def merge(self, other: Record) -> Record:
        """The races of both, whole, in the order they were run."""
        races = {race.id: race for race in (*other.races, *self.races)}
        return self._with(sorted(races.values(), key=lambda race: (race.when, race.id)))

    def _with(self, races: list[Race]) -> Record:
        """A copy with these races, less the old ones to which newer ones leave nothing to say, or too many.

        A race stays while it knows a candidate best, and while it joins two others to one clock. Of those to which only
        other versions of their algorithms leave nothing to say the newest stays, and with it what else its versions
        have found, of which its notes tell, too: two versions of autoconv may share a folder.
        """
        record, spared = replace(self, races=tuple(races)), dict[str, str]()
        known: set[tuple[Candidate, str]] = set()
        for race in reversed(races):
            reached = {(candidate, facts.version) for candidate, facts in race.facts.items() if not facts.unreached}
            versions = {candidate.algorithm: version for candidate, version in reached}
            if {candidate for candidate, _ in reached} <= {candidate for candidate, _ in known}:
                less = replace(record, races=tuple(r for r in record.races if r is not race))
                alike = all(spared.get(name, version) == version for name, version in versions.items())
                if alike and not reached <= known:
                    spared |= versions
                elif less.facts().keys() == record.facts().keys():
                    record = less
            known |= reached
        return replace(record, races=record.races[-MAX_RACES:])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"layer": self.layer, "device": self.device, "races": [race.to_json() for race in self.races]}

    @classmethod
    def from_json(cls, data: object) -> Record:
        """The record a plain dict describes.

        Parameters
        ----------
        data : dict
            As `to_json` gives it. It is not trusted.

        Returns
        -------
        Record

        Raises
        ------
        RecordError
            When a field is missing, unknown, of a wrong type, out of bounds, or makes no sense.
        """
        values = _checked(data, _RECORD, required=_RECORD)
        try:
            ConvLayer.parse(values["layer"])
        except AutoconvError as error:
            raise RecordError(str(error)) from None
        races = tuple(map(Race.from_json, values["races"]))
        if len({race.id for race in races}) != len(races):
            raise RecordError("races: expected an id of its own for each, got the same id twice")
        return cls(values["layer"], values["device"], races)


Check = Callable[[Any], bool]


def _text(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= LONGEST and value.isprintable()


def _number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9  # type: ignore[operator]  # NaN is not


def _size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _truth(value: object) -> bool:
    return type(value) is bool


_FACTS: dict[str, Check] = {
    "version": _text,
    "failure": _text,
    "time": _number,
    "hot": _number,
    "pack": _number,
    "spread": _number,
    "samples": _size,
    "workspace": _size,
    "packed": _size,
    "error": _number,
    "deterministic": _truth,
    "tf32": _truth,
    "vendor": _text,
    "dropped_by": _text,
}
_WHEN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?\+00:00", re.ASCII)
_ID = re.compile("[0-9a-f]{32}")
_RACE: dict[str, Check] = {
    "id": lambda v: type(v) is str and _ID.fullmatch(v) is not None,
    "when": lambda v: type(v) is str and _WHEN.fullmatch(v) is not None,
    "versions": lambda v: type(v) is dict and len(v) <= 64 and all(_text(n) and _text(t) for n, t in v.items()),
    "isolated": _truth,
    "budget": lambda v: v is None or _number(v),
    "facts": lambda v: type(v) is dict and len(v) <= MAX_CANDIDATES,
    "covers": lambda v: v == "" or _text(v),
}
_RECORD: dict[str, Check] = {
    "layer": _text,
    "device": _text,
    "races": lambda v: type(v) is list and 0 < len(v) <= MAX_RACES,
}


def _checked(data: object, checks: Mapping[str, Check], required: Iterable[str]) -> dict[str, Any]:
    """`data`, when it is a dict of known fields whose values pass, with all that are required."""
    if type(data) is not dict:
        raise RecordError(f"expected an object with {', '.join(checks)}, got {data!r:.60}")
    for name, value in data.items():
        if name not in checks:
            raise RecordError(f"field {name!r:.60}: expected one of {', '.join(checks)}")
        if not checks[name](value):
            raise RecordError(f"{name}={value!r:.60}: not a value that a record can have")
    if missing := [name for name in required if name not in data]:
        raise RecordError(f"expected {', '.join(checks)}, got none of {', '.join(missing)}")
    return data


@functools.lru_cache(maxsize=1 << 14)  # the same names stand in every record
def _candidate(text: str) -> Candidate:
    candidate = Candidate.parse(text)
    if str(candidate) != text:
        raise RecordError(f"candidate {text!r:.80}: expected {str(candidate)!r:.80}")
    return candidate
