"""What errors of layers come to in a network's outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from graphs import convolution, image

from autoconv.accuracy import RELATIVE
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.networks.choice.errors import combined, sensitivities
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import Concat, Elementwise, Pool, Reduce


def reach(graph: Graph, **outputs: str) -> dict[str, float]:
    """Sensitivities without what depends on a layer's sums alone."""
    graph.outputs = outputs
    layers = {name: layer_of(graph, graph.nodes[name]) for name in sensitivities(graph)}
    return {
        name: weight / (RELATIVE**2 * layers[name].C)  # type: ignore[union-attr]
        for name, weight in sensitivities(graph).items()
    }


def test_a_chain_passes_errors_on_as_they_are() -> None:
    graph, x = image()
    a = convolution(graph, "a", x, 8)
    b = convolution(graph, "b", graph.add("relu", Elementwise(("relu", 0)), a), 16)
    assert reach(graph, y=b) == pytest.approx({"a": 1.0, "b": 1.0})


def test_sums_and_concatenations_take_means_of_squares() -> None:
    graph, x = image()
    a, b = convolution(graph, "a", x, 4), convolution(graph, "b", x, 12)
    joined = graph.add("joined", Concat(1), a, b)
    c = convolution(graph, "c", joined, 16, residual=joined)
    total = graph.add("total", Elementwise(("add", 0, 1)), c, joined)
    assert reach(graph, y=total) == pytest.approx({"a": 0.25, "b": 0.75, "c": 0.25})
    assert reach(graph, y=total, z=c)["c"] == pytest.approx(0.75)


def test_a_mean_over_the_image_cancels_errors() -> None:
    graph, x = image()
    a = convolution(graph, "a", x, 8)
    pooled = graph.add("pooled", Pool(reduction="mean", window=(7, 7)), a)
    least = 1 / (1 + 48 / math.pi)
    assert reach(graph, y=pooled) == pytest.approx({"a": least})
    assert reach(graph, y=graph.add("reduced", Reduce("mean", (2, 3)), a)) == pytest.approx({"a": least})


@pytest.mark.parametrize("window", [(1, 1), (2, 2), (3, 3), (7, 7)])
def test_the_largest_of_a_window_is_larger_and_errs_as_any(window: tuple[int, int]) -> None:
    graph, x = image()
    a = convolution(graph, "a", x, 8)
    pooled = graph.add("pooled", Pool(reduction="max", window=window), a)
    values = np.random.default_rng(0).standard_normal((100_000, math.prod(window)))
    share = np.mean(np.maximum(values[:, 0], 0) ** 2) / np.mean(np.maximum(values.max(axis=1), 0) ** 2)
    assert reach(graph, y=pooled) == pytest.approx({"a": share}, rel=0.03)
    if window == (7, 7):
        assert reach(graph, y=graph.add("reduced", Reduce("max", (2, 3)), a)) == reach(graph, y=pooled)


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
@pytest.mark.parametrize("channels", [16, 256])
def test_an_error_is_what_records_make_one_expect(channels: int) -> None:
    """Within a factor: `RELATIVE` is about right for a convolution of uniform operands."""
    graph, x = image(channels)
    graph.outputs = {"y": convolution(graph, "a", x, 64)}
    net = CompiledNetwork(graph, CPU.current(), {"vendors": False, "exact": True})
    found = net.run(value := np.random.default_rng(0).uniform(-1, 1, (1, channels, 7, 7)).astype(np.float32))
    w = graph.constants["w.a"].reshape(64, channels).astype(np.float64)
    true = np.einsum("kc,nchw->nkhw", w, value.astype(np.float64))
    error = float(np.abs(found - true).max() / (np.abs(w) @ np.abs(value[0]).reshape(channels, -1)).max())
    expected = combined({"a": error}, sensitivities(graph))
    off = float(np.sqrt(np.mean((found - true) ** 2) / np.mean(true**2)))
    assert 1 / 3 < expected / off < 3
