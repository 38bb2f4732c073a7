"""`autoconv tune` of a whole network: layers, and layouts of what lies between them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from networks.onnx_models import model, node
from onnx import helper, numpy_helper

from autoconv.cli import main
from autoconv.cli import tune as verb
from autoconv.cli.main import cli
from autoconv.cpu import pool
from autoconv.layer import ConvLayer
from autoconv.networks.choice import layout_choice
from autoconv.networks.layer_list import layer_of
from autoconv.networks.onnx_reader import read
from autoconv.networks.passes import optimized
from autoconv.plans import Plan
from autoconv.tuning.planner import plan


def saved(path: Path, images: int | str = "N") -> str:
    """A network of a convolution and a fully connected layer, of so many images or as many as one likes, in a file."""
    filters = {"k": np.ones((8, 4, 1, 1), np.float32), "w": np.ones((5, 8), np.float32)}
    nodes = [
        node("Conv", "x k", "c"),
        node("GlobalMaxPool", "c", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f w", "y", transB=1),
    ]
    path.parent.mkdir(exist_ok=True)
    onnx.save(model(nodes, {"x": [images, 4, 3, 3]}, filters), path)
    return str(path)


@pytest.mark.usefixtures("place")
def test_layers_are_those_that_the_network_runs_at_every_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "net.onnx")
    assert main(["tune", path, "--batch", "1,8", "--mode", "heuristic", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert [table["batch"] for table in tables] == [1, 8]
    for table in tables:
        graph = optimized(read(path, table["batch"]))
        layers = [layer_of(graph, found) for found in graph.nodes.values()]
        assert [row["layer"] for row in table["layers"]] == [layer.key() for layer in layers if layer is not None]
    assert main(["explain", f"{path}:y", "--batch", "8", "--json"]) == 0
    assert [found["layer"] for found in json.loads(capsys.readouterr().out)] == [tables[1]["layers"][1]["layer"]]


@pytest.mark.usefixtures("place")
def test_networks_of_one_name_have_tables_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [saved(tmp_path / folder / "net.onnx") for folder in "ab"]
    assert main(["tune", *paths, "--mode", "heuristic", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert [(table["network"], len(table["layers"])) for table in tables] == [("net", 2)] * 2


@pytest.fixture
def budgets(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of the layers that were to be timed: they are estimated."""
    found: list[Any] = []

    def estimated(layer: ConvLayer, mode: str, **options: Any) -> Plan:
        found.append(options["budget"])
        return plan(layer, "heuristic")

    monkeypatch.setattr(verb, "plan", estimated)
    return found


class Whole(SimpleNamespace):
    """Stands for a network of two layers: how it was loaded, and with which budget it was tuned."""

    plans: ClassVar[dict[str, None]] = {"a": None, "b": None}
    in_nhwc = frozenset(["a", "x"])

    def tune(self, mode: str, budget: Any) -> None:
        self.budget = budget


@pytest.fixture
def loaded(budgets: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Whole]:
    """The networks whose layouts were chosen."""
    found: list[Whole] = []

    def load(path: str, batch: int | None, **options: Any) -> Whole:
        found.append(Whole(graph=SimpleNamespace(name=Path(path).name), batch=batch, options=options))
        return found[-1]

    monkeypatch.setattr(verb, "load", load)
    return found


def test_layouts_are_chosen_at_the_batch_sizes_of_the_layers_under_limits_of_a_network(
    loaded: list[Whole], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [saved(tmp_path / "open.onnx"), saved(tmp_path / "fixed.onnx", 4)]
    assert main(["tune", *paths, "--tolerance", "1e-3", "--exact"]) == 0
    assert [(net.graph.name, net.batch) for net in loaded] == [("open.onnx", 1), ("fixed.onnx", 4)]
    assert all(net.options["exact"] and not {"tolerance", "weights"} & net.options.keys() for net in loaded)
    assert "open.onnx: 1 of 2 layers in NHWC\nfixed.onnx: 1 of 2 layers in NHWC\n" in capsys.readouterr().out
    assert main(["tune", paths[0], "--batch", "1,8", "--no-isolate"]) == 0
    assert [net.batch for net in loaded[2:]] == [1, 8]
    assert [net.options["isolate"] for net in loaded] == [True, True, False, False]


def test_layouts_have_a_part_of_the_budget(
    budgets: list[Any], loaded: list[Whole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "share", lambda end, parts: parts)
    assert main(["tune", *(saved(tmp_path / name) for name in ("a.onnx", "b.onnx"))]) == 0
    assert budgets == [6, 5, 4, 3], "that of one layer is left for two of the same network"
    assert [net.budget for net in loaded] == [4, 2], "of each of two layers of two networks, and of the last"


def test_layouts_that_cannot_be_chosen_are_a_failure(
    budgets: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", saved(tmp_path / "net.onnx", 4), "--batch", "8"]) == 1
    said = capsys.readouterr()
    assert "2 layers, no candidate timed, in" in said.out
    assert said.err.startswith(f"autoconv: error: {tmp_path / 'net.onnx'}: layouts: ")
    assert "--batch 8: the file says (4, 4, 3, 3) of input 'x'" in said.err
    assert main(["tune", str(tmp_path / "net.onnx"), "--batch", "8", "--json"]) == 1
    (layouts,) = json.loads(capsys.readouterr().out)["layouts"]
    assert (layouts["model"], layouts["batch"]) == (str(tmp_path / "net.onnx"), 8)
    assert "--batch 8: the file says (4, 4, 3, 3)" in layouts["error"]


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
def test_layouts_are_tuned_with_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_choice, "HOPE", 1e-3)  # so that NHWC is worth a look
    monkeypatch.setattr(layout_choice.OperatorTimes, "seconds", lambda times, operator, inputs: 0.0)
    path = tmp_path / "net.onnx"
    weights = numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w")
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 8, 9, 9]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "net", ends[:1], ends[1:], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    asked = ["tune", str(path), "--mode", "hybrid", "--budget", "0.1s", "--no-isolate"]
    found = CliRunner().invoke(cli, [*asked, "--json"], catch_exceptions=False)
    assert found.exit_code == 0
    told = json.loads(found.stdout)
    assert told["timed"] > told["tables"][0]["layers"][0]["timed"] > 0, "those in NHWC count, too"
    (layouts,) = told["layouts"]
    assert layouts["layers"] == 1
    again = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert "of 1 layers in NHWC\n" in again.output
    layer = ConvLayer(N=1, C=8, H=9, W=9, K=8, R=1, S=1)
    for layout in ("NCHW", "NHWC"):
        assert plan(layer.replace(layout=layout), "cached").timings
