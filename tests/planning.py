"""Plans as the tests of planning ask for them: a small layer, other processes, records that say what a test wants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from faulty import FaultyCPU

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.layer import ConvLayer
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts, Race
from autoconv.tuning import lookup, planner
from autoconv.tuning.candidates import CandidateSet
from autoconv.tuning.staleness import note

LAYER = ConvLayer(N=1, C=4, H=10, W=9, K=6, R=3, S=3, padding=1)


def fresh(*arguments: Any, **options: Any) -> Plan:
    """A plan as another process would get it: from the records, not from memory."""
    planner.forget_plans()
    return planner.plan(*arguments, **options)


def rigged(cache: TuningCache, layer: ConvLayer = LAYER, **facts: Facts) -> FaultyCPU:
    """A device whose record says what the test wants."""
    device = FaultyCPU.having(*facts)
    found = {Candidate.parse(f"faulty.{name}"): replace(f, version="1", samples=9) for name, f in facts.items()}
    found[Candidate("numpy.direct")] = Facts(NumpyDirect().version, time=1.0, samples=9)
    covers = note(registry.algorithms(device))
    race = Race("0" * 32, "2026-01-01T00:00:00+00:00", device.versions, False, None, found, covers)
    cache.add(layer.key(), device.key, race)
    return device


def listed(monkeypatch: pytest.MonkeyPatch) -> list[CandidateSet]:
    """The candidate sets that are made from now on."""
    sets = list[CandidateSet]()

    def made(*arguments: Any) -> CandidateSet:
        sets.append(CandidateSet(*arguments))
        return sets[-1]

    monkeypatch.setattr(lookup, "CandidateSet", made)
    return sets
