"""Products of computed matrices: layers where there are kernels for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import agree, compiled, filters

import autoconv
from autoconv.cpu import pool
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Elementwise, MatMul, TensorType
from autoconv.networks.run.planned import Choices

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


@pytest.mark.parametrize("candidate", [None, "direct", "gemm"])  # of which gemm packs its filters in every run
@pytest.mark.parametrize(("left", "right"), [((2, 3, 5, 4), (2, 3, 4, 7)), ((5, 4), (4, 7)), ((6, 1, 4), (6, 4, 1))])
def test_products_of_computed_matrices_are_layers(
    left: tuple[int, ...], right: tuple[int, ...], candidate: str | None, tmp_path: Path
) -> None:
    graph = Graph("products")
    a, b = graph.add_input("a", TensorType(left)), graph.add_input("b", TensorType(right))
    c = graph.add_input("c", TensorType((*left[:-1], right[-1])))
    y = graph.add("sum", Elementwise(("add", 0, 1)), graph.add("product", MatMul(), a, b), c)
    graph.outputs = {"y": graph.add("y", Elementwise(("relu", 0)), y)}
    net = compiled(graph, known=None if candidate is None else Choices({"y.product": candidate}))
    assert net.plans["y.product"].layer.residual
    assert candidate in (None, net.plans["y.product"].candidate.algorithm)
    assert net.foreign == []
    agree(net, graph, 1e-5)
    net.save(tmp_path / "net.autoconv")
    agree(autoconv.load(tmp_path / "net.autoconv"), graph, 1e-5)


def test_products_with_one_matrix_share_it() -> None:
    graph = Graph("shared")
    y = graph.add_input("x", TensorType((3, 4)))
    w = graph.add_constant("w", filters(4, 4))
    for n in range(3):
        y = graph.add(f"tanh{n}", Elementwise(("tanh", 0)), graph.add(f"product{n}", MatMul(), y, w))
    graph.outputs = {"y": y}
    net = compiled(graph)
    assert len(net.graph.constants) == 1
    agree(net, graph, 1e-5)


@pytest.mark.parametrize(("left", "right"), [((2, 3, 5, 4), (3, 4, 7)), ((2, 5, 4), (1, 4, 7)), ((2, 3, 0), (2, 0, 4))])
def test_products_of_matrices_that_repeat_are_computed_by_numpy(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    graph = Graph("products")
    a, b = graph.add_input("a", TensorType(left)), graph.add_input("b", TensorType(right))
    graph.outputs = {"y": graph.add("y", MatMul(), a, b)}
    net = compiled(graph)
    assert net.foreign == ["y"]
    agree(net, graph, 1e-5)
