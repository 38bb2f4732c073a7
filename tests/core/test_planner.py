"""Modes, limits, named candidates and faults: what is timed, what is chosen, and what never is."""

from __future__ import annotations

import gc
import queue
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import SIZE, FaultyCPU, patient_but_with_hangs
from forked import exit_code, forks
from planning import LAYER, fresh, rigged

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common.split_products import SPLIT_PRODUCTS
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts, Race
from autoconv.tuning import candidates, lookup, planner, racing
from autoconv.tuning.candidates import CandidateSet
from autoconv.tuning.measurement import Event

pytestmark = pytest.mark.usefixtures("few_families")


def test_profile_times_everything_once_and_then_nothing(cache: TuningCache) -> None:
    first = fresh(LAYER, cache=cache)
    runnable = set(first.facts)
    assert first.source == "profile"
    assert first.timed == len([f for f in first.facts.values() if f.failure is None]) > 3
    assert all(found.failure is None for found in first.facts.values())
    assert first.timings[str(first.candidate)] <= 1.2 * min(first.timings.values())
    again = fresh(LAYER, cache=cache)
    assert (again.source, again.timed, again.candidate) == ("cache", 0, first.candidate)
    assert set(again.facts) == runnable
    assert planner.plan(LAYER, cache=cache) is planner.plan(LAYER, cache=cache)


def test_a_plan_from_memory_says_that_it_timed_nothing(cache: TuningCache) -> None:
    assert [bool(planner.plan(LAYER, cache=cache).timed) for _ in range(2)] == [True, False]


def test_what_is_timed_later_serves_also_who_asked_for_less(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "HYBRID_CANDIDATES", 1)
    options: dict[str, Any] = {"device": FaultyCPU.having("none", "slow"), "cache": cache}
    lesser = [planner.plan(LAYER, mode, **options) for mode in ("heuristic", "hybrid")]
    assert [len(made.timings) for made in lesser] == [0, 1]
    best = planner.plan(LAYER, **options)
    assert len(best.timings) == 3
    for mode in ("heuristic", "hybrid"):
        made = planner.plan(LAYER, mode, **options)
        assert (made.candidate, made.timings, made.timed) == (best.candidate, best.timings, 0)


def test_other_limits_choose_anew_without_timing(cache: TuningCache) -> None:
    fresh(LAYER, cache=cache)
    for limits in (
        {"workspace_limit": 0},
        {"tolerance": 1e-6},
        {"deterministic": True},
        {"weights": "constant"},
        {"workspace_limit": 10_000, "weights": "constant"},
    ):
        made = fresh(LAYER, cache=cache, **limits)
        assert made.timed == 0
        facts = made.facts[str(made.candidate)]
        assert not made.limits.why_not(facts)
        if "workspace_limit" in limits:
            assert made.workspace_bytes <= limits["workspace_limit"]


@pytest.mark.parametrize(
    ("limits", "winner"),
    [
        ({}, "faulty.none"),
        ({"weights": "constant"}, "faulty.slow"),
        ({"workspace_limit": SIZE - 1}, "numpy.direct"),
        ({"workspace_limit": SIZE}, "faulty.none"),
        ({"tolerance": 1e-7}, "numpy.direct"),
        ({"deterministic": True}, "faulty.raises"),
    ],
)
def test_each_limit_finds_its_own_winner(cache: TuningCache, limits: dict[str, Any], winner: str) -> None:
    device = rigged(
        cache,
        none=Facts("1", time=0.1, workspace=SIZE, error=1e-6, deterministic=False),
        slow=Facts("1", time=0.05, pack=0.5, workspace=SIZE, error=1e-6, deterministic=False),
        raises=Facts("1", time=0.2, workspace=SIZE, error=1e-6),
    )
    made = fresh(LAYER, device=device, cache=cache, **limits)
    assert (str(made.candidate), made.timed) == (winner, 0)


