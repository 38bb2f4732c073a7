"""Choice: the best of what is known, or expected, under the caller's limits; and why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.common import code_hash, split_products
from autoconv.device import Device
from autoconv.errors import PlanError, RecordError
from autoconv.plans import Source
from autoconv.records.kept import Kept
from autoconv.records.limits import ranking
from autoconv.records.schema import Facts
from autoconv.tuning.candidates import CandidateSet, expected
from autoconv.tuning.lookup import Known, Request, credible, look_up, sizes
from autoconv.tuning.racing import again, complete, finer
from autoconv.tuning.search.nearby import foreseen, sources
from autoconv.tuning.staleness import former_winner, resized, suffices

MODES = ("profile", "hybrid", "heuristic", "cached")
TIMING = ("profile", "hybrid")


@dataclass(frozen=True, eq=False)
class Choice:
    """A candidate, what is known of all, and what gives the order of those that satisfy the limits."""

    candidate: Candidate
    source: Source
    facts: dict[Candidate, Facts]
    ranking: Callable[[], Sequence[Candidate]]
    timed: int = 0


def check_mode(mode: object, device: Device) -> None:
    """Refuse a mode that is none, and names no algorithm of a device and none of its candidates.

    Raises
    ------
    PlanError
        For such a mode, whatever the layer.
    """
    known = [algorithm.name for algorithm in registry.algorithms(device)]
    if not isinstance(mode, str) or (mode not in MODES and mode.partition("[")[0] not in known):
        raise PlanError(
            f"mode={mode!r}: expected {', '.join(MODES)}, an algorithm ({', '.join(known)}) or one of its candidates"
        )


def choose(request: Request, mode: object, once_more: bool = False) -> Choice:
    """The candidate that a mode finds for a request, or that it names.

    Parameters
    ----------
    request : Request
    mode : str
    once_more : bool
        Whether those near the best race once more, where the mode times and all has been timed before.

    Raises
    ------
    PlanError
        For an unknown mode, when no candidate satisfies the limits, and in mode "cached" when the records do not
        suffice.
    """
    if not isinstance(mode, str):
        raise PlanError(f"mode={mode!r}: expected {', '.join(MODES)}, or the name of an algorithm or a candidate")
    known = look_up(request)
    if mode not in MODES:
        return _named(request, known, mode)
    facts = known.facts
    timing = mode in TIMING
    if not suffices(request, known) or (timing and resized(request, known)):
        if timing:
            known = complete(request, known, mode)
            facts = known.facts
        elif (former := former_winner(request, known.record)) is not None:
            if mode == "cached":
                raise PlanError(
                    f"{former}, the winner on record for {request.layer} on {request.device.key}, has changed since: "
                    "tune the layer again, or use another mode"
                )
            facts = {}  # what they say of the others is no reason to prefer one of those
    if timing and once_more and not known.timed:
        known = again(request)
        facts = known.facts
    if timing and request.limits.tolerance is not None:
        known = finer(request, known, mode)
        facts = known.facts
    facts, ranked = _ranked(request, facts)
    if ranked:
        return Choice(ranked[0], "profile" if known.timed else "cache", facts, lambda: ranked, known.timed)
    if mode == "cached":
        _refuse_miss(request, known)
    return _expected(request, facts, known.timed)


def _ranked(request: Request, facts: dict[Candidate, Facts]) -> tuple[dict[Candidate, Facts], list[Candidate]]:
    """The facts less those of candidates that would win and are not what they say, and the order of the rest."""
    ranked = ranking(facts, request.limits, request.layer.bytes)
    kept = dict(facts)
    while ranked and not credible(request, ranked[0], kept[ranked[0]]):
        del kept[ranked.pop(0)]
    return kept, ranked


def _expected(request: Request, facts: dict[Candidate, Facts], timed: int) -> Choice:
    """The best by the estimates, among those of which nothing is known; of those not worth timing if no other can.

    With nothing on record it is what it was the last time, unless more is known of nearby layers: to estimate the
    layers of a network takes seconds.
    """
    kept = None if facts or request.limits.vendors != frozenset() else _kept_estimates(request)
    what = " ".join([request.layer.key(), str(request.limits), *sources(request)]) if kept is not None else ""
    if kept is not None and (before := kept.read(what, partial(_recalled, request))) is not None:
        return Choice(before, "heuristic", facts, lambda: _by_estimates(request, facts), timed)
    ranked = _by_estimates(request, facts)
    if ranked:
        if kept is not None:
            kept.keep(what, candidate=str(ranked[0]))
        return Choice(ranked[0], "heuristic", facts, lambda: ranked, timed)
    offered = request.candidate_set
    against = {candidate: request.limits.why_not(found) for candidate, found in facts.items()}
    raise PlanError(
        f"no candidate can run {request.layer} under {request.limits}:\n"
        + _listed(request, offered.examples(), against)
    )


def _by_estimates(request: Request, facts: dict[Candidate, Facts]) -> list[Candidate]:
    offered = request.candidate_set
    unknown = [c for c in offered.runnable(request.limits) if c not in facts or facts[c].unreached]
    worth, ahead = [c for c in unknown if c not in offered.pruned] or unknown, foreseen(request)
    return sorted(worth, key=ahead.__getitem__)


def _kept_estimates(request: Request) -> Kept:
    """Which candidates were expected to be the best, by today's code and for this machine as it is known."""
    code = registry.code_of(request.offered), code_hash.version(CandidateSet.__module__), split_products.allowed()
    return Kept(request.cache, request.device, "estimate", f"{code} {request.device.estimated_from}")


