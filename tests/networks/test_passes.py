"""Passes: fewer nodes, the same answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx_models import model, node

from autoconv.bench.networks.models import light, randomised
from autoconv.common.epilogue import activations
from autoconv.common.epilogue.expressions import with_constants
from autoconv.cpu.operators import INPUTS
from autoconv.cuda.operators import elementwise as on_a_gpu
from autoconv.networks.graph import Graph
from autoconv.networks.onnx_reader import translated
from autoconv.networks.operators import Concat, Conv, ConvTranspose, Elementwise, MatMul, Reshape, TensorType
from autoconv.networks.passes import PASSES, fusion, optimized
from autoconv.networks.passes.epilogue import activation_of
from autoconv.networks.reference import evaluate

RNG = np.random.default_rng(1)
LARGEST = float(np.finfo(np.float32).max)


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


NORM = {"s": drawn(6), "b": drawn(6), "m": drawn(6), "v": np.abs(drawn(6)) + 0.5}
BATCH_NORM = node("BatchNormalization", "c s b m v", "n")
CONV = node("Conv", "x w", "c", pads=[1, 1, 1, 1])
X = {"x": [2, 4, 5, 7]}
W = {"w": drawn(6, 4, 3, 3)}

# nodes, inputs, constants, and the kinds of nodes that are left
CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, np.ndarray], list[str]]] = {
    "batch norm and relu": ([CONV, BATCH_NORM, node("Relu", "n")], X, W | NORM, ["Conv"]),
    "of one dimension": (
        [node("Conv", "x w", "c", pads=[1, 1]), BATCH_NORM, node("Relu", "n", "r"), node("Conv", "r u", "d"),
         node("Add", "d r", "a"), node("Relu", "a")],
        {"x": [2, 4, 7]}, {"w": drawn(6, 4, 3), "u": drawn(6, 6, 1)} | NORM, ["Reshape", "Conv", "Conv", "Reshape"],
    ),
    "of three dimensions": (
        [node("Conv", "x w", "c", pads=[0, 1, 1, 0, 1, 1]), BATCH_NORM, node("Relu", "n", "r"),
         node("Conv", "r u", "d"), node("Add", "d r", "a"), node("Relu", "a")],
        {"x": [2, 4, 3, 5, 7]}, {"w": drawn(6, 4, 1, 3, 3), "u": drawn(6, 6, 1, 1, 1)} | NORM,
        ["Transpose", "Reshape", "Conv", "Conv", "Reshape", "Transpose"],
    ),
    "seen in the same way": (
        [node("Transpose", "x", "t", perm=[0, 2, 1]), node("Transpose", "z", "u", perm=[0, 2, 1]),
         node("Add", "t u", "a"), node("Mul", "a k", "m"), node("Transpose", "q", "v", perm=[0, 2, 1]),
         node("Concat", "m v", "j", axis=2), node("Transpose", "j", "y", perm=[0, 2, 1])],
        {"x": [2, 4, 7], "z": [2, 4, 7], "q": [2, 5, 7]}, {"k": drawn(7, 1)}, ["mul", "Concat"],
    ),
    "that others need transposed": (
        [node("Transpose", "x", "t", perm=[0, 2, 1]), node("Relu", "t", "r"), node("MatMul", "t w", "p"),
         node("Concat", "r p", "y", axis=2)],
        {"x": [2, 4, 7]}, {"w": drawn(4, 5)}, ["Transpose", "relu", "MatMul", "Concat"],
    ),
    "numbers for parts of an axis": (
        [node("Reshape", "x s", "t"), node("Mul", "t k", "m"), node("Add", "m b")],
        {"x": [2, 12]}, {"s": np.array([2, 3, 4]), "k": drawn(3, 4), "b": drawn(3, 1)}, ["mul", "Reshape", "add"],
    ),
    "a bias before batch norm": (
        [node("Conv", "x w k", "c"), BATCH_NORM, node("Relu", "n")], X, W | NORM | {"k": drawn(6)}, ["Conv"],
    ),
    "batch norm in front": (
        [node("BatchNormalization", "x s b m v", "n"), node("Relu", "n", "r"), node("Conv", "r w")],
        {"x": [2, 6, 5, 7]}, NORM | {"w": drawn(3, 6, 1, 1)}, ["relu", "Conv"],
    ),
    "a factor after relu": ([CONV, node("Relu", "c", "r"), node("Mul", "r k")], X, W | {"k": drawn(6, 1, 1)},
                            ["Conv", "mul"]),
    "a factor of every pixel": ([CONV, node("Mul", "c k")], X, W | {"k": drawn(5, 7)}, ["Conv", "mul"]),
    "divided by a scalar": ([CONV, node("Div", "c k")], X, W | {"k": drawn(1)}, ["Conv"]),
    "a constant less it": ([CONV, node("Sub", "k c")], X, W | {"k": drawn(1)}, ["Conv", "sub"]),
    "residual and relu": (
        [CONV, node("Add", "c r", "a"), node("Relu", "a")], X | {"r": [2, 6, 5, 7]}, W, ["Conv"],
    ),
    "two convolutions added": (
        [CONV, node("Conv", "x w", "d", pads=[1, 1, 1, 1]), node("Add", "c d", "a"), node("Relu", "a")], X, W,
        ["Conv", "Conv"],
    ),
    "a convolution added to itself": ([CONV, node("Add", "c c")], X, W, ["Conv", "add"]),
    "one that another takes, too": (
        [CONV, node("Relu", "c", "r"), node("Add", "c r")], X, W, ["Conv", "add"],
    ),
    "one that is an output, too": ([CONV, node("Relu", "c")], X, W, ["Conv", "relu"]),
    "padding": ([node("Pad", "x p", "q"), node("Conv", "q w", "y", pads=[0, 1, 2, 0])], X,
                W | {"p": np.array([0, 0, 1, 2, 0, 0, 3, 0])}, ["Conv"]),
    "padding by ones": ([node("Pad", "x p k", "q"), node("Conv", "q w", "y")], X,
                        W | {"p": np.array([0, 0, 1, 2, 0, 0, 3, 0]), "k": np.float32(1)}, ["Pad", "Conv"]),
    "a small bound before a logarithm": (
        [CONV, node("Clip", "c l", "k"), node("Log", "k")], X, W | {"l": np.float32(1e-7)}, ["Conv", "log"],
    ),
    "small bounds": (
        [CONV, node("Clip", "c l h", "k"), node("Log", "k")], X, W | {"l": np.float32(1e-7), "h": np.float32(1)},
        ["Conv", "log"],
    ),
    "bounds that are the largest numbers": (
        [CONV, node("Clip", "c l h")], X, W | {"l": np.float32(-LARGEST), "h": np.float32(LARGEST)}, ["Conv"],
    ),
    "bounds that are infinite": (
        [CONV, node("Clip", "c l h")], X, W | {"l": np.float32(-np.inf), "h": np.float32(np.inf)}, ["Conv"],
    ),
    "silu": ([CONV, node("Sigmoid", "c", "s"), node("Mul", "c s")], X, W, ["Conv"]),
    "hard swish of parts": (
        [CONV, node("Add", "c t", "s"), node("Clip", "s l h", "k"), node("Mul", "c k", "m"), node("Div", "m h")], X,
        W | {"t": np.float32(3), "l": np.float32(0), "h": np.float32(6)}, ["Conv"],
    ),
    "leaky relu after the bias": (
        [node("Gemm", "x w k", "g", transB=1), node("LeakyRelu", "g", alpha=0.3)], {"x": [3, 8]},
        {"w": drawn(5, 8), "k": drawn(5)}, ["MatMul"],
    ),
    "a slope for every channel": ([CONV, node("PRelu", "c k")], X, W | {"k": drawn(6, 1, 1)}, ["Conv"]),
    "slopes behind batch norm and a sum": (
        [CONV, BATCH_NORM, node("Add", "n r", "a"), node("PRelu", "a k")], X | {"r": [2, 6, 5, 7]},
        W | NORM | {"k": drawn(6, 1, 1)}, ["Conv"],
    ),
    "slopes of a transposed convolution": (
        [node("ConvTranspose", "x w", "c", strides=[2, 2], group=2), node("PRelu", "c k")], X,
        {"w": drawn(4, 3, 2, 2), "k": drawn(6, 1, 1)}, ["ConvTranspose"],
    ),
    "slopes of a product": (
        [node("Gemm", "x w b", "g", transB=1), node("PRelu", "g k")], {"x": [3, 4]},
        {"w": drawn(5, 4), "b": drawn(5), "k": drawn(5)}, ["MatMul"],
    ),
    "one slope": ([CONV, node("PRelu", "c k")], X, W | {"k": drawn(1)}, ["Conv"]),
    "a slope for every column": ([CONV, node("PRelu", "c k")], X, W | {"k": drawn(7)}, ["Conv", "prelu"]),
    "computed slopes": ([CONV, node("PRelu", "c k")], X | {"k": [6, 1, 1]}, W, ["Conv", "prelu"]),
    "slopes by a computed bias": (
        [node("Conv", "x w k", "c"), node("PRelu", "c s")], X | {"k": [6]}, W | {"s": drawn(6, 1, 1)},
        ["Conv", "Reshape", "prelu"],
    ),
    "slopes of an output, too": ([CONV, node("PRelu", "c k")], X, W | {"k": drawn(6, 1, 1)}, ["Conv", "prelu"]),
    "an expression of three inputs": (
        [node("Mul", "x a", "m"), node("Add", "m b", "n"), node("Clip", "n l h")], {"x": [2, 3], "a": [1, 3]},
        {"b": drawn(3), "l": np.float32(0), "h": np.float32(6)}, ["min"],
    ),
    "fully connected": (
        [node("Gemm", "x w k", "g", transB=1), node("Relu", "g")], {"x": [3, 8]}, {"w": drawn(5, 8), "k": drawn(5)},
        ["MatMul"],
    ),
    "fully connected, otherwise": (
        [node("MatMul", "x w", "g"), node("Add", "g k", "h"), node("Mul", "h s")], {"x": [2, 3, 8]},
        {"w": drawn(8, 5), "k": drawn(5), "s": drawn(1)}, ["MatMul"],
    ),
    "a bias for every row": ([node("Gemm", "x w k")], {"x": [3, 8]}, {"w": drawn(8, 5), "k": drawn(3, 1)},
                             ["MatMul", "add"]),
    "transposed": (
        [node("ConvTranspose", "x w", "c", group=2, strides=[2, 2]), BATCH_NORM], X,
        {"w": drawn(4, 3, 3, 3)} | NORM, ["ConvTranspose"],
    ),
    "transposed, with all that may follow": (
        [node("ConvTranspose", "x w k", "c", strides=[2, 2]), node("Add", "r c", "a"), node("LeakyRelu", "a")],
        X | {"r": [2, 3, 10, 14]}, {"w": drawn(4, 3, 2, 2), "k": drawn(3)}, ["ConvTranspose"],
    ),
    "shapes alone": (
        [node("Reshape", "x r", "a"), node("Flatten", "a", "b"), node("Identity", "b", "c"),
         node("Transpose", "c", "d", perm=[0, 1]), node("Relu", "d")],
        X, {"r": np.array([2, 20, 1, 7])}, ["relu", "Reshape"],
    ),
    "a transpose that moves nothing": (
        [node("Transpose", "x", "t", perm=[1, 0, 2]), node("Relu", "t")], {"x": [4, 1, 3]}, {}, ["relu", "Reshape"],
    ),
}  # fmt: skip


def agree(graph: Graph, other: Graph, tolerance: float) -> None:
    x = {name: RNG.standard_normal(t.shape) for name, t in graph.inputs.items()}
    expected, found = evaluate(graph, x), evaluate(other, x)
    assert list(expected) == list(found)
    for name, y in expected.items():
        assert found[name].shape == y.shape
        assert np.abs(found[name] - y).max() <= tolerance * np.abs(y).max()


@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_the_same(case: str) -> None:
    nodes, inputs, constants, kinds = CASES[case]
    last = nodes[-1].output[0]
    outputs = [last, "c"] if "output, too" in case else [last]
    graph = translated(model(nodes, inputs, constants, outputs), case)
    kept = {**graph.nodes}
    found = optimized(graph)
    assert graph.nodes == kept
    assert [n.operator.kind for n in found.nodes.values()] == kinds
    agree(graph, found, 1e-6)


def test_arrays_without_elements_stay_where_they_are() -> None:
    graph = Graph("empty")
    shapes = {"x": (0, 3), "z": (0, 5)}
    x, z = (graph.add_input(name, TensorType(shape)) for name, shape in shapes.items())
    parts = graph.add("t", Reshape((0, 2)), x), graph.add("u", Reshape((0, 4)), z)
    graph.outputs["y"] = graph.add("y", Concat(1), *parts)
    assert optimized(graph).nodes == graph.nodes


def test_nodes_are_fused_up_to_the_inputs_that_kernels_take() -> None:
    assert fusion.MOST_INPUTS == len(INPUTS) == on_a_gpu.MOST_INPUTS


def test_epilogues_are_in_the_layers() -> None:
    nodes, inputs, constants, _ = CASES["residual and relu"]
    (conv,) = optimized(translated(model(nodes, inputs, constants), "net")).nodes.values()
    assert conv.operator == Conv(padding=((1, 1), (1, 1)), residual=True, activation="relu")
    assert conv.inputs == ("x", "w", "r")


def test_a_graph_is_put_in_order_once_by_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks it has: each time all nodes are gone through."""
    graph = Graph("blocks")
    value = graph.add_input("x", TensorType((1, 4, 5, 5)))
    for _ in range(5):
        conv = graph.add("c", Conv(), value, graph.add_constant("w", drawn(4, 4, 1, 1)))
        conv = graph.add("d", Conv(), conv, graph.add_constant("w", drawn(4, 4, 1, 1)))
        value = graph.add("r", Elementwise(("relu", 0)), graph.add("a", Elementwise(("add", 0, 1)), value, conv))
    graph.outputs["y"] = value
    cleaned: list[Graph] = []
    clean = Graph.clean
    monkeypatch.setattr(Graph, "clean", lambda self: cleaned.append(self) or clean(self))
    found = optimized(graph)
    assert [(node.operator.residual, node.operator.activation) for node in found.nodes.values()] == [
        *5 * [(False, None), (True, "relu")]
    ]
    assert len(cleaned) <= len(PASSES) + 1
    agree(graph, found, 1e-6)


