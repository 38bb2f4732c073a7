"""Runs of `autoconv bench` that are made up: samples, and fake baselines of a small network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import edge

from autoconv.bench import race
from autoconv.bench.baselines import ALL_BASELINES, BASELINES, Baseline, Prepared, Problem
from autoconv.bench.suites import OURS, Row, Setting, Suite
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.tuning import planner, reference

LAYER = edge("plain", N=1)
NET = """
name: Tiny
layers:
  - {name: first, C: 3, H: 12, K: 4, R: 3, padding: 1, bias: true, activation: relu}
  - {name: second, C: 4, H: 6, K: 8, R: 1, repeat: 2}
"""


def row(name: str = "layer", layer: ConvLayer = LAYER, repeat: int = 1, **times: list[float]) -> Row:
    return Row(name, layer, repeat, "numpy.gemm[tile=image]", {OURS: times.pop("ours"), **times})


def setting(*names: str, **changes: Any) -> Setting:
    return Setting(CPU.current(), names or tuple(BASELINES), isolate=False, **changes)


def suite(*rows: Row, **changes: Any) -> Suite:
    return Suite("Tiny", 1, setting(**changes), len(rows), True, list(rows))


def complete(**times: list[float]) -> dict[str, list[float]]:
    return {name: [9.0] * 6 for name in BASELINES} | times


def exactly(problem: Problem) -> Any:
    return reference.convolve(problem.layer, problem.a, problem.b, problem.bias, problem.residual).astype(np.float32)


def fake(name: str, answer: Callable[[Problem], Any] = exactly) -> Baseline:
    """A baseline that has the answer ready."""

    def prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
        ready = answer(problem)
        return Prepared(lambda: ready)

    baseline = ALL_BASELINES[name]
    return Baseline(name, baseline.label, ("numpy",), prepare, ("fwd", "dgrad", "wgrad"), dtypes=baseline.dtypes)


def broken(problem: Problem) -> Any:
    raise RuntimeError("no kernel\nfor this")


def estimated(layer: ConvLayer, wanted: Setting) -> planner.Plan:
    """In the place of `race.planned`, which takes its time."""
    return planner.plan(layer, "heuristic", device=wanted.device, vendors=False)


tuned = race.planned


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a small network, and no time to lose."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race, "SLOT", 0.0)
    monkeypatch.setattr(race, "planned", estimated)
    (tmp_path / "tiny.yaml").write_text(NET)
    return tmp_path


def samples() -> Suite:
    return suite(
        row("alpha", ours=[1e-3] * 6, **complete(torch=[2e-3] * 6)),
        row("beta", edge("pointwise"), 2, ours=[2e-3] * 6, **complete(torch_cl=[1e-3] * 6)),
    )
