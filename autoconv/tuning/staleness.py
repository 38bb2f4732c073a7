"""Staleness: whether what is on record still answers a request, or something has changed since.

Three things may have: the software that times depend on (`Device.versions`: another LLVM, NVRTC or NumPy), which has
winner and runner-up timed once more; an algorithm's own code (`Algorithm.version`), whose candidates race anew against
the best of the others; and which candidates there are. As to list all of them takes a while, and a search times a part,
a race notes the algorithms of which it left nothing to time, so that the next process need not ask again. Candidates
that there was no memory for are timed as soon as there is. A model of the machine may change, too, when it is measured
anew: then a candidate may be cut otherwise, and is timed as the kernel that it is now.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common import split_products
from autoconv.records.limits import ranking
from autoconv.records.schema import LONGEST, Facts, Record
from autoconv.tuning.candidates import PRUNE_FACTOR
from autoconv.tuning.lookup import Known, Request, sizes

DIGITS = 8  # of an algorithm's note


def suffices(request: Request, known: Known) -> bool:
    """Whether races under today's versions left nothing to ask about."""
    record = known.record
    if record is None or stale(request, record):
        return False
    if uncovered(request, record):
        return False
    return not starved_no_more(request, known)


def starved_no_more(request: Request, known: Known) -> list[Candidate]:
    """The candidates that there was no memory for when they were to be timed, and is now."""
    return [
        candidate for candidate, facts in known.facts.items() if facts.starved and request.may_retry(candidate, facts)
    ]


def within_reach(request: Request, known: Known, candidate: Candidate, facts: Facts) -> bool:
    """Whether one that its last race did not reach may have its turn now: there is memory, or a larger budget."""
    if facts.starved:
        return request.may_retry(candidate, facts)
    spent = known.attempts[candidate].budget
    return spent is not None and (request.budget is None or request.budget > spent)


def resized(request: Request, known: Known) -> list[Candidate]:
    """The candidates that would win by facts of another size than they have today, which are of another kernel.

    Less those that another race has not reached since, unless this one may.
    """
    found = []
    for candidate in ranking(known.facts, request.limits, request.layer.bytes):
        today, facts = sizes(request, candidate), known.facts[candidate]
        if today == (facts.workspace, facts.packed):
            break
        last = known.attempts[candidate].facts[candidate]
        if today is not None and (not last.unreached or within_reach(request, known, candidate, last)):
            found.append(candidate)
    return found


def uncovered(request: Request, record: Record | None) -> set[str]:
    """The names of the algorithms that may be used and of which no race has left nothing to time."""
    noted = _noted(record)
    return {name for name, algorithm in request.allowed.items() if _digest(algorithm) not in noted}


def covered(request: Request, record: Record | None) -> list[Algorithm[Any]]:
    """The algorithms as they are today of which a race has left nothing to time, be they asked for or not."""
    noted, ours = _noted(record), {algorithm.name: algorithm for algorithm in registry.own(request.device)}
    return [algorithm for algorithm in (ours | request.allowed).values() if _digest(algorithm) in noted]


def _noted(record: Record | None) -> set[str]:
    return {digest for race in record.races for digest in race.covers.split()} if record is not None else set()


def stale(request: Request, record: Record | None) -> bool:
    """Whether every race that says something of today was run under other versions of what times depend on."""
    if record is None:
        return False
    telling = [race for race in record.races if any(itertools.starmap(request.unchanged, race.facts.items()))]
    return all(race.versions != request.device.versions for race in telling or record.races)


def former_winner(request: Request, record: Record | None) -> Candidate | None:
    """The best on record, if its algorithm is another today: facts of the rest do not say who wins now.

    They do once the layer is tuned again, here or where shipped records come from, though the budget may end before its
    turn, or no candidate of today have its name: who tunes again in the same way learns no more.
    """
    if record is None or not record.races:
        return None
    asked = _asked(request, record)
    newest = request.usable(asked.races[-1].facts)
    if newest and all(request.unchanged(candidate, facts) for candidate, facts in newest.items()):
        return None
    recorded = request.usable(asked.facts(request.unchanged))
    best = next(iter(ranking(recorded, request.limits, request.layer.bytes)), None)
    today = {c.algorithm for race in record.races for c, facts in race.facts.items() if request.unchanged(c, facts)}
    return None if best is None or best.algorithm in today else best


def _asked(request: Request, record: Record) -> Record:
    """The races that asked about what the request does: one of exact algorithms alone says nothing of the others."""
    inexact = {a.name for a in request.offered if not a.exact}
    races = tuple(race for race in record.races if any(candidate.algorithm in inexact for candidate in race.facts))
    return replace(record, races=races) if races else record


def note(algorithms: Iterable[Algorithm[Any]], older: Iterable[str] = ()) -> str:
    """What a race notes of the algorithms of which nothing is left to time, before what it has noted until then.

    What other races note of other versions stays with their facts. The oldest go where all would be too long.
    """
    digests = list(dict.fromkeys([*(_digest(a) for a in algorithms), *older]))
    return " ".join(digests[: (LONGEST + 1) // (DIGITS + 1)])


def _digest(algorithm: Algorithm[Any]) -> str:
    """What decides which of an algorithm's candidates are worth timing."""
    return _hash(f"{PRUNE_FACTOR} {algorithm.name}={algorithm.version}", *split_products.forbidden())


@functools.cache
def _hash(*texts: str) -> str:
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()[:DIGITS]
