"""Whole networks on a GPU, as far as NumPy and the emulator can be one: graphs, memory and streams."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_graphs import answer, cupy, options, scaled
from layers import edge
from simt import fake_cupy
from simt.emulator import MISSING
from simt.fake_cupy import FakeCuPy, ndarray
from simt.libraries import NumpyBLAS

import autoconv
from autoconv.bench.gpu import networks
from autoconv.bench.gpu.agenda import Target, items
from autoconv.bench.gpu.helper import Work
from autoconv.bench.gpu.networks import ALIKE, OPERATORS, check_network, difference, drawn, networks_version
from autoconv.bench.gpu.report import markdown
from autoconv.cuda import device as module
from autoconv.cuda.device import CUDA
from autoconv.errors import ArrayError, PlanError
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    Concat,
    Conv,
    Elementwise,
    MatMul,
    Resize,
    Slice,
    TensorType,
)
from autoconv.networks.reference import evaluate
from autoconv.networks.run.cuda_instance import CudaInstance
from autoconv.networks.run.memory import Views
from autoconv.registry import algorithms

__all__ = ["cupy", "options"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


@pytest.mark.parametrize("batch", [1, 2])
def test_a_network_of_everything_agrees_with_the_cpu(batch: int, cupy: FakeCuPy, options: dict[str, Any]) -> None:
    found = check_network("made", batch, CUDA(0), options)
    assert "failure" not in found
    assert 0 < found["error"] <= ALIKE
    assert set(found["candidates"].values()) == {"direct"}
    assert {"direct", "elementwise", "pool", "reduce", "softmax", "lrn", "resize", "pad"} <= {*cupy.launches}


def test_a_run_is_one_launch_of_a_graph(
    cupy: FakeCuPy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = scaled()
    net = CompiledNetwork(graph, CUDA(0), options)
    assert cupy.launches == ["direct", "elementwise"]  # once, before the capture
    assert cupy.captures == 1
    assert not cupy.capturing

    def forbidden(*_: object) -> None:
        raise AssertionError("called by run")

    monkeypatch.setattr(fake_cupy.Function, "__call__", forbidden)
    monkeypatch.setattr(fake_cupy.Stream, "synchronize", forbidden)
    monkeypatch.setattr(fake_cupy.Event, "synchronize", forbidden, raising=False)
    x = drawn(graph)
    answers = [answer(net, cupy, {"x": factor * x["x"]}) for factor in (1, -0.5)]
    for factor, y in zip((1, -0.5), answers, strict=True):  # memory of their own
        assert type(y) is ndarray
        assert difference(y, evaluate(graph, {"x": factor * x["x"]})["y"]) <= 1e-6
    assert cupy.launches == ["direct", "elementwise"] * 3
    assert (net.foreign, len(net._instances)) == ([], 1)
    assert "in 1 call\n" in net.explain()


def test_activations_that_no_kernel_applies_are_nodes(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    graph = Graph("activations")
    x = graph.add_input("x", TensorType((1, 2, 4, 4)))
    w = graph.add_constant("w", np.ones((2, 2, 1, 1), np.float32))
    a = graph.add("a", Elementwise(("relu", 0)), graph.add("a.conv", Conv(), x, w))
    b = graph.add("b", Elementwise(("min", ("max", 0, 0.0), 6.0)), graph.add("b.conv", Conv(), a, w))
    graph.outputs["y"] = graph.add("y", Elementwise(("mul", 0, 2.0)), b)
    net = CompiledNetwork(graph, CUDA(0), options)
    kinds = {name: node.operator.kind for name, node in net.graph.nodes.items()}
    assert kinds == {"a": "Conv", "b.sums": "Conv", "y": "mul"}
    assert [net.plans[name].layer.activation for name in ("a", "b.sums")] == ["relu", None]
    inputs = drawn(graph)
    assert difference(answer(net, cupy, inputs), evaluate(graph, inputs)["y"]) <= 1e-6


def test_parts_that_kernels_could_not_read_are_not_computed_in_place(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    """Sixteen bytes are the widest load: a part may begin at no other place."""
    graph = Graph("parts")
    x = graph.add_input("x", TensorType((1, 3, 3, 3)))
    first, second = (graph.add(name, Elementwise((name, 0)), x) for name in ("neg", "abs"))
    graph.outputs["y"] = graph.add("y", Concat(1), first, second)
    whole = Views(graph)
    views = Views(graph, CUDA.alignment)
    node = graph.nodes["y"]
    assert [whole.within(node, place) for place in (0, 1)] == [0, 108]
    assert [views.within(node, place) for place in (0, 1)] == [0, None]
    assert whole.free == {"y"}
    assert not views.free
    for start, free in ((1, False), (2, True)):
        cut = Graph("slice")
        rows = cut.add_input("x", TensorType((3, 2)))
        name = cut.add("part", Slice((start, 0), (1, 2), (1, 1)), rows)
        assert (name in Views(cut, CUDA.alignment).free) == free
        assert name in Views(cut).free
    net = CompiledNetwork(graph, CUDA(0), options)
    assert len(net._running.schedule.calls) == 3
    inputs = drawn(graph)
    assert difference(answer(net, cupy, inputs), evaluate(graph, inputs)["y"]) == 0


def test_products_of_computed_matrices_are_cublas(
    cupy: FakeCuPy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorded(NumpyBLAS):
        """What is multiplied while the stream is captured is multiplied when the graph runs."""

        def multiply(self, *arguments: Any) -> None:
            recorded = cupy.current_stream.recorded
            if recorded is None:
                super().multiply(*arguments)
            else:
                recorded.append(lambda: super(Recorded, self).multiply(*arguments))

    monkeypatch.setattr(module, "cublas", lambda capability: Recorded())
    graph = Graph("product")
    a, b = graph.add_input("a", TensorType((2, 3, 4))), graph.add_input("b", TensorType((4, 5)))
    graph.outputs["y"] = graph.add("y", Elementwise(("relu", 0)), graph.add("product", MatMul(), a, b))
    net = CompiledNetwork(graph, CUDA(0), options)
    for factor in (1, -1):
        inputs = {name: factor * array for name, array in drawn(graph).items()}
        inputs["b"] = np.abs(inputs["b"])
        assert difference(answer(net, cupy, inputs), evaluate(graph, inputs)["y"]) <= 1e-6
    assert net.arena_bytes >= Recorded.workspace_bytes
    assert "cuBLAS" in net.explain()
    within = CompiledNetwork(graph, CUDA(0), {**options, "memory_limit": net.arena_bytes})
    assert within.arena_bytes == net.arena_bytes
    with pytest.raises(PlanError, match=f"expected at least {net.arena_bytes} bytes, which the arrays and the scratch"):
        CompiledNetwork(graph, CUDA(0), {**options, "memory_limit": net.arena_bytes - 1})


@pytest.mark.parametrize("right", [True, False])
def test_networks_and_operators_are_items_of_the_run_on_hardware(
    right: bool, cupy: FakeCuPy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole networks come before all tuning; an answer that differs is a failure."""
    work = list(items(("check", "tune"), algorithms(CUDA(0)), [Target("one", (edge("one"),))]))
    kinds = [item.split("/")[0] for item in work]
    assert kinds.index("host") < kinds.index("network") < kinds.index("tune") < kinds.index("operator")
    assert [kinds.count(kind) for kind in ("network", "operator")] == [2 * len(networks.BUILDERS), len(OPERATORS)]
    monkeypatch.setitem(networks.BUILDERS, "scaled", lambda batch: scaled())  # type: ignore[arg-type]
    names = [f"network/{networks_version()}/scaled/1", f"operator/{networks_version()}/constant"]
    assert names[1] in work
    if not right:
        monkeypatch.setattr(networks, "host", lambda array: np.asarray(array) + 0.5)
    done = [Work(CUDA(0), tmp_path, {}).do(item) for item in names]
    results = [{"item": item} | found for item, found in zip(names, done, strict=True)]
    assert ["failure" in result for result in results] == [not right] * 2
    text = markdown([{"item": "machine", "name": "GPU", "versions": {}, "autoconv": "", "commit": "", "baselines": {},
                      "missing": {}, "vendors": {}}, *results], [], 0)  # fmt: skip
    assert f"networks against the CPU's answers: {'scaled/1' if right else 'none'} right, {int(not right)} not" in text
    assert f"kernels against float64: {int(right)} right, {int(not right)} not" in text