def _recalled(request: Request, kept: dict[str, Any]) -> Candidate | None:
    """The candidate that is kept; None where it cannot run."""
    candidate = Candidate.parse(kept["candidate"])
    return candidate if candidate.algorithm in request.allowed and sizes(request, candidate) is not None else None


def _named(request: Request, known: Known, mode: str) -> Choice:
    """A candidate, or the best of a family, that the caller names."""
    if mode in request.algorithms:
        return _best_of_family(request, known, mode)
    try:
        candidate = Candidate.parse(mode)
    except RecordError:
        _refuse_name(request, mode)
    facts = known.facts.get(candidate)
    if facts is None or not facts.timed or not credible(request, candidate, facts):  # else it was listed once
        offered = request.family(candidate.algorithm)
        if candidate not in offered.candidates and candidate not in offered.finer:
            _refuse_name(request, mode)
        if reasons := offered.against(candidate):
            raise PlanError(f"{candidate} cannot run {request.layer}: {'; '.join(reasons)}")
        facts = expected(request.algorithms[candidate.algorithm], request.layer, request.device, candidate)
    if reasons := request.limits.why_not(facts):
        limits = f"{request.limits}: {'; '.join(reasons)}"
        raise PlanError(f"{candidate} is not allowed for {request.layer} under {limits}")
    return Choice(candidate, "user", known.facts, lambda: [candidate])


def _best_of_family(request: Request, known: Known, name: str) -> Choice:
    offered = request.family(name)
    family = {candidate for candidate in offered.candidates if candidate.algorithm == name}
    recorded = {candidate: found for candidate, found in known.facts.items() if candidate in family}
    recorded, ranked = _ranked(request, recorded)
    against = {c: request.limits.why_not(found) for c, found in recorded.items() if not found.unreached}
    ranked = ranked or [c for c in offered.runnable(request.limits) if c in family and c not in against]
    if not ranked:
        listed = _listed(request, [c for c in offered.examples() if c in family], against)
        raise PlanError(f"no candidate of {name!r} can run {request.layer} under {request.limits}:\n{listed}")
    return Choice(ranked[0], "user", known.facts, lambda: ranked)


def _refuse_name(request: Request, mode: str) -> NoReturn:
    name = mode.partition("[")[0]
    there = registry.by_name(request.device)
    if name in there and name not in request.algorithms:
        given, why = (
            ("exact=True", "does more to a sum than reorder it")
            if request.limits.exact and not there[name].exact
            else ("denormals='keep'", "counts them as 0")
        )
        raise PlanError(
            f"mode={mode!r}: {given} leaves {name} out, as it {why}; "
            f"expected one of {', '.join(request.algorithms)}, or no {given}"
        )
    if name not in request.algorithms:
        raise PlanError(
            f"mode={mode!r}: expected {', '.join(MODES)}, an algorithm ({', '.join(request.algorithms)}) or one of its "
            "candidates"
        )
    offered = request.family(name)
    members = [candidate for candidate in offered.examples() if candidate.algorithm == name]
    reasons = {candidate: list(offered.against(candidate)) for candidate in members}
    if not (able := [str(candidate) for candidate in members if not reasons[candidate]]):
        listed = _listed(request, members, reasons)
        raise PlanError(f"mode={mode!r}: no candidate of {name} can run {request.layer}:\n{listed}")
    raise PlanError(f"mode={mode!r}: expected a candidate of {name} for {request.layer}, such as {', '.join(able)}")


def _refuse_miss(request: Request, known: Known) -> NoReturn:
    unmet = ""
    if known.record is not None:
        refused = any(facts.timed and request.limits.why_not(facts) for facts in known.facts.values())
        unmet = f" satisfies the limits ({request.limits})" if refused else " is of a candidate that there is today"
    raise PlanError(
        f"nothing recorded for {request.layer} on {request.device.key}{unmet}: "
        "tune the layer first, or use another mode"
    )


def _listed(
    request: Request, candidates: Iterable[Candidate], reasons: dict[Candidate, list[str]] | None = None
) -> str:
    offered, limits = request.candidate_set, request.limits
    unfit = {candidate: against for candidate, facts in offered.expected.items() if (against := limits.why_not(facts))}
    known = offered.pruned | offered.reasons | unfit | (reasons or {})
    return "\n".join(f"  {candidate}: {'; '.join(known.get(candidate, ['not tried']))}" for candidate in candidates)
