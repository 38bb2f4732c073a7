"""`autoconv bench`: what fails on one layer, or of one contestant, ends nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from runs import LAYER, broken, exactly, fake, place, setting

from autoconv import networks
from autoconv.bench import agreement, race
from autoconv.bench.baselines import Prepared, Problem
from autoconv.bench.suites import OURS
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks import NamedLayer, Network

__all__ = ["place"]  # a fixture

pytestmark = pytest.mark.usefixtures("few_families", "place")


def test_a_baseline_that_fails_or_errs_is_named() -> None:
    def refuse(problem: Problem) -> Any:
        raise PlanError("not this one")

    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    entrants = {
        "torch": fake("torch", broken),
        "torch_cl": fake("torch_cl", lambda problem: exactly(problem) * np.float32(1.005)),
        "onnxruntime": fake("onnxruntime"),
        "openvino": fake("openvino", refuse),
        "ncnn": fake("ncnn", lambda problem: exactly(problem) * np.float32(1.5)),
        "mnn": fake("mnn", lambda problem: exactly(problem)[:, :1]),
    }
    found = race.run_suite(net, 1, setting(rounds=2), network=False, baselines=entrants)
    assert set(found.rows[0].times) == {OURS, "torch_cl", "onnxruntime"}
    assert found.rows[0].errors["torch_cl"] == pytest.approx(5e-3, rel=1e-2)
    assert found.incomplete == [
        "plain: torch: no kernel for this",
        "plain: ncnn: its answer differs from that of autoconv by 5.0e-01 of the largest value",
        "plain: mnn: its answer differs from that of autoconv by inf of the largest value",
    ]
    assert found.left_out == ["plain: openvino: not this one"]


def test_a_layer_on_which_everybody_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryError("too large")

    monkeypatch.setattr(race, "ours", refuse)
    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    found = race.run_suite(net, 1, setting("torch"), network=False, baselines={"torch": fake("torch", broken)})
    assert found.rows[0].times == {}
    assert found.rows[0].failures == {OURS: "too large", "torch": "no kernel for this"}


def test_who_fails_later_fails_alone() -> None:
    def later(problem: Problem) -> Any:
        answers = iter([exactly(problem)])
        return lambda: next(answers)  # and no more

    def prepare(problem: Problem, *_: Any) -> Prepared:
        return Prepared(later(problem))

    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    failing = replace(fake("torch"), prepared=prepare)
    entrants = {"torch": failing, "ncnn": fake("ncnn")}
    found = race.run_suite(net, 1, setting("torch", "ncnn", rounds=2), network=False, baselines=entrants)
    assert set(found.rows[0].times) == {OURS, "ncnn"}
    assert set(found.rows[0].failures) == {"torch"}


@pytest.mark.parametrize("error", [OSError("no space left"), MemoryError("no space left"), PlanError("no space left")])
@pytest.mark.parametrize("step", ["planned", "draw"])
def test_what_one_layer_lacks_ends_no_others(step: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    place = race if step == "planned" else Problem
    does = getattr(place, step)

    def failing(layer: ConvLayer, *rest: Any) -> Any:
        if layer.R == 3:
            raise error
        return does(layer, *rest)

    monkeypatch.setattr(place, step, failing)
    entrants = {"torch": fake("torch")}
    found = race.run_suite(networks.load("tiny.yaml"), 1, setting("torch", rounds=2), baselines=entrants)
    assert [row.failures for row in found.rows] == [{OURS: "no space left"}, {}]
    assert [set(row.times) for row in found.rows] == [set(), {OURS, "torch"}]


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        (np.array([100, 0], np.uint8), np.array([101, 0], np.uint8), 1 / 101),
        (np.array([127, 3], np.int8), np.array([-128, 3], np.int8), 255 / 128),
        (np.array([2**31 - 1], np.int32), np.array([-1], np.int32), 2**31),
        (np.array([True]), np.array([False]), 1 / float(np.finfo(np.float32).tiny)),
        (np.array([1.0, 2.5], np.float32), np.array([1.0, 2.0], np.float32), 0.25),
        (np.zeros((1, 0)), np.zeros((1, 0)), 0.0),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_answers_of_any_type_are_compared_as_numbers(got: np.ndarray, want: np.ndarray, error: float) -> None:
    assert agreement.disagreement(got, want) == pytest.approx(error)
