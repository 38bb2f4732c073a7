"""Sweeps: the layers they make, where curves cross, and the command."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoconv import CPU, ConvLayer, forget_plans, networks
from autoconv.algorithm import Candidate
from autoconv.bench.report.study import Studied
from autoconv.bench.report.sweep import Sweep, values_of, varied
from autoconv.cli import main, options
from autoconv.errors import LayerError
from autoconv.plans import Plan
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts

LAYER = ConvLayer(N=1, C=8, H=12, W=18, K=16, R=3, S=3, padding=1)
DEPTHWISE = ConvLayer(N=1, C=8, H=12, W=12, K=16, R=5, S=5, padding=2, groups=8)


def test_what_belongs_to_an_extent_goes_with_it() -> None:
    assert varied(LAYER, "N", 4) == LAYER.replace(N=4)
    assert varied(LAYER, "H", 24) == LAYER.replace(H=24, W=36)
    assert varied(LAYER, "R", 5) == LAYER.replace(R=5, S=5, padding=2)
    assert varied(LAYER.replace(padding=2), "R", 5) == LAYER.replace(R=5, S=5, padding=2)
    assert varied(LAYER.replace(dilation=2, padding=2), "R", 5) == LAYER.replace(R=5, S=5, dilation=2, padding=4)
    assert varied(LAYER.replace(S=1, padding=(1, 0)), "R", 7) == LAYER.replace(R=7, S=1, padding=(3, 0))
    assert varied(DEPTHWISE, "C", 32) == DEPTHWISE.replace(C=32, K=64, groups=32)
    with pytest.raises(LayerError, match="K=20"):
        varied(DEPTHWISE, "K", 20)


@pytest.mark.parametrize("layer", [LAYER, DEPTHWISE, LAYER.replace(padding=0, H=4, W=4)])
@pytest.mark.parametrize("extent", "NCKRH")
def test_values_around_a_layer_are_valid_and_its_own_is_among_them(layer: ConvLayer, extent: str) -> None:
    values = values_of(layer, extent)
    assert getattr(layer, extent) in values
    assert values == sorted(set(values))
    assert len({varied(layer, extent, value) for value in values}) == len(values) >= 2


def at(value: int, **seconds: float) -> tuple[int, Studied]:
    """A layer with one candidate for each algorithm."""
    layer = LAYER.replace(C=value)
    facts = {Candidate(name): Facts("1", time=time, samples=9) for name, time in seconds.items()}
    order = tuple(sorted(facts, key=lambda candidate: facts[candidate].time))
    device = CPU.current()
    return value, Studied(f"C={value}", layer, 1, device, Limits(weights="constant"), order[0], facts, order)


def test_a_takeover_is_where_the_curves_cross() -> None:
    # One grows with the value and the other does not: they cross where both take 8.
    sweep = Sweep("C", (at(2, direct=2.0, fft=8.0), at(4, direct=4.0, fft=8.0), at(16, direct=16.0, fft=8.0)))
    (takeover,) = sweep.takeovers
    assert (takeover.old, takeover.new, takeover.low, takeover.high) == ("direct", "fft", 4, 16)
    assert takeover.at == pytest.approx(8)
    assert str(takeover) == "direct up to 4, fft from 16, crossing near 8"
    assert sweep.algorithms == ["direct", "fft"]
    assert sweep.curve("fft") == [(2, 8.0), (4, 8.0), (16, 8.0)]


def test_what_the_limits_forbid_is_no_part_of_a_curve_and_another_library_is() -> None:
    coarse, slow = (Candidate("fft", (("tile", tile),)) for tile in (16, 8))
    points = []
    for value, point in (at(4, direct=4.0, torch=1.0), at(16, direct=16.0, torch=2.0)):
        of_torch = replace(point.facts[Candidate("torch")], vendor="torch", error=1e-3)
        facts = dict(point.facts) | {Candidate("torch"): of_torch, slow: Facts("1", time=8.0, error=1e-7, samples=9)}
        facts[coarse] = Facts("1", time=0.5, error=1e-4, samples=9)
        winner = slow if value == 16 else Candidate("direct")
        points.append((value, replace(point, facts=facts, limits=replace(point.limits, tolerance=1e-6), winner=winner)))
    sweep = Sweep("C", tuple(points))
    assert sweep.curve("fft") == [(4, 8.0), (16, 8.0)]
    assert sweep.curve("torch") == [(4, 1.0), (16, 2.0)]
    assert sweep.takeovers[0].at == pytest.approx(8)


def test_no_crossing_is_made_up_where_a_curve_ends() -> None:
    sweep = Sweep("C", (at(4, direct=4.0), at(16, direct=16.0, fft=8.0)))
    (takeover,) = sweep.takeovers
    assert takeover.at is None
    assert str(takeover) == "direct up to 4, fft from 16"
    assert sweep.curve("fft") == [(16, 8.0)]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="NOT CHECKED: no matplotlib")
def test_the_command_times_what_has_no_record_and_draws(
    numpy_alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", LAYER.key(), "--extent", "K", "--values", "4,2", "--weights", "constant"]
    command += ["--vendors", "none", "--threads", "1"]
    assert main([*command, "--mode", "cached"]) == 1
    assert capsys.readouterr().err.count("nothing recorded for") == 2
    assert main([*command, "--no-isolate", "--budget", "0.2s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == CPU.current(1).key
    assert [point["value"] for point in found["sweeps"][0]["points"]] == [2, 4]
    for point in found["sweeps"][0]["points"]:
        assert ConvLayer.parse(point["layer"]) == LAYER.replace(K=point["value"])
        assert min(point["seconds"].values()) > 0
        assert {name.partition(".")[0] for name in point["seconds"]} == {"numpy"}
    assert main([*command, "--mode", "cached", "-o", str(tmp_path / "sweep.html")]) == 0
    told = capsys.readouterr().out
    assert "as K grows" in told
    assert f"written: {tmp_path / 'sweep.html'}\n" in told
    assert "budget" not in told
    assert "As K grows: filters" in (tmp_path / "sweep.html").read_text(encoding="utf-8")


def test_the_command_tells_of_a_budget_that_was_too_small(
    numpy_alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "LEAST_BUDGET", 1e-9)
    command = ["sweep", LAYER.key(), "--extent", "K", "--values", "2,4", "--no-isolate", "--budget"]
    assert main([*command, "0.1ms"]) == 1
    assert "on record: expected a larger budget\n" in capsys.readouterr().err
    forget_plans()
    assert main([*command, "600s"]) == 0
    assert "within the budget" not in capsys.readouterr().out
    monkeypatch.setattr(Plan, "cut_short", property(lambda made: made.layer.K == 4))
    assert main([*command, "600s"]) == 0
    out = capsys.readouterr().out
    assert "not finished within the budget: 1 of 2 layers; a larger one goes on there\n" in out
    assert "written" not in out


def test_of_several_batch_sizes_of_a_layer_the_first_is_meant(
    numpy_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", "cifar10:conv2", "--extent", "K", "--values", "32", "--threads", "1", "--mode", "cached"]
    layer = networks.load("cifar10").find("conv2")
    assert len(networks.load("cifar10").batches) > 1
    for more, expected in (
        ([], layer.at(1)),
        (["--batch", "100"], layer.at(100)),
        (["--direction", "wgrad"], layer.at(1, "wgrad")),
    ):
        assert main([*command, "--json", *more]) == 1, "nothing is on record"
        assert json.loads(capsys.readouterr().out)["layer"] == expected.key()


def test_the_first_of_a_layer_s_directions_is_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two.yaml").write_text("layers: [{name: a, C: 2, H: 5, K: 3, R: 3, direction: [dgrad, wgrad]}]\n")
    command = ["sweep", f"{tmp_path}/two.yaml:a", "--extent", "N", "--values", "2", "--mode", "cached", "--json"]
    assert main(command) == 1, "nothing is on record"
    assert json.loads(capsys.readouterr().out)["layer"].startswith("dgrad-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar10"], "cifar10: expected one layer, a key or NET:NAME, got 3"),
        (["alexnet"], "alexnet: expected one layer, a key or NET:NAME, got 5"),
        (["alexnet:conv3", "--values", "1,2"], "--values: expected --extent with one extent as well"),
        (["alexnet:conv3", "--extent", "W"], "expected some of N,C,K,R,H"),
        (["alexnet:conv2", "--extent", "C", "--values", "3"], "groups=2: it must divide C=3"),
        (["alexnet:conv3", "--mode", "fastest"], "--mode 'fastest': expected one of"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
