"""`autoconv bench`: sums and means of made-up samples, and what is measured against fake baselines."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import edge
from runs import LAYER, complete, exactly, fake, place, row, setting, suite, tuned

from autoconv import networks, registry
from autoconv.bench import agreement, display, race
from autoconv.bench.baselines import BASELINES, Prepared, Problem, base
from autoconv.bench.suites import CLASSES, OURS, Row, Suite, as_exported, class_of
from autoconv.cpu.device import CPU
from autoconv.errors import ConfigError
from autoconv.layer import ConvLayer
from autoconv.networks import NamedLayer, Network
from autoconv.tuning import reference
from autoconv.tuning.planner import forget_plans

__all__ = ["place"]  # a fixture

pytestmark = pytest.mark.usefixtures("few_families")


def test_the_best_baseline_has_the_least_median() -> None:
    found = row(ours=[1.0] * 3, torch=[3.0, 3.0, 1.0], torch_cl=[2.0, 2.0, 9.0])
    assert found.best == "torch_cl"
    assert found.against("best") == [2.0, 2.0, 9.0]
    assert found.against("onnxruntime") is None
    assert Row("failed", LAYER, 1, times={"torch": [1.0]}).against("best") is None


def test_a_mean_is_the_geometric_one_of_the_layers_medians() -> None:
    found = suite(
        row(ours=[1.0] * 6, **complete(torch=[4.0, 4.0, 4.0, 4.0, 5.0, 3.0])),
        row(ours=[2.0] * 6, layer=edge("pointwise"), **complete(torch=[2.0] * 6)),
    )
    mean = found.mean("torch")
    assert mean is not None
    assert mean.median == pytest.approx(2.0)
    assert math.sqrt(3) < mean.low <= 2.0 <= mean.high < math.sqrt(5)
    assert found.mean("torch") == mean  # the bootstrap has a seed
    only = found.mean("torch", "1x1")
    assert only is not None
    assert (only.low, only.median, only.high) == pytest.approx((1.0, 1.0, 1.0))


def test_a_mean_over_layers_that_a_baseline_has_not_all_run_is_none() -> None:
    found = suite(row(ours=[1.0] * 6, **complete()), row(ours=[1.0] * 6, torch=[1.0] * 6))
    assert found.mean("onnxruntime") is None
    assert found.mean("torch") is not None
    assert suite().mean("torch") is None
    found.rows[1].unable["onnxruntime"] = "it cannot"
    mean = found.mean("onnxruntime")
    assert mean is not None
    assert mean.median == pytest.approx(9.0)
    assert found.counted("onnxruntime") == found.rows[:1]
    assert found.left_out == ["layer: onnxruntime: it cannot"]


def test_the_best_counts_the_layers_that_any_baseline_can_compute() -> None:
    found = suite(row(ours=[1.0] * 6, **complete()), row(ours=[1.0] * 6), row(ours=[1.0] * 6))
    found.rows[1].unable.update(dict.fromkeys(BASELINES, "activation='silu'"))
    found.rows[2].unable.update(dict.fromkeys(list(BASELINES)[1:], "it cannot"))
    assert found.counted("best") == [found.rows[0], found.rows[2]]
    assert found.mean("best") is None, "the first has failed on the last"
    del found.rows[2]
    mean = found.mean("best")
    assert mean is not None
    assert mean.median == pytest.approx(9.0)
    assert display._mean(found, "best", None).endswith(" (1)")


def test_a_sum_weights_repeats_round_by_round() -> None:
    found = suite(row(ours=[1.0, 2.0], **complete()), row(ours=[10.0, 20.0], repeat=3))
    assert found.total(OURS) == [31.0, 62.0]
    assert found.total("torch") is None


def test_classes() -> None:
    names = [class_of(named.layer) for named in networks.load("mixed27").layers]
    assert [names.count(name) for name in CLASSES] == [12, 5, 3, 3, 4]
    stem = networks.load("mobilenet-v2").layers[0].layer
    assert class_of(stem) == "5x5, stems, dilated"
    assert class_of(edge("depthwise strided")) == "others"


# What does not count


def test_a_run_with_all_baselines_is_complete() -> None:
    assert suite(row(ours=[1.0], **complete())).incomplete == []


def test_gradients_need_only_the_baselines_that_have_them() -> None:
    found = Suite("Tiny", 1, setting("torch", "torch_cl", direction="wgrad"), 0, True)
    assert found.incomplete == []


def test_whatever_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "installed", lambda package: package not in ("onnx", "openvino"))
    found = suite(row(ours=[1.0], torch=[1.0]), restrictions={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    found.setting = setting("torch", restrictions={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    found.rows[0].failures["torch"] = "it broke"
    found.layers = 2
    assert found.incomplete == [
        "torch, channels_last did not take part",
        "ONNX Runtime did not take part: onnx not installed",
        "OpenVINO did not take part: openvino not installed",
        "ncnn did not take part",
        "MNN did not take part: onnx not installed",
        "layer: torch: it broke",
        "torch is not at its default settings (ONEDNN_MAX_CPU_ISA=AVX2), and the others have no such settings",
        "ended after 1 of 2 layers",
    ]


# Measuring


class Clock:
    """Time that passes only when somebody works or sleeps."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []  # type: ignore[var-annotated]

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> Callable[[], None]:
        durations = itertools.cycle(seconds)

        def run() -> None:
            assert not gc.isenabled()
            self.log.append(name)
            self.now += next(durations)

        return run

    def sleep(self, seconds: float) -> None:
        self.log.append("idle")
        self.now += seconds


