"""Saved networks of which PyTorch runs a node: files come from anywhere, and may be damaged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

from damaged import header_of  # noqa: E402
from torch_models import Applied, numbers  # noqa: E402

import autoconv  # noqa: E402
import autoconv.torch  # noqa: E402
from autoconv.cpu.device import CPU  # noqa: E402
from autoconv.networks.compiled.network import CompiledNetwork  # noqa: E402
from autoconv.networks.torch_reader import exported, translated  # noqa: E402

IMAGES = (2, 4, 7, 6)


def of_a_node(path: Path, **changes: Any) -> None:
    """Save a network that PyTorch runs one node of, with such changes to it."""
    graph = translated(exported(Applied(lambda x: x.cumsum(0)).eval(), (numbers(IMAGES),)), "net")
    CompiledNetwork(graph, CPU.current(), {}).save(path)
    with header_of(path) as header:
        header["nodes"][0][2] |= changes


def test_a_saved_network_has_pytorch_run_the_same(tmp_path: Path) -> None:
    of_a_node(tmp_path / "net.autoconv")
    x = numbers(IMAGES)
    np.testing.assert_allclose(autoconv.load(tmp_path / "net.autoconv").run(x.numpy()), x.cumsum(0).numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operator": "aten::from_file"}, "expected one of PyTorch's core operators"),
        ({"operator": "aten::resize_"}, "expected one of PyTorch's core operators"),  # which is one, but writes
        ({"operator": "aten::no_such"}, "expected an operator of PyTorch's"),
        ({"operator": "other::cumsum"}, "expected an operator of PyTorch's"),
        ({"operator": "aten::topk"}, "PyTorch does not take it"),
        ({"arguments": "{"}, "PyTorch does not take it"),
        ({"arguments": '{"self": {"array": 1}, "dim": 0, "dtype": null}'}, "PyTorch does not take it"),
        ({"arguments": '{"self": {"torch": "load"}, "dim": 0, "dtype": null}'}, "expected an array or a constant of"),
        ({"output": 1}, "expected an output of its model"),
        ({"dtype": "float64"}, "expected an output of its model"),
        ({"takes": []}, "expected none"),
    ],
)
def test_a_damaged_node_is_refused_when_the_file_is_read(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    of_a_node(tmp_path / "net.autoconv", **changes)
    with pytest.raises(autoconv.ConfigError, match=message) as caught:
        autoconv.load(tmp_path / "net.autoconv")
    assert "\n" not in str(caught.value)


def test_a_saved_network_says_that_pytorch_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_node(tmp_path / "net.autoconv")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(autoconv.ConfigError, match=r"^aten::cumsum: no kernel here: expected torch to be installed"):
        autoconv.load(tmp_path / "net.autoconv")


def test_complex_constants_are_saved_and_loaded(tmp_path: Path) -> None:
    x, filters = numbers(IMAGES), torch.polar(torch.rand(4, 7, 4), torch.rand(4, 7, 4))
    model = Applied(lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * filters))
    net = CompiledNetwork(translated(exported(model.eval(), (x,)), "net"), CPU.current(), {})
    net.save(tmp_path / "net.autoconv")
    y = autoconv.load(tmp_path / "net.autoconv").run(x.numpy())
    np.testing.assert_allclose(y, model(x).numpy(), rtol=1e-5, atol=1e-5)


def test_no_file_asks_for_more_than_core_operators(tmp_path: Path) -> None:
    graph = translated(exported(Applied(torch.rand_like).eval(), (numbers(IMAGES),)), "net")
    with pytest.raises(autoconv.ConfigError, match=r"node 'rand_like' \(aten::rand_like\): expected one of PyTorch's"):
        CompiledNetwork(graph, CPU.current(), {}).save(tmp_path / "net.autoconv")
    assert not [*tmp_path.glob("net*")]
