"""Racing: which candidates a request has timed, against whom, and what is recorded of it."""

from __future__ import annotations

import functools
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from autoconv.algorithm import Candidate
from autoconv.device import Device
from autoconv.records.limits import Limits, ranking
from autoconv.records.schema import Facts, Race
from autoconv.tuning.lookup import Known, Request, known_from, look_up, on_record
from autoconv.tuning.measurement import Event, failed, measure
from autoconv.tuning.staleness import former_winner, note, noted, stale
from autoconv.tuning.worker import Worker

HYBRID_CANDIDATES = 4  # how many of the estimate's first the hybrid mode times

_measuring = threading.Lock()


def _renew_lock() -> None:
    global _measuring
    _measuring = threading.Lock()  # a thread that the child lacks may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


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
    former = former_winner(request, known.record)
    if not _missing(request, known, mode, former) and not stale(request, known.record):
        _note_what_is_covered(request, known)
        return known
    if request.progress is not None:
        request.progress(Event("wait", request.layer, None, 0, 0))
    with _measuring, request.cache.timing_lock(request.device.key):
        known = look_up(request)  # another process may have been quicker
        former = former_winner(request, known.record)
        if stale(request, known.record) and known.facts:
            known = _recheck(request, known)
        missing = _missing(request, known, mode, former)
        if missing:
            known = _against_incumbents(request, known, missing)
    return known


def challenge(request: Request, candidates: Sequence[Candidate]) -> Known:
    """What is known after a race of candidates that the caller has chosen, those of them that the records do not hold.

    Parameters
    ----------
    request : Request
    candidates : sequence of Candidate
        Of its candidate set.
    """
    with _measuring, request.cache.timing_lock(request.device.key):
        known = look_up(request)
        new = [candidate for candidate in candidates if _unknown(request, known, candidate)]
        return _against_incumbents(request, known, new) if new else known


def _against_incumbents(request: Request, known: Known, newcomers: Sequence[Candidate]) -> Known:
    incumbents = [candidate for candidate in _incumbents(known.facts) if candidate not in newcomers]
    return _race(request, known, [*newcomers, *incumbents])


def _missing(request: Request, known: Known, mode: str, former: Candidate | None) -> list[Candidate]:
    """What the mode asks of the candidate set, and the former winner, be it only to record that it is no more."""
    offered = request.candidate_set
    asked = offered.worth_timing() if mode == "profile" else offered.worth_timing(request.limits)[:HYBRID_CANDIDATES]
    if former is not None and former not in asked:
        asked.append(former)
    return [candidate for candidate in asked if _unknown(request, known, candidate)]


def _unknown(request: Request, known: Known, candidate: Candidate) -> bool:
    """Whether there are no facts, or none for want of memory, or of a budget that is larger now."""
    facts = known.facts.get(candidate)
    if facts is None or facts.starved or not facts.unreached:
        return facts is None or facts.starved
    spent = known.budgets.get(candidate)
    return spent is not None and (request.budget is None or request.budget > spent)


def _incumbents(facts: Mapping[Candidate, Facts]) -> list[Candidate]:
    """Those a newcomer has to beat: winner and runner-up, for either kind of weights."""
    both = (Limits(weights="varying"), Limits(weights="constant"))
    return list(dict.fromkeys(candidate for limits in both for candidate in ranking(facts, limits)[:2]))


def _recheck(request: Request, known: Known) -> Known:
    """Time the winner and the runner-up once more; all of them if the order no longer holds."""
    before = _incumbents(known.facts)
    known = _race(request, known, before)
    if _incumbents(known.facts)[:1] == before[:1]:
        return known
    return _race(request, known, request.candidate_set.worth_timing())


def _race(request: Request, known: Known, candidates: Sequence[Candidate]) -> Known:
    """Race these candidates and record the facts; what is known afterwards."""
    found, entrants = _admitted(request, candidates)
    tune = _worker(request.device).measure if request.isolate else functools.partial(measure, device=request.device)
    found |= tune(layer=request.layer, candidates=entrants, budget=request.budget, progress=request.progress)
    race = Race(
        id=uuid.uuid4().hex,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=request.device.versions,
        isolated=request.isolate,
        budget=request.budget,
        facts=found,
        covers=_note(request, known.facts | found),
    )
    request.cache.add(request.layer.key(), request.device.key, race)
    return known_from(request, on_record(request), known.timed + sum(facts.failure is None for facts in found.values()))


def _admitted(request: Request, candidates: Sequence[Candidate]) -> tuple[dict[Candidate, Facts], list[Candidate]]:
    """The facts of those that cannot take part, and those that can."""
    free = request.device.memory_available()
    refused: dict[Candidate, Facts] = {}
    admitted = []
    for candidate in candidates:
        algorithm, expected = request.algorithms[candidate.algorithm], request.candidate_set.expected.get(candidate)
        if expected is None:  # on record, as an incumbent or before its algorithm changed
            refused[candidate] = failed(algorithm, "it is not a candidate of this layer")
        elif (need := expected.workspace + expected.packed) > free // 2:
            reason = f"not enough memory: needs {need >> 20} MiB, and {free >> 20} MiB are free"
            refused[candidate] = failed(algorithm, reason)
        else:
            admitted.append(candidate)
    return refused, admitted


def _note(request: Request, facts: Mapping[Candidate, Facts]) -> str:
    """What a race may note when these facts leave nothing to ask; else nothing."""
    complete = all(c in facts and not facts[c].unreached for c in request.candidate_set.worth_timing())
    return note(request.offered, request.vendors) if complete else ""


def _note_what_is_covered(request: Request, known: Known) -> None:
    """Spare the next process the candidate set, where it differs in nothing that could be timed."""
    if known.record is None or not (new := _note(request, known.facts)):
        return
    newest = known.record.races[-1]
    covering = replace(newest, covers=noted(newest.covers, new))
    request.cache.add(request.layer.key(), request.device.key, covering)


@functools.cache
def _worker(device: Device) -> Worker:
    return Worker(device)
