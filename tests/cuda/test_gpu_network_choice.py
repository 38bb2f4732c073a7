"""What is chosen for networks on a GPU: kernels, layouts and parts of a batch; and what is said and kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_graphs import answer, cupy, options, scaled
from simt.emulator import MISSING
from simt.fake_cupy import FakeCuPy

import autoconv
from autoconv.bench.gpu.networks import difference, drawn
from autoconv.cuda.device import CUDA
from autoconv.errors import ArrayError
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    Pool,
    Reduce,
    TensorType,
)
from autoconv.networks.reference import evaluate
from autoconv.networks.run.planned import Choices

__all__ = ["cupy", "options"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


def test_tuning_times_layers_and_what_lies_between(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    """All take the same time on the fake: nothing is to be gained by another layout, whose conversions cost."""
    graph = scaled()
    net = CompiledNetwork(graph, CUDA(0), options)
    before = net._instances[0]
    assert net.plans["conv"].source == "heuristic"
    net.tune(isolate=False)
    assert net.plans["conv"].timings["direct"] > 0
    assert net.in_nhwc == frozenset()
    assert net._instances[0] is not before
    assert difference(answer(net, cupy, drawn(graph)), evaluate(graph, drawn(graph))["y"]) <= 1e-6


def test_arrays_in_nhwc_are_converted_in_between(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    graph = Graph("two layouts")
    x = graph.add_input("x", TensorType((1, 3, 5, 7)))
    graph.outputs["y"] = graph.add("y", Pool(reduction="max", window=(2, 2)), x)
    net = CompiledNetwork(graph, CUDA(0), options, Choices(in_nhwc=frozenset({"y"})))
    assert net.in_nhwc == {"y"}
    assert difference(answer(net, cupy, drawn(graph)), evaluate(graph, drawn(graph))["y"]) == 0
    assert cupy.launches == 2 * ["transpose", "pool", "transpose"]


def test_a_batch_runs_in_parts_where_memory_is_short(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    """An image of 900 bytes ends between the places where kernels can read: the second is copied."""
    graph = Graph("batch")
    x = graph.add_input("x", TensorType((2, 1, 9, 25)))
    for _ in range(2):
        x = graph.add("pool", Pool(reduction="max", window=(2, 2), padding=((1, 0), (1, 0))), x)
    graph.outputs["y"] = graph.add("y", Reduce("mean", (2, 3)), x)
    whole = CompiledNetwork(graph, CUDA(0), options)
    parts = CompiledNetwork(graph, CUDA(0), {**options, "memory_limit": whole.arena_bytes - 1})
    assert whole.images == {}
    assert set(parts.images.values()) == {1}
    assert parts.arena_bytes < whole.arena_bytes
    assert difference(answer(parts, cupy, drawn(graph)), evaluate(graph, drawn(graph))["y"]) <= 1e-6
    copies = [step.node.name for step in parts._running.schedule.steps if step.node.operator.kind == "Slice"]
    assert copies == ["x 1:2"]
    assert [line.split()[0] for line in parts.explain().splitlines()[2:]] == ["pool", "pool.2", "y"]
    steps = parts.profile(cupy.asarray(drawn(graph)["x"]), repeat=1)
    assert [(step.name, step.by) for step in steps] == [("pool", "kernel"), ("pool.2", "kernel"), ("y", "kernel")]
    assert steps[0].seconds == pytest.approx(0.00025 * 3)


def test_steps_are_timed_one_by_one(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    graph = scaled()
    net = CompiledNetwork(graph, CUDA(0), options)
    x = cupy.asarray(drawn(graph)["x"])
    steps = net.profile(x, repeat=3)
    assert [(step.name, step.by, step.seconds) for step in steps] == [
        ("conv", "direct", 0.00025),
        ("y", "kernel", 0.00025),
    ]
    assert cupy.captures == 1
    with pytest.raises(ArrayError, match="alone=True: expected False on a GPU"):
        net.profile(x, alone=True)


def test_a_saved_network_keeps_its_choices(cupy: FakeCuPy, options: dict[str, Any], tmp_path: Path) -> None:
    graph = scaled()
    net = CompiledNetwork(graph, CUDA(0), options).tune("direct")
    net.save(tmp_path / "net.autoconv")
    again = autoconv.load(tmp_path / "net.autoconv", device="cuda", **options)
    assert again.plans["conv"].source == "user"
    np.testing.assert_array_equal(answer(again, cupy, drawn(graph)), answer(net, cupy, drawn(graph)))
    on_cpu = autoconv.load(tmp_path / "net.autoconv", batch=1)
    assert difference(on_cpu.run(**drawn(graph)), evaluate(graph, drawn(graph))["y"]) <= 1e-6
