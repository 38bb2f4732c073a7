"""What errors of layers come to in a network's outputs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphs import convolution, image

from autoconv.accuracy import RELATIVE
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.networks.choice.errors import combined, error_by, sensitivities, unmixed
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import Concat, Elementwise, Pool, Reduce, Reshape
from autoconv.records.schema import Facts


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
def test_the_largest_of_a_window_errs_as_neighbours_do_that_are_alike(window: tuple[int, int]) -> None:
    """And less where they are not, as it is larger than most of them."""
    graph, x = image()
    a = convolution(graph, "a", x, 8)
    pooled = graph.add("pooled", Pool(reduction="max", window=window), a)
    assert reach(graph, y=pooled) == pytest.approx({"a": 1.0})
    if window == (7, 7):
        assert reach(graph, y=graph.add("reduced", Reduce("max", (2, 3)), a)) == reach(graph, y=pooled)
    rng, size = np.random.default_rng(0), (100_000, math.prod(window))
    own, errors = rng.standard_normal((2, *size))
    for unlike, least, most in ((0.01, 0.97, 1.01), (1.0, 0.1, 1.01 if window == (1, 1) else 0.65)):
        values = (1 - unlike) * rng.standard_normal((size[0], 1)) + unlike * own

        def square(true: np.ndarray, found: np.ndarray) -> float:
            return float(np.mean((np.maximum(found, 0) - np.maximum(true, 0)) ** 2) / np.mean(np.maximum(true, 0) ** 2))

        erring = values + 1e-6 * errors
        share = square(values.max(axis=1), erring.max(axis=1)) / square(values, erring)
        assert least < share < most


def test_places_are_mixed_where_all_of_an_image_is_added_up() -> None:
    graph, x = image()
    a = convolution(graph, "a", x, 8)
    b = convolution(graph, "b", graph.add("relu", Elementwise(("relu", 0)), a), 8)
    mean = graph.add("mean", Reduce("mean", (2, 3)), b)
    c = graph.add("c", Reshape((1, 8)), mean)
    graph.outputs = {"y": c}
    assert unmixed(graph) == {"c"}
    graph.outputs = {"y": c, "z": b}
    assert unmixed(graph) >= {"a", "b", "c", "relu"}
    assert "mean" not in unmixed(graph)


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
def test_tiles_count_by_their_corners_or_by_all_of_their_places() -> None:
    device, layer = CPU.current(), ConvLayer(N=1, C=128, H=28, W=28, K=128, R=3, S=3, padding=1)
    tiles, sums = "winograd[m=7x7,rows=1,coop=0]", "direct[TK=16,TP=1,TQ=7,BC=16,filters=packed]"
    facts = {name: Facts("", time=1.0, error=1e-6, samples=9) for name in (tiles, sums)}
    made: Any = SimpleNamespace(layer=layer, facts=facts)
    for name, share in ((tiles, 0.634**2), (sums, 1.0)):
        assert error_by(made, name, device, mixed=False) == 1e-6
        assert error_by(made, name, device, mixed=True) == pytest.approx(share * 1e-6, rel=0.01)
    made.facts = {}
    usual = error_by(made, tiles, device, mixed=False)
    assert error_by(made, tiles, device, mixed=True) == pytest.approx(0.634**2 * usual, rel=0.01)


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
