"""Quantised networks: what ONNX's reference answers, bit by bit, by kernels of ours in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_cases import cases_of  # noqa: E402
from onnx_models import compiled_model, model_like, node  # noqa: E402

import autoconv  # noqa: E402
from autoconv.cpu import pool  # noqa: E402
from autoconv.errors import ConfigError  # noqa: E402
from autoconv.networks.compiled.network import CompiledNetwork  # noqa: E402
from autoconv.networks.onnx_reader import translated  # noqa: E402
from autoconv.networks.operators import QuantizedProduct  # noqa: E402
from autoconv.networks.reference import evaluate  # noqa: E402

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")

OPERATORS = (
    "ConvInteger",
    "DequantizeLinear",
    "MatMulInteger",
    "MaxPool",
    "QLinearConv",
    "QLinearMatMul",
    "QuantizeLinear",
)
RNG = np.random.default_rng(3)

Nodes = list[Any]
Constants = dict[str, Any]


def cases(operator: str) -> list[Any]:
    """ONNX's own, of uint8 and int8; made when they are asked for, as those of pooling take seconds."""
    ours = {TensorProto.UINT8, TensorProto.INT8}
    return [
        case
        for case in cases_of(operator.lower())
        if len(case.model.graph.node) == 1 and case.model.graph.node[0].op_type == operator
        and {v.type.tensor_type.elem_type for v in (*case.model.graph.input, *case.model.graph.output)} & ours
    ]  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_tests_of_the_standard(operator: str) -> None:
    assert cases(operator)
    for case in cases(operator):
        # scales per block, matrices of rank 3
        elsewhere = any(name in case.name for name in ("blocked", "float16", "_3D_"))
        for inputs, (wanted,) in case.data_sets:
            model = onnx.ModelProto()
            model.CopyFrom(case.model)
            given = zip(inputs, model.graph.input, strict=True)
            known = [numpy_helper.from_array(np.asarray(a), v.name) for a, v in given]
            model.graph.initializer.extend(known[1:])
            net = compiled_model(model)
            y = net.run(np.asarray(inputs[0]))
            assert y.dtype == wanted.dtype
            np.testing.assert_array_equal(y, wanted, err_msg=case.name)
            assert bool(net.foreign) == elsewhere, case.name


def drawn(dtype: str, *shape: int) -> Any:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def answers(model: Any, inputs: dict[str, np.ndarray]) -> tuple[CompiledNetwork, np.ndarray]:
    """A network whose kernels, and whose reference, give what ONNX's reference gives."""
    (wanted,) = ReferenceEvaluator(model).run(None, inputs)
    net = compiled_model(model)
    y = net.run(**inputs)
    assert y.dtype == wanted.dtype
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(evaluate(net.graph, inputs)["y"], wanted)
    return net, y


# Scales are powers of 2, so that products of floats are exact and ties are real, and zero points of outputs are even:
# the reference of QLinearConv rounds after it has added them.
SCALES: Constants = {
    "s": np.float32(2**-5), "z": np.uint8(130), "h": np.float32(2**-4), "n": np.uint8(0), "k": np.uint8(96),
    "t": np.float32(2**-9), "i": np.int8(0),
}  # fmt: skip
FILTERS = (2.0 ** RNG.integers(-9, -6, 6)).astype(np.float32)
X = {"x": RNG.standard_normal((2, 3, 10, 9)).astype(np.float32) * 2}


