"""Finer forms of candidates: timed where a tolerance leaves out what they are forms of, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning import fresh

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Race
from autoconv.tuning import racing
from autoconv.tuning.candidates import CandidateSet, FinerForm, expected, finer_form
from autoconv.tuning.measurement import Measurement
from autoconv.tuning.staleness import note

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
LAYER = ConvLayer(N=1, C=128, H=14, W=14, K=32, R=3, S=3, padding=1)
OPTIONS: dict[str, Any] = {"vendors": False, "weights": "constant"}


def recorded(cache: TuningCache) -> tuple[FinerForm, float]:
    """The finer form of what wins on record without a tolerance, and a tolerance that it keeps, and the winner not."""
    device = CPU.current()
    winograd = registry.by_name(device)["winograd"]
    found = {}
    for m, time, error in (("6x6", 1e-9, 2e-6), ("2x2", 1.0, 1e-7)):  # as the record says
        candidate = Candidate("winograd", (("m", m), ("rows", 1), ("coop", 0)))
        found[candidate] = replace(expected(winograd, LAYER, device, candidate), time=time, error=error, samples=9)
    covers = note(registry.algorithms(device))
    race = Race("0" * 32, "2026-01-01T00:00:00+00:00", device.versions, False, None, found, covers)
    cache.add(LAYER.key(), device.key, race)
    form = finer_form(winograd, LAYER, next(iter(found)))
    assert form is not None
    return form, 1.3 * form.share * 2e-6


def test_where_a_tolerance_leaves_out_the_fastest_its_finer_form_is_timed(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path, None)
    form, enough = recorded(cache)
    for mode, tolerance, timed in (
        ("profile", None, 0),
        ("heuristic", enough, 0),
        ("profile", 0.9 * form.share * 2e-6, 0),
        ("profile", 2e-6, 0),
        ("profile", enough, 3),  # against the two best on record
    ):
        made = fresh(LAYER, mode, cache=cache, tolerance=tolerance, **OPTIONS)
        assert made.timed == timed
        assert (str(form.candidate) in made.timings) == (timed > 0)
    assert made.facts[str(form.candidate)].error < enough
    assert fresh(LAYER, "profile", cache=cache, tolerance=enough, **OPTIONS).timed == 0


def test_a_finer_form_that_a_budget_has_not_reached_has_its_turn_with_a_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, prepared = TuningCache(tmp_path, None), list[float | None]()

    def measurement(*arguments: Any, preparing: float | None, **options: Any) -> Measurement:
        prepared.append(preparing)
        return Measurement(*arguments, preparing=preparing, **options)

    monkeypatch.setattr(racing, "Measurement", measurement)
    form, enough = recorded(cache)
    for mode, budget, reached in (("hybrid", 0.0, False), ("profile", 0.0, False), ("hybrid", 60.0, True)):
        made = fresh(LAYER, mode, cache=cache, tolerance=enough, budget=budget, **OPTIONS)
        assert (str(form.candidate) in made.timings) == reached != made.cut_short
    assert prepared == [0.0, 60.0 * racing.PREPARING]


def test_what_errs_no_less_is_no_finer_form() -> None:
    device = CPU.current()
    winograd, direct = (registry.by_name(device)[name] for name in ("winograd", "direct"))
    tiles = Candidate("winograd", (("m", "4x4"), ("rows", 2), ("coop", 0)))
    form = finer_form(winograd, LAYER, tiles)
    assert form is not None
    assert 0.5 < form.share < 0.8
    assert finer_form(winograd, LAYER, form.candidate) is None
    assert finer_form(winograd, LAYER.replace(C=32), tiles) is None, "which are one part of a sum anyway"
    assert finer_form(direct, LAYER, direct.all(LAYER, device)[0]) is None


def test_a_finer_form_may_be_named_and_is_not_listed(tmp_path: Path) -> None:
    device, cache = CPU.current(), TuningCache(tmp_path, None)
    offered = CandidateSet(LAYER, device, [registry.by_name(device)["winograd"]], frozenset())
    form = finer_form(registry.by_name(device)["winograd"], LAYER, offered.candidates[0])
    assert form is not None
    assert form.candidate not in offered.candidates
    assert fresh(LAYER, str(form.candidate), cache=cache, **OPTIONS).candidate == form.candidate
    for terms in (0, -32):  # a loop of such steps would never end
        params = {**form.candidate.params, "terms": terms}
        for name in ("winograd", "winograd.compact"):
            refused = registry.by_name(device)[name].why_not(LAYER, device, params)
            assert refused == [f"terms: expected at least 1, got {terms}"]
    other = str(form.candidate).replace("terms=32", "terms=48")
    with pytest.raises(PlanError, match="expected a candidate of winograd for"):
        fresh(LAYER, other, cache=cache, **OPTIONS)
