"""Racing: which candidates a request has timed, against whom, and what is recorded of it."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common.forks import renew_in_children
from autoconv.device import Device
from autoconv.records.failures import NO_CANDIDATE, starved
from autoconv.records.limits import Limits, equally_fast, ranking
from autoconv.records.schema import Facts, Race, Record
from autoconv.tuning.candidates import finer_form
from autoconv.tuning.lookup import Known, Request, credible, known_from, look_up, on_record
from autoconv.tuning.measurement import FEWEST_READY, Event, Measurement, failed
from autoconv.tuning.search.nearby import lessons, winners
from autoconv.tuning.search.search import Search
from autoconv.tuning.staleness import (
    covered,
    former_winner,
    note,
    resized,
    stale,
    starved_no_more,
    uncovered,
    within_reach,
)
from autoconv.tuning.worker import Worker

PREPARING = 2.5  # times its budget that mode hybrid may take to build and verify candidates
HYBRID_CANDIDATES = 10  # that mode hybrid times at most, beside those for which it has another reason, ...
HURRIED_CANDIDATES = 6  # ... and where a budget bounds the time
FAR = 3.0  # times the least estimate: who takes longer on record may wait; estimates are seldom as wrong
NEAR, NEAREST = 1.12, 8  # times the best on record, and how many at most, for those that race once more

_measuring = threading.RLock()  # as `progress` may plan, too
renew_in_children(sys.modules[__name__], "_measuring", threading.RLock)
_at_work: list[Worker] = []  # one within the other, where `progress` plans


@contextmanager
def _alone(request: Request) -> Iterator[None]:
    """Be the only process, and the only thread of this one, that times on a request's device."""
    with request.cache.timing_lock(request.device.key), _measuring:  # in this order: a caller may hold the first
        yield


def complete(request: Request, known: Known, mode: str) -> Known:
    """What is known after timing what the mode wants to know and the records do not hold.

    Parameters
    ----------
    request : Request
    known : Known
        What is on record, where that does not suffice.
    mode : "profile" or "hybrid"

    Returns
    -------
    Known
        With the number of candidates timed.
    """
    left, preparing = _left(request, known, mode), _preparing(request, mode)
    if not left and not stale(request, known.record):
        _note_what_is_covered(request, known)
        return known
    if request.progress is not None:
        request.progress(Event("wait", request.layer, None, 0, 0))
    with _alone(request):
        now = look_up(request)  # another process may have been quicker
        if stale(request, now.record) and (before := _incumbents(request, now.facts)):
            now = _race(request, now, _Left(before, preparing=preparing))
            if before[0] not in next(equally_fast(now.facts, Limits(weights="varying")), []):  # the order has changed
                return _race(request, replace(now, facts={}), _everything(request, preparing))
        if now.record != known.record:
            left = _left(request, now, mode)
        return _race(request, now, left) if left else now


def again(request: Request) -> Known:
    """What is known after those near the best on record have raced once more, where there are several.

    Whatever disturbs a machine does so for seconds or minutes, and costs some candidates more than others: who was the
    best in one race only had luck more often than who is near the best in one, and the best in another.

    Parameters
    ----------
    request : Request
    """
    with _alone(request):
        known = look_up(request)
        costs = {candidate: request.limits.cost(facts) for candidate, facts in known.facts.items()}
        ranked = ranking(known.facts, request.limits, request.layer.bytes)
        able = [candidate for candidate in ranked if credible(request, candidate, known.facts[candidate])]
        least = min((costs[candidate] for candidate in able), default=0.0)
        near = [candidate for candidate in able if costs[candidate] <= NEAR * least][:NEAREST]
        return _race(request, known, _Left(near)) if len(near) > 1 else known


