"""Types other than float32: floats of 16 bits are rounded once, integers and bounds stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from graphs import compiled  # noqa: E402
from onnx import TensorProto  # noqa: E402
from onnx_models import model, node  # noqa: E402

from autoconv.common.types import DTYPES  # noqa: E402
from autoconv.errors import ConfigError  # noqa: E402
from autoconv.networks.graph import Graph  # noqa: E402
from autoconv.networks.onnx_reader import translated  # noqa: E402
from autoconv.networks.operators import (  # noqa: E402
    LRN,
    Elementwise,
    MatMul,
    Normalization,
    Operator,
    Pool,
    Reduce,
    Resize,
    Softmax,
    TensorType,
)
from autoconv.networks.reference import evaluate  # noqa: E402

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = np.finfo(np.float32).max
INT64 = np.iinfo(np.int64)

# An operator, shapes, and about how large the elements are: squares and sums of them do not fit into float16.
OPERATORS: dict[str, tuple[Operator, list[tuple[int, ...]], float]] = {
    "mean of images": (Reduce("mean", (2, 3)), [(1, 8, 112, 112)], 10),
    "sum": (Reduce("sum", (1,)), [(3, 1000)], 1),
    "largest": (Reduce("max", (1,)), [(3, 1000)], 1),
    "average pool": (Pool(reduction="mean", window=(32, 32), stride=(4, 4)), [(1, 2, 40, 40)], 100),
    "max pool": (Pool(reduction="max", window=(2, 2)), [(1, 2, 5, 5)], 100),
    "softmax": (Softmax(1), [(2, 3000)], 1),
    "normalised rows": (Normalization(axis=1, epsilon=1e-5), [(40, 1000)], 1000),
    "LRN": (LRN(size=5, alpha=1e-4, beta=0.75, bias=1.0), [(1, 7, 3, 3)], 400),
    "product": (MatMul(), [(3, 4, 1000), (3, 1000, 5)], 1),
    "expression": (Elementwise(("sqrt", ("add", ("mul", 0, 0), 1.0))), [(3, 50)], 1000),
    "resize": (Resize(1, ((0, 1), (1, 2)), ((0.3, 0.7), (0.1, 0.9))), [(3, 4)], 1),
}


@pytest.mark.parametrize(("factor", "size"), [(1e-6, 100), (1e7, 1e-5)])  # filters times that are 0, or infinite
def test_factors_that_filters_of_16_bits_do_not_hold_stay_apart(factor: float, size: float) -> None:
    graph, rng = Graph("scaled"), np.random.default_rng(0)
    x = graph.add_input("x", TensorType((3, 64), "float16"))
    w = graph.add_constant("w", rng.uniform(0.01, 0.02, (64, 5)).astype(np.float16))
    y = graph.add("product", MatMul(), x, w)
    graph.outputs["y"] = graph.add("y", Elementwise(("mul", 0, factor)), y)
    given = {"x": (size * rng.uniform(1, 2, (3, 64))).astype(np.float16)}
    (expected,) = evaluate(graph, given).values()
    np.testing.assert_allclose(compiled(graph).run(**given), expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_whole_numbers_are_divided_when_they_are_summed(dtype: str) -> None:
    graph = Graph("quotients")
    x = graph.add_input("x", TensorType((2, 3), dtype))
    w, three = np.array([[3, 1], [4, 1], [5, 9]], dtype), np.array([3], dtype)
    y = graph.add("product", MatMul(), x, graph.add_constant("w", w))
    graph.outputs["y"] = graph.add("y", Elementwise(("div", 0, 1)), y, graph.add_constant("three", three))
    given = np.arange(6, dtype=dtype).reshape(2, 3)
    np.testing.assert_array_equal(compiled(graph).run(given), given @ w // 3)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("name", OPERATORS)
def test_floats_of_16_bits_are_rounded_once(name: str, dtype: str) -> None:
    operator, shapes, scale = OPERATORS[name]
    rng, graph = np.random.default_rng(0), Graph(name)
    x = {f"x{n}": (scale * rng.uniform(0.5, 1.5, shape)).astype(DTYPES[dtype]) for n, shape in enumerate(shapes)}
    names = [graph.add_input(name, TensorType(array.shape, dtype)) for name, array in x.items()]
    graph.outputs["y"] = graph.add("y", operator, *names)
    (expected,) = evaluate(graph, x).values()
    y = compiled(graph).run(**x)
    assert y.dtype == DTYPES[dtype]
    error = np.abs(y.astype(np.float64) - expected)
    assert (error <= 0.51 * EPSILON[dtype] * np.abs(expected) + 2.0**-25).all()


@pytest.mark.parametrize("dtype", EPSILON)
def test_types_meet_in_float32(dtype: str) -> None:
    graph = Graph("mixed")
    x = graph.add_input("x", TensorType((3,), dtype))
    graph.outputs["wide"] = graph.add("wide", Elementwise(("mul", 0, 0), "float32"), x)
    graph.outputs["back"] = graph.add("back", Elementwise(("div", 0, 1), dtype), "wide", x)
    given = np.array([1000, -3, 0.5], DTYPES[dtype])
    found = compiled(graph).run(x=given)
    assert [y.dtype.name for y in found.values()] == ["float32", dtype]
    np.testing.assert_array_equal(found["wide"], np.square(given.astype(np.float32)))
    np.testing.assert_array_equal(found["back"], given)


def clipped(x: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """What a network makes of an array by Clip alone."""
    bounds = {name: np.array(value, x.dtype) for name, value in (("l", low), ("h", high)) if value is not None}
    names = " ".join(name if name in bounds else "-" for name in ("l", "h"))
    dtype = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = translated(model([node("Clip", f"x {names}")], {"x": x.shape}, bounds, dtype=dtype), "clip")
    return np.asarray(compiled(graph).run(x=x))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("int64", 1, None), ("int64", None, INT64.max - 1), ("int64", INT64.min + 3, 7), ("uint64", 3, 2**64 - 2),
     ("int32", -(2**24) - 1, 2**24 + 1), ("uint8", 3, 200)],
)  # fmt: skip
def test_integers_are_clipped_exactly(dtype: str, low: int | None, high: int | None) -> None:
    limits = np.iinfo(dtype)
    x = np.array([limits.max, limits.max - 1, limits.min, limits.min + 1, 5, 0], dtype)
    y = clipped(x, low, high)
    assert y.dtype == dtype
    bounds = (limits.min if low is None else low, limits.max if high is None else high)
    np.testing.assert_array_equal(y, [min(max(int(number), bounds[0]), bounds[1]) for number in x])


@pytest.mark.parametrize(
    ("dtype", "low", "high", "expected"),
    [
        ("float32", None, LARGEST, [LARGEST, -np.inf, 1]),
        ("float32", -LARGEST, LARGEST, [LARGEST, -LARGEST, 1]),
        ("float32", 0, LARGEST, [LARGEST, 0, 1]),
        ("float32", -np.inf, np.inf, [np.inf, -np.inf, 1]),
        ("float32", np.inf, None, [np.inf, np.inf, np.inf]),
        ("float32", None, None, [np.inf, -np.inf, 1]),
        ("float64", None, 1e39, [1e39, -np.inf, 1]),
    ],
)
def test_the_largest_number_bounds_infinity(dtype: str, low: Any, high: Any, expected: list[float]) -> None:
    np.testing.assert_array_equal(clipped(np.array([np.inf, -np.inf, 1], dtype), low, high), np.array(expected, dtype))


def test_bounds_of_old_opsets_are_attributes() -> None:
    clip = node("Clip", "x", min=-float(LARGEST), max=float(LARGEST))
    net = compiled(translated(model([clip], {"x": [3]}, opset=7), "clip"))
    x = np.array([np.inf, -np.inf, 1], np.float32)
    np.testing.assert_array_equal(net.run(x), np.array([LARGEST, -LARGEST, 1], np.float32))


@pytest.mark.parametrize("value", [INT64.max, INT64.min + 1, 2**53 + 1])
def test_integers_are_padded_with_what_they_are_told(value: int) -> None:
    constants = {"p": np.array([1, 2]), "k": np.array(value)}
    graph = translated(model([node("Pad", "x p k")], {"x": [3]}, constants, dtype=TensorProto.INT64), "pad")
    x = np.arange(3)
    np.testing.assert_array_equal(compiled(graph).run(x), np.pad(x, (1, 2), constant_values=value))


def resize(dtype: str, sizes: list[int], **attributes: Any) -> Any:
    """A model of Resize alone, of images of a type."""
    constants = {"s": np.array([1, 3, *sizes])}
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model([node("Resize", "x - - s", **attributes)], {"x": [1, 3, 9, 11]}, constants, opset=18, dtype=kind)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("sizes", [[18, 22], [5, 6], [13, 17], [9, 30]])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("coordinate", ["half_pixel", "align_corners", "asymmetric"])
def test_bytes_are_resized_as_by_onnx_runtime(dtype: str, sizes: list[int], mode: str, coordinate: str) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="NOT CHECKED: onnxruntime is not installed")
    limits = np.iinfo(dtype)
    x = np.random.default_rng(1).integers(limits.min, limits.max, (1, 3, 9, 11), dtype, endpoint=True)
    proto = resize(dtype, sizes, mode=mode, coordinate_transformation_mode=coordinate)
    proto.ir_version = 9
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    y = compiled(translated(proto, "resize")).run(x)
    assert y.dtype == dtype
    differs = y != expected  # where the sums are next to a whole number
    assert np.abs(y.astype(int) - expected).max() <= (mode == "linear")
    assert differs.mean() <= 0.02


@pytest.mark.parametrize(
    ("dtype", "attributes", "message"),
    [
        ("uint8", {"mode": "cubic"}, r"\(Resize\): mode='cubic', antialias=0: expected floats, got uint8"),
        ("uint8", {"mode": "linear", "antialias": 1}, "mode='linear', antialias=1: expected floats, got uint8"),
        ("int32", {"mode": "linear"}, "expected floats to interpolate, got int32"),
    ],
)
def test_integers_on_whose_sums_nobody_agrees_are_refused(dtype: str, attributes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translated(resize(dtype, [13, 17], **attributes), "resize")
