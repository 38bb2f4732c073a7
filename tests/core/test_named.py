"""A candidate that is named: nobody lists the grids of other families for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faulty import SIZE, FaultyCPU

from autoconv import forget_plans
from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts, Race
from autoconv.registry import algorithms
from autoconv.tuning import lookup
from autoconv.tuning.candidates import CandidateSet
from autoconv.tuning.planner import plan

LAYER = ConvLayer(N=1, C=4, H=10, W=9, K=6, R=3, S=3, padding=1)


@pytest.mark.parametrize("name", [f"TK={TK},TP=1,TQ={TQ},BC=4,filters=packed" for TK, TQ in ((100, 2), (8, 10**9))])
@pytest.mark.parametrize("mode", ["heuristic", "itself"])
def test_a_record_of_what_no_grid_lists_is_not_believed(tmp_path: Path, name: str, mode: str) -> None:
    """A file of records may come from anywhere; code is not generated for whatever it says."""
    cache, device = TuningCache(tmp_path, system=None), CPU(2, "generic")
    direct = next(a for a in algorithms(device) if a.name == "direct")
    bogus = Candidate.parse(f"direct[{name}]")
    sizes = {
        "workspace": direct.workspace_bytes(LAYER, device, bogus.params),
        "packed": direct.packed_bytes(LAYER, device, bogus.params),
    }
    facts = {bogus: Facts(direct.version, time=1e-9, samples=9, **sizes)}
    cache.add(LAYER.key(), device.key, Race("3" * 32, "2026-01-02T00:00:00+00:00", device.versions, False, None, facts))
    if mode == "itself":
        with pytest.raises(PlanError, match="expected a candidate of direct"):
            plan(LAYER, str(bogus), device=device, cache=cache)
    else:
        assert plan(LAYER, mode, device=device, cache=cache).candidate != bogus


def test_the_best_of_a_family_is_what_it_says_and_has_not_failed(tmp_path: Path) -> None:
    cache, device = TuningCache(tmp_path, system=None), CPU.current()
    gemm = next(a for a in algorithms(device) if a.name == "numpy.gemm")
    one = gemm.all(LAYER, device)[0]
    found = [Facts(gemm.version, time=1e-9, samples=9), Facts(gemm.version, failure="wrong result")]
    for day, facts in enumerate(found, 1):
        race = Race(f"{day}" * 32, f"2026-01-0{day}T00:00:00+00:00", device.versions, False, None, {one: facts})
        cache.add(LAYER.key(), device.key, race)
        forget_plans()
        with pytest.raises(PlanError, match="the limit is 0" if facts.timed else "wrong result"):
            plan(LAYER, "numpy.gemm", device=device, cache=cache, workspace_limit=0 if facts.timed else None)


def test_the_best_of_a_family_is_held_to_what_was_measured_of_it(tmp_path: Path) -> None:
    """Not to what the family says of itself: one that gave other bits the second time is not deterministic."""
    cache, device = TuningCache(tmp_path, system=None), FaultyCPU.having("unsteady")
    found = {Candidate("faulty.unsteady"): Facts("1", time=1.0, samples=9, workspace=SIZE, deterministic=False)}
    cache.add(LAYER.key(), device.key, Race("2" * 32, "2026-01-02T00:00:00+00:00", device.versions, False, None, found))
    options: dict[str, Any] = {"device": device, "cache": cache}
    assert str(plan(LAYER, "faulty.unsteady", **options).candidate) == "faulty.unsteady"
    with pytest.raises(PlanError, match=r"no candidate of 'faulty\.unsteady' can run .*\n.*: it is not deterministic"):
        plan(LAYER, "faulty.unsteady", deterministic=True, **options)


@pytest.mark.parametrize(
    "name", ["winograd[m=99,rows=1,coop=0]", "winograd[m=4,rows=1,coop=0]", "fft[tile=x,rows=1,coop=0]"]
)
def test_a_record_of_strange_parameters_stops_nobody(tmp_path: Path, name: str) -> None:
    cache, device = TuningCache(tmp_path, system=None), CPU(2, "generic")
    family = next(a for a in algorithms(device) if a.name == name.partition("[")[0])
    facts = {Candidate.parse(name): Facts(family.version, failure="unreached, no memory: too little")}
    for layer, found in (
        (LAYER, facts),
        (LAYER.replace(N=2), {c: Facts(family.version, time=1e-9, samples=9) for c in facts}),
    ):
        race = Race("3" * 32, "2026-01-02T00:00:00+00:00", device.versions, False, None, found)
        cache.add(layer.key(), device.key, race)
    assert plan(LAYER, "heuristic", device=device, cache=cache).candidate not in facts
    assert plan(LAYER, "hybrid", device=device, cache=cache, budget=0.0).candidate not in facts


def test_limits_hold_for_a_named_candidate_too(tmp_path: Path) -> None:
    cache, device = TuningCache(tmp_path, system=None), CPU.current()
    gemm = next(a for a in algorithms(device) if a.name == "numpy.gemm")
    candidate = gemm.all(LAYER, device)[0]
    size = gemm.workspace_bytes(LAYER, device, candidate.params)
    options: dict[str, Any] = {"device": device, "cache": cache, "weights": "constant"}
    assert plan(LAYER, str(candidate), workspace_limit=size, **options).workspace_bytes == size
    with pytest.raises(PlanError, match=f"is not allowed for .* it needs {size} bytes of workspace; the limit is 0"):
        plan(LAYER, str(candidate), workspace_limit=0, **options)
    with pytest.raises(PlanError, match=r"over the tolerance of 1\.0e-30"):
        plan(LAYER, str(candidate), tolerance=1e-30, **options)


def test_a_named_candidate_is_looked_for_in_its_own_family_alone_and_on_record_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, device, sets = TuningCache(tmp_path, system=None), CPU.current(), list[CandidateSet]()

    def made(*arguments: Any) -> CandidateSet:
        sets.append(CandidateSet(*arguments))
        return sets[-1]

    monkeypatch.setattr(lookup, "CandidateSet", made)
    gemm = next(a for a in algorithms(device) if a.name == "numpy.gemm")
    candidate = gemm.all(LAYER, device)[0]
    assert plan(LAYER, str(candidate), device=device, cache=cache).candidate == candidate
    assert [{c.algorithm for c in found.candidates} for found in sets] == [{"numpy.gemm"}]
    workspace, packed = (size(LAYER, device, candidate.params) for size in (gemm.workspace_bytes, gemm.packed_bytes))
    facts = {candidate: Facts(gemm.version, time=1.0, samples=9, workspace=workspace, packed=packed)}
    cache.add(LAYER.key(), device.key, Race("2" * 32, "2026-01-02T00:00:00+00:00", device.versions, False, None, facts))
    forget_plans()
    assert plan(LAYER, str(candidate), device=device, cache=cache).candidate == candidate
    assert len(sets) == 1