def challenge(request: Request, candidates: Sequence[Candidate], preparing: float | None = None) -> Known:
    """What is known after a race of candidates that the caller has chosen, those of them that the records do not hold.

    Parameters
    ----------
    request : Request
    candidates : sequence of Candidate
        Of its candidate set.
    preparing : float, optional
        Seconds for building and verifying them, as `Measurement` takes them.
    """
    with _alone(request):
        known = look_up(request)
        new = [candidate for candidate in candidates if _unknown(request, known, candidate)]
        return _race(request, known, _Left(new, preparing=preparing)) if new else known


def finer(request: Request, known: Known, mode: str) -> Known:
    """What is known after a race of finer forms of those that a tolerance leaves out, as far as they might win.

    Parameters
    ----------
    request : Request
        With a tolerance.
    known : Known
        After all else has been timed.
    mode : "profile" or "hybrid"
    """
    limits, found = request.limits, dict[Candidate, float]()
    allowed = ranking(known.facts, limits, request.layer.bytes)
    least = min((limits.cost(known.facts[candidate]) for candidate in allowed), default=math.inf)
    for candidate, facts in known.facts.items():
        if facts.timed and limits.cost(facts) < least:
            form = finer_form(request.algorithms[candidate.algorithm], request.layer, candidate)
            if form is not None and not limits.why_not(replace(facts, error=form.share * facts.error)):
                found[form.candidate] = limits.cost(facts)
    new = [form for form in sorted(found, key=found.__getitem__) if _unknown(request, known, form)]
    if not new:
        return known
    challenged = challenge(request, new[:NEAREST], _preparing(request, mode))
    return replace(challenged, timed=known.timed + challenged.timed)


@dataclass(frozen=True)
class _Left:
    """What is left to do: candidates to time, algorithms whose grids are to be searched, and what may be spent on that.

    The candidates are all timed unless there is a limit on the seconds in which they are prepared, the best first.
    """

    candidates: list[Candidate]
    grids: set[str] = field(default_factory=set)
    preparing: float | None = None

    def __bool__(self) -> bool:
        return bool(self.candidates or self.grids)


def _left(request: Request, known: Known, mode: str) -> _Left:
    """What the mode asks of the candidate set, and the former winner, be it only to record that it is no more."""
    offered, grids = request.candidate_set, set[str]()
    recut = resized(request, known)
    known = replace(known, facts={c: facts for c, facts in known.facts.items() if c not in recut})
    if mode == "profile":
        asked = [*recut, *(candidate for candidate in offered.worth_timing() if not offered.searched(candidate))]
        grids = uncovered(request, known.record) & {c.algorithm for c in offered.grid()}
        grids = {name for name in grids if not _spent(request, known, name)}
    else:
        most = HYBRID_CANDIDATES if request.budget is None else HURRIED_CANDIDATES
        asked = [*recut[:most], *offered.few(request.limits, most)]
        if not known.facts:  # else more layers on record would have it timed again and again
            asked[1:1] = winners(request)  # no more than the first two may be reached: the estimates' best is one
    asked += starved_no_more(request, known)
    former = former_winner(request, known.record)
    if former is not None and former not in offered.reasons:  # what cannot run today may again tomorrow
        asked = [former, *asked]
    new = [candidate for candidate in dict.fromkeys(asked) if _unknown(request, known, candidate)]
    return _Left(new, grids, _preparing(request, mode))


def _preparing(request: Request, mode: str) -> float | None:
    """Seconds for building and verifying: no end where the mode wants to know all."""
    return PREPARING * request.budget if mode == "hybrid" and request.budget is not None else None


def _unknown(request: Request, known: Known, candidate: Candidate) -> bool:
    """Whether there are no facts, or none for want of memory that there is now, or of a budget that is larger now."""
    facts = known.facts.get(candidate)
    return facts is None or (facts.unreached and within_reach(request, known, candidate, facts))


def _spent(request: Request, known: Known, algorithm: str) -> bool:
    """Whether a search of an algorithm's grid was begun, and a budget as large as this one ended it."""
    unreached = [c for c, facts in known.facts.items() if facts.unreached and not facts.starved]
    ended = any(not _unknown(request, known, candidate) for candidate in unreached)
    return ended and any(candidate.algorithm == algorithm for candidate in known.facts)