def test_slopes_are_an_operand_of_the_layer() -> None:
    nodes, inputs, constants, _ = CASES["slopes behind batch norm and a sum"]
    graph = optimized(translated(model(nodes, inputs, constants), "net"))
    (conv,) = graph.nodes.values()
    assert conv.operator == Conv(padding=((1, 1), (1, 1)), bias=True, residual=True, activation="prelu")
    assert conv.inputs[0::3] == ("x", "r")
    np.testing.assert_array_equal(graph.constants[conv.inputs[2]][6:], constants["k"].reshape(-1))


HARD = ("min", ("max", ("add", ("mul", 0, 0.16666667), 0.5), 0.0), 1.0)


@pytest.mark.parametrize(
    ("expression", "activation"),
    [
        (("relu", 0), "relu"),
        (("max", 0, 0.0), "relu"),
        (("min", ("relu", 0), 6.0), "clip:0:6"),
        (("max", ("min", 0, 1.5), -0.1), "clip:-0.1:1.5"),
        (("prelu", 0, 0.2), "leaky_relu:0.2"),
        (("max", 0, ("mul", 0, 0.2)), "leaky_relu:0.2"),
        (("div", 1.0, ("add", 1.0, ("exp", ("neg", 0)))), "sigmoid"),
        (("mul", ("sigmoid", 0), 0), "silu"),
        (HARD, "hardsigmoid"),
        (("div", ("mul", 0, ("min", ("relu", ("add", 0, 3.0)), 6.0)), 6.0), "hardswish"),
        (("mul", 0, HARD), "hardswish"),
        (("mul", ("mul", 0, ("add", ("erf", ("div", 0, 1.4142135)), 1.0)), 0.5), "gelu"),
        (("min", 0, 6.0), None),
        (("mul", 0, 2.0), None),
        (("mul", 0, ("sigmoid", ("mul", 0, 1.702))), None),
        (("min", ("max", ("add", ("mul", 0, 0.2), 0.5), 0.0), 1.0), None),
        (("tanh", 0), None),
        (("log", 0), None),
        (("max", 0, float("nan")), None),
        (("max", 0, 1e300), None),
        (("mul", 0.5, ("add", 0, ("abs", 0))), "relu"),
        (("add", ("mul", 0.5, ("tanh", ("mul", 0, 0.5))), 0.5), "sigmoid"),
        (("div", 0, ("add", 1.0, ("exp", ("neg", 0)))), "silu"),
        (("mul", ("mul", 0, ("min", ("max", ("add", 0, 3.0), 0.0), 6.0)), 0.16666667), "hardswish"),
        (("mul", ("min", ("max", ("add", 0, 3.0), 0.0), 6.0), 0.16666667), "hardsigmoid"),
        # Small numbers are there to be divided by, or to have a logarithm.
        (("max", 0, 1e-7), None),
        (("max", 0, 1e-12), None),
        (("max", ("relu", 0), 1e-30), None),
        (("add", ("relu", 0), 1e-7), None),
        (("prelu", 0, 1e-7), "leaky_relu:0.0000001"),
        (("min", ("max", 0, 1e-7), 1.0), "clip:0.0000001:1"),
        (("min", ("max", 0, 0.0), 1e-7), "clip:0:0.0000001"),
        (("min", ("max", 0, 0.0), 1.0000001), "clip:0:1.0000001"),
        (("mul", ("sigmoid", 0), 1e-7), None),
        (("add", ("sigmoid", 0), 1e-7), None),
        (("max", ("sigmoid", 0), 1e-7), None),
        (("min", ("sigmoid", 0), 0.9999999), None),
        (("min", ("max", HARD, 1e-7), 1.0), None),
        (("add", ("mul", 0, ("sigmoid", 0)), 1e-7), None),
        (("mul", 0, ("add", ("sigmoid", 0), 1e-7)), None),
        # Whose largest number is a bound for infinity.
        (("min", ("relu", 0), LARGEST), f"clip:0:{LARGEST:.0f}"),
    ],
)
def test_an_activation_is_known_however_it_is_written(expression: Any, activation: str | None) -> None:
    assert activation_of(with_constants(expression)) == (activation and activations.canonical(activation))


