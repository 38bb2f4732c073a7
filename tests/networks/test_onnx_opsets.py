"""Operators as older opsets have them, where newer ones take attributes as inputs or mean something else by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx_models import model, node  # noqa: E402

from autoconv.cpu.device import CPU  # noqa: E402
from autoconv.errors import ConfigError  # noqa: E402
from autoconv.networks import translation  # noqa: E402
from autoconv.networks.compiled.network import CompiledNetwork  # noqa: E402
from autoconv.networks.onnx_reader import translated  # noqa: E402
from autoconv.networks.onnx_reader.reader import OLDEST  # noqa: E402
from autoconv.networks.reference import evaluate  # noqa: E402

NEWEST = onnx.defs.onnx_opset_version()
X = np.random.default_rng(0).standard_normal((2, 3, 4, 6))
PADS = [0, 0, 1, 0, 0, 0, 0, 2]
DOUBLED = X.repeat(2, axis=2).repeat(2, axis=3)


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


def constants(**values: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in values.items()}


SCALES = np.array([1, 1, 2, 2], np.float32)
BOUNDS = constants(l=np.float32(-0.5), h=np.float32(0.5))
FIRST = X.reshape(2, -1)

# first and last opset, the node, its constants, and what it gives
CASES: dict[str, tuple[int, int, Any, dict[str, np.ndarray], np.ndarray]] = {
    "clip by attributes": (7, 10, node("Clip", "x", min=-0.5, max=0.5), {}, X.clip(-0.5, 0.5)),
    "clip by inputs": (11, NEWEST, node("Clip", "x l h"), BOUNDS, X.clip(-0.5, 0.5)),
    "pad by attributes": (7, 10, node("Pad", "x", pads=PADS, value=2.0), {},
                          np.pad(X, ((0, 0), (0, 0), (1, 0), (0, 2)), constant_values=2)),
    "pad by inputs": (11, NEWEST, node("Pad", "x p v"), constants(p=int64(*PADS), v=np.float32(2)),
                      np.pad(X, ((0, 0), (0, 0), (1, 0), (0, 2)), constant_values=2)),
    **{f"pad by {mode}": (7, 10, node("Pad", "x", pads=[0, 1, 4, 2, 0, 0, 1, 5], mode=mode), {},
                          np.pad(X, ((0, 0), (1, 0), (4, 1), (2, 5)), mode)) for mode in ("reflect", "edge")},
    "slice by attributes": (7, 9, node("Slice", "x", starts=[1, 0], ends=[9, -1], axes=[2, 3]), {}, X[:, :, 1:, :-1]),
    "slice by inputs": (10, NEWEST, node("Slice", "x s e a t"),
                        constants(s=int64(1, 5), e=int64(9, 0), a=int64(2, 3), t=int64(1, -2)), X[:, :, 1:, 5:0:-2]),
    "softmax of all that follows": (7, 12, node("Softmax", "x"), {}, softmax(FIRST, 1).reshape(X.shape)),
    "softmax of an axis": (13, NEWEST, node("Softmax", "x"), {}, softmax(X, 3)),
    "split by an attribute": (7, 12, node("Split", "x", "a y", split=[1, 2], axis=1), {}, X[:, 1:]),
    "split by an input": (13, NEWEST, node("Split", "x s", "a y", axis=1), constants(s=int64(1, 2)), X[:, 1:]),
    "split evenly": (7, 17, node("Split", "x", "a y", axis=3), {}, X[..., 3:]),
    "split by a number": (18, NEWEST, node("Split", "x", "a b y", axis=3, num_outputs=3), {}, X[..., 4:]),
    "unsqueeze by an attribute": (7, 12, node("Unsqueeze", "x", axes=[0, 5]), {}, X[None, ..., None]),
    "unsqueeze by an input": (13, NEWEST, node("Unsqueeze", "x a"), constants(a=int64(0, -1)), X[None, ..., None]),
    "squeeze": (7, 12, node("Squeeze", "x"), {}, X),
    "mean by an attribute": (7, 17, node("ReduceMean", "x", axes=[1, 3], keepdims=0), {}, X.mean(axis=(1, 3))),
    "mean by an input": (18, NEWEST, node("ReduceMean", "x a"), constants(a=int64(-1)), X.mean(axis=3, keepdims=True)),
    "sum by an attribute": (7, 12, node("ReduceSum", "x", axes=[2]), {}, X.sum(axis=2, keepdims=True)),
    "sum by an input": (13, NEWEST, node("ReduceSum", "x a"), constants(a=int64(2)), X.sum(axis=2, keepdims=True)),
    "upsample by an attribute": (7, 8, node("Upsample", "x", scales=SCALES.tolist()), {}, DOUBLED),
    "upsample by an input": (9, 9, node("Upsample", "x s"), constants(s=SCALES), DOUBLED),
    "resize without a region": (10, 10, node("Resize", "x s"), constants(s=SCALES), DOUBLED),
    "resize to less": (10, 10, node("Resize", "x s"), constants(s=np.float32([1, 1, 0.6, 1.5])),
                       X[:, :, [0, 2]][..., [0, 0, 1, 2, 2, 3, 4, 4, 5]]),
    "upsample never to less": (9, 9, node("Upsample", "x s"), constants(s=np.float32([1, 1, 0.6, 1])), X[:, :, [0, 1]]),
    "resize": (11, NEWEST, node("Resize", "x - s"), constants(s=SCALES), DOUBLED),
    "dropout": (7, 11, node("Dropout", "x", ratio=0.5), {}, X),
    "dropout by an input": (12, NEWEST, node("Dropout", "x r"), constants(r=np.float32(0.5)), X),
    "batch norm": (7, NEWEST, node("BatchNormalization", "x s b m v", epsilon=0.5),
                   {name: np.full(3, value, np.float32) for name, value in (("s", 2), ("b", 1), ("m", 3), ("v", 0.5))},
                   (X - 3) * 2 + 1),
    "flatten": (7, NEWEST, node("Flatten", "x"), {}, FIRST),
    "largest of windows": (7, NEWEST, node("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2]), {},
                           X.reshape(2, 3, 2, 2, 3, 2).max(axis=(3, 5))),
    "averages": (7, NEWEST, node("AveragePool", "x", kernel_shape=[2, 2], strides=[2, 2]), {},
                 X.reshape(2, 3, 2, 2, 3, 2).mean(axis=(3, 5))),
    "one of an axis": (7, NEWEST, node("Gather", "x i", axis=2), constants(i=np.int64(-1)), X[:, :, -1]),
    "some of an axis": (7, NEWEST, node("Gather", "x i", axis=3), constants(i=int64(4, 0, 4)), X[..., [4, 0, 4]]),
    "a table of places": (7, NEWEST, node("Gather", "x i", axis=1), constants(i=np.array([[2, 0], [1, -1]])),
                          X[:, [[2, 0], [1, 2]]]),
    "slopes": (7, NEWEST, node("PRelu", "x k"), constants(k=np.array([[[2.0]], [[3.0]], [[4.0]]], np.float32)),
               np.where(X < 0, X * np.array([2, 3, 4]).reshape(3, 1, 1), X)),
}  # fmt: skip


@pytest.mark.parametrize("extent", [1 << 16, 20], ids=["bytes", "long"])
@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_bytes_and_long_axes_are_padded_by_pieces(mode: str, extent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of all their places would be as long as they are, and is for floats alone."""
    kind = onnx.TensorProto.FLOAT if extent == 20 else onnx.TensorProto.UINT8
    pads = np.array([0, 23 if mode == "reflect" else 3, 0, 2])
    made = model([node("Pad", "x p", mode=mode)], {"x": [2, 20]}, {"p": pads}, opset=19, dtype=kind)
    monkeypatch.setattr(translation, "LARGEST_EXTENT", extent)
    graph = translated(made, "pieces")
    assert {node.operator.kind for node in graph.nodes.values()} == {"Concat", "Slice"}
    x = np.arange(40).reshape(2, 20).astype(graph.types["x"].dtype)
    expected = np.pad(x, ((0, 0), (pads[1], 2)), mode)
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], expected)
    np.testing.assert_array_equal(CompiledNetwork(graph, CPU.current(), {}).run(x), expected)


