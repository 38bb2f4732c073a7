"""Fixed strategies beside those that choose, on a small network."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from runs import exactly, fake

from autoconv.bench import race, strategies
from autoconv.bench.baselines import BASELINES, Prepared, Problem, base
from autoconv.cli import main
from autoconv.cli.main import cli
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.errors import ConfigError, PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.layers import NamedLayer, Network
from autoconv.plans import Plan
from autoconv.tuning.planner import plan
from autoconv.tuning.timing.full_speed import FullSpeed

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")

LAYER = ConvLayer(N=1, C=4, H=6, W=6, K=4, R=3, S=3, padding=1)
TWO = Network("two", "", (NamedLayer("a", LAYER, 1, 1), NamedLayer("b", LAYER.replace(K=8), 1, 2)))
LIST = """
layers:
  - {name: plain, C: 8, H: 10, K: 8, R: 3, padding: 1, bias: true, activation: relu, repeat: 2}
  - {name: separate, C: 8, H: 10, K: 8, R: 3, padding: 1, groups: 8, stride: 2, activation: silu}
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Estimates in the place of whatever would be tuned; the modes that were asked for."""
    modes: list[str] = []

    def estimated(layer: ConvLayer, mode: str, *, budget: object = None, isolate: bool = False, **options: Any) -> Plan:
        modes.append(mode)
        return plan(layer, "heuristic" if mode in ("profile", "hybrid") else mode, **options)

    monkeypatch.setattr(race, "SLOT", 0.0)
    monkeypatch.setattr(strategies, "plan", estimated)
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / "cache"))
    return modes


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One algorithm in the place of all, for tests of what is added up."""

    def direct(layer: ConvLayer, mode: str, *, device: CPU, weights: Any, **options: Any) -> Plan:
        return plan(layer, "numpy.direct", device=device, weights=weights)

    monkeypatch.setattr(strategies, "plan", direct)


def test_the_command_compares_strategies(tmp_path: Path, at_once: list[str]) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(LIST, encoding="utf-8")
    arguments = ["compare", str(path), "--rounds", "6", "--budget", "0.01s", "--no-isolate", "--threads", "1"]
    against = [] if BASELINES["torch"].missing() else ["--against", "torch"]
    done = CliRunner().invoke(cli, [*arguments, "--json", *against], standalone_mode=False)
    assert done.exception is None
    found = json.loads(done.stdout)
    assert {*strategies.FIXED, *strategies.CHOOSING} <= set(found["strategies"])
    for name, cost in found["strategies"].items():
        if name in (*strategies.FIXED, *strategies.CHOOSING):
            assert cost["seconds"] > 0
            assert cost["workspace"] >= 0
            assert set(cost["elsewhere"]) <= {"plain", "separate"}
    assert found["strategies"]["direct"]["elsewhere"] == []
    assert {"profile", "hybrid", "heuristic", "direct", "winograd"} <= set(at_once)


def test_a_strategy_turns_elsewhere_where_its_family_cannot() -> None:
    strided = ConvLayer(N=1, C=3, H=9, W=9, K=4, R=1, S=1, stride=2, direction="dgrad")
    options = {"device": CPU.current(1), "vendors": False, "weights": "varying"}
    family, made = strategies._of_families(strided, strategies.FIXED["fft"], options)
    assert family == "gemm", "no Fourier transform computes it"
    name = made.candidate.algorithm.removeprefix("numpy.").split(".")[0]
    assert name in strategies.FAMILIES[family]


@pytest.mark.usefixtures("uncompiled")
def test_repeats_count_and_memory_is_that_of_the_neediest(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ConvLayer(N=1, C=4, H=6, W=6, K=4, R=3, S=3, padding=1)
    net = Network("two", "", (NamedLayer("a", layer, 3, 1), NamedLayer("b", layer.replace(K=8), 1, 2)))
    monkeypatch.setattr(strategies, "_timed", lambda found, layer, *rest: dict.fromkeys(found.costs, float(layer.K)))
    found = strategies.compare(net, 2, CPU.current(1), budget=0.01, isolate=False)
    assert {cost.seconds for cost in found.costs.values()} == {3 * 4.0 + 8.0}
    assert found.costs["direct"].packed is not None
    monkeypatch.setattr(strategies, "_timed", lambda *_: {})
    assert math.isnan(strategies.compare(net, 2, CPU.current(1), budget=0.01, isolate=False).costs["fft"].seconds)


@pytest.mark.usefixtures("uncompiled")
def test_in_training_the_first_layers_dgrad_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ConvLayer(N=1, C=4, H=6, W=6, K=4, R=3, S=3, padding=1)
    net = Network("two", "", (NamedLayer("a", layer, 1, 1), NamedLayer("b", layer, 1, 2)))
    seen = []

    def timed(found: strategies.Comparison, layer: ConvLayer, label: str, *rest: object) -> dict[str, float]:
        seen.append(label)
        assert layer.N == 2
        return {}

    monkeypatch.setattr(strategies, "_timed", timed)
    strategies.compare(net, 2, CPU.current(1), training=True, budget=0.01, isolate=False)
    assert seen == ["a, fwd", "a, wgrad", "b, fwd", "b, dgrad", "b, wgrad"]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("training", "ways"), [(False, ["dgrad"]), (True, ["dgrad", "wgrad"])])
