"""conv2d and its relatives against the oracle, and against each other as adjoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import EDGES, edge, operands

import autoconv
from autoconv import plans
from autoconv.errors import ArrayError, LayerError
from autoconv.functional import operands as functional_operands
from autoconv.layer import DTYPES, ConvLayer
from autoconv.plans import signature
from autoconv.records.cache import TuningCache
from autoconv.tuning import planner, reference


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, object]:
    return {"mode": "heuristic", "cache": TuningCache(tmp_path, system=None)}


def geometry(layer: ConvLayer) -> dict[str, object]:
    return {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups", "layout")}


def close(layer: ConvLayer, got: np.ndarray, a: np.ndarray, b: np.ndarray, *epilogue: np.ndarray | None) -> bool:
    want = reference.convolve(layer, a, b, *epilogue)
    assert got.shape == want.shape
    assert got.dtype == layer.numpy_dtype
    return reference.error(got, want, reference.magnitude(layer, a, b, *epilogue)) < 2e-5


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_all_three_directions_agree_with_the_oracle(name: str, layout: str, quick: dict[str, object]) -> None:
    layer = edge(name, layout=layout)
    x, w, _, _ = operands(layer)
    assert close(layer, autoconv.conv2d(x, w, **geometry(layer), **quick), x, w)
    backward = layer.replace(direction="dgrad")
    dy, w, _, _ = operands(backward)
    dx = autoconv.conv2d_dgrad(dy, w, input_size=(layer.H, layer.W), **geometry(layer), **quick)
    assert close(backward, dx, dy, w)
    backward = layer.replace(direction="wgrad")
    dw = autoconv.conv2d_wgrad(x, dy, filter_size=(layer.R, layer.S), **geometry(layer), **quick)
    assert close(backward, dw, x, dy)


def test_the_epilogue_and_out(quick: dict[str, object]) -> None:
    layer = edge("grouped", bias=True, residual=True, activation="relu")
    x, w, bias, residual = operands(layer)
    out = np.empty(layer.y_shape, np.float32)
    got = autoconv.conv2d(x, w, bias, residual=residual, activation="relu", out=out, **geometry(layer), **quick)
    assert got is out
    assert close(layer, out, x, w, bias, residual)


def test_slopes(quick: dict[str, object]) -> None:
    layer = edge("grouped", bias=True, activation="prelu")
    x, w, values, _ = operands(layer)
    bias, slope = values.reshape(2, -1)
    got = autoconv.conv2d(x, w, bias, activation="prelu", slope=slope, **geometry(layer), **quick)
    assert close(layer, got, x, w, values)


def test_channels_last_memory_is_computed_as_it_lies(quick: dict[str, object]) -> None:
    layer = edge("grouped")
    x, w, _, _ = operands(layer)
    want = autoconv.conv2d(x, w, **geometry(layer), **quick)
    last = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    got = autoconv.conv2d(last, w, **geometry(layer), **quick)
    assert got.shape == want.shape
    assert got.transpose(0, 2, 3, 1).flags.c_contiguous
    np.testing.assert_allclose(got, want, atol=1e-4)
    for out in (np.empty_like(want), np.empty_like(got)):  # in either order
        assert autoconv.conv2d(last, w, out=out, **geometry(layer), **quick) is out
        np.testing.assert_allclose(out, want, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2, (3, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_transposed_convolution_is_the_adjoint(stride: object, groups: int, quick: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 6, 5, 7))
    w = rng.standard_normal((6, 4, 3, 2))
    bias = rng.standard_normal(4 * groups)
    shape = {"stride": stride, "padding": 1, "dilation": 2, "groups": groups}
    extra = (0 if stride == 1 else 1, 0)
    y = autoconv.conv_transpose2d(x, w, output_padding=extra, **shape, **quick)
    assert y.shape[1] == 4 * groups
    probe = rng.standard_normal(y.shape)
    np.testing.assert_allclose((y * probe).sum(), (x * autoconv.conv2d(probe, w, **shape, **quick)).sum())
    biased = autoconv.conv_transpose2d(x, w, bias, output_padding=extra, **shape, **quick)
    np.testing.assert_allclose(biased, y + bias.reshape(-1, 1, 1))
    out = np.empty_like(y)
    assert autoconv.conv_transpose2d(x, w, bias, output_padding=extra, out=out, **shape, **quick) is out
    np.testing.assert_array_equal(out, biased)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("stride", "padding", "extra"), [((1, 3), (0, 2), (3, 2)), ((2, 1), (1, 0), (1, 1))])
def test_a_transposed_convolution_may_be_larger_than_its_sums_reach(
    stride: tuple[int, int], padding: tuple[int, int], extra: tuple[int, int], layout: str, quick: dict[str, object]
) -> None:
    rng = np.random.default_rng(0)
    x, w, bias = rng.standard_normal((2, 4, 5, 4)), rng.standard_normal((4, 3, 3, 2)), rng.standard_normal(6)
    shape = {"stride": stride, "dilation": (4, 2), "groups": 2}
    (top, left), (down, across) = padding, extra
    full = np.pad(autoconv.conv_transpose2d(x, w, **shape, **quick), ((0, 0), (0, 0), (0, down), (0, across)))
    want = full[:, :, top : full.shape[2] - top, left : full.shape[3] - left] + bias.reshape(-1, 1, 1)
    if layout == "NHWC":
        x, w, want = (np.ascontiguousarray(array.transpose(0, 2, 3, 1)) for array in (x, w, want))
    out = np.empty_like(want, order="C")
    more = {"padding": padding, "output_padding": extra, "layout": layout, "out": out}
    assert autoconv.conv_transpose2d(x, w, bias, **shape, **more, **quick) is out
    np.testing.assert_allclose(out, want)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"groups": 2}, LayerError, "groups=2: it must divide C=3"),
        ({"groups": 2.0, "bias": np.ones(2, np.float32)}, LayerError, "groups=2.0: expected an integer"),
        ({"groups": -1}, LayerError, "groups=-1: expected 1"),
        ({"stride": 0}, LayerError, "stride=0: expected 1"),
        ({"stride": -2}, LayerError, "stride=-2: expected 1"),
        ({"stride": 1.5}, LayerError, "stride=1.5: expected an integer"),
        ({"padding": 1.5}, LayerError, "padding=1.5: expected an integer"),
        ({"dilation": (1, 1.5)}, LayerError, "dilation[1]=1.5: expected an integer"),
        ({"output_padding": -1}, LayerError, "output_padding=-1: expected 0"),
        ({"output_padding": (0, 2), "stride": (3, 2)}, ArrayError, "output_padding=(0, 2): expected less than the str"),
        ({"layout": "nchw"}, LayerError, "layout='nchw': expected one of 'NCHW', 'NHWC'"),
        ({"x": np.ones((1, 3, 4, 4), ">f4")}, ArrayError, "x is >f4: expected the order of bytes of this machine"),
        ({"x": np.ones((1, 3, 0, 4), np.float32)}, LayerError, "H=0: expected 1"),
        ({"w": np.ones((2, 3, 3, 3), np.float32)}, ArrayError, "w has shape (2, 3, 3, 3): expected 3 in the first"),
    ],
)
def test_a_transposed_convolution_names_what_it_was_given(
    given: dict[str, object], error: type, words: str, quick: dict[str, object]
) -> None:
    arrays = {"x": np.ones((1, 3, 4, 4), np.float32), "w": np.ones((3, 2, 3, 3), np.float32)}
    with pytest.raises(error) as caught:
        autoconv.conv_transpose2d(**(arrays | given | quick))
    assert str(caught.value).startswith(words)


def float32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


X, W, DY, SEVEN = float32(1, 4, 6, 6), float32(4, 2, 3, 3), float32(1, 4, 4, 4), float32(7)
BYTES = X.astype(np.uint8), float32(5, 4, 3, 3).astype(np.int8)


@pytest.mark.parametrize("mode", ["hybrid", "profile", "heuristic", "cached", "direct"])
@pytest.mark.parametrize(
    ("convolve", "given", "name"),
    [
        (autoconv.conv2d, (X, W), "w"),  # without its groups
        (autoconv.conv2d, (X, W.astype(np.float64), None, {"groups": 2}), "w"),
        (autoconv.conv2d, (X, W, SEVEN, {"groups": 2}), "bias"),
        (autoconv.conv2d, (X, W, None, {"groups": 2, "residual": X}), "residual"),
        (autoconv.conv2d, (X, W, None, {"groups": 2, "activation": "prelu"}), "slope"),
        (autoconv.conv2d, (X, W, None, {"groups": 2, "slope": SEVEN}), "slope"),
        (autoconv.conv2d, (X, W, None, {"groups": 2, "out": X}), "out"),
        (autoconv.conv2d, (X, W, None, {"groups": 2, "padding": 1, "out": X}), "out: expected memory of its own"),
        (autoconv.conv2d_dgrad, (DY, W.astype(np.float64), {"input_size": (6, 6), "groups": 2}), "w"),
        (autoconv.conv2d_dgrad, (DY, W, {"input_size": (6, 6), "groups": 2, "out": DY}), "out"),
        (autoconv.conv2d_wgrad, (X, DY.astype(np.float64), {"filter_size": (3, 3)}), "dy"),
        (autoconv.conv2d_wgrad, (X, DY, {"filter_size": (3, 3), "out": W}), "out"),
        (autoconv.conv_transpose2d, (X, W.astype(np.float64)), "w"),
        (autoconv.conv_transpose2d, (X, W, SEVEN), "bias"),
        (autoconv.conv_transpose2d, (X, W, None, {"out": X}), "out"),
        (autoconv.conv2d_quantized, (BYTES[0], BYTES[1][:, :2]), "w"),
        (autoconv.conv2d_quantized, (BYTES[0], BYTES[1][:, :2], None, {"w_zero_point": 3}), "w"),
        (autoconv.conv2d_quantized, (*BYTES, SEVEN.astype(int)), "bias"),
    ],
)
def test_nothing_is_planned_for_arrays_that_do_not_fit(
    convolve: Any, given: tuple[Any, ...], name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[object] = []
    monkeypatch.setattr(functional_operands, "plan", lambda *given, **options: planned.append(given))
    *arrays, options = given if isinstance(given[-1], dict) else (*given, {})
    with pytest.raises(ArrayError, match=f"^{name}"):
        convolve(*arrays, **options, mode=mode)
    assert not planned


def test_arrays_are_checked_once_in_a_call(quick: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    operand = signature.Signature._operand

    def counted(self: signature.Signature, array: object, name: str, *expected: Any) -> Any:
        checked.append(name)
        return operand(self, array, name, *expected)

    monkeypatch.setattr(signature.Signature, "_operand", counted)
    x, w = np.ones((1, 2, 6, 6), np.float32), np.ones((3, 2, 3, 3), np.float32)
    autoconv.conv2d(x, w, np.ones(3, np.float32), residual=np.ones((1, 3, 4, 4), np.float32), **quick)
    assert checked == ["x", "w", "bias", "residual"]


def test_a_candidate_that_adds_no_bias_may_be_named_for_a_transposed_convolution() -> None:
    x, w, bias = (np.ones(shape, np.float32) for shape in ((1, 2, 4, 4), (2, 3, 3, 3), (3,)))
    plain = autoconv.conv_transpose2d(x, w, mode="numpy.gemm")
    assert np.allclose(autoconv.conv_transpose2d(x, w, bias, mode="numpy.gemm"), plain + 1)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_transposed_convolution_is_rounded_once_with_its_bias(layout: str, quick: dict[str, object]) -> None:
    channels = -3 if layout == "NCHW" else -1
    x = np.array([2048, 1], np.float16).reshape((1, 2, 1, 1) if layout == "NCHW" else (1, 1, 1, 2))
    w = np.ones((2, 3, 1, 1) if layout == "NCHW" else (2, 1, 1, 3), np.float16)
    bias = np.array([0, 1, 3], np.float16)
    y = autoconv.conv_transpose2d(x, w, bias, layout=layout, **quick)
    assert y.shape[channels] == 3
    assert y.ravel().tolist() == [2048, 2050, 2052], (
        "float16 has no 2049, which is to be rounded only when all is added"
    )


def test_lists_spell_pairs(quick: dict[str, object]) -> None:
    x, w = np.ones((1, 2, 6, 6), np.float32), np.ones((3, 2, 3, 3), np.float32)
    np.testing.assert_array_equal(
        autoconv.conv2d(x, w, stride=[2, 2], padding=[1, 1], **quick),
        autoconv.conv2d(x, w, stride=2, padding=1, **quick),
    )


def test_integers_of_numpy_are_integers(quick: dict[str, object]) -> None:
    x, w = np.ones((1, 4, 6, 6), np.float32), np.ones((4, 2, 3, 3), np.float32)
    two, sizes = np.int64(2), np.array([13, 13])
    y = autoconv.conv_transpose2d(x, w, stride=two, groups=two, **quick)
    assert y.shape == (1, 4, 13, 13)
    np.testing.assert_array_equal(
        autoconv.conv2d_dgrad(x, w, input_size=sizes, stride=two, groups=two, **quick),
        autoconv.conv2d_dgrad(x, w, input_size=(13, 13), stride=2, groups=2, **quick),
    )


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (np.ones(1, np.float32), r"bias is float32 \(1,\): expected float32 \(4,\)"),
        (np.ones((4, 1, 1), np.float32), r"bias is float32 \(4, 1, 1\)"),
        (np.ones(4), r"bias is float64 \(4,\): expected float32 \(4,\)"),
        ([1.0] * 4, "bias: expected an array of NumPy, or one that speaks DLPack, got list"),
    ],
)
def test_a_transposed_convolution_takes_no_bias_of_another_shape_or_type(
    bias: object, words: str, quick: dict[str, object]
) -> None:
    x, w = np.ones((1, 3, 6, 6), np.float32), np.ones((3, 4, 3, 3), np.float32)
    with pytest.raises(ArrayError, match=words):
        autoconv.conv_transpose2d(x, w, bias, **quick)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["heuristic", "direct"])
def test_a_transposed_convolution_gives_nothing_where_its_bias_lies(mode: str) -> None:
    x, w, memory = np.ones((1, 4, 5, 5), np.float32), np.ones((4, 3, 3, 3), np.float32), np.ones(147, np.float32)
    with pytest.raises(ArrayError, match="out: expected memory of its own, got an array that overlaps bias"):
        autoconv.conv_transpose2d(x, w, memory[:3], out=memory.reshape(1, 3, 7, 7), mode=mode)
    assert (memory == 1).all()


@pytest.mark.parametrize("mode", ["heuristic", "direct", "numpy.direct"])
def test_a_transposed_convolution_adds_its_bias_before_it_rounds(mode: str) -> None:
    x, w = np.full((1, 32, 8, 8), 16, np.float16), np.full((32, 8, 4, 4), 40, np.float16)
    y = autoconv.conv_transpose2d(x, w, np.full(8, -30000, np.float16), stride=2, padding=1, mode=mode)
    assert (y[0, 0, 8, 8], y[0, 0, 0, 0]) == (51920, -9520), "the sum alone is beyond the type"


def test_only_mode_hybrid_has_a_budget_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def planned(layer: ConvLayer, *, device: object, mode: str, budget: float | None) -> plans.Plan:
        asked.append((mode, budget))
        return planner.plan(layer, "numpy.direct", device=device)

    monkeypatch.setattr(functional_operands, "plan", planned)
    x, w = np.ones((1, 2, 6, 6), np.float32), np.ones((3, 2, 3, 3), np.float32)
    given = {}, {"mode": "hybrid", "budget": 1.0}, {"mode": "profile"}, {"mode": "profile", "budget": 0.5}
    for options in (*given, {"mode": "heuristic"}):
        autoconv.conv2d(x, w, **options)
    assert asked == [("hybrid", 0.2), ("hybrid", 1.0), ("profile", None), ("profile", 0.5), ("heuristic", None)]


def test_arrays_in_files_are_taken_in_every_type(tmp_path: Path, quick: dict[str, object]) -> None:
    for dtype in DTYPES.values():
        x = np.memmap(tmp_path / "x", dtype, "w+", shape=(1, 2, 6, 6))
        x[...] = 1
        y = autoconv.conv2d(x, np.ones((3, 2, 3, 3), dtype), **quick)
        assert y.dtype == dtype
        assert (y == 18).all()


def test_what_is_nowhere_is_refused(quick: dict[str, object]) -> None:
    class Nowhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise ValueError("there is no memory behind it")

        def __dlpack__(self, **options: object) -> object:
            raise ValueError("there is no memory behind it")

    with pytest.raises(ArrayError, match=r"x: expected an array that can be read .*, got Nowhere: there is no memory"):
        autoconv.conv2d(Nowhere(), np.ones((3, 2, 3, 3), np.float32), **quick)


def test_what_does_not_fit_is_refused(quick: dict[str, object]) -> None:
    x, w = np.ones((1, 2, 6, 6), np.float32), np.ones((3, 2, 3, 3), np.float32)
    dy = np.ones((1, 3, 4, 4), np.float32)
    with pytest.raises(ArrayError, match=r"x has shape .* expected four dimensions"):
        autoconv.conv2d(x[0], w, **quick)
    with pytest.raises(ArrayError, match=r"w: expected float32 \(3, 2, 3, 3\) .*, got float32 \(3, 3, 3, 3\)"):
        autoconv.conv2d(x, np.ones((3, 3, 3, 3), np.float32), **quick)
    for convolve, more in (
        (autoconv.conv2d, {}),
        (autoconv.conv2d_dgrad, {"input_size": (8, 8)}),
        (autoconv.conv_transpose2d, {}),
    ):
        with pytest.raises(ArrayError, match="arrays of uint8: expected floating point; conv2d_quantized takes bytes"):
            convolve(np.ones((1, 3, 6, 6), np.uint8), np.ones((3, 3, 3, 3), np.int8), **more, **quick)
    with pytest.raises(LayerError, match="dtype='int32'"):
        autoconv.conv2d(x.astype(np.int32), w, **quick)
    with pytest.raises(ArrayError, match=r"dy has \(K, P, Q\) = \(3, 4, 4\): expected \(3, 5, 5\)"):
        autoconv.conv2d_dgrad(dy, w, input_size=(7, 7), **quick)
    with pytest.raises(ArrayError, match="input_size=6: expected a pair of integers"):
        autoconv.conv2d_dgrad(dy, w, input_size=6, **quick)
    with pytest.raises(ArrayError, match="filter_size"):
        autoconv.conv2d_wgrad(x, dy, filter_size=(3,), **quick)
    autoconv.conv2d(x, w, groups=1, padding=1, **quick)
    for name, value in (("groups", 1.0), ("padding", True)):  # equal to what has been seen, but no integers
        with pytest.raises(LayerError, match=f"{name}={value}: expected an integer"):
            autoconv.conv2d(x, w, **({"groups": 1, "padding": 1, name: value} | quick))
    autoconv.conv2d(x, w, stride=(1, 1), padding=((1, 1), (1, 1)), **quick)
    for name, value in (("stride", (1.0, 1)), ("padding", ((1, True), (1, 1)))):
        with pytest.raises(LayerError, match=f"{name}.*: expected an integer"):
            autoconv.conv2d(x, w, **({"stride": (1, 1), "padding": ((1, 1), (1, 1)), name: value} | quick))
    with pytest.raises(ArrayError, match="x: expected an array of NumPy, or one that speaks DLPack, got NoneType"):
        autoconv.conv2d(None, w, **quick)
    with pytest.raises(ArrayError, match="w: expected an array of NumPy, or one that speaks DLPack, got NoneType"):
        autoconv.conv2d(x, None, **quick)
