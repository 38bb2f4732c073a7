"""Plans of exact algorithms alone: what is timed and listed for them, and that they leave others' notes as they are."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from faulty import SIZE, Faulty, FaultyCPU
from planning import LAYER, fresh, listed, rigged

from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.errors import PlanError
from autoconv.functional import conv2d
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts, Race
from autoconv.registry import algorithms
from autoconv.tuning import planner, racing
from autoconv.tuning.measurement import Measurement


def test_exact_times_and_lists_the_exact_alone(cache: TuningCache) -> None:
    device = FaultyCPU.having("none", "unsteady")
    made = fresh(LAYER, device=device, cache=cache, exact=True)
    assert (made.facts.keys(), made.timed, made.reasons) == ({"numpy.direct"}, 1, {})
    assert made.limits.exact
    assert "faulty" not in made.explain()
    for algorithm in algorithms(CPU.current()):
        if algorithm.name.startswith(("winograd", "fft", "numpy.winograd", "numpy.fft")):
            assert not algorithm.exact
    guess = planner.plan(LAYER.replace(N=2), "heuristic", exact=True, cache=cache)
    offered = {algorithm.name: algorithm for algorithm in algorithms(guess.device)}
    assert len(guess.ranking) > 1
    assert all(offered[name.partition("[")[0]].exact for name in guess.ranking)


def test_what_an_exact_race_covers_is_not_all(cache: TuningCache) -> None:
    options: dict[str, Any] = {"device": FaultyCPU.having("none", "unsteady"), "cache": cache}
    assert fresh(LAYER, exact=True, **options).timed == 1
    assert fresh(LAYER, exact=True, **options).timed == 0
    everything = fresh(LAYER, **options)
    assert everything.timed == 3  # both newcomers, and the incumbent
    assert everything.facts.keys() == {"numpy.direct", "faulty.none", "faulty.unsteady"}


@pytest.mark.parametrize(
    ("trait", "limits"), [("exact", {"exact": True}), ("keeps_denormals", {"denormals": "keep"}), (None, {})]
)
def test_who_is_far_behind_those_alone_that_a_limit_leaves_out_is_timed(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch, trait: str | None, limits: dict[str, Any]
) -> None:
    """Else nobody would time it ever: the first request notes that nothing is left to time."""
    options: dict[str, Any] = {"device": FaultyCPU.having("none", "slow"), "cache": cache}
    monkeypatch.setattr(Faulty, "estimate", lambda self, *_: 1e-6 if self.name == "faulty.none" else 1e-4)
    monkeypatch.setattr(NumpyDirect, "estimate", lambda self, *_: 2e-5)
    if trait is not None:
        monkeypatch.setattr(Faulty, trait, property(lambda self: self.name == "faulty.slow"))
    made = fresh(LAYER, **options)
    assert ("faulty.slow" in made.facts) == (trait is not None)
    assert trait or made.reasons["faulty.slow"] == ["estimated at 100 times the least estimate"]
    assert fresh(LAYER, **options, **limits).timed == 0


@pytest.mark.parametrize("first", [True, False])
def test_exact_and_other_requests_leave_each_others_notes(
    cache: TuningCache, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every process that asks one way after another asked the other way lists all candidates again."""
    options: dict[str, Any] = {"device": FaultyCPU.having("none"), "cache": cache}
    for exact in (first, not first):
        fresh(LAYER, exact=exact, **options)
    fresh(LAYER, exact=True, **options)
    sets = listed(monkeypatch)
    for exact in (True, False, True, False):
        made = fresh(LAYER, exact=exact, **options)
        assert (made.timed, made.source) == (0, "cache")
    assert not sets


