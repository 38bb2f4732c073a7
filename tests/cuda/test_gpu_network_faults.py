"""Networks on a GPU that fail, and inputs that they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gpu_graphs import cupy, options, scaled
from simt.emulator import MISSING
from simt.fake_cupy import FakeCuPy

from autoconv.bench.gpu.networks import difference, drawn
from autoconv.cuda.device import CUDA
from autoconv.errors import ArrayError, PlanError
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Operator, Pool, QuantizedConv, TensorType
from autoconv.networks.reference import evaluate
from autoconv.networks.run.cuda_instance import CudaInstance

__all__ = ["cupy", "options"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


def test_a_capture_that_fails_is_ended(
    cupy: FakeCuPy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = CUDA.load

    def refusing(self: CUDA, unit: Any) -> Any:
        launch = load(self, unit)

        def run(*arguments: Any) -> None:
            if cupy.current_stream.is_capturing():
                raise RuntimeError("not while captured")
            launch(*arguments)

        return run

    monkeypatch.setattr(CUDA, "load", refusing)
    before = cupy.current_stream
    with pytest.raises(RuntimeError, match="not while captured"):
        CompiledNetwork(scaled(), CUDA(0), options)
    assert cupy.captures == 1
    assert not cupy.capturing
    assert cupy.current_stream is before


def test_a_stream_that_is_captured_is_refused(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    graph = scaled()
    net = CompiledNetwork(graph, CUDA(0), options)
    x = cupy.asarray(drawn(graph)["x"])
    cupy.current_stream.begin_capture()
    with pytest.raises(PlanError, match="scaled: expected a stream that is not captured"):
        net.run(x)
    with pytest.raises(PlanError, match="scaled: expected a stream that is not captured"):
        CudaInstance(net._running.schedule)
    cupy.current_stream.end_capture()
    assert difference(net.run(x), evaluate(graph, drawn(graph))["y"]) <= 1e-6


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((1, 2, 3, 4), np.float32), "x: expected an array on GPU 0, got ndarray in host memory: cupy.asarray"),
        ((1, 2, 3, 5), "input 'x': planned for float32 (1, 2, 3, 4), got float32 (1, 2, 3, 5)"),
        (None, "input 'x' is missing: expected float32 (1, 2, 3, 4)"),
    ],
)
def test_wrong_inputs_are_named(cupy: FakeCuPy, options: dict[str, Any], array: Any, said: str) -> None:
    net = CompiledNetwork(scaled(), CUDA(0), options)
    given = cupy.empty(array) if isinstance(array, tuple) else array
    with pytest.raises(ArrayError) as raised:
        net.run(*[] if given is None else [given])
    assert said in str(raised.value)


@dataclass(frozen=True)
class Det(Operator):
    """Determinants, which no kernel for a GPU computes."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        return TensorType(inputs[0].shape[:-2])

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        return np.asarray(np.linalg.det(inputs[0]))


def test_nodes_without_a_kernel_are_named(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    graph = Graph("net")
    x = graph.add_input("x", TensorType((1, 2, 3, 4)))
    graph.outputs["y"] = graph.add("y", Det(), x)
    with pytest.raises(PlanError, match=r"net: node 'y', Det of float32 \(1, 2, 3, 4\): no kernel for a GPU"):
        CompiledNetwork(graph, CUDA(0), options)
    graph = Graph("net")
    x = graph.add_input("x", TensorType((1, 2, 3, 4), "uint8"))
    w = graph.add_constant("w", np.ones((2, 2, 1, 1), np.int8))
    words = graph.add_constant("words", np.zeros(6, np.int32))
    graph.outputs["y"] = graph.add("y", QuantizedConv(), x, w, words)
    with pytest.raises(PlanError, match="net: node 'y', QuantizedConv: no kernel for a GPU: dtype: expected float32"):
        CompiledNetwork(graph, CUDA(0), options)
    assert not cupy.launches


def test_integers_have_no_pooling_on_a_gpu(cupy: FakeCuPy, options: dict[str, Any]) -> None:
    graph = Graph("net")
    x = graph.add_input("x", TensorType((1, 2, 4, 4), "int8"))
    graph.outputs["y"] = graph.add("y", Pool(reduction="max", window=(2, 2)), x)
    with pytest.raises(PlanError, match=r"node 'y', max_pool of int8 \(1, 2, 4, 4\): no kernel for a GPU"):
        CompiledNetwork(graph, CUDA(0), options)
