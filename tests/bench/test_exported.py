"""Networks as ONNX models: every layer has its place, and what it reads has the right shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from runs import exactly, place, setting

from autoconv import ConvLayer, networks
from autoconv.bench.baselines import Problem
from autoconv.bench.exported import (
    NETWORKS,
    convolution_share,
    exported_model,
    exported_networks,
    spent_in_onnxruntime,
)
from autoconv.bench.suites import OURS
from autoconv.cpu.device import CPU

__all__ = ["place"]

LAST = {
    "AlexNet": ("alexnet", 256, 13),
    "VGG-16": ("vgg16", 512, 14),
    "ResNet-50 v1": ("resnet50", 2048, 7),
    "GoogLeNet": ("googlenet", 1024, 7),
    "MobileNet-V2": ("mobilenet-v2", 1280, 7),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_has_its_place(name: str) -> None:
    onnx = pytest.importorskip("onnx", reason="NOT CHECKED: onnx is not installed")
    file, channels, side = LAST[name]
    net = networks.load(file)
    assert net.name == name
    layers = {f"{n.name}.{copy}": n.at(2) for n in net.layers for copy in range(n.repeat)}
    model = onnx.load_model_from_string(exported_model(name, layers, {}))  # shapes are inferred, and checked
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    assert len(convolutions) == len(layers)
    assert not {f"{name}.x" for name in layers} & {value.name for value in model.graph.input}
    assert model.graph.input[0].name == "image"
    (features,) = model.graph.output
    shape = [axis.dim_value for axis in features.type.tensor_type.shape.dim]
    assert shape == [2, channels, side, side]
    inputs = {value for node in model.graph.node for value in node.input}
    unread = {node.output[0] for node in model.graph.node} - inputs
    assert unread == {features.name}
    with pytest.raises(ValueError, match=r"got more\.0 as well"):
        exported_model(name, layers | {"more.0": layers[next(iter(layers))]}, {})
    layers.popitem()
    with pytest.raises(ValueError, match="expected one more layer '"):
        exported_model(name, layers, {})


def test_the_share_of_convolutions_leaves_out_pooling() -> None:
    events = [
        {"cat": "Session", "name": "run", "dur": 900},
        {"cat": "Node", "name": "a_fence_before", "dur": 50, "args": {"op_name": "MaxPool"}},
        {"cat": "Node", "name": "a_kernel_time", "dur": 25, "args": {"op_name": "MaxPool"}},
        {"cat": "Node", "name": "b_kernel_time", "dur": 65, "args": {"op_name": "Conv"}},
        {"cat": "Node", "name": "c_kernel_time", "dur": 10, "args": {"op_name": "ReorderOutput"}},
    ]
    assert convolution_share(spent_in_onnxruntime(events)) == pytest.approx(0.75)


@pytest.mark.usefixtures("place")
def test_both_run_the_network_as_it_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="NOT CHECKED: onnx is not installed")
    pytest.importorskip("onnxruntime", reason="NOT CHECKED: onnxruntime is not installed")
    monkeypatch.setitem(NETWORKS, "tiny", lambda graph, x: graph.pool(graph.convs(x, "a", "b"), 2, 2))
    layers = {"a.0": ConvLayer(N=1, C=3, H=8, W=8, K=16, R=3, S=3, padding=1)}
    layers["b.0"] = layers["a.0"].replace(C=16, bias=True, activation="relu")
    problems = {name: Problem.draw(layer, CPU.current(), seed) for seed, (name, layer) in enumerate(layers.items())}
    found = exported_networks("tiny", problems, setting())
    assert set(found) == {OURS, "onnxruntime"}
    assert all(0 < share < 1 for _, share in found.values()), "pooling takes some time in either"
    y = exactly(replace(problems["b.0"], a=exactly(problems["a.0"])))
    for prepared, _ in found.values():
        np.testing.assert_allclose(
            prepared.read(prepared.run()), y.reshape(1, 16, 4, 2, 4, 2).max((3, 5)), rtol=1e-4, atol=1e-5
        )
