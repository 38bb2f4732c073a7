"""Modes, limits and named candidates: what is timed, what is chosen, and what is refused."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest
from faulty import SIZE, FaultyCPU
from layers import operands
from planning import LAYER, fresh, rigged

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common.split_products import SPLIT_PRODUCTS
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts, Race
from autoconv.tuning import lookup, planner, racing, reference
from autoconv.tuning.candidates import CandidateSet

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


def test_those_near_the_best_race_once_more_where_that_is_asked_for(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"device": FaultyCPU.having("none", "unsteady", "slow"), "cache": cache}
    first = fresh(LAYER, again=True, **options)
    assert first.timed == len(first.facts), "nothing was on record"
    assert fresh(LAYER, "heuristic", again=True, **options).timed == 0, "a mode that never times"
    monkeypatch.setattr(racing, "NEAR", 1.0)
    assert fresh(LAYER, again=True, **options).timed == 0, "it has no rival"
    monkeypatch.setattr(racing, "NEAR", 1e9)
    monkeypatch.setattr(racing, "NEAREST", 3)
    made = fresh(LAYER, again=True, **options)
    before, after = next(iter(cache.records())).races
    assert (made.timed, made.source) == (len(after.facts), "profile")
    assert set(first.ranking[:3]) <= {str(candidate) for candidate in after.facts}
    assert 3 <= len(after.facts) < len(before.facts)
    assert made.facts[first.ranking[0]].time == after.facts[Candidate.parse(first.ranking[0])].time
    assert planner.plan(LAYER, **options).candidate == made.candidate, "from memory"


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
        ({"again": 1}, "again=1: expected True or False"),
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
    several = ({"deterministic": 1, "workspace_limit": 1}, {"deterministic": True, "workspace_limit": 1.0})
    asked = {"deterministic": True, "workspace_limit": 1}
    for arguments in (*several, asked | {"isolate": 1}, asked | {"build": 1}, asked | {"progress": 1}):
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


def test_limits_share_a_list_of_candidates_where_they_are_told_to_and_not_what_they_leave_out(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[CandidateSet]()
    monkeypatch.setattr(lookup, "CandidateSet", lambda *given: made.append(CandidateSet(*given)) or made[-1])
    asked: list[dict[str, Any]] = [{}, {"workspace_limit": 0}, {"exact": True}]

    def listed(layer: ConvLayer) -> int:
        made.clear()
        for limits in asked:
            fresh(layer, "heuristic", cache=cache, vendors=False, **limits)  # another test may load one
        return len(made)

    with lookup.shared_across_limits():
        assert listed(LAYER) == 2, "the exact ones are others"
    assert listed(LAYER.replace(N=LAYER.N + 1)) == 3


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


@pytest.mark.parametrize("mode", ["heuristic", "hybrid"])
def test_a_tolerance_allows_what_usually_errs_less_by_far(cache: TuningCache, mode: str) -> None:
    layer = ConvLayer(N=1, C=32, H=14, W=14, K=32, R=3, S=3, padding=1)
    made = fresh(layer, mode, cache=cache, tolerance=6e-7, vendors=False)
    assert bool(made.timed) == (mode == "hybrid")
    x, w, _, _ = operands(layer)
    assert reference.error(made.run(x, w), reference.convolve(layer, x, w), reference.magnitude(layer, x, w)) <= 6e-7
    with pytest.raises(PlanError, match=r"its error of \d\.\de-07 is over the tolerance of 2.0e-09"):
        fresh(layer, mode, cache=cache, tolerance=2e-9, vendors=False)


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


def test_of_too_many_plans_those_go_that_nobody_asked_for_the_longest(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "REMEMBERED", 3)

    def made(images: int) -> Plan:
        return planner.plan(LAYER.replace(N=images), "heuristic", cache=cache)

    first, second, third = made(1), made(2), made(3)
    assert made(1) is first
    made(4)
    assert (made(1), made(3)) == (first, third)
    assert made(2) is not second


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
