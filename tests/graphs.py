"""Graphs that tests make, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoconv.cpu.device import CPU
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    Concat,
    Conv,
    ConvTranspose,
    Elementwise,
    MatMul,
    Operator,
    Pool,
    Reshape,
    Slice,
    TensorType,
)
from autoconv.networks.passes import optimized
from autoconv.networks.reference import evaluate
from autoconv.networks.run.planned import Choices


def filters(*shape: int) -> np.ndarray:
    """Filters scaled by their fan-in, the same every time."""
    rng = np.random.default_rng(shape)
    return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def small(batch: int) -> Graph:
    """A network with a bit of everything: a residual, branches that are joined, halves, a transpose, two outputs."""
    graph = Graph("small")
    x = graph.add_input("x", TensorType((batch, 4, 12, 10)))
    constant = graph.add_constant
    a = graph.add("a", Conv(padding=((1, 1), (1, 1))), x, constant("wa", filters(8, 4, 3, 3)))
    a = graph.add("a.bias", Elementwise(("add", 0, 1)), a, constant("ba", filters(8, 1, 1)))
    a = graph.add("a.relu", Elementwise(("relu", 0)), a)
    b = graph.add("b", Conv(), a, constant("wb", filters(8, 8, 1, 1)))
    b = graph.add("b.sum", Elementwise(("add", 0, 1)), b, a)
    c = graph.add("c", Conv(stride=(2, 2), groups=2), b, constant("wc", filters(6, 4, 2, 2)))
    c = graph.add("c.silu", Elementwise(("mul", 0, ("sigmoid", 0))), c)
    c = graph.add("c.tanh", Elementwise(("tanh", 0)), c)
    d = graph.add("d", Pool(reduction="max", window=(2, 2), stride=(2, 2)), b)
    joined = graph.add("joined", Concat(1), c, d, c)
    again = graph.add("again", Concat(1), joined, graph.add("e", Elementwise(("neg", 0)), d))
    half = graph.add("half", Slice((0, 10, 0, 0), (batch, 10, 6, 5), (1, 1, 1, 1)), again)
    up = graph.add("up", ConvTranspose(stride=(2, 2)), half, constant("wu", filters(10, 3, 2, 2)))
    rows = graph.add("rows", Reshape((batch, 300)), half)
    y = graph.add("y", MatMul(transposed=True), rows, constant("wy", filters(7, 300)))
    graph.outputs = {"scores": graph.add("scores", Elementwise(("add", 0, 1)), y, constant("by", filters(7))), "up": up}
    return graph


def halves(graph: Graph, name: str) -> tuple[str, str]:
    """The halves of an array's channels, as a split gives them."""
    N, C, H, W = graph.types[name].shape
    left, right = (
        graph.add(part, Slice((0, start, 0, 0), (N, C // 2, H, W), (1, 1, 1, 1)), name)
        for part, start in (("left", 0), ("right", C // 2))
    )
    return left, right


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


def compiled(graph: Graph, device: CPU | None = None, known: Choices | None = None, **options: Any) -> CompiledNetwork:
    """The graph, ready to run by kernels of ours; as was chosen, where that is known."""
    graph = graph if known is None else optimized(graph)
    return CompiledNetwork(graph, device or CPU.current(), {"vendors": False, **options}, known)


def agree(net: CompiledNetwork, graph: Graph, tolerance: float, seed: int = 0) -> None:
    """Hold a network's outputs to the graph's in float64, relative to the largest."""
    inputs = drawn(graph, seed)
    found = net.run(**inputs)
    found = found if isinstance(found, dict) else {next(iter(graph.outputs)): found}
    for name, expected in evaluate(graph, inputs).items():
        assert found[name].shape == expected.shape
        assert found[name].dtype == np.float32
        assert np.abs(found[name] - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-30), name


def convolution(graph: Graph, name: str, source: str, K: int, **options: Any) -> str:
    """Filters of 1x1 over an array, drawn at random."""
    weights = graph.add_constant(f"w.{name}", filters(K, graph.types[source].shape[1], 1, 1))
    rest = [options.pop("residual")] if "residual" in options else []
    return graph.add(name, Conv(residual=bool(rest), **options), source, weights, *rest)


def image(channels: int = 4, batch: int = 1) -> tuple[Graph, str]:
    """A graph with nothing but an input, and its name."""
    graph = Graph("net")
    return graph, graph.add_input("x", TensorType((batch, channels, 7, 7)))
