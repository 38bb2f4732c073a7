"""With nothing on record, a layer's candidates are estimated once on a machine, and not by every process."""

from __future__ import annotations

import json

import pytest
from planning import LAYER, fresh, listed
from vectors import device_with

from autoconv import registry
from autoconv.records.cache import TuningCache
from autoconv.records.kept import Kept


def test_another_process_estimates_nothing_until_it_is_asked(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fresh(LAYER, "heuristic", cache=cache, vendors=False)
    sets = listed(monkeypatch)
    second = fresh(LAYER, "heuristic", cache=cache, vendors=False)
    assert (second.candidate, second.source, second.facts) == (first.candidate, "heuristic", {})
    assert not sets
    assert second.ranking == first.ranking
    assert second.explain() == first.explain()
    assert sets


def test_other_limits_other_layers_and_another_machine_are_estimated_anew(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, other = device_with("avx2", 2), device_with("avx2", 2, (16 << 10, 256 << 10, 4 << 20))
    options = {"cache": cache, "vendors": False}
    fresh(LAYER, "heuristic", device=device, **options)
    sets = listed(monkeypatch)
    fresh(LAYER, "heuristic", device=device, workspace_limit=0, **options)
    fresh(LAYER.replace(N=2), "heuristic", device=device, **options)
    assert len(sets) == 2
    fresh(LAYER, "heuristic", device=other, **options)
    assert len(sets) == 3
    monkeypatch.setattr(registry, "code_of", lambda algorithms: "that of tomorrow")
    fresh(LAYER, "heuristic", device=device, **options)
    assert len(sets) == 4


@pytest.mark.parametrize(
    "kept",
    [
        [],
        {"candidate": 3},
        {"candidate": "magic"},
        {"candidate": "winograd[m=1x99,rows=1,coop=0]"},
        {"candidate": "gemm["},
    ],
    ids=json.dumps,
)
def test_what_cannot_run_is_estimated_anew(cache: TuningCache, monkeypatch: pytest.MonkeyPatch, kept: object) -> None:
    first = fresh(LAYER, "heuristic", cache=cache, vendors=False)
    monkeypatch.setattr(Kept, "get", lambda self, what: kept)
    assert fresh(LAYER, "heuristic", cache=cache, vendors=False).candidate == first.candidate


def test_what_is_kept_is_read_or_is_none(cache: TuningCache) -> None:
    kept = Kept(cache, device_with("avx2", 2), "test", "1")
    assert kept.read("layer", lambda found: found["seconds"]) is None
    kept.keep("layer", seconds=2)
    assert kept.read("layer", lambda found: float(found["seconds"])) == 2.0
    kept.keep("layer", seconds="two")
    assert kept.read("layer", lambda found: float(found["seconds"])) is None


def test_vendors_are_asked_every_time(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they would do depends on code that is not ours, of which no version tells all."""
    pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
    fresh(LAYER, "heuristic", cache=cache, vendors=True)
    sets = listed(monkeypatch)
    fresh(LAYER, "heuristic", cache=cache, vendors=True)
    assert len(sets) == 1