def test_hybrid_times_a_few_and_profile_then_the_rest(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "HYBRID_CANDIDATES", 2)
    few = fresh(LAYER, "hybrid", cache=cache)
    assert few.source == "profile"
    assert few.timed == 2
    assert fresh(LAYER, "hybrid", cache=cache).timed == 0
    everything = fresh(LAYER, cache=cache)
    assert everything.timed >= len(everything.facts) - 2
    assert fresh(LAYER, "hybrid", cache=cache).timed == 0  # more effort serves a request for less


def test_heuristic_never_times_and_prefers_what_is_recorded(cache: TuningCache) -> None:
    guess = planner.plan(LAYER, "heuristic", cache=cache)
    assert (guess.source, guess.timed, guess.facts) == ("heuristic", 0, {})
    best = planner.plan(LAYER, cache=cache)
    after = planner.plan(LAYER, "heuristic", cache=cache)
    assert (after.source, after.candidate) == ("cache", best.candidate)
    roomless = planner.plan(LAYER.replace(N=2), "heuristic", cache=cache, workspace_limit=0)
    assert roomless.workspace_bytes == 0


def test_cached_never_times_and_a_miss_is_a_clear_error(cache: TuningCache) -> None:
    with pytest.raises(
        PlanError, match=r"nothing recorded for fwd-float32-NCHW[^ ]* on cpu-[^ ]*: tune the layer first"
    ):
        planner.plan(LAYER, "cached", cache=cache, vendors=False)
    best = planner.plan(LAYER, cache=cache, vendors=False)
    with pytest.raises(PlanError, match=r"on cpu-[^ ]* satisfies the limits \(tolerance=0.0\): tune the layer first"):
        planner.plan(LAYER, "cached", tolerance=0, cache=cache, vendors=False)
    assert planner.plan(LAYER, "cached", cache=cache, vendors=False).candidate == best.candidate
    found = {Candidate("pixel"): Facts("1", time=0.1, samples=9)}  # of a name that there is no more
    race = Race("2" * 32, "2026-01-01T00:00:00+00:00", {}, False, None, found)
    cache.add(LAYER.replace(N=2).key(), best.device.key, race)
    with pytest.raises(PlanError, match=r"on cpu-[^ ]* is of a candidate that there is today: tune the layer first"):
        planner.plan(LAYER.replace(N=2), "cached", cache=cache)


