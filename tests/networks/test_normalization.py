"""Normalised rows as one node, however they are written, and what keeps them apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from graphs import agree, compiled
from onnx_models import model, node

from autoconv.networks.graph import Graph
from autoconv.networks.onnx_reader import translated
from autoconv.networks.operators import Elementwise, Normalization, Reduce, TensorType
from autoconv.networks.passes import optimized
from autoconv.networks.passes.normalization import fuse_normalization
from autoconv.networks.reference import evaluate

RNG = np.random.default_rng(4)
ROOTS = (("div", 0, ("sqrt", ("add", 1, 1e-5))), ("mul", 0, ("div", 1.0, ("sqrt", ("add", 1e-5, 1)))))


def drawn(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 1.5, shape).astype(np.float32)


def decomposed(axes: list[int], last: str = "y") -> list[Any]:
    """As files have it that were written before opset 17."""
    return [
        node("ReduceMean", "x", "m", axes=axes), node("Sub", "x m", "c"), node("Pow", "c two", "p"),
        node("ReduceMean", "p", "v", axes=axes), node("Add", "v e", "w"), node("Sqrt", "w", "r"),
        node("Div", "c r", last),
    ]  # fmt: skip


PARTS = {"two": np.float32(2), "e": np.float32(1e-5)}
AFFINE = [node("Mul", "n s", "k"), node("Add", "k b")]
OF_CHANNELS = {"s": drawn(24), "b": drawn(24)}
LAYER = node("LayerNormalization", "x s b", axis=-1)

# nodes, the input's shape, constants, and what is left
CASES: dict[str, tuple[list[Any], tuple[int, ...], dict[str, Any], list[str]]] = {
    "layer": ([LAYER], (2, 5, 7, 24), OF_CHANNELS, ["Normalization"]),
    "layer without shift": (
        [node("LayerNormalization", "x s", axis=-1)], (40, 24), {"s": drawn(24)}, ["Normalization"],
    ),
    "layer of several axes": (
        [node("LayerNormalization", "x s b", axis=-2)], (40, 3, 9), {"s": drawn(3, 9), "b": drawn(9)},
        ["Normalization"],
    ),
    "root of the mean square": (
        [node("RMSNormalization", "x s", axis=-1)], (40, 24), {"s": drawn(24)}, ["Normalization"],
    ),
    "in parts": (decomposed([3]), (2, 5, 7, 24), PARTS, ["Normalization"]),
    "in as many parts as can be": (
        [node("Pow", "x two", "p"), node("ReduceSum", "p", "t", axes=[2]), node("Div", "t count", "v"),
         node("Add", "v e", "w"), node("Sqrt", "w", "r"), node("Div", "one r", "f"), node("Mul", "f x")],
        (5, 9, 24), PARTS | {"count": np.float32(24), "one": np.float32(1)}, ["Normalization"],
    ),
    "in parts, with scale and shift": (
        [*decomposed([-1], "n"), *AFFINE], (2, 5, 7, 24), PARTS | OF_CHANNELS, ["Normalization"],
    ),
    "instances": (
        [node("InstanceNormalization", "x s b")], (2, 24, 5, 7), OF_CHANNELS, ["Normalization"],
    ),
    "instances and relu": (
        [node("InstanceNormalization", "x s b", "n"), node("Relu", "n")], (2, 24, 5, 7), OF_CHANNELS,
        ["Normalization", "relu"],
    ),
    "groups": (
        [node("GroupNormalization", "x s b", num_groups=4)], (8, 24, 5, 7), {"s": drawn(4), "b": drawn(4)},
        ["Reshape", "Normalization", "Reshape"],
    ),
    "two scales of different rows": (
        [*decomposed([2, 3], "n"), *AFFINE], (2, 24, 5, 7), PARTS | {"s": drawn(2, 24, 1, 1), "b": drawn(24, 1, 1)},
        ["Normalization"],
    ),
    "a scale of elements and a shift of rows": (
        [*decomposed([2], "n"), *AFFINE], (5, 9, 24), PARTS | {"s": drawn(24), "b": drawn(9, 1)},
        ["Normalization", "add"],
    ),
    "a scale of all": ([*decomposed([2], "n"), node("Mul", "n s")], (5, 9, 4), PARTS | {"s": drawn(9, 4)},
                       ["Normalization", "mul"]),
    "a shift before the scale": (
        [*decomposed([2], "n"), node("Add", "n b", "k"), node("Mul", "k s")], (5, 9, 24), PARTS | OF_CHANNELS,
        ["Normalization", "mul"],
    ),
    "across channels": (decomposed([1]), (2, 24, 5, 7), PARTS,
                        ["mean_of_axes", "sub", "mul", "mean_of_axes", "sqrt", "div"]),
    "of few rows": (decomposed([2]), (5, 6, 24), PARTS, ["mean_of_axes", "sub", "mul", "mean_of_axes", "sqrt", "div"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_however_a_file_writes_them(case: str) -> None:
    nodes, shape, constants, kinds = CASES[case]
    graph = translated(model(nodes, {"x": shape}, constants, [nodes[-1].output[0]]), case)
    found = optimized(graph)
    assert [n.operator.kind for n in found.nodes.values()] == kinds
    x = 3 + RNG.standard_normal(shape)
    (expected,), (y,) = (evaluate(some, {"x": x}).values() for some in (graph, found))
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    agree(compiled(graph), graph, 5e-6)


def rows_of(root: Any, first: tuple[int, ...], second: tuple[int, ...], squared: bool = True) -> Graph:
    """Rows less their mean along some axes, over the root of their mean square along others."""
    graph = Graph("rows")
    x = graph.add_input("x", TensorType((5, 9, 24)))
    centred = graph.add("centred", Elementwise(("sub", 0, 1)), x, graph.add("mean", Reduce("mean", first), x))
    other = graph.add("other", Elementwise(("sub", 0, 1)), x, graph.add("mean", Reduce("mean", first), x))
    squares = graph.add("squares", Elementwise(("mul", 0, 0)), other if squared else x)
    mean = graph.add("mean", Reduce("mean", second), squares)
    graph.outputs["y"] = graph.add("y", Elementwise(root), centred, mean)
    return graph


@pytest.mark.parametrize("root", ROOTS)
def test_rows_that_are_centred_twice_are_the_same(root: Any) -> None:
    found = optimized(rows_of(root, (2,), (2,)))
    assert [n.operator for n in found.nodes.values()] == [Normalization(axis=2, epsilon=1e-5)]


@pytest.mark.parametrize(
    "graph",
    [
        rows_of(ROOTS[0], (1,), (2,)),
        rows_of(ROOTS[0], (2,), (1,)),
        rows_of(ROOTS[0], (2,), (2,), squared=False),
        rows_of(("div", 0, ("sqrt", ("add", 1, -1e-5))), (2,), (2,)),
        rows_of(("div", 1, ("sqrt", ("add", 0, 1e-5))), (2,), (2,)),
        rows_of(("mul", 0, ("div", 2.0, ("sqrt", ("add", 1, 1e-5)))), (2,), (2,)),
        rows_of(("div", 0, ("sqrt", ("add", 1, 1))), (2,), (2,)),
    ],
    ids=["centred along others", "squared along others", "not centred", "less", "the other way", "twice", "no number"],
)
def test_what_looks_like_it_stays(graph: Graph) -> None:
    kinds = [n.operator for n in graph.nodes.values()]
    fuse_normalization(graph)
    assert [n.operator for n in graph.nodes.values()] == kinds


def test_what_others_take_stays_beside_it() -> None:
    graph = rows_of(ROOTS[0], (2,), (2,))
    graph.outputs["n"] = graph.nodes["y"].inputs[0]
    x = {"x": RNG.standard_normal((5, 9, 24))}
    found = optimized(graph)
    assert [n.operator.kind for n in found.nodes.values()] == ["mean_of_axes", "sub", "Normalization"]
    for name, expected in evaluate(graph, x).items():
        np.testing.assert_allclose(evaluate(found, x)[name], expected, rtol=1e-6, atol=1e-6)


def test_an_output_takes_no_scale() -> None:
    graph = rows_of(ROOTS[0], (2,), (2,))
    graph.outputs["z"] = graph.add("z", Elementwise(("mul", 0, 1)), "y", graph.add_constant("s", drawn(24)))
    assert [n.operator.kind for n in optimized(graph).nodes.values()] == ["Normalization", "mul"]


def test_small_arrays_may_be_computed_in_any_number_of_steps() -> None:
    """Each of which takes two before it, so that they are more the further one looks."""
    graph = Graph("steps")
    x = graph.add_input("x", TensorType((40, 24)))
    before = last = graph.add("mean", Reduce("mean", (1,)), x)
    for _ in range(1200):
        before, last = last, graph.add("step", Elementwise(("add", 0, ("mul", 1, 0.5))), before, last)
    graph.outputs["y"] = graph.add("y", Elementwise(("mul", 0, 1)), x, last)
    assert len(optimized(graph).nodes) == 1201  # two of them are one


@pytest.mark.parametrize("affine", [None, "elements", "rows"])
def test_equal_numbers_have_no_deviation(affine: Any) -> None:
    """However large they are: means are rounded once, and what is left of the numbers is 0."""
    graph = Graph("equal")
    x = graph.add_input("x", TensorType((40, 1000)))
    numbers = {"elements": 1000, "rows": 8}.get(affine, 0)
    names = [graph.add_constant(name, drawn(numbers)) for name in ("scale", "shift") if affine]
    operator = Normalization(axis=1, epsilon=1e-5, affine=affine)
    graph.outputs["y"] = graph.add("y", operator, x, *names)
    given = np.broadcast_to(RNG.uniform(-1e6, 1e6, (40, 1)).astype(np.float32), (40, 1000))
    shift = graph.constants[names[1]] if affine else np.zeros(1, np.float32)
    expected = np.tile(shift, 5)[:, np.newaxis] if affine == "rows" else shift
    np.testing.assert_array_equal(compiled(graph).run(given), np.broadcast_to(expected, (40, 1000)))
