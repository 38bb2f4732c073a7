"""Graphs that tests make, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoconv.cpu.device import CPU
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Operator, TensorType
from autoconv.networks.reference import evaluate
from autoconv.networks.run.compiled import CompiledNetwork


def graph_of(operator: Operator, *shapes: Sequence[int]) -> Graph:
    """A graph of one node and its inputs."""
    graph = Graph("test")
    for n, shape in enumerate(shapes):
        graph.add_input(f"x{n}", TensorType(tuple(shape)))
    graph.outputs["y"] = graph.add("y", operator, *graph.inputs)
    return graph


def drawn(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a graph, drawn at random."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(t.shape).astype(np.float32) for name, t in graph.inputs.items()}


def compiled(graph: Graph, device: CPU | None = None) -> CompiledNetwork:
    """The graph, ready to run by kernels of ours."""
    return CompiledNetwork(graph, device or CPU.current(), {"vendors": False})


def agree(net: CompiledNetwork, graph: Graph, tolerance: float, seed: int = 0) -> None:
    """Hold a network's outputs to the graph's in float64, relative to the largest."""
    inputs = drawn(graph, seed)
    found = net.run(**inputs)
    found = found if isinstance(found, dict) else {next(iter(graph.outputs)): found}
    for name, expected in evaluate(graph, inputs).items():
        assert found[name].shape == expected.shape
        assert found[name].dtype == np.float32
        assert np.abs(found[name] - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-30), name
