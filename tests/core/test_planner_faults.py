"""What fails never wins, and what there was no time or no room for is timed when there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from faulty import SIZE, FaultyCPU, patient_but_with_hangs
from planning import LAYER, fresh

from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.records.cache import TuningCache
from autoconv.tuning import planner

pytestmark = pytest.mark.usefixtures("few_families")


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