def test_a_race_interleaves_with_idle_times_and_no_garbage_collection() -> None:
    clock = Clock()
    runs = {"a": clock.work("a", 0.010), "b": clock.work("b", 0.200)}
    times = race.race(runs, 6, clock=clock, sleep=clock.sleep, busy=lambda: 0.0)
    assert gc.isenabled()
    assert times == {"a": pytest.approx([0.010] * 6), "b": pytest.approx([0.200] * 6)}
    turns = [name for name, _ in itertools.groupby(clock.log)]
    assert turns[::2] == ["idle"] * 12
    rounds = [tuple(turns[i : i + 4 : 2]) for i in range(1, 24, 4)]
    assert set(rounds) == {("a", "b"), ("b", "a")}


def test_a_sample_is_the_median_of_a_slot_without_the_first_run() -> None:
    clock = Clock()
    gc.disable()
    try:
        assert race.sample(clock.work("a", 0.05, 0.01, 0.02, 0.03, 0.02), clock) == pytest.approx(0.02)
        assert clock.log.count("a") == 1 + 4  # 10 + 20 + 30 + 20 ms are the first to fill 75
        clock.log.clear()
        assert race.sample(clock.work("long", 0.4), clock) == pytest.approx(0.4)
        assert clock.log == ["long"] * 2, "it is warmed, as all others are"
    finally:
        gc.enable()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_a_suite_against_fake_baselines(direction: str, constant: bool, fresh: bool) -> None:
    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    wanted = setting("torch", direction=direction, constant=constant, fresh=fresh, rounds=2)
    found = race.run_suite(net, 2, wanted, network=False, baselines={"torch": fake("torch")})
    (only,) = found.rows
    assert only.layer == LAYER.replace(N=2, direction=direction)
    assert only.failures == {}
    assert {name: len(samples) for name, samples in only.times.items()} == {OURS: 2, "torch": 2}
    assert only.candidate
    assert not only.candidate.startswith(("torch", "onnxruntime"))


@pytest.mark.usefixtures("place")
def test_baselines_are_not_given_every_activation() -> None:
    net = Network("One", "", (NamedLayer("plain", LAYER.replace(activation="silu"), 1, 1),))
    found = race.run_suite(net, 1, setting("torch"), network=False, baselines={"torch": fake("torch")})
    assert set(found.rows[0].times) == {OURS}
    assert found.left_out == ["plain: torch: activation='silu': baselines are given None or 'relu'"]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "layer",
    [
        ConvLayer(N=1, C=6, H=1, W=5, K=4, R=1, S=1, layout="NHWC", bias=True),
        edge("plain", N=1, layout="NHWC", residual=True, activation="relu"),
    ],
    ids=["fully connected", "images"],
)
def test_layers_in_nhwc_are_given_to_baselines_in_nchw(layer: ConvLayer) -> None:
    seen = []
    entrant = fake("torch", lambda problem: seen.append(problem.layer) or exactly(problem))
    net = Network("One", "", (NamedLayer("last", layer, 1, 1),))
    found = race.run_suite(net, 2, setting("torch", rounds=2), network=False, baselines={"torch": entrant})
    (only,) = found.rows
    assert seen == [layer.replace(N=2, layout="NCHW")]
    assert (only.failures, only.unable) == ({}, {})
    assert set(only.times) == {OURS, "torch"}
    assert only.errors["torch"] < 1e-4


