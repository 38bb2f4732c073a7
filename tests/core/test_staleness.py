"""Records of other versions and of other candidates: what is timed again, against whom, and what is passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty import SIZE, Faulty, FaultyCPU, pretended
from planning import LAYER, fresh, listed, rigged

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.common import code_hash
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.errors import PlanError
from autoconv.records.cache import TuningCache
from autoconv.records.failures import NO_CANDIDATE
from autoconv.records.schema import Facts, Race
from autoconv.registry import algorithms
from autoconv.tuning import racing, staleness
from autoconv.tuning.staleness import note


@pytest.mark.parametrize("covers", [True, False])
def test_a_recorded_candidate_that_is_not_what_it_says_is_passed_over(cache: TuningCache, covers: bool) -> None:
    device = CPU.current()
    noted = note(registry.algorithms(device)) if covers else ""
    names = ["numpy.gemm[tile=7]", "numpy.gemm[tile=image]", "winograd[m=99]", "winograd[rows=-1]", "direct[TK=3]"]
    names += ["numpy.winograd[m=1000,r=3]", "gemm", "depthwise[TP=0,NV=0,nt=0]", "numpy.fft[tile=x]", "gone[a=1]"]
    versions = {algorithm.name: algorithm.version for algorithm in algorithms(device)}
    named = map(Candidate.parse, names)
    found = {c: Facts(versions.get(c.algorithm, "1"), time=0.01, workspace=3) for c in named}
    found[Candidate("numpy.direct")] = Facts(versions["numpy.direct"], time=1.0)
    race = Race("1" * 32, "2026-01-02T00:00:00+00:00", device.versions, False, None, found, noted)
    cache.add(LAYER.key(), device.key, race)
    for mode in ("cached", "profile"):
        made = fresh(LAYER, mode, device=device, cache=cache, vendors=False)
        if mode == "cached":
            assert str(made.candidate) == "numpy.direct"
        else:  # there is such a candidate, but of another size
            assert made.facts["numpy.gemm[tile=image]"].workspace != 3
        assert str(made.candidate) not in names or "tile=image" in str(made.candidate)


def test_candidates_are_listed_once_when_an_algorithm_changed_that_has_no_part_in_the_layer(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every process pays for the list, until something else makes it tune again."""
    wide = replace(LAYER, W=501)
    fresh(wide, device=FaultyCPU.having(), cache=cache)
    sets = listed(monkeypatch)
    for _ in range(2):
        made = fresh(wide, device=FaultyCPU.having("none"), cache=cache)  # never for wide images
        assert (made.timed, made.source, len(sets)) == (0, "cache", 1)


def test_a_changed_algorithm_races_against_the_incumbents_alone(cache: TuningCache) -> None:
    fresh(LAYER, device=FaultyCPU.having("none", "slow"), cache=cache)
    changed = FaultyCPU.having("none", "slow", version="2")
    made = fresh(LAYER, device=changed, cache=cache)
    assert made.timed == 3  # both changed, and the incumbent, direct
    assert fresh(LAYER, device=changed, cache=cache).timed == 0


@pytest.mark.parametrize(("far", "place"), [(3.0, -1), (1e9, 0)])
def test_an_incumbent_far_behind_what_is_expected_has_its_turn_last(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch, far: float, place: int
) -> None:
    """Where all that was quicker has changed, a budget would be spent on what was never the best."""
    rigged(cache, none=Facts("1", time=0.1))  # and numpy.direct, which takes a second
    raced: list[list[str]] = []
    monkeypatch.setattr(racing, "Measurement", pretended(lambda c: Facts("2", time=1.0), raced))
    monkeypatch.setattr(racing, "FAR", far)
    fresh(LAYER, "hybrid", device=FaultyCPU.having("none", version="2"), cache=cache, budget=1.0)
    assert raced[0][place] == "numpy.direct"


def test_a_new_algorithm_races_against_the_best_two(cache: TuningCache) -> None:
    fresh(LAYER, device=FaultyCPU.having("none", "unsteady", "slow"), cache=cache)
    made = fresh(LAYER, device=FaultyCPU.having("none", "unsteady", "slow", "raises"), cache=cache)
    assert made.timed == 2
    assert {"faulty.slow", "faulty.raises"} <= set(made.facts)


