"""`plan`, the one door: candidates → reasons → recorded facts, or new ones → the best under the limits."""

from __future__ import annotations

import functools
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.device import Device
from autoconv.errors import PlanError, RecordError
from autoconv.layer import ConvLayer
from autoconv.plans import Plan, Source
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts, Limits, Race, Record, Weights, ranking
from autoconv.registry import resolve
from autoconv.tuning.candidates import Survey, covered, note
from autoconv.tuning.measurement import Event, Progress, failed, measure
from autoconv.tuning.worker import Worker

__all__ = ["Event", "Plan", "plan"]

Mode = Literal["profile", "hybrid", "heuristic", "cached"]
MODES = get_args(Mode)

HYBRID_CANDIDATES = 4  # how many of the estimate's first the hybrid mode times
REMEMBERED = 1024  # plans kept in memory
ENDLESS = 1e9  # seconds of a budget that is none

INTEGERS = (int, np.integer)
NUMBERS = (*INTEGERS, float, np.floating)
T = TypeVar("T", int, float)

_memo: OrderedDict[object, Plan] = OrderedDict()
_memo_lock = threading.Lock()
_measuring = threading.Lock()


def _renew_locks() -> None:
    global _memo_lock, _measuring
    _memo_lock, _measuring = threading.Lock(), threading.Lock()  # threads the child lacks may have held them


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def plan(
    layer: ConvLayer,
    mode: str = "profile",
    *,
    device: Device | str | None = None,
    workspace_limit: int | None = None,
    deterministic: bool = False,
    tolerance: float | None = None,
    allow_tf32: bool = False,
    weights: Weights = "varying",
    vendors: bool | Literal["loaded"] = "loaded",
    exact: bool = False,
    budget: float | None = None,
    cache: TuningCache | None = None,
    isolate: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """The fastest way to compute a layer on a device, under the caller's limits.

    Parameters
    ----------
    layer : ConvLayer
    mode : str
        "profile": from recorded facts, and where any candidate has none, time those.
        "hybrid": likewise, but only for the few that the estimate ranks first, and for a winner that has changed.
        "heuristic": from recorded facts if there are any, else from estimates; never time.
        "cached": from recorded facts only; a miss is an error, and so is a winner whose algorithm has changed since,
        until the layer is tuned again.
        Or the name of an algorithm, such as "numpy.gemm", or of a candidate, as `explain` lists them.
    device : Device or str, optional
        This machine's CPU, all of it, unless given; "cuda" is CuPy's current GPU, "cuda:1" another.
    workspace_limit : int, optional
        Most bytes of scratch memory, packed filters included where weights vary.
    deterministic : bool
        Only candidates that give the same bits every time.
    tolerance : float, optional
        Largest measured error, as `max|y - ref| / max(sum |x||w|)`.
    allow_tf32 : bool
        Whether tensor cores may round float32 operands to 10 bits.
    weights : "varying" or "constant"
        Whether transforming the filters counts in every run, or is done once by `Plan.pack`.
    vendors : "loaded", True or False
        Vendor libraries among the candidates: those this process has imported, all installed, or none.
    exact : bool
        Only algorithms that do no more to a sum than reorder it: no Winograd, and no Fourier transforms.
    budget : float, optional
        Seconds the timing may take; compilation and verification come on top.
    cache : TuningCache, optional
        Where facts are kept; the user's own unless given.
    isolate : bool
        Build, verify and time in a worker process, which may crash or hang without harm.
    progress : callable, optional
        Called with an `Event` before every step of the tuning.

    Raises
    ------
    PlanError
        For an unknown mode, candidate, device or option, when no candidate satisfies the limits, in mode
        "cached" when records do not suffice; and, as DeviceLostError, when a candidate left a GPU unusable.
    """
    device = resolve(device)
    cache = cache or _default_cache(os.environ.get("AUTOCONV_CACHE_DIR"))
    allowed = _vendors(device, vendors)
    key = (
        layer,
        mode,
        device,
        workspace_limit,
        deterministic,
        tolerance,
        allow_tf32,
        weights,
        allowed,
        exact,
        budget,
        cache,
    )
    try:
        found = _memo[key]
    except (KeyError, TypeError):  # a miss; or something unhashable, which is refused below by name
        pass
    else:
        return found
    if not isinstance(layer, ConvLayer):
        raise PlanError(f"layer is {type(layer).__name__}: a ConvLayer is wanted")
    if weights not in get_args(Weights):
        raise PlanError(f"weights={weights!r}: allowed are 'varying', 'constant'")
    limits = Limits(
        _number(workspace_limit, "workspace_limit", int),
        _truth(deterministic, "deterministic"),
        _number(tolerance, "tolerance", float),
        _truth(allow_tf32, "allow_tf32"),
        weights,
        allowed,
    )
    seconds, isolate, exact = _number(budget, "budget", float), _truth(isolate, "isolate"), _truth(exact, "exact")
    if seconds is not None and seconds >= ENDLESS:
        seconds = None
    if not isinstance(cache, TuningCache):
        raise PlanError(f"cache={cache!r}: a TuningCache is wanted, or None")
    if not (progress is None or callable(progress)):
        raise PlanError(f"progress={progress!r}: a function is wanted, or None")
    offered = tuple(a for a in registry.algorithms(device) if a.exact or not exact)
    request = _Request(layer, device, cache, limits, offered, allowed, seconds, isolate, progress)
    with device.selected():
        made = request.answer(mode)
    with _memo_lock:
        if made.timed:  # an answer found with more effort serves requests for less
            for old in [old for old, kept in _memo.items() if kept.layer == layer]:
                del _memo[old]
        _memo[key] = made if made.source != "profile" else made.from_records()
        while len(_memo) > REMEMBERED:
            _memo.popitem(last=False)
    return made


@functools.cache
def _default_cache(directory: str | None) -> TuningCache:
    return TuningCache(directory)


@functools.cache
def _installed(adapter: Algorithm[Any]) -> bool:
    return adapter.installed()


@functools.cache
def _adapters(device: Device) -> dict[str, Algorithm[Any]]:
    """One algorithm of each vendor."""
    return {a.vendor: a for a in registry.algorithms(device) if a.vendor is not None}


def _vendors(device: Device, vendors: object) -> frozenset[str]:
    if vendors == "loaded":
        return frozenset(name for name, adapter in _adapters(device).items() if adapter.loaded())
    if vendors is True:
        return frozenset(name for name, adapter in _adapters(device).items() if _installed(adapter))
    if vendors is False:
        return frozenset()
    raise PlanError(f"vendors={vendors!r}: allowed are 'loaded', True, False")


def _number(value: object, name: str, kind: type[T]) -> T | None:
    """A number of at least 0 as a plain one, be it NumPy's; or None."""
    if value is None:
        return None
    noun, wanted = ("an integer", INTEGERS) if kind is int else ("a number", NUMBERS)
    if isinstance(value, bool) or not isinstance(value, wanted) or not value >= 0:
        raise PlanError(f"{name}={value!r}: {noun} of at least 0 is wanted, or None")
    return kind(value)


def _truth(value: object, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise PlanError(f"{name}={value!r}: allowed are True, False")
    return bool(value)


@dataclass
class _Request:
    """One call of `plan` that memory could not answer."""

    layer: ConvLayer
    device: Device
    cache: TuningCache
    limits: Limits
    offered: tuple[Algorithm[Any], ...]
    vendors: frozenset[str]
    budget: float | None
    isolate: bool
    progress: Progress | None

    def __post_init__(self) -> None:
        self.algorithms = {algorithm.name: algorithm for algorithm in self.offered}
        self.budgets: dict[str, float | None] = {}  # of the last race each candidate was in
        self.timed = 0

    @functools.cached_property
    def survey(self) -> Survey:
        """Made only when the records do not suffice, or somebody wants an explanation."""
        return Survey(self.layer, self.device, self.offered, self.vendors)

    def answer(self, mode: str) -> Plan:
        if mode not in MODES:
            return self._named(mode)
        record = self._record()
        facts = self._usable(record)
        if not self._suffices(record):
            if mode in ("profile", "hybrid"):
                facts = self._complete(record, facts, mode)
            elif (former := self._former_winner(record)) is not None:
                if mode == "cached":
                    raise PlanError(
                        f"{former}, the winner on record for {self.layer} on {self.device.key}, has changed since: "
                        "tune the layer again, or use another mode"
                    )
                facts = {}  # what they say of the others is no reason to prefer one of those
        ranked = ranking(facts, self.limits)
        while ranked and not self._credible(ranked[0], facts[ranked[0]]):
            del facts[ranked.pop(0)]
        if ranked:
            return self._plan(ranked[0], "profile" if self.timed else "cache", facts, ranked)
        if mode == "cached":
            unmet = f" satisfies the limits ({self.limits})" if record is not None else ""
            raise PlanError(
                f"nothing recorded for {self.layer} on {self.device.key}{unmet}: "
                "tune the layer first, or use another mode"
            )
        ranked = [n for n in self.survey.promising(self.limits) if n not in facts or facts[n].unreached]
        if ranked:
            return self._plan(ranked[0], "heuristic", facts, ranked)
        raise PlanError(
            f"no candidate can run {self.layer} under {self.limits}:\n"
            + self._listed(self.survey.candidates, {name: self.limits.why_not(found) for name, found in facts.items()})
        )

    def _named(self, mode: str) -> Plan:
        """The plan for a candidate, or the best of a family, that the caller names."""
        if not isinstance(mode, str):
            raise PlanError(f"mode={mode!r}: allowed are {', '.join(MODES)}, or a candidate's name")
        facts, candidates = self._usable(self._record()), self.survey.candidates
        if mode in self.algorithms:
            family = [name for name, candidate in candidates.items() if candidate.algorithm == mode]
            ranked = ranking({name: found for name, found in facts.items() if name in family}, self.limits)
            runnable = ranked or [name for name in self.survey.runnable(self.limits) if name in family]
            if not runnable:
                raise PlanError(
                    f"no candidate of {mode!r} can run {self.layer} under {self.limits}:\n" + self._listed(family)
                )
            return self._plan(runnable[0], "user", facts, runnable)
        try:
            name = str(Candidate.parse(mode))
        except RecordError:
            name = mode
        if name not in candidates:
            raise PlanError(
                f"mode={mode!r}: allowed are {', '.join(MODES)}, an algorithm ({', '.join(self.algorithms)}), "
                f"or a candidate of this layer ({', '.join(candidates)})"
            )
        if name in self.survey.reasons:
            raise PlanError(f"{name} cannot run {self.layer}: {'; '.join(self.survey.reasons[name])}")
        return self._plan(name, "user", facts, [name])

    def _record(self) -> Record | None:
        return self.cache.load(self.layer.key(), self.device.key)

    def _usable(self, record: Record | None) -> dict[str, Facts]:
        """The recorded facts of candidates whose algorithms exist today, may be used, and are unchanged."""
        for race in record.races if record is not None else ():
            self.budgets |= dict.fromkeys(race.facts, race.budget)
        known = self._known(record.facts()) if record is not None else {}
        return {name: found for name, found in known.items() if self._unchanged(name, found)}

    def _known(self, facts: dict[str, Facts]) -> dict[str, Facts]:
        """Those of candidates whose algorithms exist today, in whatever version, and may be used."""
        algorithms = {n: a for n, a in self.algorithms.items() if a.vendor in (None, *self.vendors)}
        return {name: found for name, found in facts.items() if name.partition("[")[0] in algorithms}

    def _unchanged(self, name: str, facts: Facts) -> bool:
        return facts.version == self._algorithm(name).version

    def _algorithm(self, name: str) -> Algorithm[Any]:
        return self.algorithms[name.partition("[")[0]]

    def _former_winner(self, record: Record | None) -> str | None:
        """The best on record, if its algorithm is another today: facts of the rest do not say who wins now.

        They do once the layer is tuned again, though the budget may end before its turn, or no candidate
        of today have its name: who tunes again in the same way learns no more.
        """
        if record is None or not record.races:
            return None
        newest = self._known(record.races[-1].facts)
        if newest and all(self._unchanged(name, found) for name, found in newest.items()):
            return None
        known = self._known(record.facts())
        best = next(iter(ranking(known, self.limits)), None)
        return None if best is None or self._unchanged(best, known[best]) else best

    def _credible(self, name: str, facts: Facts) -> bool:
        """Whether a recorded candidate can run today, and is what the record says: it may be of any origin."""
        candidate = Candidate.parse(name)
        algorithm, params = self.algorithms[candidate.algorithm], candidate.params
        try:
            return (
                not algorithm.why_not(self.layer, self.device, params)
                and algorithm.workspace_bytes(self.layer, self.device, params) == facts.workspace
                and algorithm.packed_bytes(self.layer, self.device, params) == facts.packed
            )
        except (ArithmeticError, LookupError, TypeError, ValueError):  # parameters it never heard of
            return False

    def _suffices(self, record: Record | None) -> bool:
        """Whether a race under today's versions left nothing to ask about."""
        return (
            record is not None
            and not self._stale(record)
            and any(covered(race.covers, self.offered, self.vendors) for race in record.races)
        )

    def _complete(self, record: Record | None, facts: dict[str, Facts], mode: str) -> dict[str, Facts]:
        """The facts, after timing what the mode wants known and the records do not hold."""
        if not self._wanted(record, facts, mode) and not self._stale(record):
            if record is not None and (covers := self._covers(facts)):
                # an algorithm changed that has no part in this layer: the next process need not survey it to see that
                self.cache.add(self.layer.key(), self.device.key, replace(record.races[-1], covers=covers))
            return facts
        if self.progress is not None:
            self.progress(Event("wait", self.layer, None, 0, 0))
        with _measuring, self.cache.timing_lock(self.device.key):
            record = self._record()  # another process may have been quicker
            facts = self._usable(record)
            if record is not None and self._stale(record) and facts:
                facts = self._recheck(facts)
            wanted = self._wanted(record, facts, mode)
            if wanted:
                incumbents = [name for name in self._incumbents(facts) if name not in wanted]
                facts = self._measure(wanted + incumbents, facts)
        return facts

    def _wanted(self, record: Record | None, facts: dict[str, Facts], mode: str) -> list[str]:
        """What the mode asks of the survey, and the former winner, be it only to record that it is no more."""
        survey = self.survey
        names = survey.promising() if mode == "profile" else survey.promising(self.limits)[:HYBRID_CANDIDATES]
        former = self._former_winner(record)
        names = names if former is None or former in names else [*names, former]
        return [name for name in names if self._unknown(name, facts.get(name))]

    def _covers(self, facts: dict[str, Facts]) -> str:
        """What a race may note when these facts leave nothing to ask; else nothing."""
        complete = all(name in facts and not facts[name].unreached for name in self.survey.promising())
        return note(self.offered, self.vendors) if complete else ""

    def _unknown(self, name: str, facts: Facts | None) -> bool:
        """Whether there are no facts, or none for want of a budget that is larger now."""
        if facts is None:
            return True
        if not facts.unreached:
            return False
        spent = self.budgets.get(name)
        return spent is not None and (self.budget is None or self.budget > spent)

    def _incumbents(self, facts: dict[str, Facts]) -> list[str]:
        """Those a newcomer has to beat, for either kind of weights."""
        both = (Limits(weights="varying"), Limits(weights="constant"))
        return list(dict.fromkeys(name for limits in both for name in ranking(facts, limits)[:2]))

    def _stale(self, record: Record | None) -> bool:
        """Whether every race was run under other versions of the libraries that times depend on."""
        return record is not None and all(race.versions != self.device.versions for race in record.races)

    def _recheck(self, facts: dict[str, Facts]) -> dict[str, Facts]:
        """Time the winner and the runner-up once more; all of them if the order no longer holds."""
        before = self._incumbents(facts)
        facts = self._measure(before, facts)
        if self._incumbents(facts)[:1] == before[:1]:
            return facts
        return self._measure(self.survey.promising(), facts)

    def _measure(self, names: Sequence[str], known: dict[str, Facts]) -> dict[str, Facts]:
        """Race these candidates and record the facts; the usable facts afterwards."""
        survey, free = self.survey, self.device.memory_available()
        found: dict[str, Facts] = {}
        entrants = []
        for name in names:
            if name not in survey.expected:  # on record, as an incumbent or before its algorithm changed
                found[name] = failed(self._algorithm(name), "it is not a candidate of this layer")
                continue
            expected = survey.expected[name]
            if (need := expected.workspace + expected.packed) > free // 2:
                reason = f"not enough memory: needs {need >> 20} MiB, and {free >> 20} MiB are free"
                found[name] = failed(self._algorithm(name), reason)
            else:
                entrants.append(survey.candidates[name])
        if self.isolate:
            found |= _worker(self.device).measure(self.layer, entrants, budget=self.budget, progress=self.progress)
        else:
            found |= measure(self.layer, self.device, entrants, budget=self.budget, progress=self.progress)
        self.timed += sum(facts.failure is None for facts in found.values())
        known = known | found
        race = Race(
            id=uuid.uuid4().hex,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=self.device.versions,
            isolated=self.isolate,
            budget=self.budget,
            facts=found,
            covers=self._covers(known),
        )
        return self._usable(self.cache.add(self.layer.key(), self.device.key, race))

    def _plan(self, name: str, source: Source, facts: dict[str, Facts], ranked: list[str]) -> Plan:
        candidate = Candidate.parse(name)
        algorithm = self.algorithms[candidate.algorithm]
        return Plan(
            layer=self.layer,
            device=self.device,
            candidate=candidate,
            kernel=algorithm.build(self.layer, self.device, candidate.params),
            source=source,
            facts=facts,
            survey=lambda: self.survey,
            ranking=ranked,
            limits=self.limits,
            restore=_restored,
            timed=self.timed,
        )

    def _listed(self, names: Iterable[str], reasons: dict[str, list[str]] | None = None) -> str:
        expected = self.survey.expected.items()
        unfit = {name: against for name, facts in expected if (against := self.limits.why_not(facts))}
        reasons = self.survey.spared | self.survey.reasons | unfit | (reasons or {})
        return "\n".join(f"  {name}: {'; '.join(reasons.get(name, ['not tried']))}" for name in names)


@functools.cache
def _worker(device: Device) -> Worker:
    return Worker(device)


def _restored(layer: ConvLayer, device: Device, candidate: str, limits: Limits) -> Plan:
    """The plan that another process pickled."""
    options: dict[str, Any] = {field.name: getattr(limits, field.name) for field in fields(limits)}
    return plan(layer, candidate, device=device, **(options | {"vendors": bool(limits.vendors)}))