def test_an_exact_race_does_not_excuse_a_winner_that_has_changed(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigged(cache, none=Facts("1", time=0.1, workspace=SIZE))
    monkeypatch.setattr(NumpyDirect, "version", "another")
    options: dict[str, Any] = {"device": FaultyCPU.having("none", version="2"), "cache": cache}
    assert fresh(LAYER, exact=True, **options).timed == 1
    with pytest.raises(PlanError, match=r"^faulty\.none, the winner on record"):
        fresh(LAYER, "cached", **options)
    assert fresh(LAYER, **options).timed == 2  # the changed one, and the incumbent
    assert fresh(LAYER, "cached", **options).source == "cache"


@pytest.mark.parametrize("limits", [{"exact": True}, {"denormals": "keep"}])
def test_a_race_of_those_alone_that_a_limit_allows_leaves_the_times_of_others(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    """Where none of them was timed before, the two races would share nobody, and the newer times alone count."""
    fewest = []

    def measurement(*arguments: Any, **options: Any) -> Measurement:
        fewest.append(options["fewest"])
        return Measurement(*arguments, **options)

    monkeypatch.setattr(racing, "Measurement", measurement)
    monkeypatch.setattr(Faulty, "keeps_denormals", False)
    device, found = FaultyCPU.having("none"), {Candidate("faulty.none"): Facts("1", time=1e-6, workspace=SIZE)}
    race = Race("0" * 32, "2026-01-01T00:00:00+00:00", device.versions, False, None, found, "")
    cache.add(LAYER.key(), device.key, race)
    limited = fresh(LAYER, device=device, cache=cache, **limits)
    assert (str(limited.candidate), limited.facts.keys()) == ("numpy.direct", {"numpy.direct"})
    assert (limited.timed, fewest) == (2, [3])  # who runs along takes no newcomer's turn
    made = fresh(LAYER, "cached", device=device, cache=cache)
    assert made.timings.keys() == {"faulty.none", "numpy.direct"}
    assert fresh(LAYER, device=device, cache=cache, **limits).timed == 0


def test_facts_of_inexact_algorithms_do_not_win_an_exact_request(cache: TuningCache) -> None:
    device = rigged(cache, none=Facts("1", time=1e-6, workspace=SIZE))
    assert str(fresh(LAYER, "cached", device=device, cache=cache).candidate) == "faulty.none"
    exact = fresh(LAYER, "cached", device=device, cache=cache, exact=True)
    assert (str(exact.candidate), exact.ranking) == ("numpy.direct", ["numpy.direct"])


def test_a_name_that_exact_leaves_out_is_refused_with_the_reason(cache: TuningCache) -> None:
    device = FaultyCPU.having("none")
    for name in ("faulty.none", "faulty.none[a=1]"):
        with pytest.raises(PlanError, match=r"exact=True leaves faulty.none out.* expected one of numpy.direct, or"):
            planner.plan(LAYER, name, device=device, cache=cache, exact=True)
    assert planner.plan(LAYER, "faulty.none", device=device, cache=cache, exact=False).source == "user"
    with pytest.raises(PlanError, match=r"under tolerance=1e-30, exact=True:"):
        planner.plan(LAYER, "heuristic", device=FaultyCPU.having(), cache=cache, exact=True, tolerance=1e-30)


def test_an_exact_plan_stays_one_when_pickled() -> None:
    made = planner.plan(LAYER, "heuristic", exact=True, vendors=False)
    again = pickle.loads(pickle.dumps(made))
    assert (again.candidate, again.limits, again.limits.exact) == (made.candidate, made.limits, True)


def test_conv2d_takes_exact() -> None:
    x, w = np.ones(LAYER.x_shape, np.float32), np.ones(LAYER.w_shape, np.float32)
    with pytest.raises(PlanError, match=r"exact=True leaves numpy.winograd out"):
        conv2d(x, w, padding=1, mode="numpy.winograd", exact=True)
    assert conv2d(x, w, padding=1, mode="numpy.winograd").max() == pytest.approx(9 * LAYER.C)
    assert conv2d(x, w, padding=1, mode="heuristic", exact=True).max() == 9 * LAYER.C


def test_six_products_of_parts_are_exact_and_three_are_not(cache: TuningCache) -> None:
    device = CPU(2, "avx2", matrix_unit="emulated")
    layer = LAYER.replace(C=64, K=64)
    ranked = planner.plan(layer, "heuristic", exact=True, device=device, cache=cache).ranking
    names = {name.partition("[")[0] for name in ranked}
    assert "matrix" in names
    assert not any("x3" in name or "winograd" in name or "fft" in name for name in names)
    with pytest.raises(PlanError, match="exact"):
        planner.plan(layer, "matrix.x3", exact=True, device=device, cache=cache)