@pytest.mark.parametrize(
    ("expression", "activation"),
    [
        (("prelu", 0, 0.01), None),
        (("prelu", 0, 0.25), "leaky_relu:0.25"),
        (("min", ("max", 0, 0.1), 6.0), None),
        (("min", ("relu", 0), 6.0), "clip:0:6"),
        (("max", 0, 1e-50), None),
        (activations.PLAIN["gelu"], "gelu"),
        (("mul", ("mul", 0, ("add", ("erf", ("div", 0, 1.4142135)), 1.0)), 0.5), None),
        (("div", 1.0, ("add", 1.0, ("exp", ("neg", 0)))), "sigmoid"),
    ],
)
def test_numbers_that_float32_rounds_are_no_activation_of_float64(expression: Any, activation: str | None) -> None:
    assert activation_of(with_constants(expression), "float64") == activation


@pytest.mark.parametrize(("slope", "kinds"), [(0.01, ["Conv", "prelu"]), (0.25, ["Conv"])])
def test_layers_of_float64_take_slopes_that_are_exact(slope: float, kinds: list[str]) -> None:
    graph = Graph("double")
    x = graph.add_input("x", TensorType((2, 4, 5, 7), "float64"))
    conv = graph.add("c", Conv(), x, graph.add_constant("w", W["w"].astype(np.float64)))
    graph.outputs["y"] = graph.add("y", Elementwise(("prelu", 0, slope)), conv)
    found = optimized(graph)
    assert [n.operator.kind for n in found.nodes.values()] == kinds
    agree(graph, found, 1e-15)


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_every_pass_keeps_the_answer_of_a_network(name: str) -> None:
    graph = translated(randomised(light(name)), name)
    x = {name: RNG.standard_normal(t.shape) for name, t in graph.inputs.items()}
    (expected,) = evaluate(graph, x).values()
    found = graph.copy()
    before = len(found.nodes)
    for rewrite in PASSES:
        rewrite(found)
        found.clean()
    (y,) = evaluate(found, x).values()
    assert len(found.nodes) < before
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()
    assert expected.std() > 1e-6  # an answer that says something
    assert not {ConvTranspose, MatMul} & {type(n.operator) for n in found.nodes.values()} or name == "shufflenet"
