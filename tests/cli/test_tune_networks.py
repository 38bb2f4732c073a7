"""`autoconv tune` of a whole network: layers, and layouts of what lies between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

from autoconv.cli.main import cli
from autoconv.cpu import pool
from autoconv.layer import ConvLayer
from autoconv.networks.choice import together
from autoconv.tuning.planner import plan


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
def test_layouts_are_tuned_with_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "HOPE", 1e-3)  # so that NHWC is worth a look
    monkeypatch.setattr(together.OperatorTimes, "seconds", lambda times, operator, inputs: 0.0)
    path = tmp_path / "net.onnx"
    weights = numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w")
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 8, 9, 9]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "net", ends[:1], ends[1:], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    asked = ["tune", str(path), "--mode", "hybrid", "--budget", "0.1s", "--no-isolate"]
    found = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert found.exit_code == 0
    assert "of 1 layers in NHWC" in found.output
    layer = ConvLayer(N=1, C=8, H=9, W=9, K=8, R=1, S=1)
    for layout in ("NCHW", "NHWC"):
        assert plan(layer.replace(layout=layout), "cached").timings