def _incumbents(request: Request, facts: Mapping[Candidate, Facts]) -> list[Candidate]:
    """Those a newcomer has to beat: winner and runner-up, for either kind of weights, of those that can run today.

    One that cannot may again tomorrow, with other split products or another model of the machine, so nothing is said
    of it.
    """
    both = (Limits(weights="varying"), Limits(weights="constant"))
    ranked = (ranking(facts, limits, request.layer.bytes) for limits in both)
    able = ((c for c in order if credible(request, c, facts[c])) for order in ranked)
    return list(dict.fromkeys(candidate for order in able for candidate in itertools.islice(order, 2)))


def _everything(request: Request, preparing: float | None) -> _Left:
    """All that is worth timing, be it on record."""
    offered = request.candidate_set
    grids = {candidate.algorithm for candidate in offered.grid()}
    return _Left([c for c in offered.worth_timing() if c.algorithm not in grids], grids, preparing)


def _race(request: Request, known: Known, left: _Left) -> Known:
    """Race these candidates against the incumbents, search these grids, and record the facts; what is known then."""
    elsewhere = _best_elsewhere(request, known)
    incumbents = [c for c in elsewhere or _incumbents(request, known.facts) if c not in left.candidates]
    begun, search = datetime.now(UTC), _search(request, known, left.grids)
    found: dict[Candidate, Facts] = {}
    late = _far_behind(request, known, incumbents)  # as where what was quicker has changed since
    early = [candidate for candidate in incumbents if candidate not in late]
    timed = elsewhere | {candidate: facts for candidate, facts in known.facts.items() if facts.timed}
    reached, block = True, [*early, *left.candidates]  # who compares with what is on record comes first
    block += [candidate for candidate in search.next() if candidate not in block]
    if left.grids:  # a budget may end before everyone's turn
        block = _best_first(request, block, early)
    block += [candidate for candidate in late if candidate not in block]
    fewest = len(early) + FEWEST_READY  # else who is on record would have the only turns
    with _measurement(request, left.preparing, fewest) as measurement:
        while block:
            refused, entrants = _admitted(request, block, timed)
            block_facts = refused | measurement.enter(entrants)
            found |= block_facts
            reached = not any(facts.unreached and not facts.starved for facts in block_facts.values())
            search.learn(block_facts)
            block = search.next() if reached else []
        found |= measurement.finish()
    done = _done(request, known.record, known.facts | found, left.grids if reached else set())
    race = Race(
        id=uuid.uuid4().hex,
        when=begun.isoformat(timespec="seconds"),
        versions=request.device.versions,
        isolated=request.isolate,
        budget=request.budget,
        facts=found,
        covers=note([*done, *covered(request, known.record)]),
    )
    request.cache.add(request.layer.key(), request.device.key, race)
    return known_from(request, on_record(request), known.timed + sum(facts.failure is None for facts in found.values()))


def _far_behind(request: Request, known: Known, incumbents: Sequence[Candidate]) -> list[Candidate]:
    """Those that take several times as long as others are expected to: a budget is to reach the others first."""
    cost, expected = request.limits.cost, request.candidate_set.expected
    least = min((cost(facts) for facts in expected.values()), default=0.0)
    return [c for c in incumbents if c in known.facts and cost(known.facts[c]) > FAR * least]


def _best_elsewhere(request: Request, known: Known) -> dict[Candidate, Facts]:
    """The best of what the request leaves out, with its facts, where nothing that it allows was timed.

    It runs along, else times of the two races could not be compared, and those of the older one would count no more.
    """
    if known.record is None or any(facts.timed for facts in known.facts.values()):
        return {}
    everybody = replace(request, limits=Limits(vendors=request.limits.vendors))
    facts = known_from(everybody, known.record).facts
    return {candidate: facts[candidate] for candidate in _incumbents(everybody, facts)[:1]}