def test_a_long_axis_that_is_not_padded_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "MOST_PLACES", 6)
    made = model([node("Pad", "x c", mode="edge")], {"x": [2, 9]}, {"c": np.array([1, 0, 3, 0])})
    x = np.arange(18, dtype=np.float32).reshape(2, 9)
    net = CompiledNetwork(translated(made, "net"), CPU.current(), {})
    np.testing.assert_array_equal(net.run(x), np.pad(x, ((1, 3), (0, 0)), "edge"))


def test_resize_as_it_first_was_takes_the_nearest_behind_where_it_shrinks() -> None:
    """The test of ONNX 1.5, test_resize_downsample_nearest."""
    made = model([node("Resize", "x s")], {"x": [1, 1, 2, 4]}, constants(s=np.float32([1, 1, 0.6, 0.6])), opset=10)
    x = np.arange(1, 9).reshape(1, 1, 2, 4)
    np.testing.assert_array_equal(evaluate(translated(made, "resize"), {"x": x})["y"], [[[[1, 3]]]])


def test_an_axis_may_be_long_that_is_not_resized() -> None:
    made = model([node("Resize", "x - s")], {"x": [1, 70_000, 2]}, constants(s=np.float32([1, 1, 2])))
    assert translated(made, "resize").types["y"].shape == (1, 70_000, 4)
    made = model([node("Resize", "x - s")], {"x": [1, 70_000, 2]}, constants(s=np.float32([1, 2, 1])))
    with pytest.raises(ConfigError, match="expected extents from 1 to 65536"):
        translated(made, "resize")


@pytest.mark.parametrize(
    ("extent", "scale", "places"),
    [(9, 1 / 3, [0, 3, 6]), (10, 0.7, [0, 1, 2, 4, 5, 7, 8]), (20, 0.1, [0, 10]),
     (10, 1.2, [0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9])],
)  # fmt: skip
def test_scales_are_float32_as_in_onnx_runtime(extent: int, scale: float, places: list[int]) -> None:
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    made = model([node("Resize", "x - s", **how)], {"x": [1, extent]}, constants(s=np.float32([1, scale])))
    graph = translated(made, "resize")
    np.testing.assert_array_equal(evaluate(graph, {"x": np.arange(extent)[None]})["y"], [places])


def test_bounds_may_be_computed() -> None:
    mean = node("ReduceMean", "x", "m", keepdims=0)
    for inputs, expected in (
        ("x m", X.clip(X.mean())),
        ("x - m", X.clip(None, X.mean())),
        ("x l m", X.clip(-0.5, X.mean())),
    ):
        graph = translated(model([mean, node("Clip", inputs)], {"x": X.shape}, BOUNDS), "clip")
        np.testing.assert_allclose(evaluate(graph, {"x": X})["y"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_in_its_oldest_and_its_newest_opset(name: str) -> None:
    first, last, what, values, expected = CASES[name]
    for opset in sorted({max(first, OLDEST), last}):
        graph = translated(model([what], {"x": X.shape}, values, opset=opset), f"{name}, opset {opset}")
        (found,) = evaluate(graph, {"x": X}).values()
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
