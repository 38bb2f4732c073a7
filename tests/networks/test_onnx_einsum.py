"""ONNX's Einsum: products of matrices, and what cannot be one."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx_models import model, node

from autoconv.errors import ConfigError
from autoconv.networks.onnx_reader import translated
from autoconv.networks.passes import optimized
from autoconv.networks.reference import evaluate

EXTENTS = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6}


@pytest.mark.parametrize(
    ("equation", "operators"),
    [
        ("bdc, bec -> bde", {"MatMul", "Transpose"}),
        ("abcd,dce->bae", {"MatMul", "Reshape", "Transpose"}),
        ("ab,cd->dbca", {"MatMul", "Reshape", "Transpose"}),
        ("abc,ab->ac", {"MatMul", "Reshape", "Transpose"}),
        ("abc,d", {"MatMul", "Reshape"}),
        ("ba,b,bc->", {"MatMul", "Reshape", "sum_of_axes"}),
        ("abcd->db", {"sum_of_axes", "Reshape", "Transpose"}),
        ("abc,bcd,de->ae", {"MatMul", "Reshape"}),
        ("a,a,a->a", {"MatMul", "Reshape"}),
    ],
)
def test_sums_of_products_of_letters_are_products_of_matrices(equation: str, operators: set[str]) -> None:
    terms = equation.partition("->")[0].replace(" ", "").split(",")
    shapes = {f"x{n}": [EXTENTS[letter] for letter in term] for n, term in enumerate(terms)}
    graph = translated(model([node("Einsum", " ".join(shapes), equation=equation)], shapes), "net")
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    expected = np.einsum(equation, *arrays.values())
    for found in (graph, optimized(graph)):
        (y,) = evaluate(found, arrays).values()
        assert y.shape == expected.shape
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
        assert {n.operator.kind for n in found.nodes.values()} <= operators


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("abc,cd->ad", r"expected a letter for each dimension, got \(2, 4\) for 'abc'"),
        ("ac,ad->c", r"expected a letter for each dimension, got \(4, 5\) for 'ad'"),
        ("ac,cd->ae", "expected letters of the inputs behind the arrow"),
    ],
)
def test_letters_that_are_no_dimensions_are_named(equation: str, message: str) -> None:
    given = [node("Einsum", "x z", equation=equation)]
    with pytest.raises(ConfigError, match=f"node 'y' .Einsum.: equation='{equation}': {message}"):
        translated(model(given, {"x": [2, 4], "z": [4, 5]}), "net")