def _best_first(request: Request, block: Sequence[Candidate], incumbents: Sequence[Candidate]) -> list[Candidate]:
    """Incumbents, then what grids have by its estimates, and the rest, which is seldom the quickest, by its own."""
    offered = request.candidate_set
    costs = {candidate: request.limits.cost(facts) for candidate, facts in offered.expected.items()}
    return sorted(block, key=lambda c: (c not in incumbents, not offered.searched(c), costs.get(c, 0.0)))


@contextmanager
def _measurement(request: Request, preparing: float | None, fewest: int) -> Iterator[Measurement | Worker]:
    """What measures a request's candidates: the device's worker, or another one while that is at work."""
    layer, device, budget, progress = request.layer, request.device, request.budget, request.progress
    if not request.isolate:
        yield Measurement(layer, device, budget=budget, preparing=preparing, fewest=fewest, progress=progress)
        return
    usual = _worker(device)
    worker = Worker(device) if usual in _at_work else usual
    _at_work.append(worker)
    try:
        yield worker.begin(layer, budget=budget, preparing=preparing, fewest=fewest, progress=progress)
    finally:
        _at_work.remove(worker)
        if worker is not usual:
            worker.close()


def _search(request: Request, known: Known, grids: set[str]) -> Search:
    """The search of some grids, which starts from what is known, of this layer and of those nearby."""
    offered = request.candidate_set
    expected = {c: offered.expected[c] for c in offered.grid() if c.algorithm in grids}
    exact = {name for name, algorithm in request.algorithms.items() if algorithm.exact}
    search = Search(expected, exact, known.facts)
    for lesson in lessons(request) if grids else ():
        search.recall(*lesson)
    return search


def _admitted(
    request: Request, candidates: Sequence[Candidate], timed: Mapping[Candidate, Facts]
) -> tuple[dict[Candidate, Facts], list[Candidate]]:
    """The facts of those that cannot take part, and those that can; who was timed can without being listed any more."""
    free, algorithms = request.device.memory_available(), registry.by_name(request.device)
    refused: dict[Candidate, Facts] = {}
    admitted = []
    for candidate in candidates:
        algorithm = algorithms[candidate.algorithm]  # of any, as one that the request leaves out may run along
        expected = request.candidate_set.expectation(candidate) or timed.get(candidate)
        if expected is None:  # on record before its algorithm changed
            refused[candidate] = failed(algorithm, NO_CANDIDATE)
        elif (need := expected.workspace + expected.packed) > free // 2:
            reason = f"needs {need >> 20} MiB, and {free >> 20} MiB are free"
            refused[candidate] = failed(algorithm, starved(reason))
        else:
            admitted.append(candidate)
    return refused, admitted


def _done(
    request: Request, record: Record | None, facts: Mapping[Candidate, Facts], searched: set[str]
) -> list[Algorithm[Any]]:
    """The algorithms of which these facts, and these finished searches, leave nothing to ask, and no race says so."""
    offered = request.candidate_set
    unfinished = {candidate.algorithm for candidate in offered.grid()} - searched
    listed = (candidate for candidate in offered.worth_timing() if not offered.searched(candidate))
    unfinished |= {c.algorithm for c in listed if c not in facts or (facts[c].unreached and not facts[c].starved)}
    names = uncovered(request, record) - unfinished
    return [algorithm for algorithm in request.offered if algorithm.name in names]


def _note_what_is_covered(request: Request, known: Known) -> None:
    """Spare the next process the candidate set, where it differs in nothing that could be timed."""
    if known.record is None or not (done := _done(request, known.record, known.facts, set())):
        return
    newest = known.record.races[-1]
    covering = replace(newest, covers=note(done, newest.covers.split()))
    request.cache.add(request.layer.key(), request.device.key, covering, newest=False)  # others may have run meanwhile


@functools.cache
def _worker(device: Device) -> Worker:
    return Worker(device)
