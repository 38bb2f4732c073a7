"""`autoconv run` and `autoconv tune` of networks on a GPU, as far as NumPy and the emulator can be one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gpu_graphs import cupy, options
from simt.emulator import MISSING
from simt.fake_cupy import FakeCuPy

import autoconv
from autoconv.cli.main import cli
from autoconv.cuda.device import CUDA

onnx = pytest.importorskip("onnx")

__all__ = ["cupy", "options"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A network with an activation that kernels apply while they store, and one that they do not."""
    from networks.onnx_models import model, node

    constants = {
        "w": np.ones((2, 2, 1, 1), np.float32),
        "slopes": np.full((2, 1, 1), 0.5, np.float32),
        "low": np.float32(0),
        "high": np.float32(6),
    }
    nodes = [
        node("Conv", "x w", "a"),
        node("PRelu", "a slopes", "b"),
        node("Conv", "b w", "c"),
        node("Clip", "c low high", "y"),
    ]
    onnx.save(model(nodes, {"x": (1, 2, 3, 4)}, constants), tmp_path / "net.onnx")
    return str(tmp_path / "net.onnx")


def invoked(*words: str) -> Result:
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def test_load_finds_on_record_what_tune_wrote(cupy: FakeCuPy, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDA, "measured_peak", lambda device, dtype: 1e12)  # else of a large product
    before = autoconv.load(path, device="cuda")
    assert {made.source for made in before.plans.values()} == {"heuristic"}
    found = invoked("tune", path, "--device", "cuda", "--no-isolate")
    assert found.exit_code == 0, found.output
    assert "of 2 layers in NHWC" in found.output
    autoconv.forget_plans()
    net = autoconv.load(path, device="cuda")
    assert sorted(str(made.layer.activation) for made in net.plans.values()) == ["None", "prelu"]
    assert {made.source for made in net.plans.values()} == {"cache"}
    explained = json.loads(invoked("explain", path, "--device", "cuda", "--json").output)
    assert {plan["layer"] for plan in explained} == {made.layer.key() for made in net.plans.values()}


def test_a_network_runs_on_a_gpu(cupy: FakeCuPy, path: str) -> None:
    found = invoked("run", path, "--device", "cuda", "--repeat", "2", "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.output)
    assert document["device"].startswith("cuda-")
    assert document["seconds"] > 0
    assert [step["by"] for step in document["steps"]] == ["direct", "direct", "kernel"]
    table = invoked("run", path, "--device", "cuda:1", "--repeat", "1")
    assert table.exit_code == 0, table.output
    assert "in convolutions and fully connected layers" in table.output


@pytest.mark.parametrize("words", [("--threads", "2"), ("--alone",), ("--against", "onnxruntime")])
def test_what_only_a_cpu_has_is_refused(path: str, words: tuple[str, ...]) -> None:
    found = invoked("run", path, "--device", "cuda", *words)
    assert found.exit_code == 2
    assert f"{words[0]}: expected with --device cpu alone, got --device cuda" in found.output
