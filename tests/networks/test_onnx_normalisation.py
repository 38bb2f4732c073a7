"""Normalisations, reductions and moves of ONNX that are made of several of our nodes: kernels run them, all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_models import model, node  # noqa: E402

from autoconv.cpu.device import CPU  # noqa: E402
from autoconv.errors import ConfigError  # noqa: E402
from autoconv.networks.compiled.network import CompiledNetwork  # noqa: E402
from autoconv.networks.onnx_reader import translated  # noqa: E402
from autoconv.networks.operators.foreign import Foreign  # noqa: E402

X = np.random.default_rng(0).standard_normal((2, 4, 6, 5)).astype(np.float32) + 0.5
FOUR, FIVE, TWO = (np.linspace(0.5, 2, n, dtype=np.float32) for n in (4, 5, 2))
SHAPE = np.array([3, 2, 4, 6, 5])

# The operator, its opset, the constants after its input, and its attributes.
CASES: dict[str, tuple[str, int, tuple[np.ndarray, ...], dict[str, Any]]] = {
    "layers": ("LayerNormalization", 17, (FIVE, -FIVE), {}),
    "layers of several axes": ("LayerNormalization", 17, (np.outer(FOUR, FOUR)[:, :1, None] + FIVE,), {"axis": 1}),
    "layers, epsilon": ("LayerNormalization", 17, (FIVE,), {"epsilon": 0.5}),
    "root mean square": ("RMSNormalization", 23, (FIVE,), {"epsilon": 0.1}),
    "images": ("InstanceNormalization", 8, (FOUR, -FOUR), {"epsilon": 0.1}),
    "groups, scales of channels": ("GroupNormalization", 21, (FOUR, -FOUR), {"num_groups": 2}),
    "groups, scales of groups": ("GroupNormalization", 18, (TWO, -TWO), {"num_groups": 2}),
    "means and variances": ("MeanVarianceNormalization", 13, (), {"axes": [2]}),
    "logarithms of softmax": ("LogSoftmax", 13, (), {"axis": 1}),
    "rows of old softmax": ("LogSoftmax", 11, (), {"axis": 2}),
    "smallest": ("ReduceMin", 13, (), {"axes": [1, 3], "keepdims": 0}),
    "root of squares": ("ReduceL2", 13, (), {"axes": [-1]}),
    "magnitudes": ("ReduceL1", 18, (np.array([1]),), {"keepdims": 0}),
    "exponentials": ("ReduceLogSumExp", 18, (), {}),
    "power": ("Pow", 13, (np.float32(2),), {}),
    "odd power of an integer": ("Pow", 15, (np.array([3]),), {}),
    "mish": ("Mish", 18, (), {}),
    "depth to space": ("DepthToSpace", 13, (), {"blocksize": 2, "mode": "CRD"}),
    "space to depth": ("SpaceToDepth", 13, (), {"blocksize": 1}),
    "tiles": ("Tile", 13, (np.array([1, 2, 1, 3]),), {}),
    "expanded": ("Expand", 13, (SHAPE,), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_run_them(name: str) -> None:
    operator, opset, constants, attributes = CASES[name]
    given = {f"c{n}": constant for n, constant in enumerate(constants)}
    nodes = [node(operator, " ".join(["x", *given]), "n", **attributes), node("Relu", "n")]
    made = model(nodes, {"x": X.shape}, given, opset=opset)
    net = CompiledNetwork(translated(made, "net"), CPU.current(), {})
    assert not any(isinstance(n.operator, Foreign) for n in net.graph.nodes.values())
    (expected,) = ReferenceEvaluator(made).run(None, {"x": X})
    got = net.run(X)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_sums_of_exponentials_of_infinities() -> None:
    made = model([node("ReduceLogSumExp", "x", axes=[1], keepdims=0)], {"x": [3, 2]}, opset=13)
    net = CompiledNetwork(translated(made, "net"), CPU.current(), {})
    x = np.array([[-np.inf, -np.inf], [np.inf, 0], [1, -np.inf]], np.float32)
    assert net.run(x).tolist() == [-np.inf, np.inf, 1]


def test_sums_of_exponentials_beyond_float32() -> None:
    made = model([node("ReduceLogSumExp", "x", keepdims=0)], {"x": [2]}, opset=13, dtype=onnx.TensorProto.DOUBLE)
    assert CompiledNetwork(translated(made, "net"), CPU.current(), {}).run(np.array([1e300, 0])) == 1e300


@pytest.mark.parametrize("numbers", [np.float16, np.float32])
def test_batches_in_sixteen_bits_around_large_means(numbers: type) -> None:
    """Whose numbers for channels are of the same type, or of float32."""
    x = (30 * X + 1000).astype(np.float16)
    constants = dict(zip("sbmv", (FOUR, -FOUR, 0 * FOUR + 1000, 900 * FOUR), strict=True))
    given = {name: value.astype(numbers) for name, value in constants.items()}
    made = model([node("BatchNormalization", "x s b m v")], {"x": X.shape}, given, dtype=onnx.TensorProto.FLOAT16)
    net = CompiledNetwork(translated(made, "net"), CPU.current(), {})
    s, b, m, v = (value.astype(np.float64)[:, None, None] for value in given.values())
    expected = (x - m) / np.sqrt(v + 1e-5) * s + b
    y = net.run(x)
    assert y.dtype == np.float16
    assert np.abs(y - expected).max() <= 2.0**-10 * np.abs(expected).max()


@pytest.mark.parametrize("opset", [9, 13, 18, 21])
def test_means_and_variances_of_images_and_pixels_by_default(opset: int) -> None:
    made = model([node("MeanVarianceNormalization", "x")], {"x": X.shape}, opset=opset)
    axes = 0, 2, 3
    expected = (X - X.mean(axes, keepdims=True)) / X.std(axes, keepdims=True)
    net = CompiledNetwork(translated(made, "net"), CPU.current(), {})
    np.testing.assert_allclose(net.run(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("operator", "opset", "constants", "attributes", "why"),
    [
        ("GroupNormalization", 21, (FOUR, FOUR), {}, "'num_groups' is missing"),
        ("GroupNormalization", 21, (FOUR, FOUR), {"num_groups": 3}, "num_groups=3: expected a number that divides"),
        ("GroupNormalization", 21, (TWO, TWO), {"num_groups": 2}, "scale: expected 4 numbers, got"),
        ("InstanceNormalization", 8, (FOUR, FIVE), {}, "expected a bias for each of the channels of"),
        ("LayerNormalization", 17, (FOUR,), {}, "scale: expected a shape that broadcasts to"),
        ("DepthToSpace", 13, (), {"blocksize": 3}, "blocksize=3: expected channels that 9 divides, got 4"),
        ("SpaceToDepth", 13, (), {"blocksize": 4}, "blocksize=4: expected extents that it divides, got 6x5"),
        ("Tile", 13, (np.array([1, 2]),), {}, "expected 4 numbers of at least 0"),
        ("Expand", 13, (np.array([3, 4]),), {}, "does not broadcast to that"),
    ],
)
def test_what_does_not_fit_is_refused(
    operator: str, opset: int, constants: tuple[np.ndarray, ...], attributes: dict[str, Any], why: str
) -> None:
    given = {f"c{n}": constant for n, constant in enumerate(constants)}
    made = model([node(operator, " ".join(["x", *given]), **attributes)], {"x": X.shape}, given, opset=opset)
    with pytest.raises(ConfigError, match=rf"node 'y' \({operator}\): .*{why}"):
        translated(made, "net")