def test_a_candidate_may_be_named(cache: TuningCache) -> None:
    made = planner.plan(LAYER, "numpy.direct", cache=cache)
    assert (made.source, str(made.candidate), made.timed) == ("user", "numpy.direct", 0)
    family = planner.plan(LAYER, "numpy.winograd", cache=cache)
    assert family.candidate.algorithm == "numpy.winograd"
    assert planner.plan(LAYER, str(family.candidate), cache=cache).candidate == family.candidate


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "fastest"}, "mode='fastest': expected profile, hybrid, heuristic, cached"),
        ({"mode": 3}, "mode=3: expected profile"),
        ({"mode": "numpy.gemm[BM=3]"}, "expected a candidate of numpy.gemm for fwd-float32-NCHW-N1-C4-"),
        ({"mode": "numpy.gemm[BM=3]"}, "padding1x1, such as numpy.gemm[tile=image]"),
        ({"mode": "numpy.winograd[m=2"}, "mode='numpy.winograd[m=2': expected a candidate of numpy.winograd for "),
        ({"mode": "direct.polyphase[TK=8]"}, "no candidate of direct.polyphase can run fwd-float32-NCHW-N1-C4-H10"),
        ({"workspace_limit": -1}, "workspace_limit=-1: expected an integer of at least 0"),
        ({"workspace_limit": 1.5}, "workspace_limit=1.5"),
        ({"tolerance": "small"}, "tolerance='small'"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"weights": "fixed"}, "weights='fixed': expected 'varying' or 'constant'"),
        ({"vendors": "all"}, "vendors='all': expected 'loaded', True or False"),
        ({"deterministic": 1}, "deterministic=1: expected True or False"),
        ({"budget": -1}, "budget=-1: expected a number of at least 0, or None"),
        ({"budget": "60s"}, "budget='60s': expected a number"),
        ({"budget": [1]}, "budget=[1]: expected a number"),
        ({"isolate": "no"}, "isolate='no': expected True or False"),
        ({"progress": 5}, "progress=5: expected a function or None"),
        ({"cache": "folder"}, "cache='folder': expected a TuningCache or None"),
    ],
)
def test_wrong_requests_are_refused_by_name(cache: TuningCache, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        planner.plan(LAYER, **({"cache": cache} | arguments))
    assert words in str(caught.value)


def test_what_equals_an_argument_is_refused_whatever_was_asked_before(cache: TuningCache) -> None:
    planner.plan(LAYER, "heuristic", deterministic=True, workspace_limit=1, cache=cache)
    for arguments in ({"deterministic": 1, "workspace_limit": 1}, {"deterministic": True, "workspace_limit": 1.0}):
        with pytest.raises(PlanError, match=r"=1(\.0)?: expected"):
            planner.plan(LAYER, "heuristic", cache=cache, **arguments)  # type: ignore[arg-type]


def test_a_plan_holds_no_list_of_candidates_until_it_is_asked_for_one(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[weakref.ref[CandidateSet]]()

    def listed(*arguments: Any) -> CandidateSet:
        found = CandidateSet(*arguments)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(lookup, "CandidateSet", listed)
    tuned = fresh(LAYER, device=FaultyCPU.having("none"), cache=cache)
    gc.collect()
    assert tuned.timed
    assert [kept() for kept in made] == [None]
    assert tuned.reasons == {}
    assert made[-1]() is not None


def test_progress_may_plan_while_a_worker_measures(cache: TuningCache) -> None:
    options: dict[str, Any] = {"device": FaultyCPU.having("none"), "cache": cache, "isolate": True}
    inner: list[Plan] = []

    def progress(event: Event) -> None:
        if event.stage == "race" and not inner:
            inner.append(planner.plan(LAYER.replace(K=5), **options))

    outer = fresh(LAYER, progress=progress, **options)
    assert [made.timed for made in (outer, *inner)] == [2, 2]
    assert not racing._at_work


def test_numbers_of_numpy_and_a_budget_without_end_are_taken(cache: TuningCache) -> None:
    options = {"workspace_limit": np.int64(SIZE), "tolerance": np.float32(1e-3), "deterministic": np.True_}
    made = fresh(LAYER, cache=cache, device=FaultyCPU.having("none"), budget=float("inf"), **options)
    assert made.timed == 2
    assert [type(value) for value in (made.limits.workspace_limit, made.limits.tolerance)] == [int, float]


def test_a_layer_of_another_type_is_refused(cache: TuningCache) -> None:
    with pytest.raises(PlanError, match="layer: expected a ConvLayer, got str"):
        planner.plan(LAYER.key(), cache=cache)  # type: ignore[arg-type]


def test_a_candidate_that_cannot_run_says_why(cache: TuningCache) -> None:
    wide = LAYER.replace(W=600)
    device = FaultyCPU.having("none")
    with pytest.raises(PlanError, match=r"'faulty\.none' can run .*\n.*: it is never for wide images"):
        planner.plan(wide, "faulty.none", device=device, cache=cache)
    made = planner.plan(wide, device=device, cache=cache)
    assert made.reasons == {"faulty.none": ["it is never for wide images"]}
    assert "it is never for wide images" in made.explain()


def test_limits_that_nothing_satisfies_are_explained(cache: TuningCache) -> None:
    with pytest.raises(PlanError, match=r"its error of .* is over the tolerance of 1.0e-30"):
        planner.plan(LAYER, cache=cache, tolerance=1e-30, vendors=False)
    with pytest.raises(PlanError) as caught:
        planner.plan(LAYER, "numpy.gemm", cache=cache, workspace_limit=0, vendors=False)
    first, *lines = str(caught.value).splitlines()
    assert first == f"no candidate of 'numpy.gemm' can run {LAYER} under workspace_limit=0:"
    assert any("bytes of workspace; the limit is 0" in line for line in lines)
    assert not any("not tried" in line for line in lines)


@pytest.mark.parametrize("isolated", [False, True])
def test_faulty_candidates_never_win_and_are_not_tried_again(
    cache: TuningCache, isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient_but_with_hangs(monkeypatch)
    faults = ["overrun", "scribble", "unwritten", "wrong", "raises"] + ["dies", "hangs", "dies_later"] * isolated
    device = FaultyCPU.having(*faults)
    made = fresh(LAYER, device=device, cache=cache, isolate=isolated)
    assert str(made.candidate) == "numpy.direct"
    assert all(made.facts[f"faulty.{fault}"].failure for fault in faults)
    assert set(made.ranking) == {"numpy.direct"}
    assert fresh(LAYER, device=device, cache=cache).timed == 0
    for fault in faults:
        assert f"faulty.{fault}" in made.explain()


def test_what_the_budget_did_not_reach_is_tried_when_there_is_more(cache: TuningCache) -> None:
    device = FaultyCPU.having("slow", "none")
    hasty = fresh(LAYER, device=device, cache=cache, budget=1e-9)
    assert hasty.source == "heuristic"
    assert all(facts.unreached for facts in hasty.facts.values())
    assert fresh(LAYER, device=device, cache=cache, budget=1e-9).timed == 0
    patient = fresh(LAYER, device=device, cache=cache, budget=1e6)
    assert patient.timed
    assert not any(facts.unreached for facts in patient.facts.values())


def test_a_larger_budget_is_spent_though_a_plan_is_in_memory(cache: TuningCache) -> None:
    device = FaultyCPU.having("slow", "none")
    assert planner.plan(LAYER, device=device, cache=cache, budget=0.0).timed == 0
    assert planner.plan(LAYER, device=device, cache=cache).timed == 3


@forks
def test_a_child_forked_while_another_thread_plans_can_plan(cache: TuningCache) -> None:
    with racing._measuring, planner._lock:
        assert exit_code(lambda: planner.plan(LAYER, device=FaultyCPU.having("none"), cache=cache).timed) == 2


def test_who_has_to_wait_for_another_to_finish_timing_is_told(cache: TuningCache) -> None:
    events: queue.Queue[Event] = queue.Queue()
    options: dict[str, Any] = {"device": FaultyCPU.having("none"), "cache": cache, "progress": events.put}
    with racing._measuring:
        thread = threading.Thread(target=planner.plan, args=(LAYER,), kwargs=options)
        thread.start()
        assert events.get(timeout=60).stage == "wait"
        with pytest.raises(queue.Empty):
            events.get(timeout=0.2)
    thread.join()
    assert events.get(timeout=60).stage == "verify"


@pytest.mark.parametrize("mode", ["profile", "hybrid"])
def test_a_candidate_too_large_for_memory_is_left_out_until_there_is_more(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    device, free = FaultyCPU.having("none"), 2 * SIZE - 1
    monkeypatch.setattr(CPU, "memory_available", lambda self: free)
    made = fresh(LAYER, mode, device=device, cache=cache)
    assert (str(made.candidate), made.timed) == ("numpy.direct", 1)
    assert made.facts["faulty.none"].failure == "unreached, no memory: needs 0 MiB, and 0 MiB are free"
    assert fresh(LAYER, mode, device=device, cache=cache).source == "cache"  # nobody is timed again meanwhile
    free = 2 * SIZE
    later = fresh(LAYER, mode, device=device, cache=cache)
    assert (later.source, later.timed) == ("profile", 2)  # it, and whom it has to beat
    assert later.facts["faulty.none"].timed
    assert fresh(LAYER, mode, device=device, cache=cache).source == "cache"


def test_plans_in_memory_follow_the_environment(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Plan:
        return planner.plan(LAYER, "heuristic", cache=cache, build=False)

    monkeypatch.delenv(SPLIT_PRODUCTS, raising=False)
    first = made()
    monkeypatch.setenv(SPLIT_PRODUCTS, "0")
    assert made() is made() is not first
    monkeypatch.setenv(SPLIT_PRODUCTS, "1")
    assert made() is first
    monkeypatch.setenv(SPLIT_PRODUCTS, "no")
    with pytest.raises(PlanError, match=f"{SPLIT_PRODUCTS}='no': expected 0 or 1"):
        made()


def test_a_layer_that_no_memory_could_hold_is_refused_at_once(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match=r"H400000000-.*: the arrays of one image take .* MiB, and .* of memory"):
        planner.plan(LAYER.replace(H=400_000_000), "heuristic", cache=cache)
    monkeypatch.setattr(CPU, "memory", lambda self: LAYER.replace(N=1).bytes)
    assert planner.plan(LAYER.replace(N=8), "heuristic", cache=cache)  # a network may run it in parts


def test_without_a_writable_folder_only_persistence_is_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = TuningCache(tmp_path / "file", system=None)
    with pytest.warns(UserWarning, match="file"):
        made = fresh(LAYER, device=FaultyCPU.having("none"), cache=cache)
    assert made.timed == 2
    a, b = np.ones(LAYER.x_shape, np.float32), np.ones(LAYER.w_shape, np.float32)
    assert made.run(a, b).max() == 9 * LAYER.C


def test_explain_lists_every_candidate(cache: TuningCache) -> None:
    made = fresh(LAYER, cache=cache)
    text = made.explain()
    for name in made.facts.keys() | made.reasons.keys():
        assert name in text
    assert f"> {made.candidate}" in text
    assert str(LAYER) in text


def test_explain_counts_the_choices_of_parameters_that_were_not_timed(cache: TuningCache) -> None:
    made = planner.plan(LAYER, "heuristic", cache=cache)
    (reason,) = made.reasons["direct"]
    assert re.fullmatch(r"\d+ choices of parameters not timed; estimated: \S+ [mu]s or more", reason)
    assert re.search(rf"  direct +{reason}\n", made.explain())


class DirectCPU(CPU):
    """A CPU with nothing but the direct algorithm and what stands in for it."""


@registry.algorithms.register
def _(device: DirectCPU) -> tuple[Algorithm, ...]:
    return tuple(a for a in registry.algorithms(CPU.current()) if a.name in ("direct", "numpy.direct"))


def test_what_stands_in_for_a_better_one_is_not_timed_but_can_be_named(cache: TuningCache) -> None:
    device = DirectCPU.current()
    made = fresh(LAYER, device=device, cache=cache)
    assert {facts.partition("[")[0] for facts in made.facts} == {"direct"}
    assert made.reasons["numpy.direct"] == ["stands in for direct, which runs this layer itself"]
    assert str(fresh(LAYER, "numpy.direct", device=device, cache=cache).candidate) == "numpy.direct"
    alone = fresh(LAYER, device=FaultyCPU.having("none"), cache=cache)
    assert "numpy.direct" in alone.facts


@forks
def test_a_child_plans_though_another_thread_was_planning(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 holds a lock of the class while a `cached_property` is computed."""
    begun, release, test = threading.Event(), threading.Event(), threading.current_thread()
    expected = candidates.expected

    def slow(*arguments: Any) -> Any:
        if threading.current_thread() is not test:
            begun.set()
            release.wait(60)
        return expected(*arguments)

    monkeypatch.setattr(candidates, "expected", slow)
    thread = threading.Thread(target=planner.plan, args=(LAYER, "heuristic"), kwargs={"cache": cache})
    thread.start()
    assert begun.wait(60)
    try:
        assert exit_code(lambda: planner.plan(LAYER.replace(N=2), "heuristic", cache=cache).timed) == 0
    finally:
        release.set()
        thread.join()
