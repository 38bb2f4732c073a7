"""Quantised layers: how they are stated, planned and run, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import integers
import numpy as np
import pytest

from autoconv import ArrayError, ConvLayer, LayerError, Quantization, TuningCache, conv2d_quantized, plan
from autoconv.common.types import MOST_TERMS
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.integer import NumpyInteger
from autoconv.tuning.verification import Verifier, WrongResultError

BASE: dict[str, Any] = {"N": 1, "C": 4, "H": 6, "W": 7, "K": 5, "R": 3, "S": 3, "dtype": "uint8"}
LAYER = ConvLayer(**BASE, output_dtype="int8")


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path / "own", system=None)


def test_keys_tell_layers_apart() -> None:
    layers = [
        ConvLayer(**(BASE | {"dtype": dtype}), output_dtype=output, activation=activation)
        for dtype, output, activation in itertools.product(
            ("uint8", "int8"), ("int32", "uint8", "int8", "float32"), (None, "relu")
        )
    ]
    assert len({layer.key() for layer in layers}) == len(layers)
    assert [ConvLayer.parse(layer.key()) for layer in layers] == layers
    assert ConvLayer(**BASE).key() == "fwd-uint8-NCHW-N1-C4-H6-W7-K5-R3-S3"
    assert LAYER.key() == "fwd-uint8-NCHW-N1-C4-H6-W7-K5-R3-S3-output_int8"
    assert LAYER.replace(N=2).output_dtype == "int8"
    assert LAYER.replace(dtype="float32").output_dtype == "float32"
    assert LAYER.replace(dtype="int8").output_dtype == "int32"


@pytest.mark.parametrize("mode", ["heuristic", "profile"])
@pytest.mark.parametrize("weights", ["constant", "varying"])
def test_there_is_a_plan_without_workspace(weights: str, mode: str, cache: TuningCache) -> None:
    """By NumPy, which else only stands in for kernels that cannot be compiled."""
    made = plan(LAYER, mode, weights=weights, workspace_limit=0, cache=cache, budget=0.01)
    assert (str(made.candidate), made.workspace_bytes) == ("numpy.int8", 0)


def test_the_types_of_a_quantised_layer() -> None:
    dtypes = LAYER.numpy_dtype, LAYER.w_numpy_dtype, LAYER.output_numpy_dtype, LAYER.accumulator
    assert [dtype.name for dtype in dtypes] == ["uint8", "int8", "int8", "int32"]
    assert ConvLayer(**BASE).bytes == 4 * 42 + 5 * 36 + 4 * 5 * 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"direction": "dgrad"}, "dtype='uint8': expected direction='fwd'"),
        ({"bias": True}, "a bias in its Quantization"),
        ({"residual": True}, "no residual"),
        ({"output_dtype": "int16"}, "output_dtype='int16': expected one of int32, uint8, int8, float32 for uint8"),
        ({"dtype": "float32", "output_dtype": "int8"}, "output_dtype='int8': expected 'float32', as the inputs are"),
        (
            {"C": 7311},
            "expected at most 65793 products in a sum, as more could overflow int32, got C/groups * R * S = 65799",
        ),
    ],
)
def test_what_is_no_quantised_layer_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayerError) as caught:
        ConvLayer(**(BASE | changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sums_may_be_as_deep_as_int32_holds() -> None:
    layer = ConvLayer(N=1, C=MOST_TERMS, H=1, W=1, K=1, R=1, S=1, dtype="uint8")
    x, w = np.full(layer.x_shape, 255, np.uint8), np.full(layer.w_shape, -128, np.int8)
    assert plan(layer, "heuristic").run(x, w, Quantization()).item() == -255 * 128 * MOST_TERMS
    with pytest.raises(ArrayError, match=r"bias\[0\]=-200000000: expected at most \d+ either way"):
        plan(layer, "heuristic").run(x, w, Quantization(bias=[-200000000]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": [1.0, 2.0]}, "scale: expected one value or K=5, got shape (2,)"),
        ({"scale": 0.0}, "scale[0]=0.0: expected a positive normal number of float32"),
        ({"scale": [1, 1, -0.5, 1, 1]}, "scale[2]=-0.5: expected a positive"),
        ({"scale": float("nan")}, "scale[0]=nan: expected a positive"),
        ({"scale": 1e-40}, "expected a positive normal number"),
        ({"x_zero_point": 256}, "x_zero_point=256: expected an integer from 0 to 255 for uint8"),
        ({"y_zero_point": 200}, "y_zero_point=200: expected an integer from -128 to 127 for int8"),
        ({"x_zero_point": 1.5}, "x_zero_point=1.5: expected an integer"),
        ({"y_zero_point": [[1], [2, 3]]}, "y_zero_point=[[1], [2, 3]]: expected an integer"),
        ({"bias": [[1], [2, 3]]}, "bias: expected K=5 integers, got object ()"),
        ({"bias": np.zeros(4, np.int32)}, "bias: expected K=5 integers, got int32 (4,)"),
        ({"bias": np.zeros(5)}, "bias: expected K=5 integers, got float64 (5,)"),
    ],
)
def test_what_does_not_fit_a_layer_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArrayError) as caught:
        Quantization(**given).operand(LAYER)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_refuses_what_it_was_not_made_for(cache: TuningCache) -> None:
    made = plan(LAYER, "heuristic", cache=cache)
    x, w = integers.drawn(LAYER)
    with pytest.raises(ArrayError, match=r"expected a Quantization, as fwd-uint8.* is quantised, got NoneType"):
        made.run(x, w)
    with pytest.raises(ArrayError, match="w: expected int8"):
        made.run(x, w.astype(np.uint8), Quantization())
    with pytest.raises(ArrayError, match="out: expected int8"):
        made.run(x, w, Quantization(), out=np.zeros(LAYER.y_shape, np.uint8))
    with pytest.raises(ArrayError, match="residual: expected None"):
        made.run(x, w, Quantization(), np.zeros(LAYER.y_shape, np.int8))
    wide = plan(ConvLayer(**BASE), "heuristic", cache=cache)
    with pytest.raises(ArrayError, match=r"scale=2\.0: expected 1, as the output of .* is int32"):
        wide.run(x, w, Quantization(2.0))


def test_a_layer_is_timed_verified_and_remembered(cache: TuningCache) -> None:
    layer = ConvLayer(**BASE, output_dtype="uint8", activation="relu", layout="NHWC")
    made = plan(layer, cache=cache, budget=0.2, weights="constant")
    assert {name.partition("[")[0] for name in made.timings} == {"int8"}
    assert all(facts.error == 0 for facts in made.facts.values() if facts.timed)
    x, w = integers.drawn(layer)
    given = {"scale": 0.003, "y_zero_point": 100}
    want = integers.output(layer, integers.sums(layer, x, w, 90), **given)
    meaning = Quantization(x_zero_point=90, **given)
    np.testing.assert_array_equal(made.run(x, made.pack(w), meaning), want)
    again = plan(layer, "cached", cache=cache, weights="constant")
    assert again.candidate == made.candidate
    np.testing.assert_array_equal(again.run(x, w, meaning), want)


@pytest.mark.parametrize("fault", ["one off", "unwritten"])
def test_a_wrong_or_missing_integer_is_found(fault: str) -> None:
    device = CPU.current()
    verifier = Verifier(LAYER, device)
    kernel = NumpyInteger().build(LAYER, device, {})
    right = kernel.run

    def run(a: Any, b: Any, out: Any, *rest: Any) -> None:
        before = out[0, 0, 0, 0].copy()
        right(a, b, out, *rest)
        out[0, 0, 0, 0] = before if fault == "unwritten" else out[0, 0, 0, 0] ^ 1

    kernel.run = run  # type: ignore[method-assign]
    if fault == "unwritten":
        with pytest.raises(WrongResultError, match="unwritten"):
            verifier.check(kernel, verifier.b)
    else:
        assert verifier.check(kernel, verifier.b)[0] > 0 == NumpyInteger().bound(LAYER, {})


W_ZEROS = {"int8": (0, 3, [1, -2, 0, 127, -128]), "uint8": (128, 0, 255, [128, 1, 2, 3, 4])}


@pytest.mark.parametrize(("w_dtype", "zero"), [(name, zero) for name, zeros in W_ZEROS.items() for zero in zeros])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW in memory as NHWC"])
def test_filters_of_either_type_and_any_zero_point(w_dtype: str, zero: Any, layout: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 255, (2, 4, 6, 7), np.uint8, endpoint=True)
    limits = np.iinfo(w_dtype)
    w = rng.integers(limits.min, limits.max, (5, 4, 3, 3), w_dtype, endpoint=True)
    layer = ConvLayer(**(BASE | {"N": 2}), padding=1, stride=2, output_dtype="int8", activation="relu")
    bias, scales = rng.integers(-500, 500, 5), rng.uniform(0.001, 0.01, 5).astype(np.float32)
    scale = np.float32(0.5) * scales / np.float32(0.3)
    want = integers.output(layer, integers.sums(layer, x, w, 130, zero), scale, -5, bias)
    if layout != "NCHW":
        x, w = (np.ascontiguousarray(array.transpose(0, 2, 3, 1)) for array in (x, w))
        if layout == "NHWC":
            want = want.transpose(0, 2, 3, 1)
        else:
            x, w = x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2)
    y = conv2d_quantized(
        x, w, bias, x_scale=0.5, x_zero_point=130, w_scale=scales, w_zero_point=zero, y_scale=0.3, y_zero_point=-5,
        output_dtype="int8", padding=1, stride=2, activation="relu", layout=layout[:4], mode="heuristic",
    )  # fmt: skip
    np.testing.assert_array_equal(y, want)


def test_bad_filters_are_refused() -> None:
    x, w = integers.drawn(LAYER)
    with pytest.raises(ArrayError, match=r"w_zero_point\[0\]=-1: expected 0 to 255, as w is uint8"):
        conv2d_quantized(x, w.view(np.uint8), w_zero_point=-1)
    with pytest.raises(ArrayError, match=r"w_zero_point\[0\]=4294967299: expected"):
        conv2d_quantized(x, w, w_zero_point=2**32 + 3)
    with pytest.raises(LayerError, match=r"groups=1.0: expected an integer"):
        conv2d_quantized(x, w, groups=1.0)
    for zero in ([1, 2], [[1], [2, 3]]):
        with pytest.raises(ArrayError, match="w_zero_point: expected one integer or K=5"):
            conv2d_quantized(x, w, w_zero_point=zero)
    with pytest.raises(ArrayError, match="w is float32: expected int8 or uint8"):
        conv2d_quantized(x, w.astype(np.float32))
    with pytest.raises(ArrayError, match="x is float32: expected uint8 or int8"):
        conv2d_quantized(x.astype(np.float32), w)
    deep = np.zeros((1, 40000, 1, 1), np.uint8)
    with pytest.raises(LayerError, match=r"w_zero_point=1: expected 0 .* could overflow int32"):
        conv2d_quantized(deep, deep.view(np.int8), w_zero_point=1)


@pytest.mark.parametrize("output_dtype", ["int32", "float32", "uint8"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x_scale": -1.0, "w_scale": -1.0}, "x_scale[0]=-1.0: expected a positive normal number of float32"),
        ({"w_scale": [1, 0, 1, 1, 1]}, "w_scale[1]=0.0: expected a positive"),
        ({"w_scale": [1.0, 2.0]}, "w_scale: expected one value or K=5, got shape (2,)"),
        ({"y_scale": 0}, "y_scale[0]=0.0: expected a positive"),
        ({"y_scale": [1.0, 2.0]}, "y_scale: expected one value, got shape (2,)"),
        ({"x_scale": "one"}, "x_scale='one': expected numbers"),
        ({"x_scale": "1"}, "x_scale='1': expected numbers"),
        ({"x_scale": None}, "x_scale=None: expected numbers"),
        ({"x_scale": 1e300}, "x_scale[0]=1e+300: expected a positive"),
    ],
)
def test_each_scale_is_refused_by_its_name(given: dict[str, Any], message: str, output_dtype: str) -> None:
    """Also where only their product would be used, or none of them."""
    x, w = integers.drawn(LAYER)
    with pytest.raises(ArrayError) as caught:
        conv2d_quantized(x, w, output_dtype=output_dtype, **given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_scales_whose_product_is_no_normal_number_are_refused() -> None:
    x, w = integers.drawn(LAYER)
    for scale in (1e-30, 1e30):
        with pytest.raises(ArrayError, match=r"scale\[0\]=.*expected a positive normal number"):
            conv2d_quantized(x, w, x_scale=scale, w_scale=scale, output_dtype="float32")


def test_what_becomes_of_an_array_later_changes_nothing() -> None:
    bias, scale = np.zeros(LAYER.K, np.int32), np.full(LAYER.K, 0.5, np.float32)
    meaning = Quantization(scale=scale, bias=bias)
    bias[:], scale[:] = 1000, 9.0
    assert (meaning.operand(LAYER) == Quantization(scale=0.5, bias=[0] * LAYER.K).operand(LAYER)).all()
