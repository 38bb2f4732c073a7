"""Look-up: a request, what is on record of its layer, and what of that can be relied on today."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common import split_products
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts, Race, Record
from autoconv.tuning.candidates import DISCREDITED, CandidateSet
from autoconv.tuning.measurement import Progress

T = TypeVar("T")
_shared: ContextVar[dict[object, Any] | None] = ContextVar("_shared", default=None)


@contextmanager
def shared_across_limits() -> Iterator[None]:
    """Within it, requests that differ in limits alone share the candidate set of a layer: it takes half a second.

    They also share what a layer on record teaches about others nearby.
    """
    before = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(before)


@dataclass(frozen=True, eq=False)
class Request:
    """One call of `plan` that memory could not answer: a layer, a device, limits, and what may be spent on it."""

    layer: ConvLayer
    device: Device
    cache: TuningCache
    limits: Limits
    budget: float | None
    isolate: bool
    progress: Progress | None

    @functools.cached_property
    def offered(self) -> tuple[Algorithm[Any], ...]:
        """The algorithms that are asked for candidates, those of vendors that may not be used included."""
        limits = self.limits
        keeping = [a for a in registry.algorithms(self.device) if a.keeps_denormals or limits.denormals == "flush"]
        return tuple(a for a in keeping if a.exact or not limits.exact)

    @functools.cached_property
    def algorithms(self) -> dict[str, Algorithm[Any]]:
        """The same, by name."""
        return {algorithm.name: algorithm for algorithm in self.offered}

    @functools.cached_property
    def candidate_set(self) -> CandidateSet:
        """Made only when the records do not suffice, or somebody wants an explanation."""
        what = self.layer, self.device, self.offered, self.limits.vendors
        return self.shared("candidates", self.layer, lambda: CandidateSet(*what))

    def shared(self, what: str, layer: ConvLayer, make: Callable[[], T]) -> T:
        """What is made for a layer, be it another one: where that is asked for, once for requests of all limits."""
        shared = _shared.get()
        if shared is None or self.limits.vendors != frozenset():  # which are loaded, or installed, may change
            return make()
        key = what, layer, self.device, self.offered, self.cache, self.device.estimated_from, split_products.allowed()
        if key not in shared:
            shared[key] = make()
        found: T = shared[key]
        return found

    def family(self, name: str) -> CandidateSet:
        """The candidates of one algorithm alone."""
        return CandidateSet(self.layer, self.device, [a for a in self.offered if a.name == name], self.limits.vendors)

    @functools.cached_property
    def allowed(self) -> dict[str, Algorithm[Any]]:
        """The algorithms that may be used, by name."""
        return {a.name: a for a in self.offered if self.limits.allows(a.vendor)}

    def usable(self, facts: Mapping[Candidate, Facts]) -> dict[Candidate, Facts]:
        """Those of candidates whose algorithms exist today, in whatever version, and may be used."""
        return {candidate: found for candidate, found in facts.items() if candidate.algorithm in self.allowed}

    def fits(self, candidate: Candidate) -> bool:
        """Whether there is memory for a candidate now; half of what is free is left to the operands, and to others."""
        algorithm, params = self.algorithms[candidate.algorithm], candidate.params
        try:
            need = algorithm.workspace_bytes(self.layer, self.device, params)
            need += algorithm.packed_bytes(self.layer, self.device, params)
        except DISCREDITED:
            return False
        return need <= self.device.memory_available() // 2

    def may_retry(self, candidate: Candidate, facts: Facts) -> bool:
        """Whether one that lacked memory may have it now; what had a worker killed is tried in a worker alone."""
        return (self.isolate or not facts.killed) and self.fits(candidate)

    def unchanged(self, candidate: Candidate, facts: Facts) -> bool:
        """Whether facts are of today's version of the candidate's algorithm, and that may be used."""
        algorithm = self.allowed.get(candidate.algorithm)
        return algorithm is not None and facts.version == algorithm.version


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a request's layer.

    Attributes
    ----------
    record : Record or None
        All that was ever found, of whatever version.
    facts : dict of Candidate to Facts
        What of it counts: of candidates whose algorithms exist today, may be used, and are unchanged.
    timed : int
        How many candidates were timed for this request to know it.
    """

    record: Record | None
    facts: dict[Candidate, Facts]
    timed: int = 0

    @functools.cached_property
    def attempts(self) -> dict[Candidate, Race]:
        """The last race that each candidate was in as it is today."""
        races = self.record.races if self.record is not None else ()
        return {
            candidate: race
            for race in races
            for candidate, then in race.facts.items()
            if candidate in self.facts and then.version == self.facts[candidate].version
        }


def look_up(request: Request) -> Known:
    """What the cache holds for a request."""
    return known_from(request, on_record(request))


def on_record(request: Request) -> Record | None:
    """The record of the device, over those of it with fewer features, which know nothing of what they lack."""
    layer, device = request.layer.key(), request.device
    found = request.cache.load(layer, device.key)
    for key in device.lesser_keys:
        if (lesser := request.cache.load(layer, key)) is not None:
            races = tuple(replace(race, covers="") for race in lesser.races)
            lesser = replace(lesser, device=device.key, races=races)
            found = lesser if found is None else found.over(lesser)
    return found


def known_from(request: Request, record: Record | None, timed: int = 0) -> Known:
    """What a record tells a request."""
    recorded = record.facts(request.unchanged) if record is not None else {}
    return Known(record, {c: found for c, found in recorded.items() if request.unchanged(c, found)}, timed)


def sizes(request: Request, candidate: Candidate) -> tuple[int, int] | None:
    """A recorded candidate's workspace and packed filters as they are today; None where it cannot run.

    It may be of any origin.
    """
    algorithm, params = request.algorithms[candidate.algorithm], candidate.params
    try:
        if algorithm.why_not(request.layer, request.device, params):
            return None
        workspace = algorithm.workspace_bytes(request.layer, request.device, params)
        return workspace, algorithm.packed_bytes(request.layer, request.device, params)
    except DISCREDITED:
        return None


def credible(request: Request, candidate: Candidate, facts: Facts) -> bool:
    """Whether a recorded candidate can run today, and is what the record says."""
    return sizes(request, candidate) == (facts.workspace, facts.packed)
