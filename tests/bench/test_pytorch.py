"""Models in PyTorch against PyTorch's own: what is raced, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

from torch import nn  # noqa: E402

import autoconv.torch  # noqa: E402
from autoconv.bench.networks import pytorch  # noqa: E402
from autoconv.bench.networks.race import keep  # noqa: E402
from autoconv.cpu import pool  # noqa: E402
from autoconv.cpu.device import CPU  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # PyTorch's own, when it is to compile
]


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(name: str) -> tuple[Any, int]:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)), 12

    monkeypatch.setattr(pytorch, "pytorch_model", model)
    monkeypatch.setattr(autoconv.torch.Conv2d, "mode", "heuristic")


@pytest.mark.parametrize("channels_last", [False, True])
def test_contestants_take_the_same_steps(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, step = [], pytorch._step
    monkeypatch.setattr(pytorch, "_step", lambda model, x, labels: seen.append((model, x)) or step(model, x, labels))
    runs = pytorch.training("small", 2, "heuristic", channels_last)
    assert [x.is_contiguous(memory_format=torch.channels_last) for _, x in seen] == [channels_last, False, True]
    assert [getattr(model[0], "mode", None) for model, _ in seen] == ["heuristic", None, None]
    assert list(runs) == ["autoconv", "torch", "torch_cl"]
    losses = [[float(run()) for _ in range(3)] for run in runs.values()]
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-4)
    assert losses[0][2] < losses[0][0]


def test_who_fails_or_errs_is_named() -> None:
    def broken() -> Any:
        raise RuntimeError("no compiler\nhere")

    runs = {"autoconv": lambda: np.ones(3), "torch": lambda: np.full(3, 1.1), "torch_cl": lambda: np.ones(3)}
    found = pytorch.raced(runs | {"torch_compiled": broken}, "small", 2, CPU.current(1), 2)
    assert set(found.times) == {"autoconv", "torch_cl"}
    assert found.failures["torch"].startswith("its answer differs from that of autoconv by 1.0e-01")
    assert found.failures["torch_compiled"] == "no compiler here"


def test_a_race_is_kept(tmp_path: Path) -> None:
    runs = pytorch.inference("small", 2)
    assert list(runs) == ["autoconv", "torch", "torch_cl", "torch_compiled"]
    del runs["torch_compiled"]  # compiling takes too long here
    found = pytorch.raced(runs, "small", 2, CPU.current(1), 2)
    keep(found, tmp_path, "inference.json")
    (row,) = json.loads((tmp_path / "inference.json").read_text(encoding="utf-8"))["networks"]
    assert (row["network"], row["batch"], row["rounds"], set(row["seconds"])) == ("small", 2, 2, set(runs))
    assert set(row["runtimes"]) == set(row["ratios"]) == {"torch", "torch_cl"}
    assert all(error < 1e-4 for error in row["errors"].values())


def test_several_models_are_raced_in_one_call(tmp_path: Path) -> None:
    arguments = ["training", "one", "two", "--batch", "2", "--rounds", "1", "-o", str(tmp_path)]
    done = CliRunner().invoke(pytorch.main, arguments)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))["networks"]
    assert [row["network"] for row in rows] == ["one", "two"]
    assert all(row["threads"] >= 1 for row in rows)
    assert done.stdout.count("batch 2") == 3  # of each, and of the table of both


@pytest.mark.parametrize("option", [["--mode", "profile"], ["--channels-last"]], ids=" ".join)
def test_how_ours_trains_is_no_option_of_inference_and_not_kept(option: list[str], tmp_path: Path) -> None:
    asked = {"--mode, --channels-last: expected training": ["inference"], "--output": ["training", "-o", str(tmp_path)]}
    for why, arguments in asked.items():
        done = CliRunner().invoke(pytorch.main, [*arguments, "one", *option])
        assert done.exit_code == 2
        assert why in done.output
    assert not list(tmp_path.iterdir())