@pytest.mark.usefixtures("place")
def test_layers_are_measured_at_their_own_batch_size_and_direction() -> None:
    up = NamedLayer("up", LAYER.replace(bias=True), 1, 2, (3,), ("dgrad",))
    entrants = {"torch": fake("torch"), "onnxruntime": replace(fake("onnxruntime"), directions=("fwd",))}
    net = Network("Two", "", (NamedLayer("plain", LAYER, 1, 1), up))
    found = race.run_suite(net, 1, setting(*entrants, rounds=2), baselines=entrants)
    assert [row.layer for row in found.rows] == [LAYER, LAYER.replace(N=3, direction="dgrad", bias=True)]
    assert [row.failures for row in found.rows] == [{}, {}]
    assert [set(row.times) for row in found.rows] == [{OURS, *entrants}, {OURS}]
    assert found.left_out == [
        "up: torch: direction='dgrad': baselines are given no bias, residual or activation",
        "up: onnxruntime: direction='dgrad': ONNX Runtime is given fwd",
    ]
    assert found.whole == {}, "ONNX Runtime has no graph of such layers"
    assert "1 of 2 layers are at a batch size or in a direction of their own" in found.remarks


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("bias", [False, True])
def test_prelu_is_given_its_slopes(bias: bool) -> None:
    layer = LAYER.replace(bias=bias, activation="prelu")
    problem = Problem.draw(layer, CPU.current())
    values = [values for values in (problem.bias, problem.slope) if values is not None]
    assert len(values) == 1 + bias
    want = reference.convolve(layer, problem.a, problem.b, np.concatenate(values), None)
    made = race.planned(layer, setting())
    assert agreement.disagreement(race.ours(made, problem, None, constant=False)(), want) < 1e-4
    net = Network("One", "", (NamedLayer("plain", layer, 1, 1),))
    found = race.run_suite(net, 1, setting("torch", rounds=2), network=False, baselines={"torch": fake("torch")})
    assert found.rows[0].failures == {}
    assert set(found.rows[0].times) == {OURS}


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8"])
def test_other_types_are_refused_before_anything_is_tuned(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "planned", lambda *_: pytest.fail("it was tuned"))
    layers = (NamedLayer("plain", LAYER, 1, 1), NamedLayer("other", edge("plain", N=1, dtype=dtype), 1, 2))
    with pytest.raises(ConfigError, match=f"Two: layer 'other': dtype='{dtype}': expected 'float32'"):
        race.run_suite(Network("Two", "", layers), 1, setting("torch"), baselines={"torch": fake("torch")})


@pytest.mark.usefixtures("place")
def test_an_interruption_keeps_what_is_done() -> None:
    def interrupt(problem: Problem) -> Any:
        if problem.layer.R == 1:
            raise KeyboardInterrupt
        return exactly(problem)

    found = race.run_suite(
        networks.load("tiny.yaml"), 1, setting("torch", rounds=2), baselines={"torch": fake("torch", interrupt)}
    )
    assert [row.name for row in found.rows] == ["first"]
    assert found.incomplete[-1] == "interrupted after 1 of 2 layers"


@pytest.mark.usefixtures("place")
def test_plans_are_tuned_without_vendors_and_kept() -> None:
    first = tuned(LAYER, setting())
    assert first.source == "profile"
    assert "not among the libraries that the option vendors allows" in first.reasons["torch[format=nchw]"][0]
    forget_plans()
    again = tuned(LAYER, setting())
    assert (again.source, again.timed, again.candidate) == ("cache", 0, first.candidate)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("seconds", "noted"), [(0.0, False), (1e6, True)])
def test_a_busy_machine_is_noted(seconds: float, noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([50.0, 50.0 + seconds])
    monkeypatch.setattr(race, "cpu_seconds_of_others", lambda: next(used))
    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    found = race.run_suite(net, 1, setting("torch", rounds=2), baselines={"torch": fake("torch")})
    told = "of a core while 1 of 1 layers were measured, which disturbs these figures"
    assert any(note.startswith("other processes") and told in note for note in found.remarks) == noted


def test_a_slow_machine_is_noted() -> None:
    rows = [race.Row("plain", LAYER, 1, slow=slow) for slow in (2, 0, 1)]
    suite = race.Suite("three", 1, setting(), 3, False, rows)
    (told,) = suite.remarks
    assert told.startswith("threads were not at their full speed in 3 samples while 2 of 3 layers were measured, ")


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = "cpu  1000 100 10 77777 8888 1 2 3 555 555\ncpu0 9 9 9 9 9 9 9 9 9 9\n"  # idle, I/O wait and guests apart
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: ticks)
    monkeypatch.setattr(time, "process_time", lambda: 4.0)
    assert race.cpu_seconds_of_others() == pytest.approx(1116 / os.sysconf("SC_CLK_TCK") - 4.0)


