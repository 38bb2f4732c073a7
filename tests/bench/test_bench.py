"""The arithmetic of `autoconv bench` on made-up samples, and runs on tiny layers against fake peers."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import edge

from autoconv.bench import baselines as peers
from autoconv.bench import reports as bench_report
from autoconv.bench import suites as bench
from autoconv.bench.baselines import PEERS, Peer, Problem
from autoconv.bench.suites import OURS, ExactCPU, Ratio, Row, Setting, Suite
from autoconv.cli import main as cli
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.networks import layers as network
from autoconv.networks.layers import NamedLayer, Network
from autoconv.registry import algorithms
from autoconv.tuning import planner, reference
from autoconv.tuning.planner import forget_plans

LAYER = edge("plain", N=1)
NET = """
name: Tiny
layers:
  - {name: first, C: 3, H: 12, K: 4, R: 3, padding: 1, bias: true, activation: relu}
  - {name: second, C: 4, H: 6, K: 8, R: 1, repeat: 2}
"""


# The arithmetic


@pytest.mark.parametrize(
    ("count", "ranks"),
    [(5, (1, 5)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (11, (2, 10)), (12, (3, 10)), (25, (8, 18))],
)
def test_an_interval_lies_between_the_order_statistics_of_the_tables(count: int, ranks: tuple[int, int]) -> None:
    """The ranks that textbooks tabulate for a 95 % interval of the median."""
    samples = [float(place) for place in range(1, count + 1)]
    found = bench.interval(samples[::-1])
    assert (found.low, found.high) == ranks
    assert found.median == statistics.median(samples)


def test_an_interval_holds_the_true_median_nineteen_times_in_twenty() -> None:
    generator = np.random.default_rng(0)
    found = [bench.interval(list(generator.standard_normal(9))) for _ in range(4000)]
    held = sum(ratio.low <= 0 <= ratio.high for ratio in found) / len(found)
    assert 0.95 <= held <= 0.97  # 96.1 % for nine samples


def test_a_loss_is_sure_only_when_all_of_the_interval_is_one() -> None:
    assert Ratio(0.9, 0.8, 0.96).behind
    assert not Ratio(0.9, 0.8, 0.97).behind


def row(name: str = "layer", layer: ConvLayer = LAYER, repeat: int = 1, **times: list[float]) -> Row:
    return Row(name, layer, repeat, "numpy.gemm[tile=image]", {OURS: times.pop("ours"), **times})


def test_a_drift_that_slows_a_whole_round_leaves_the_ratios_alone() -> None:
    drift = [1.0, 2.0, 5.0, 1.5, 3.0, 1.0]
    found = row(ours=[1e-3 * d for d in drift], torch=[2e-3 * d for d in drift])
    assert found.against("torch") == pytest.approx([2.0] * 6)


def test_the_best_peer_is_the_one_with_the_least_median() -> None:
    found = row(ours=[1.0] * 3, torch=[3.0, 3.0, 1.0], torch_cl=[2.0, 2.0, 9.0])
    assert found.best == "torch_cl"
    assert found.against("best") == [2.0, 2.0, 9.0]
    assert found.against("onnxruntime") is None
    assert Row("failed", LAYER, 1, times={"torch": [1.0]}).against("best") is None


def setting(*names: str, **changes: Any) -> Setting:
    return Setting(CPU.current(), names or tuple(PEERS), isolate=False, **changes)


def suite(*rows: Row, network: bool = True, **changes: Any) -> Suite:
    return Suite("Tiny", 1, setting(**changes), len(rows), network, list(rows))


def complete(**times: list[float]) -> dict[str, list[float]]:
    return {"torch": [9.0] * 6, "torch_cl": [9.0] * 6, "onnxruntime": [9.0] * 6} | times


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


def test_a_mean_over_layers_that_a_peer_has_not_all_run_is_none() -> None:
    found = suite(row(ours=[1.0] * 6, **complete()), row(ours=[1.0] * 6, torch=[1.0] * 6))
    assert found.mean("onnxruntime") is None
    assert found.mean("torch") is not None
    assert suite().mean("torch") is None


def test_a_sum_weights_repeats_round_by_round() -> None:
    found = suite(row(ours=[1.0, 2.0], **complete()), row(ours=[10.0, 20.0], repeat=3))
    assert found.total(OURS) == [31.0, 62.0]
    assert found.total("torch") is None


def test_classes() -> None:
    names = [bench.kind(named.layer) for named in network.load("mixed27").layers]
    assert [names.count(name) for name in bench.KINDS] == [12, 5, 3, 3, 4]
    stem = network.load("mobilenet-v2").layers[0].layer
    assert bench.kind(stem) == "5x5, stems, dilated"
    assert bench.kind(edge("depthwise strided")) == "others"


# What does not count


def test_a_run_with_all_peers_is_complete() -> None:
    assert suite(row(ours=[1.0], **complete())).incomplete == []


def test_gradients_need_only_the_peers_that_have_them() -> None:
    found = Suite("Tiny", 1, setting("torch", "torch_cl", direction="wgrad"), 0, True)
    assert found.incomplete == []


def test_whatever_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "installed", lambda package: package != "onnx")
    found = suite(row(ours=[1.0], torch=[1.0]), restrictions={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    found.setting = setting("torch", restrictions={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    found.rows[0].failures["torch"] = "it broke"
    found.layers = 2
    assert found.incomplete == [
        "torch, channels_last did not take part",
        "ONNX Runtime did not take part: onnx not installed",
        "layer: torch: it broke",
        "torch is not at its default settings (ONEDNN_MAX_CPU_ISA=AVX2), and ONNX Runtime cannot be held likewise",
        "interrupted after 1 of 2 layers",
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


def test_a_race_interleaves_with_idle_times_and_without_garbage_collection() -> None:
    clock = Clock()
    runs = {"a": clock.work("a", 0.010), "b": clock.work("b", 0.200)}
    times = bench.race(runs, 6, clock=clock, sleep=clock.sleep, busy=lambda: 0.0)
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
        assert bench.sample(clock.work("a", 0.05, 0.01, 0.02, 0.03, 0.02), clock) == pytest.approx(0.02)
        assert clock.log.count("a") == 1 + 4  # 10 + 20 + 30 + 20 ms are the first to fill 75
        clock.log.clear()
        assert bench.sample(clock.work("long", 0.4), clock) == pytest.approx(0.4)
        assert clock.log == ["long"]
    finally:
        gc.enable()


def exactly(problem: Problem) -> Any:
    return reference.convolve(problem.layer, problem.a, problem.b, problem.bias, problem.residual).astype(np.float32)


def fake(name: str, answer: Callable[[Problem], Any] = exactly) -> Peer:
    """A peer that has the answer ready."""

    def prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> peers.Run:
        ready = answer(problem)
        return lambda: ready

    return Peer(name, PEERS[name].label, ("numpy",), prepare, ("fwd", "dgrad", "wgrad"))


def broken(problem: Problem) -> Any:
    raise RuntimeError("no kernel\nfor this")


def estimated(layer: ConvLayer, wanted: Setting) -> planner.Plan:
    """In the place of `bench.planned`, which takes its time."""
    return planner.plan(layer, "heuristic", device=wanted.device, vendors=False)


tuned = bench.planned


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a small network, and no time to lose."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "SLOT", 0.0)
    monkeypatch.setattr(bench, "planned", estimated)
    (tmp_path / "tiny.yaml").write_text(NET)
    return tmp_path


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_a_suite_against_fake_peers(direction: str, constant: bool, fresh: bool) -> None:
    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    wanted = setting("torch", direction=direction, constant=constant, fresh=fresh, rounds=2)
    found = bench.run_suite(net, 2, wanted, network=False, peers={"torch": fake("torch")})
    (only,) = found.rows
    assert only.layer == LAYER.replace(N=2, direction=direction)
    assert only.failures == {}
    assert {name: len(samples) for name, samples in only.times.items()} == {OURS: 2, "torch": 2}
    assert only.algorithm
    assert not only.algorithm.startswith(("torch", "onnxruntime"))


@pytest.mark.usefixtures("place")
def test_a_peer_that_fails_or_errs_is_named_and_the_rest_goes_on() -> None:
    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    entrants = {
        "torch": fake("torch", broken),
        "torch_cl": fake("torch_cl", lambda problem: exactly(problem) * np.float32(1.01)),
        "onnxruntime": fake("onnxruntime"),
    }
    found = bench.run_suite(net, 1, setting(rounds=2), network=False, peers=entrants)
    assert found.rows[0].best is not None
    assert found.incomplete == [
        "plain: torch: no kernel for this",
        f"plain: torch_cl: {found.rows[0].failures['torch_cl']}",
    ]
    assert "its answer differs by 1.0e-02 of the largest value" in found.incomplete[1]


@pytest.mark.usefixtures("place")
def test_a_layer_on_which_everybody_fails_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryError("too large")

    monkeypatch.setattr(bench, "ours", refuse)
    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    found = bench.run_suite(net, 1, setting("torch"), network=False, peers={"torch": fake("torch", broken)})
    assert found.rows[0].times == {}
    assert found.rows[0].failures == {OURS: "too large", "torch": "no kernel for this"}


@pytest.mark.usefixtures("place")
def test_an_interruption_keeps_what_is_done() -> None:
    def interrupt(problem: Problem) -> Any:
        if problem.layer.R == 1:
            raise KeyboardInterrupt
        return exactly(problem)

    found = bench.run_suite(
        network.load("tiny.yaml"), 1, setting("torch", rounds=2), peers={"torch": fake("torch", interrupt)}
    )
    assert [row.name for row in found.rows] == ["first"]
    assert found.incomplete[-1] == "interrupted after 1 of 2 layers"


@pytest.mark.usefixtures("place")
def test_plans_are_tuned_without_vendors_and_kept() -> None:
    first = tuned(LAYER, setting())
    assert first.source == "profile"
    assert "not among the vendors allowed" in first.reasons["torch[format=nchw]"][0]
    forget_plans()
    again = tuned(LAYER, setting())
    assert (again.source, again.timed, again.candidate) == ("cache", 0, first.candidate)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("seconds", "noted"), [(0.0, False), (1e6, True)])
def test_a_busy_machine_is_noted(seconds: float, noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([50.0, 50.0 + seconds])
    monkeypatch.setattr(bench, "cpu_seconds_of_others", lambda: next(used))
    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    found = bench.run_suite(net, 1, setting("torch", rounds=2), peers={"torch": fake("torch")})
    assert any("these figures are disturbed" in note for note in found.notes) == noted


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = "cpu  1000 100 10 77777 8888 1 2 3 555 555\ncpu0 9 9 9 9 9 9 9 9 9 9\n"  # idle, I/O wait and guests apart
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: ticks)
    monkeypatch.setattr(time, "process_time", lambda: 4.0)
    assert bench.cpu_seconds_of_others() == pytest.approx(1116 / os.sysconf("SC_CLK_TCK") - 4.0)


def test_exact_means_exact_algorithms_only() -> None:
    device = ExactCPU(1, "generic")
    assert device.key == CPU(1, "generic").key
    assert {algorithm.exact for algorithm in algorithms(device)} == {True}
    assert len(algorithms(device)) < len(CPU(1, "generic").algorithms)


def test_the_whole_network_is_measured_with_every_repeat(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def graph(problems: dict[str, Problem], outs: dict[str, Any], threads: int) -> Callable[[], None]:
        graphs.append(problems)
        return lambda: None

    monkeypatch.setattr(bench, "onnxruntime_network", graph)
    entrants = {name: fake(name) for name in PEERS}
    found = bench.run_suite(network.load("tiny.yaml"), 1, setting(rounds=2), peers=entrants)
    assert found.incomplete == []
    ((first, second, third),) = [tuple(problems.values()) for problems in graphs]
    assert second.a is third.a
    assert second.b is not third.b
    assert first.a is not second.a
    assert set(found.whole) == {OURS, "onnxruntime"}
    text = bench_report.totals(found)
    assert set(text) == {"sum of the layers, each measured alone", "all layers in sequence, ONNX Runtime in one graph"}


# The report and the command


def samples() -> Suite:
    return suite(
        row("alpha", ours=[1e-3] * 6, **complete(torch=[2e-3] * 6)),
        row("beta", edge("pointwise"), 2, ours=[2e-3] * 6, **complete(torch_cl=[1e-3] * 6)),
    )


def test_the_table_has_layers_means_losses_sums_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    bench_report.print_suite(samples())
    text = capsys.readouterr().out
    assert "2.00 [2.00 2.00]" in text
    assert "1 of 2 layers surely behind" in text
    assert "sum of the layers, each measured alone: autoconv 5 ms" in text
    assert "\n  all " in text
    assert "vendors off" in text
    assert "exact" not in text
    assert "INCOMPLETE" not in text


def test_the_caption_says_what_was_asked_for() -> None:
    exact = replace(setting("torch", constant=False, fresh=True), device=ExactCPU(1, "generic"))
    text = "\n".join(bench_report.caption(Suite("Tiny", 1, exact, 0, False)))
    for part in ("only exact algorithms", "varying, transformed in every run", "a fresh output in every run"):
        assert part in text
    gradient = "\n".join(bench_report.caption(Suite("Tiny", 1, setting("torch", direction="wgrad"), 0, False)))
    assert "filters" not in gradient
    assert "ONNX" not in gradient


def test_incomplete_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = samples()
    found.rows[0].failures["torch"] = "it broke"
    bench_report.print_suite(found)
    assert capsys.readouterr().out.endswith("INCOMPLETE: alpha: torch: it broke\n")


def test_json_holds_every_sample() -> None:
    found = json.loads(json.dumps(bench_report.to_json(samples()), allow_nan=False))
    assert found["layers"][0]["seconds"][OURS] == [1e-3] * 6
    assert found["layers"][0]["ratios"]["best"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert found["means"]["best"]["median"] == pytest.approx(1.0)
    assert found["class_means"]["1x1"]["best"]["median"] == pytest.approx(0.5)
    assert found["sums"][OURS] == pytest.approx([5e-3] * 6)
    assert found["incomplete"] == []


def test_a_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench_report.chart([samples(), samples()], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def verb(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, with fake peers that are always there."""
    for name in PEERS:
        monkeypatch.setitem(PEERS, name, fake(name))
    monkeypatch.setattr(bench, "onnxruntime_network", lambda problems, outs, threads: lambda: None)

    def run(*arguments: str) -> int:
        return cli.main(["bench", *arguments])

    return run