def test_a_file_runs_as_its_reference_says(cupy: FakeCuPy, options: dict[str, Any], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from networks.onnx_models import model, node
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(0)
    weights = {"w": (4, 3, 3, 3), "b": (4,), "v": (5, 8)}
    constants = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    nodes = [
        node("Conv", "x w b", "conv", pads=[1, 1, 1, 1]),
        node("Relu", "conv", "relu"),
        node("MaxPool", "relu", "largest", kernel_shape=[2, 2], strides=[2, 2]),
        node("Add", "largest largest", "sum"),
        node("Concat", "sum largest", "joined", axis=1),
        node("GlobalAveragePool", "joined", "mean"),
        node("Flatten", "mean", "rows"),
        node("Gemm", "rows v", "gemm", transB=1),
        node("Softmax", "gemm", "y", axis=1),
    ]
    proto = model(nodes, {"x": ("N", 3, 6, 8)}, constants)
    onnx.save(proto, tmp_path / "net.onnx")
    net = autoconv.load(tmp_path / "net.onnx", batch=2, device="cuda", **options)
    x = rng.standard_normal((2, 3, 6, 8)).astype(np.float32)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert difference(net.run(cupy.asarray(x)), expected.astype(np.float64)) <= 1e-5


def test_streams_that_run_at_once_have_memory_of_their_own(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    graph = scaled()
    net = CompiledNetwork(graph, CUDA(0), options)
    x = drawn(graph)
    expected = evaluate(graph, x)["y"]
    first, second = cupy.current_stream, cupy.cuda.Stream(non_blocking=True)
    assert difference(answer(net, cupy, x), expected) <= 1e-6
    assert not cupy.waits
    with second:  # the first stream is idle: its memory will do, once that stream is done
        assert difference(answer(net, cupy, x), expected) <= 1e-6
    assert cupy.waits == [(second.ptr, first.ptr)]
    cupy.pending = True
    answer(net, cupy, x)
    assert len(net._instances) == cupy.captures == 2
    with second:
        answer(net, cupy, x)
    answer(net, cupy, x)
    assert len(net._instances) == cupy.captures == 2
    assert cupy.waits == [(second.ptr, first.ptr)]


def test_memory_of_a_dropped_network_is_kept_until_its_run_is_done(
    cupy: FakeCuPy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    net = CompiledNetwork(scaled(), CUDA(0), options)
    (instance,) = net._instances
    arena = weakref.ref(instance._arena)
    with cupy.cuda.Stream(non_blocking=True):
        answer(net, cupy, drawn(scaled()))
    monkeypatch.setattr(cupy, "waited", lambda: held.append(arena() is not None))
    del net, instance
    gc.collect()
    assert held == [True]
    assert arena() is None


def test_no_more_memory_is_kept_than_is_said(
    cupy: FakeCuPy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = scaled()
    net = CompiledNetwork(graph, CUDA(0), options)
    monkeypatch.setattr(CudaInstance, "most_idle", 1)
    answer(net, cupy, drawn(graph))
    cupy.pending = True
    with cupy.cuda.Stream(non_blocking=True):
        answer(net, cupy, drawn(graph))  # a second one, for which nobody waits in vain
    assert (len(net._instances), cupy.captures) == (1, 2)


def test_another_gpu_is_selected_meanwhile(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    graph = scaled()
    graph.outputs["y"] = graph.add("up", Resize(2, ((0,), (1,), (2,), (2,)), ((1.0,),) * 4), "y")
    net = CompiledNetwork(graph, CUDA(1), options)
    with cupy.cuda.Device(1):
        x = cupy.asarray(drawn(graph)["x"])
    y = net.run(x)
    assert y.gpu == 1
    assert difference(y, evaluate(graph, drawn(graph))["y"]) <= 1e-6
    assert cupy.current == 0
    with pytest.raises(ArrayError, match="x: expected an array on GPU 1, got one on GPU 0"):
        net.run(cupy.asarray(drawn(graph)["x"]))


def test_a_process_without_a_gpu_or_networks_imports_nothing_of_them() -> None:
    rooms = ("autoconv.cuda", "autoconv.networks")
    code = f"import sys, autoconv; print([name for name in sys.modules if name.startswith({rooms})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