def qdq() -> tuple[Nodes, Constants]:
    """Two convolutions, the second with a residual sum, a pool, and a fully connected layer."""
    constants = SCALES | {
        "w1": drawn("int8", 6, 3, 3, 3), "f1": FILTERS, "zf": np.zeros(6, np.int8),
        "b1": RNG.integers(-900, 900, 6, np.int32), "fb": FILTERS * np.float32(2**-5), "w2": drawn("int8", 6, 6, 3, 3),
        "w3": drawn("int8", 6 * 5 * 5, 7),
        "b2": (RNG.integers(-900, 900, 6) * 2.0**-13).astype(np.float32), "flat": np.array([2, -1]),
        "g": np.float32(2**-11), "r": np.float32(2**-2),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x s z", "xq"),
        node("DequantizeLinear", "xq s z", "xd"),
        node("DequantizeLinear", "w1 f1 zf", "w1d", axis=0),
        node("DequantizeLinear", "b1 fb", "b1d", axis=0),
        node("Conv", "xd w1d b1d", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("QuantizeLinear", "r1 h n", "q1"),
        node("DequantizeLinear", "q1 h n", "d1"),
        node("DequantizeLinear", "w2 t i", "w2d"),
        node("Conv", "d1 w2d b2", "c2", pads=[1, 1, 1, 1]),
        node("QuantizeLinear", "c2 r k", "q2"),
        node("DequantizeLinear", "q2 r k", "d2"),
        node("Add", "d1 d2", "a"),
        node("Relu", "a", "ra"),
        node("QuantizeLinear", "ra r n", "qa"),
        node("DequantizeLinear", "qa r n", "da"),
        node("MaxPool", "da", "m", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        node("QuantizeLinear", "m r n", "mq"),
        node("DequantizeLinear", "mq r n", "md"),
        node("Reshape", "md flat", "v"),
        node("DequantizeLinear", "w3 g i", "w3d"),
        node("MatMul", "v w3d", "p"),
        node("QuantizeLinear", "p h z", "pq"),
        node("DequantizeLinear", "pq h z", "y"),
    ]
    return nodes, constants


def qoperator(second: str = "uint8") -> tuple[Nodes, Constants]:
    """Two convolutions with a pool between them, padded there, transposed, and a product."""
    zero = drawn(second, 4)
    zero[0] = np.iinfo(second).min
    constants = SCALES | {
        "w1": drawn("int8", 8, 3, 3, 3), "f1": np.full(8, 2**-9, np.float32),
        "b1": RNG.integers(-900, 900, 8, np.int32),
        "w2": drawn(second, 4, 4, 2, 2), "zw": zero, "w3": drawn(second, 5, 6), "z3": np.array(3, second),
        "flat": np.array([2, -1, 5]), "big": np.float32(2**-1), "even": np.int8(-6),
        "sides": np.array([0, 0, 1, 0, 0, 0, 0, 1]),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x s z", "xq"),
        node("QLinearConv", "xq s z w1 f1 i h k b1", "c1", pads=[1, 1, 1, 1]),
        node("MaxPool", "c1", "m", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Pad", "m sides k", "p"),
        node("QLinearConv", "p h k w2 t zw big even", "c2", group=2),
        node("Transpose", "c2", "tr", perm=[0, 2, 3, 1]),
        node("Reshape", "tr flat", "f"),
        node("QLinearMatMul", "f big even w3 g z3 big even", "y"),
    ]
    return nodes, constants | {"g": np.float32(2**-8)}


def test_a_network_between_quantize_and_dequantize() -> None:
    net, y = answers(model_like(*qdq()[:1], X, qdq()[1]), X)
    assert len(np.unique(y)) > 10
    kinds = [n.operator.kind for n in net.graph.nodes.values()]
    products = ["QuantizedConv", "QuantizedConv", "quantize", "max_pool", "Reshape", "QuantizedMatMul"]
    assert kinds == ["quantize", *products, "dequantize"]  # the residual sum is one kernel of bytes
    assert net.foreign == []
    assert "in 1 call\n" in net.explain()
    assert [net.graph.types[n].dtype for n in net.graph.nodes][:-1] == ["uint8"] * 7


@pytest.mark.parametrize("second", ["uint8", "int8"])
def test_a_network_of_quantised_operators(second: str) -> None:
    nodes, constants = qoperator(second)
    net, y = answers(model_like(nodes, X, constants), X)
    assert len(np.unique(y)) > 10
    assert net.foreign == []
    assert "in 1 call\n" in net.explain()
    assert sum(isinstance(n.operator, QuantizedProduct) for n in net.graph.nodes.values()) == 3


def test_bytes_come_in_and_go_out_and_a_saved_network_answers_the_same(tmp_path: Path) -> None:
    nodes, constants = qoperator()
    given = {"xq": drawn("uint8", 2, 3, 10, 9)}
    net, y = answers(model_like(nodes[1:], given, constants), given)
    assert y.dtype == np.int8
    net.tune("heuristic").save(tmp_path / "net.autoconv")
    again = autoconv.load(tmp_path / "net.autoconv")
    np.testing.assert_array_equal(again.run(**given), y)
    assert {name: str(made.candidate) for name, made in again.plans.items()} == {
        name: str(made.candidate) for name, made in net.plans.items()
    }


def test_without_kernels_the_answers_are_the_same() -> None:
    nodes, constants = qoperator()
    model = model_like(nodes, X, constants)
    (wanted,) = ReferenceEvaluator(model).run(None, X)
    net = compiled_model(model).tune("numpy.int8")
    assert {str(made.candidate) for made in net.plans.values()} == {"numpy.int8"}
    np.testing.assert_array_equal(net.run(**X), wanted)


CONV = [
    node("DequantizeLinear", "x s z", "xd"),
    node("DequantizeLinear", "w t i", "wd"),
    node("Conv", "xd wd", "c"),
]
ROUND = node("QuantizeLinear", "a h k")
BYTES = {"x": drawn("uint8", 1, 3, 6, 5)}
LEFT: dict[str, tuple[Nodes, Constants, list[str]]] = {
    "no rounding": ([*CONV, node("Identity", "c")], {}, ["QuantizedConv"]),
    "relu and no rounding": ([*CONV, node("Relu", "c")], {}, ["QuantizedConv"]),
    "a function between": ([*CONV, node("Tanh", "c", "a"), ROUND], {}, ["QuantizedConv", "quantize"]),
    "bounds beyond the range": (
        [*CONV, node("Clip", "c low high", "a"), ROUND], {"low": np.float32(-6), "high": np.float32(10)},
        ["QuantizedConv"],
    ),
    "relu6 within the range": (
        [*CONV, node("Clip", "c low high", "a"), ROUND], {"low": np.float32(0), "high": np.float32(6)},
        ["QuantizedConv", "quantize"],
    ),
    "relu with a bound beyond": (
        [*CONV, node("Clip", "c low high", "a"), ROUND], {"low": np.float32(0), "high": np.float32(10)},
        ["QuantizedConv"],
    ),
    "sums that are taken twice": (
        [*CONV, node("QuantizeLinear", "c h k", "q"), node("DequantizeLinear", "q h k", "d"), node("Add", "c d")], {},
        ["QuantizedConv", "quantize", "dequantize"],
    ),
    "channels of the input that have their own scale": (
        [node("DequantizeLinear", "x sc zc", "xd"), *CONV[1:], node("Identity", "c")],
        {"sc": np.array([1, 2, 4], np.float32) / 32, "zc": np.array([1, 2, 3], np.uint8)}, ["dequantize", "Conv"],
    ),
    "bytes of another meaning": (
        [node("DequantizeLinear", "x s z", "d"), node("QuantizeLinear", "d h z")], {}, ["quantize"],
    ),
    "bytes of the same meaning": (
        [
            node("DequantizeLinear", "x s z", "d"), node("QuantizeLinear", "d s z", "q"),
            node("DequantizeLinear", "q s z"),
        ],
        {}, ["dequantize"],
    ),
    "a transpose, a slice and halves that are joined": (
        [
            node("DequantizeLinear", "x s z", "d"), node("Transpose", "d", "t1", perm=[0, 2, 1, 3]),
            node("Slice", "t1 from to", "t2"), node("Concat", "t2 t2", "a", axis=1), node("QuantizeLinear", "a s z"),
        ],
        {"from": np.array([0, 1, 0, 1]), "to": np.array([1, 4, 3, 4])}, ["Transpose", "Slice", "Concat"],
    ),
    "a bias of one scale": (
        [
            *CONV[:2], node("DequantizeLinear", "b t", "bd"), node("Conv", "xd wd bd", "c"),
            node("QuantizeLinear", "c h k"),
        ],
        {"b": RNG.integers(-900, 900, 4, np.int32)}, ["QuantizedConv"],
    ),
    "a matrix of one scale that is turned": (
        [
            *CONV[:2], node("Transpose", "wd", "wt", perm=[1, 0]), node("MatMul", "xd wt", "c"),
            node("QuantizeLinear", "c h k"),
        ],
        {"w": drawn("int8", 4, 5)}, ["QuantizedMatMul"],
    ),
    "a sum of int32": (
        [node("ConvInteger", "x w z", "c"), node("Cast", "c", "f", to=1), node("Mul", "f s")], {},
        ["QuantizedConv", "dequantize"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_folded(name: str) -> None:
    nodes, constants, kinds = LEFT[name]
    nodes = [n for n in nodes if n.op_type != "Identity"]
    last = onnx.NodeProto()
    last.CopyFrom(nodes[-1])
    last.output[:] = ["y"]
    nodes = [*nodes[:-1], last]
    weights = {"w": drawn("int8", 4, 3, 3, 2)} | SCALES
    net, _ = answers(model_like(nodes, BYTES, {**weights, **constants}), BYTES)
    assert [n.operator.kind for n in net.graph.nodes.values()] == kinds
    assert net.foreign == []


def test_computed_zero_points_are_left_to_others() -> None:
    nodes = [node("DynamicQuantizeLinear", "x", "q s z"), node("ConvInteger", "q w z", "y")]
    net, _ = answers(model_like(nodes, X, {"w": drawn("int8", 2, 3, 3, 3)}), X)
    assert [n.operator.kind for n in net.graph.nodes.values()].count("ConvInteger") == 1
    assert net.foreign


@pytest.mark.parametrize("y", ["uint8", "int8"])
def test_rounding_and_the_ends_of_the_range(y: str) -> None:
    """Halves go to the even number, whatever is beyond the range to its end, NaN to the least."""
    given = np.array(
        [[-1e30, -300, -2.5, -1.5, -0.5, -0.25, 0, 0.5, 1.5, 2.5, 77.5, 300, 1e30, np.inf, -np.inf]], np.float32
    )
    low, high = np.iinfo(y).min, np.iinfo(y).max
    nodes = [node("QuantizeLinear", "x one zero")]
    model = model_like(nodes, {"x": given}, {"one": np.float32(1), "zero": np.array(7, y)})
    net = compiled_model(model)
    np.testing.assert_array_equal(net.run(given), np.clip(np.rint(given.astype(np.float64)) + 7, low, high).astype(y))
    assert net.run(np.full_like(given, np.nan)).tolist() == [[low] * given.size]


REFUSED: dict[str, tuple[str, Constants, str]] = {
    "scales of the filters": ("conv", {"f": np.ones(3, np.float32)}, "w_scale: expected one value or 4, got shape"),
    "a scale of 0": ("conv", {"f": np.array([1, 1, 0, 1], np.float32)}, r"w_scale\[2\]=0.0: expected a positive"),
    "a negative scale": ("conv", {"s": np.float32(-1)}, r"x_scale\[0\]=-1.0: expected a positive"),
    "a scale without end": ("conv", {"h": np.float32(np.inf)}, r"y_scale\[0\]=inf: expected a positive"),
    "two scales of the input": ("conv", {"s": np.ones(2, np.float32)}, "x_scale: expected one value, got shape"),
    "a zero point of another type": ("conv", {"z": np.int8(3)}, "x_zero_point: expected uint8, .* got int8"),
    "zero points of the filters": ("conv", {"i": np.zeros(3, np.int8)}, "w_zero_point: expected one value or 4"),
    "a bias of another length": ("conv", {"b": np.zeros(3, np.int32)}, "bias: expected K=4 integers"),
    "a bias that overflows": ("conv", {"b": np.full(4, 2**31 - 1, np.int32)}, r"bias\[0\]=2147483647: expected at"),
    "filters of other channels": ("conv", {"w": np.zeros((4, 2, 3, 3), np.int8)}, r"expected filters \(K, 3/1, R, S"),
    "a product of scales too small": ("conv", {"s": np.float32(1e-30), "f": np.float32(1e-30)}, r"scale\[0\]=0.0"),
    "integer convolution": ("integer", {"z": np.int8(3)}, "x_zero_point: expected uint8, .* got int8"),
    "quantize": ("quantize", {"h": np.float32(0)}, r"y_scale\[0\]=0.0: expected a positive"),
    "quantize, an axis": (
        "quantize", {"h": np.ones(5, np.float32), "k": np.zeros(5, np.uint8)}, "y_scale: expected one value or 3",
    ),
    "dequantize": ("dequantize", {"z": np.int8(1)}, "x_zero_point: expected uint8"),
    "a product": ("product", {"m": np.zeros((4, 2), np.int8)}, r"expected \(\.\.\., M, K\) and \(N, K\)"),
}  # fmt: skip
ONE: dict[str, Any] = {
    "conv": node("QLinearConv", "x s z w f i h k b"),
    "integer": node("ConvInteger", "x w z i"),
    "quantize": node("QuantizeLinear", "v h k"),
    "dequantize": node("DequantizeLinear", "x s z"),
    "product": node("QLinearMatMul", "x s z m t i h k"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(name: str) -> None:
    kind, changes, message = REFUSED[name]
    constants = {
        **SCALES, "w": drawn("int8", 4, 3, 3, 3), "f": np.ones(4, np.float32), "b": np.zeros(4, np.int32),
        "m": drawn("int8", 5, 2), "v": np.zeros((1, 3, 2, 2), np.float32), **changes,
    }  # fmt: skip
    inputs = {"x": BYTES["x"]}
    if kind == "quantize":
        inputs = {"v": np.asarray(constants.pop("v"))}
    with pytest.raises(ConfigError, match=message) as found:
        translated(model_like([ONE[kind]], inputs, constants), "net")
    text = str(found.value)
    assert text.startswith(f"net: node 'y' ({ONE[kind].op_type}): ")
    assert "\n" not in text


def test_sums_that_could_overflow_stay_in_float32() -> None:
    nodes = [*CONV[:2], node("Conv", "xd wd", "y")]
    x = {"x": np.full((1, 66000, 1, 1), 255, np.uint8)}
    model = model_like(nodes, x, SCALES | {"w": np.full((1, 66000, 1, 1), 127, np.int8)})
    net = compiled_model(model)
    assert [n.operator.kind for n in net.graph.nodes.values()] == ["dequantize", "Conv"]
    np.testing.assert_allclose(net.run(**x), [[[[66000 * 125 * 127 * 2.0**-14]]]], rtol=2e-3)