def test_a_transposed_convolution_is_compared_as_one_at_its_own_batch_size(
    training: bool, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ConvLayer(N=1, C=4, H=6, W=6, K=4, R=2, S=2, stride=2, bias=True)
    net = Network("one", "", (NamedLayer("up", layer, 1, 1, (3,), ("dgrad",)),))
    seen = []

    def timed(found: strategies.Comparison, layer: ConvLayer, *rest: object) -> dict[str, float]:
        seen.append((layer.N, layer.direction, layer.bias))
        return {}

    monkeypatch.setattr(strategies, "_timed", timed)
    strategies.compare(net, 1, CPU.current(1), training=training, budget=0.01, isolate=False)
    assert seen == [(3, way, way == "dgrad") for way in ways], "the gradient of the first layer's input is left out"


def test_other_types_are_refused_before_anything_is_tuned(at_once: list[str]) -> None:
    layer = ConvLayer(N=1, C=4, H=6, W=6, K=4, R=3, S=3, dtype="float64")
    with pytest.raises(ConfigError, match="one: layer 'a': dtype='float64': expected 'float32'"):
        strategies.compare(Network("one", "", (NamedLayer("a", layer, 1, 1),)), 1, CPU.current(1))
    assert at_once == []


@pytest.mark.usefixtures("uncompiled")
def test_a_layer_without_an_answer_is_left_out_of_all_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(found: strategies.Comparison, layer: ConvLayer, label: str, *rest: object) -> dict[str, float]:
        if label == "a":
            raise PlanError("no candidate\nwill do")
        return dict.fromkeys(found.costs, 2.0)

    monkeypatch.setattr(strategies, "_timed", timed)
    found = strategies.compare(TWO, 1, CPU.current(1))
    assert found.left_out == found.to_json()["left_out"] == {"a": "no candidate will do"}
    assert {cost.seconds for cost in found.costs.values()} == {2.0}
    with pytest.raises(PlanError, match="a: no candidate will do"):
        strategies.compare(replace(TWO, layers=TWO.layers[:1]), 1, CPU.current(1))


@pytest.mark.usefixtures("uncompiled")
def test_a_baseline_that_fails_in_a_later_run_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
        answer, runs = exactly(problem), itertools.count()

        def run() -> Any:
            if problem.layer.K == 8 and next(runs):
                raise RuntimeError("no\nmemory")
            return answer

        return Prepared(run)

    monkeypatch.setitem(BASELINES, "torch", replace(fake("torch"), prepared=prepare))
    monkeypatch.setitem(BASELINES, "ncnn", fake("ncnn"))
    found = strategies.compare(TWO, 1, CPU.current(1), baselines=["torch", "ncnn"], rounds=2)
    assert found.failures == {"torch": "b: no memory"}
    assert math.isnan(found.costs["torch"].seconds)
    assert found.costs["ncnn"].seconds > 0
    assert found.costs["profile"].seconds > 0
    assert (found.left_out, found.slow) == ({}, 0)


@pytest.mark.usefixtures("uncompiled")
def test_samples_below_full_speed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "pace", lambda device: 9.0)
    monkeypatch.setattr(FullSpeed, "of", lambda device: FullSpeed(device.pace, 0.0))
    assert strategies.compare(TWO, 1, CPU.current(1), rounds=2).slow == 4, "of two layers, in two rounds"


def test_the_command_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    costs = {name: strategies.Cost(1.0) for name in (*strategies.FIXED, *strategies.CHOOSING)}
    made = strategies.Comparison("two", 1, False, CPU.current(1), costs, left_out={"a": "no mode='x' here"}, slow=3)
    monkeypatch.setattr(strategies, "compare", lambda *args, **options: made)
    assert main(["compare", "alexnet"]) == 1
    said = capsys.readouterr()
    assert "threads were not at their full speed in 3 samples" in said.out
    assert said.err == "autoconv: error: a is left out: no --mode x here\n"


def test_a_baseline_that_is_not_installed_is_bad_usage(
    at_once: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(base, "installed", lambda package: package not in ("torch", "onnx"))
    assert main(["compare", "alexnet", "--against", "torch,ncnn,mnn"]) == 2
    assert capsys.readouterr().err == "autoconv: error: --against: not installed, torch: torch; mnn: onnx\n"
    assert at_once == [], "nothing was tuned"
