"""The README's own code runs, and what it says of the command holds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoconv.cpu
from autoconv import ConvLayer, TuningCache, networks
from autoconv.cli.main import cli
from autoconv.tuning import planner

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path))
    planner._memo.clear()
    planner._default_cache.cache_clear()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in blocks("python"):
        if not block.startswith('"""autoconv/cpu/'):
            exec(compile(block, "README.md", "exec"), names)
    assert "GFLOP/s" in capsys.readouterr().out
    x, w, out = names["x"], names["w"], names["out"]
    np.testing.assert_allclose(
        out, np.maximum(names["y"], 0), atol=1e-5 * np.abs(x).max() * np.abs(w).sum(axis=(1, 2, 3)).max()
    )
    assert names["dx"].shape == x.shape
    assert names["dw"].shape == w.shape


def test_the_algorithm_of_the_example_is_verified_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = (block for block in blocks("python") if block.startswith('"""autoconv/cpu/'))
    path = tmp_path / "product.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("product", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(autoconv.cpu, "ALGORITHMS", (*autoconv.cpu.ALGORITHMS, module.Product()))
    cache = TuningCache(tmp_path / "cache", system=None)
    layer = ConvLayer(N=2, C=16, H=7, W=9, K=8, R=1, S=1)
    plan = autoconv.plan(layer, cache=cache)
    assert plan.facts["product"].timed
    assert plan.facts["product"].error < 2e-6
    named = autoconv.plan(layer, "product", cache=cache)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(layer.x_shape, np.float32), rng.standard_normal(layer.w_shape, np.float32)
    np.testing.assert_allclose(named.run(x, w), np.einsum("nchw,kc->nkhw", x, w[:, :, 0, 0]), rtol=1e-4, atol=1e-4)
    strided = autoconv.plan(layer.replace(stride=2, bias=True), "heuristic", cache=cache)
    assert strided.reasons["product"] == ["pixels are skipped or padded", "it has no tail"]


def test_the_yaml_example_is_a_network(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "net.yaml").write_text(text)
    net = networks.load(tmp_path / "net.yaml")
    assert [(named.layer.P, named.layer.Q, named.repeat) for named in net.layers] == [(32, 32, 1), (32, 32, 4)]


def test_every_command_and_network_is_mentioned() -> None:
    for name in cli.commands:
        assert f"autoconv {name} " in README
    for name in networks.names():
        assert f"`{name}`" in README


def test_the_set_up_is_two_commands_that_the_gate_runs() -> None:
    assert [block.count("\n") for block in blocks("sh")] == [1, 1]
    gate = (Path(__file__).parents[2] / ".ci" / "run").read_text(encoding="utf-8")
    for block in blocks("sh"):
        prefixes = re.findall(r'readme "([^"]+)"', gate)
        assert any(block.startswith(prefix) for prefix in prefixes)
