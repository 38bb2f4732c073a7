"""Networks in ONNX Runtime's own quantised operators: what the same answers, spelled out in those of the standard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_models import compiled_model, model_like, node  # noqa: E402

import autoconv  # noqa: E402
from autoconv.cpu import pool  # noqa: E402
from autoconv.errors import ConfigError  # noqa: E402
from autoconv.networks.onnx_reader import microsoft, translated  # noqa: E402

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")

RNG = np.random.default_rng(5)


def ours(operator: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    found = node(operator, inputs, outputs, **attributes)
    found.domain = microsoft.DOMAIN
    return found


def drawn(dtype: str, *shape: int) -> Any:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


# Scales are powers of 2, and images of 2x2 and 4x4 are averaged, so that floats are exact and ties are real.
CONSTANTS: dict[str, Any] = {
    "s": np.float32(2**-5), "z": np.uint8(130), "h": np.float32(2**-4), "k": np.uint8(96), "n": np.uint8(0),
    "t": np.float32(2**-8), "f": np.float32(2**-9), "i": np.int8(0), "w": drawn("int8", 6, 3, 3, 3),
    "b": RNG.integers(-900, 900, 6, np.int32), "other": drawn("uint8", 6, 1, 1), "flat": np.array([2, -1]),
    "m": drawn("int8", 12, 7), "c": RNG.integers(-900, 900, 7, np.int32), "g": np.float32(2**-6),
}  # fmt: skip
NODES = [
    node("QuantizeLinear", "x s z", "q"),
    node("QLinearConv", "q s z w f i h k b", "conv", pads=[1, 1, 1, 1]),
    ours("QLinearLeakyRelu", "conv h k h z", "leaky", alpha=0.125),
    ours("QLinearAdd", "conv h k leaky h z h k", "sum"),
    ours("QLinearMul", "sum h k other t n h k", "product"),
    ours("QLinearSigmoid", "product h k t n", "sigmoid"),
    ours("QLinearConcat", "h k sigmoid t n sum h k", "both", axis=1),
    ours("QLinearAveragePool", "both h k s z", "pooled", kernel_shape=[2, 2], strides=[2, 2]),
    ours("QLinearGlobalAveragePool", "pooled s z s k", "means"),
    node("Reshape", "means flat", "rows"),
    ours("QGemm", "rows s k m g i c h k", "gemm"),
    ours("QLinearSoftmax", "gemm h k t n", "softmax", axis=-1, opset=13),
    node("DequantizeLinear", "softmax t n", "y"),
]
X = {"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32) * 2}


def spelled_out(given: Any) -> list[Any]:
    """A node in operators of the standard."""
    if given.domain != microsoft.DOMAIN:
        return [given]
    name, (y,), kept = given.op_type.removeprefix("QLinear"), given.output, {}
    for attribute in given.attribute:
        if attribute.name != "opset":
            kept[attribute.name] = helper.get_attribute_value(attribute)
    inputs = list(given.input)
    if name == "QGemm":
        a, s, z, b, t, i, c, *to = inputs
        return [
            node("MatMulInteger", f"{a} {b} {z} {i}", f"{y}.p"), node("Add", f"{y}.p {c}", f"{y}.i"),
            node("Cast", f"{y}.i", f"{y}.f", to=1), node("Mul", f"{s} {t}", f"{y}.s"),
            node("Mul", f"{y}.f {y}.s", f"{y}.r"), node("QuantizeLinear", f"{y}.r {' '.join(to)}", y),
        ]  # fmt: skip
    to = inputs[:2] if name == "Concat" else inputs[-2:]
    arrays = inputs[2:] if name == "Concat" else inputs[:-2]
    floats = [f"{y}.{n}" for n in range(len(arrays) // 3)]
    return [
        *(node("DequantizeLinear", " ".join(arrays[3 * n : 3 * n + 3]), made) for n, made in enumerate(floats)),
        node(name, " ".join(floats), f"{y}.f", **kept),
        node("QuantizeLinear", f"{y}.f {' '.join(to)}", y),
    ]


def test_every_operator_answers_as_spelled_out() -> None:
    outputs = tuple(n.output[0] for n in NODES if n.domain)
    assert {n.op_type for n in NODES if n.domain} == set(microsoft.LOWERINGS)
    long = [part for given in NODES for part in spelled_out(given)]
    wanted = ReferenceEvaluator(model_like(long, X, CONSTANTS, outputs=outputs)).run(None, X)
    net = compiled_model(model_like(NODES, X, CONSTANTS, outputs=outputs))
    assert net.foreign == []
    found = net.run(**X)
    for name, expected in zip(outputs, wanted, strict=True):
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
        assert len(np.unique(expected)) > 5


def test_a_network_is_one_call_on_bytes() -> None:
    net = compiled_model(model_like(NODES, X, CONSTANTS))
    long = [part for given in NODES for part in spelled_out(given)]
    (wanted,) = ReferenceEvaluator(model_like(long, X, CONSTANTS)).run(None, X)
    np.testing.assert_array_equal(net.run(**X), wanted)
    assert "in 1 call\n" in net.explain()
    kinds = [n.operator.kind for n in net.graph.nodes.values()]
    assert [kind for kind in kinds if kind.startswith("Quantized")] == ["QuantizedConv", "QuantizedMatMul"]
    # Sums, functions and what brings arrays to one scale are single kernels from bytes to bytes.
    assert kinds[:8] == ["quantize", "QuantizedConv", *["quantize"] * 5, "Concat"]


def test_a_product_of_matrices_in_its_other_forms() -> None:
    rows = {"x": drawn("uint8", 12, 5)}
    constants = CONSTANTS | {"turned": drawn("int8", 7, 12), "per": 2.0 ** RNG.integers(-9, -6, 7).astype(np.float32)}
    attributes = {"alpha": 0.5, "transA": 1, "transB": 1}
    net = compiled_model(model_like([ours("QGemm", "x s z turned per i", **attributes)], rows, constants))
    exact = (rows["x"].T.astype(np.int64) - 130) @ constants["turned"].T.astype(np.int64)
    np.testing.assert_array_equal(net.run(**rows), (exact * (2.0**-6 * constants["per"])).astype(np.float32))
    assert net.foreign == []


REFUSED = {
    "computed scales": (ours("QLinearSigmoid", "x v k t n"), "expected scales and zero points that are constants"),
    "floats": (ours("QLinearSigmoid", "v s k t n"), r"expected arrays of uint8 or int8 and scales of float32, got"),
    "two scales": (ours("QLinearSigmoid", "x two k t n"), r"x_scale: expected one value, got shape \(2,\)"),
    "another zero point": (ours("QLinearAdd", "x s i x s k t n"), "x_zero_point: expected uint8, .* got int8"),
    "another result": (ours("QLinearAdd", "x s k x s k t i"), "y_zero_point: expected uint8, .* got int8"),
    "channels last": (
        ours("QLinearGlobalAveragePool", "x s k s k", channels_last=1), "channels_last=1: expected images with chan",
    ),
    "no opset": (ours("QLinearSoftmax", "x s k t n"), "the attribute 'opset' is missing"),
    "nothing to join": (ours("QLinearConcat", "s k", axis=1), "input 2 is missing"),
    "sums of many rows": (ours("QGemm", "x s k m g i sums h k"), r"C: expected one row of 7, got int32 \(2, 7\)"),
    "computed matrices": (ours("QGemm", "x s k x s k - h k"), "expected two matrices, the second a constant"),
    "an unknown one": (
        ours("QLinearWhere", "x s k t n"), "no such operator here of the domain 'com.microsoft': expected one of QGemm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(name: str) -> None:
    given, message = REFUSED[name]
    x = drawn("uint8", 2, 12)
    constants = CONSTANTS | {"two": np.ones(2, np.float32), "sums": np.zeros((2, 7), np.int32)}
    nodes = [node("DequantizeLinear", "x s z", "v"), given]
    with pytest.raises(ConfigError, match=message) as found:
        translated(model_like(nodes, {"x": x}, constants), "net")
    assert str(found.value).startswith(f"net: node 'y' ({given.op_type}): ")
    assert "\n" not in str(found.value)


def test_what_the_quantiser_of_onnx_runtime_writes(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization", reason="NOT CHECKED: onnxruntime is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="NOT CHECKED: onnxruntime is not installed")
    draw = lambda *shape: RNG.standard_normal(shape).astype(np.float32)  # noqa: E731
    nodes = [
        node("Conv", "x w1", "c1", pads=[1, 1, 1, 1]), node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2", pads=[1, 1, 1, 1]), node("Add", "r1 c2", "a"), node("LeakyRelu", "a", "l"),
        node("Sigmoid", "c2", "g"), node("Mul", "a g", "p"), node("Concat", "p l", "j", axis=1),
        node("MaxPool", "j", "mp", kernel_shape=[2, 2], strides=[2, 2]),
        node("AveragePool", "mp", "ap", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "ap", "gp"), node("Flatten", "gp", "fl"), node("Gemm", "fl w3 b3", "v"),
        node("Softmax", "v", "y"),
    ]  # fmt: skip
    constants = {"w1": draw(8, 3, 3, 3), "w2": draw(8, 8, 3, 3) / 5, "w3": draw(16, 10) / 3, "b3": draw(10)}
    model = model_like(nodes, X, constants)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    model.ir_version = 9
    onnx.save(model, tmp_path / "floats.onnx")

    left = [{"x": draw(2, 3, 8, 8)} for _ in range(4)]

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return left.pop() if left else None

    quantization.quantize_static(
        tmp_path / "floats.onnx", tmp_path / "integers.onnx", Samples(), reduce_range=True, per_channel=True,
        quant_format=quantization.QuantFormat.QOperator, weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip
    written = onnx.load(tmp_path / "integers.onnx")
    assert {n.op_type for n in written.graph.node if n.domain == microsoft.DOMAIN} == set(microsoft.LOWERINGS)
    net = autoconv.load(tmp_path / "integers.onnx")
    assert net.foreign == []
    session = onnxruntime.InferenceSession(tmp_path / "integers.onnx", providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, X)
    step = 1 / 255  # of a softmax; what is nearly a tie may go either way before
    np.testing.assert_allclose(net.run(**X), wanted, atol=2.5 * step, rtol=0)