def test_the_command_prints_a_table_and_json(verb: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("tiny.yaml", "--rounds", "6") == 0
    assert "first" in capsys.readouterr().out
    assert verb("tiny.yaml", "--batch", "1,2", "--rounds", "6", "--json", "--exact", "--layers", "second") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert [found["batch"] for found in json.loads(captured.out)] == [1, 2]


def test_layers_can_be_left_out(verb: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("tiny.yaml", "--batch", "1", "--rounds", "6", "--json", "--without", "first") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["layers"]] == ["second"]
    assert verb("tiny.yaml", "--without", "conv9") == 2


def test_fewer_peers_are_incomplete(verb: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("tiny.yaml", "--rounds", "6", "--against", "torch") == 1
    assert "INCOMPLETE: torch, channels_last did not take part" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "tensorflow"], "allowed are some of torch,torch_cl,onnxruntime"),
        (["--batch", "0"], "integers from 1"),
        (["--rounds", "5"], "--rounds"),
        (["--layers", "conv9"], "has no layer 'conv9'"),
        (["nowhere"], "no such file"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_chart_in_a_folder_that_is_not_there_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found("json" if name == "matplotlib" else name))
    assert cli.main(["bench", "--chart", "nowhere/out.png"]) == 2
    assert capsys.readouterr().err == "autoconv: error: --chart nowhere/out.png: no such folder\n"


def test_a_chart_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert cli.main(["bench", "--chart", "out.png"]) == 2
    assert "pip install 'autoconv[report]'" in capsys.readouterr().err


def test_gradients_are_not_asked_of_who_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--direction", "wgrad", "--against", "onnxruntime"]) == 2
    assert "allowed are torch,torch_cl" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_the_real_peers_agree(direction: str, name: str) -> None:
    peer = PEERS[name]
    if direction not in peer.directions:
        return
    for package in peer.packages:
        pytest.importorskip(package)
    tail: dict[str, Any] = {"bias": True, "residual": True, "activation": "relu"} if direction == "fwd" else {}
    layer = edge("tails", direction=direction, **tail)
    problem = Problem.draw(layer, CPU.current())
    for constant, fresh in itertools.product([True, False], repeat=2):
        run = peer.prepare(problem, CPU.current(), constant, fresh)
        assert bench.disagreement(run(), exactly(problem)) < 1e-5
