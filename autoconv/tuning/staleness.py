"""Staleness: whether what is on record still answers a request, or something has changed since.

Three things may have: the software that times depend on (`Device.versions`: another LLVM, NVRTC or NumPy), which has
winner and runner-up timed once more; an algorithm's own code (`Algorithm.version`), whose candidates race anew against
the best of the others; and which candidates there are. As to list all of them takes a while, a race notes the
candidate sets of which it left nothing to time, so that the next process need not make them again.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from typing import Any

from autoconv.algorithm import Algorithm, Candidate
from autoconv.records.limits import ranking
from autoconv.records.schema import LONGEST, Record
from autoconv.tuning.candidates import PRUNE_FACTOR
from autoconv.tuning.lookup import Known, Request

_BETWEEN = "; "  # notes of one race


def suffices(request: Request, known: Known) -> bool:
    """Whether races under today's versions left nothing to ask about."""
    record = known.record
    if record is None or stale(request, record):
        return False
    return any(covered(race.covers, request.offered, request.vendors) for race in record.races)


def stale(request: Request, record: Record | None) -> bool:
    """Whether every race was run under other versions of the software that times depend on."""
    return record is not None and all(race.versions != request.device.versions for race in record.races)


def former_winner(request: Request, record: Record | None) -> Candidate | None:
    """The best on record, if its algorithm is another today: facts of the rest do not say who wins now.

    They do once the layer is tuned again, though the budget may end before its turn, or no candidate
    of today have its name: who tunes again in the same way learns no more.
    """
    if record is None or not record.races:
        return None
    asked = _asked(request, record)
    newest = request.usable(asked.races[-1].facts)
    if newest and all(request.unchanged(candidate, facts) for candidate, facts in newest.items()):
        return None
    recorded = request.usable(asked.facts())
    best = next(iter(ranking(recorded, request.limits)), None)
    if best is None or request.unchanged(best, record.facts().get(best, recorded[best])):
        return None
    return best


def _asked(request: Request, record: Record) -> Record:
    """The races that asked about what the request does: one of exact algorithms alone says nothing of the others."""
    inexact = {a.name for a in request.offered if not a.exact}
    races = tuple(race for race in record.races if any(candidate.algorithm in inexact for candidate in race.facts))
    return replace(record, races=races) if races else record


def note(algorithms: tuple[Algorithm[Any], ...], vendors: frozenset[str]) -> str:
    """What a race records of a candidate set of which it left nothing to time."""
    own, others = _fingerprint(algorithms, vendors)
    return " ".join([own, *sorted(others)])


def noted(covers: str, new: str) -> str:
    """The notes of a race with one more, before the others; the oldest go where all would be too long.

    One race may cover several sets: all algorithms, and the exact ones alone.
    """
    notes = list(dict.fromkeys([new, *filter(None, covers.split(_BETWEEN))]))
    while len(notes) > 1 and len(_BETWEEN.join(notes)) > LONGEST:
        notes.pop()
    return _BETWEEN.join(notes)


def covered(covers: str, algorithms: tuple[Algorithm[Any], ...], vendors: frozenset[str]) -> bool:
    """Whether a race with these notes covers a candidate set of today; one of more vendors covers one of fewer."""
    own, others = _fingerprint(algorithms, vendors)
    for text in covers.split(_BETWEEN):
        first, *rest = text.split() or [""]
        if first == own and others <= frozenset(rest):
            return True
    return False


@functools.cache
def _fingerprint(algorithms: tuple[Algorithm[Any], ...], vendors: frozenset[str]) -> tuple[str, frozenset[str]]:
    """What decides the outcome of a candidate set: the algorithms of our own, and the vendors' by name."""
    own = [f"{a.name}={a.version}" for a in algorithms if a.vendor is None]
    others = frozenset(f"{a.name}={a.version}" for a in algorithms if a.vendor in vendors)
    return hashlib.sha256("\n".join([str(PRUNE_FACTOR), *own]).encode()).hexdigest()[:16], others