@pytest.mark.usefixtures("place")
def test_exact_means_exact_algorithms_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoconv.cpu.FAMILIES", ("numpy",))
    registry._table.cache_clear()
    try:
        made = tuned(LAYER, setting(exact=True))
        exact = {algorithm.name for algorithm in registry.algorithms(made.device) if algorithm.exact}
    finally:
        registry._table.cache_clear()
    assert made.timings
    assert {name.partition("[")[0] for name in made.timings} <= exact


def test_the_whole_network_is_measured_with_every_repeat(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def graph(problems: dict[str, Problem], outs: dict[str, Any], threads: int) -> Callable[[], None]:
        graphs.append(problems)
        return lambda: None

    monkeypatch.setattr(race, "onnxruntime_network", graph)
    entrants = {name: fake(name) for name in BASELINES}
    found = race.run_suite(networks.load("tiny.yaml"), 1, setting(rounds=2), baselines=entrants)
    assert found.incomplete == []
    ((first, second, third),) = [tuple(problems.values()) for problems in graphs]
    assert second.a is third.a
    assert second.b is not third.b
    assert first.a is not second.a
    assert set(found.whole) == {OURS, "onnxruntime"}
    text = display.totals(found)
    assert set(text) == {"sum of the layers, each timed alone", "all layers in sequence, in one graph of ONNX Runtime"}


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("no memory")])
def test_what_ends_the_race_of_the_whole_loses_no_layer(
    failure: BaseException, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_it_is_exported(*_: Any) -> Any:
        return {name: (Prepared(lambda: np.ones(1)), 0.5) for name in (OURS, "onnxruntime")}

    def ends(runs: dict[str, Any], *rest: Any) -> Any:
        if as_exported(OURS) in runs:
            raise failure
        return timed(runs, *rest)

    timed = race.race
    monkeypatch.setattr(race, "race", ends)
    monkeypatch.setattr(race, "onnxruntime_network", lambda *_: lambda: None)
    monkeypatch.setattr(race, "exported_networks", as_it_is_exported)
    monkeypatch.setitem(race.NETWORKS, "Tiny", lambda graph, x: x)
    entrants = {"onnxruntime": fake("onnxruntime")}
    wanted = setting("onnxruntime", rounds=2)
    found = race.run_suite(networks.load("tiny.yaml"), 1, wanted, baselines=entrants, folder=place / "out")
    assert (len(found.rows), found.interrupted) == (2, isinstance(failure, KeyboardInterrupt))
    assert list(display.totals(found)) == ["sum of the layers, each timed alone"]
    (path,) = (place / "out").iterdir()
    assert [layer["name"] for layer in json.loads(path.read_text())["layers"]] == ["first", "second"]


@pytest.mark.usefixtures("place")
def test_a_sequence_has_no_activations_that_baselines_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "onnxruntime_network", lambda *_: pytest.fail("it knows none of them"))
    net = Network("One", "", (NamedLayer("plain", LAYER.replace(activation="silu"), 1, 1),))
    entrants = {"onnxruntime": fake("onnxruntime")}
    found = race.run_suite(net, 1, setting("onnxruntime", rounds=2), baselines=entrants)
    assert (set(found.rows[0].times), found.whole, found.notes) == ({OURS}, {}, [])


def test_a_network_as_exported_counts_by_its_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = suite(row(ours=[1.0] * 6, **complete()))
    exported = {as_exported(OURS): [2.0] * 6, as_exported("onnxruntime"): [4.0] * 6}
    found.whole = {OURS: [1.0] * 6, "onnxruntime": [3.0] * 6, **exported}
    found.shares = {OURS: 0.5, "onnxruntime": 0.75}
    texts = display.totals(found)
    assert texts["and the convolutions of the network as exported (50% and 75% of its time)"] == {
        OURS: "1 s",
        "onnxruntime": "3 s (3.00 [3.00 3.00])",
    }
    assert texts["all layers in sequence, in one graph of ONNX Runtime"]["onnxruntime"] == "3 s (3.00 [3.00 3.00])"