@pytest.mark.parametrize("winner", ["none", "direct"])
def test_a_winner_that_has_changed_is_no_reason_to_take_another_on_record(cache: TuningCache, winner: str) -> None:
    """Its facts are of a kernel that is gone; those of the others say nothing about who wins now."""
    rigged(cache, none=Facts("1", time=0.1 if winner == "none" else 2.0, workspace=SIZE, error=1e-6))
    changed = FaultyCPU.having("none", version="2")
    if winner == "direct":  # unchanged, and the best on record
        for mode in ("cached", "heuristic"):
            assert str(fresh(LAYER, mode, device=changed, cache=cache).candidate) == "numpy.direct"
        return
    with pytest.raises(PlanError, match=r"^faulty.none, the winner on record for .* tune the layer again"):
        fresh(LAYER, "cached", device=changed, cache=cache)
    assert fresh(LAYER, "heuristic", device=changed, cache=cache).source == "heuristic"
    assert fresh(LAYER, "cached", device=changed, cache=cache, workspace_limit=0).source == "cache"


@pytest.mark.parametrize("mode", ["profile", "hybrid"])
def test_a_former_winner_stands_in_the_way_only_until_the_layer_is_tuned_again(
    cache: TuningCache, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon the budget ended: what the tuning found serves a request for less."""
    former = {"none": Facts("1", time=0.1), "none[a=1]": Facts("1", time=0.05), "none[a=2]": Facts("1", time=0.06)}
    rigged(cache, **former)
    changed = FaultyCPU.having("none", version="2")
    with pytest.raises(PlanError, match=r"^faulty.none\[a=1\], the winner on record"):
        fresh(LAYER, "cached", device=changed, cache=cache)

    def hasty(candidate: Candidate) -> Facts:
        late = Facts("2", failure="unreached: the budget was spent")
        return late if candidate.algorithm == "faulty.none" else Facts(NumpyDirect().version, time=1.0)

    monkeypatch.setattr(racing, "Measurement", pretended(hasty))
    tuned = fresh(LAYER, mode, device=changed, cache=cache, budget=1.0)
    assert (str(tuned.candidate), tuned.timed) == ("numpy.direct", 1)
    assert tuned.facts["faulty.none[a=1]"].failure == NO_CANDIDATE
    for less in ("cached", "heuristic"):
        made = fresh(LAYER, less, device=changed, cache=cache)
        assert (str(made.candidate), made.source) == ("numpy.direct", "cache")


def test_a_former_winner_that_has_ceased_to_take_the_layer_is_asked_about_once(cache: TuningCache) -> None:
    wide = LAYER.replace(W=600)
    rigged(cache, wide, none=Facts("1", time=0.1))
    changed = FaultyCPU.having("none", version="2")
    with pytest.raises(PlanError, match="the winner on record"):
        fresh(wide, "cached", device=changed, cache=cache)
    assert fresh(wide, device=changed, cache=cache).timed == 0, "there is nothing new"
    assert str(fresh(wide, "cached", device=changed, cache=cache).candidate) == "numpy.direct"


def test_a_former_winner_that_cannot_run_today_is_timed_when_it_can(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that needs products which the environment forbids for now, and whose code has changed."""
    rigged(cache, none=Facts("1", time=0.1, workspace=SIZE))
    changed = FaultyCPU.having("none", "unsteady", version="2")
    with monkeypatch.context() as patch:
        patch.setattr(Faulty, "refusals", lambda self, *_: ["not today"] if self.name == "faulty.none" else [])
        assert "faulty.none" not in fresh(LAYER, device=changed, cache=cache).facts
    monkeypatch.setattr(staleness, "PRUNE_FACTOR", 13.0)  # with another environment there is another note, too
    assert fresh(LAYER, device=changed, cache=cache).facts["faulty.none"].timed


def test_hybrid_times_also_the_former_winner(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "HYBRID_CANDIDATES", 1)
    rigged(cache, none=Facts("1", time=0.5), slow=Facts("1", time=0.1))
    changed = FaultyCPU.having("none", "slow", "unsteady", version="2")
    made = fresh(LAYER, "hybrid", device=changed, cache=cache)
    assert set(made.facts) == {"faulty.none", "faulty.slow", "numpy.direct"}
    assert made.timed == 3


def test_a_record_of_other_versions_is_checked_once_by_its_best(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FaultyCPU.having("slow")
    fresh(LAYER, device=device, cache=cache)
    monkeypatch.setattr(CPU, "versions", {"numpy": "0.0"})
    device = FaultyCPU.having("slow")
    assert fresh(LAYER, "cached", device=device, cache=cache).timed == 0
    checked = fresh(LAYER, device=device, cache=cache)
    assert checked.timed == 2
    assert checked.source == "profile"
    assert fresh(LAYER, device=device, cache=cache).timed == 0


def test_another_llvm_has_winner_and_runner_up_timed_again_and_no_more(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM's version is no part of a family's, which would make all its facts worthless; it stands in the race."""
    times = {"none": 0.1, "slow": 0.2, "unsteady": 0.3, "direct": 1.0}
    faults = list(times)[:3]
    device = rigged(cache, **{name: Facts("1", time=times[name], workspace=SIZE) for name in faults})
    before = {algorithm.name: algorithm.version for algorithm in algorithms(CPU.current())}
    raced: list[list[str]] = []
    offered = {algorithm.name: algorithm for algorithm in algorithms(device)}

    def timed(candidate: Candidate) -> Facts:
        algorithm = offered[candidate.algorithm]
        seconds, workspace = times[algorithm.name.partition(".")[2]], algorithm.workspace_bytes(LAYER, device, {})
        return Facts(algorithm.version, time=seconds, samples=9, workspace=workspace)

    monkeypatch.setattr(racing, "Measurement", pretended(timed, raced))
    assert fresh(LAYER, device=device, cache=cache).timed == 0
    monkeypatch.setattr("llvmlite.__version__", "99.0")
    for cached in (code_hash.version, code_hash._files):
        cached.cache_clear()
    device = FaultyCPU.having(*faults)
    assert device.versions["llvmlite"] == "99.0"
    assert {algorithm.name: algorithm.version for algorithm in algorithms(CPU.current())} == before
    checked = fresh(LAYER, device=device, cache=cache)
    assert (raced, checked.timed, str(checked.candidate)) == ([["faulty.none", "faulty.slow"]], 2, "faulty.none")
    assert fresh(LAYER, device=device, cache=cache).timed == 0
    times["none"] = 0.5  # who was best is no more: then all are asked
    monkeypatch.setattr("llvmlite.__version__", "100.0")
    assert str(fresh(LAYER, device=FaultyCPU.having(*faults), cache=cache).candidate) == "faulty.slow"
    assert [sorted(names) for names in raced[1:]] == [
        ["faulty.none", "faulty.slow"],
        ["faulty.none", "faulty.slow", "faulty.unsteady", "numpy.direct"],
    ]


def test_an_incumbent_that_cannot_run_today_keeps_its_time(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that needs products which the environment forbids for now."""
    device = rigged(cache, none=Facts("1", time=0.1, workspace=SIZE), slow=Facts("1", time=0.2, workspace=SIZE))
    more = FaultyCPU.having("none", "slow", "unsteady")
    with monkeypatch.context() as patch:
        patch.setattr(Faulty, "refusals", lambda self, *_: ["not today"] if self.name == "faulty.none" else [])
        made = fresh(LAYER, device=more, cache=cache)
        assert made.timed >= 2  # the newcomer, and an incumbent
        assert made.facts["faulty.none"].timed
    assert fresh(LAYER, "cached", device=device, cache=cache).facts["faulty.none"].timed


def test_an_incumbent_that_is_not_listed_any_more_races_on(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a grid that another model of the machine does not have."""
    rigged(cache, none=Facts("1", time=0.1, workspace=SIZE))
    monkeypatch.setattr(Faulty, "candidates", lambda self, *_: [] if self.name == "faulty.none" else [{}])
    made = fresh(LAYER, device=FaultyCPU.having("none", "unsteady"), cache=cache)
    assert made.facts["faulty.none"].failure is None
    assert made.facts["faulty.none"].time != 0.1


def test_what_had_a_worker_killed_is_not_tried_in_this_process(cache: TuningCache) -> None:
    killed = Facts("1", failure="unreached, no memory: the worker died of signal 9 (SIGKILL) (being verified)")
    device = rigged(cache, none=killed)
    made = fresh(LAYER, device=device, cache=cache)
    assert (made.timed, made.facts["faulty.none"].timed) == (0, False)
    assert fresh(LAYER, device=device, cache=cache, isolate=True).facts["faulty.none"].timed


@pytest.mark.parametrize("covers", [True, False])
@pytest.mark.parametrize("winner", ["none", "none[a=1]"])
def test_an_own_race_of_older_code_does_not_hide_a_shipped_one(tmp_path: Path, covers: bool, winner: str) -> None:
    """Be it run later, and be its winner no candidate of today."""
    newer, shipped = FaultyCPU.having("none", "slow", version="2"), tmp_path / "shipped"
    shipped.mkdir()
    maker = TuningCache(tmp_path / "maker", system=None)
    found = {
        Candidate(f"faulty.{name}"): Facts("2", time=time, samples=9, workspace=SIZE)
        for name, time in (("none", 0.1), ("slow", 0.2))
    }
    found[Candidate("numpy.direct")] = Facts(NumpyDirect().version, time=1.0, samples=9)
    noted = note(registry.algorithms(newer)) if covers else ""
    race = Race("2" * 32, "2025-01-01T00:00:00+00:00", newer.versions, False, None, found, noted)
    maker.add(LAYER.key(), newer.key, race)
    maker.export(shipped)
    cache = TuningCache(tmp_path / "own", system=shipped)
    older = {"slow": Facts("1", time=0.04, workspace=SIZE), winner: Facts("1", time=0.03, workspace=SIZE)}
    rigged(cache, **older)
    for mode in ("cached", "heuristic", *(["hybrid", "profile"] if covers else [])):
        made = fresh(LAYER, mode, device=newer, cache=cache)
        assert (str(made.candidate), made.timed, made.source) == ("faulty.none", 0, "cache")
        assert made.timings == {"faulty.none": 0.1, "faulty.slow": 0.2, "numpy.direct": 1.0}
    former = fresh(LAYER, "cached", device=FaultyCPU.having("none", "slow"), cache=cache)
    assert former.timings[f"faulty.{winner}"] == 0.03
    for each in (maker, cache):
        each.close()


def test_versions_of_the_code_may_share_a_cache(cache: TuningCache) -> None:
    """Two may take turns, and nobody is told by the notes of others that nothing is left to time."""
    devices = {version: FaultyCPU.having("none", "slow", version=version) for version in "123"}
    for version, timed in (("1", 3), ("2", 3), ("1", 0), ("2", 0), ("3", 3), ("2", 0), ("1", 3)):
        made = fresh(LAYER, device=devices[version], cache=cache)
        assert (made.timed, made.timings.keys()) == (timed, {"faulty.none", "faulty.slow", "numpy.direct"})


@pytest.mark.parametrize("limits", [{"deterministic": True}, {"tolerance": 1e-7}])
def test_versions_that_share_a_cache_keep_what_any_limit_may_ask_for(
    cache: TuningCache, limits: dict[str, object]
) -> None:
    """Though a version had a second race, of a few, before the other one's."""
    none = Facts("1", time=0.1, workspace=SIZE, error=1e-6, deterministic=False)
    device = rigged(cache, none=none, slow=Facts("1", time=0.2, workspace=SIZE))
    (first,) = cache.load(LAYER.key(), device.key).races  # type: ignore[union-attr]
    few = {candidate: facts for candidate, facts in first.facts.items() if candidate.algorithm != "faulty.slow"}
    cache.add(LAYER.key(), device.key, replace(first, id="1" * 32, facts=few))
    assert fresh(LAYER, device=FaultyCPU.having("none", "slow", version="2"), cache=cache).timed == 3
    made = fresh(LAYER, "cached", device=device, cache=cache, **limits)
    assert (str(made.candidate), made.timed) == ("faulty.slow", 0)


def test_facts_of_today_under_other_versions_are_checked_whatever_older_code_ran_under(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An own race of older code says nothing of today, be it run under today's LLVM."""
    device = FaultyCPU.having("none", version="2")
    found = {
        Candidate("faulty.none"): Facts("2", time=0.1, samples=9, workspace=SIZE),
        Candidate("numpy.direct"): Facts(NumpyDirect().version, time=1.0, samples=9),
    }
    covers = note(registry.algorithms(device))
    race = Race("2" * 32, "2025-01-01T00:00:00+00:00", {"llvmlite": "0"}, False, None, found, covers)
    cache.add(LAYER.key(), device.key, race)
    older = {Candidate("faulty.none"): Facts("1", time=0.1, samples=9, workspace=SIZE)}
    cache.add(LAYER.key(), device.key, replace(race, id="1" * 32, versions=device.versions, facts=older))
    raced: list[list[str]] = []
    monkeypatch.setattr(racing, "Measurement", pretended(lambda candidate: found[candidate], raced))
    assert fresh(LAYER, device=device, cache=cache).timed == 2
    assert fresh(LAYER, device=device, cache=cache).timed == 0
    assert raced == [["faulty.none", "numpy.direct"]]


@pytest.mark.parametrize("mode", ["profile", "hybrid"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_winner_that_another_model_cuts_otherwise_is_timed_again(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch, mode: str, listed: bool
) -> None:
    """Its facts are of another kernel: the workspace on record is not that of today's."""
    facts = {"none": Facts("1", time=0.1, workspace=SIZE + 8), "slow": Facts("1", time=0.2, workspace=SIZE)}
    device, raced = rigged(cache, **facts), list[list[str]]()
    for less in ("cached", "heuristic"):
        assert str(fresh(LAYER, less, device=device, cache=cache).candidate) == "faulty.slow"

    def timed(candidate: Candidate) -> Facts:
        if candidate.algorithm == "numpy.direct":
            return Facts(NumpyDirect().version, time=1.0)
        return Facts("1", time=0.15 if candidate.algorithm == "faulty.none" else 0.2, workspace=SIZE)

    monkeypatch.setattr(racing, "Measurement", pretended(timed, raced))
    monkeypatch.setattr(Faulty, "candidates", lambda self, *_: [{}] if listed or self.name != "faulty.none" else [])
    made = fresh(LAYER, mode, device=device, cache=cache)
    assert (str(made.candidate), made.timed) == ("faulty.none", 3)
    assert [sorted(names) for names in raced] == [["faulty.none", "faulty.slow", "numpy.direct"]]
    for again in (mode, "cached"):
        made = fresh(LAYER, again, device=device, cache=cache)
        assert (str(made.candidate), made.timed, made.timings["faulty.none"]) == ("faulty.none", 0, 0.15)


def test_a_budget_that_did_not_reach_what_is_to_be_timed_again_is_not_spent_twice(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"none": Facts("1", time=0.1, workspace=SIZE + 8), "slow": Facts("1", time=0.2, workspace=SIZE)}
    device, raced = rigged(cache, **facts), list[list[str]]()

    def hasty(candidate: Candidate) -> Facts:
        if candidate.algorithm == "numpy.direct":
            return Facts(NumpyDirect().version, time=1.0)
        late = candidate.algorithm == "faulty.none"
        return Facts("1", failure="unreached: no time") if late else Facts("1", time=0.2, workspace=SIZE)

    monkeypatch.setattr(racing, "Measurement", pretended(hasty, raced))
    for budget, races in ((1.0, 1), (1.0, 1), (2.0, 2), (None, 3), (None, 3)):
        made = fresh(LAYER, device=device, cache=cache, budget=budget)
        assert (str(made.candidate), len(raced)) == ("faulty.slow", races)


def test_where_the_order_holds_no_longer_there_are_two_races_and_no_third(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take a whole budget: who was timed, and all; what a search left out waits for the next request."""
    monkeypatch.setattr(Faulty, "searched", property(lambda self: self.name == "faulty.unsteady"))
    grid = [{"a": number} for number in range(200)]
    monkeypatch.setattr(Faulty, "candidates", lambda self, *_: grid if self.searched else [{}])
    monkeypatch.setattr(Faulty, "estimate", lambda self, layer, device, params: 1e-6 * (1 + params.get("a", 0) % 7))
    rigged(cache, none=Facts("1", time=0.1, workspace=SIZE), unsteady=Facts("1", time=9.0, workspace=SIZE))
    raced, prepared = list[list[str]](), list[float | None]()

    def slower(candidate: Candidate) -> Facts:
        if candidate.algorithm == "numpy.direct":
            return Facts(NumpyDirect().version, time=1.0)
        if candidate.algorithm == "faulty.none":
            return Facts("1", time=5.0, workspace=SIZE)
        return Facts("1", failure="unreached: the budget of 1 s was spent")

    def measurement(*arguments: Any, preparing: float | None, **options: Any) -> Any:
        prepared.append(preparing)
        return pretended(slower, raced)(*arguments, **options)

    monkeypatch.setattr(racing, "Measurement", measurement)
    monkeypatch.setattr(CPU, "versions", {"numpy": "0.0"})
    fresh(LAYER, "hybrid", device=FaultyCPU.having("none", "unsteady"), cache=cache, budget=1.0)
    assert len(raced) == 2
    assert raced[0] == ["faulty.none", "numpy.direct"]
    assert prepared == [racing.PREPARING] * 2  # times the budget: no more is built and verified
