"""The problem: spelling, arithmetic, keys, and what is refused with which words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from layers import layers

from autoconv.errors import LayerError
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

BASE = {"N": 2, "C": 6, "H": 11, "W": 13, "K": 9, "R": 3, "S": 5}


@given(layers())
def test_a_key_is_canonical_and_parses_back(layer: ConvLayer) -> None:
    assert ConvLayer.parse(layer.key()) == layer
    assert eval(repr(layer), {"ConvLayer": ConvLayer}) == layer
    assert hash(ConvLayer.parse(layer.key())) == hash(layer)


@given(layers())
def test_derived_figures_count_what_the_loops_count(layer: ConvLayer) -> None:
    for extent, taps, out, axis in ((layer.H, layer.R, layer.P, 0), (layer.W, layer.S, layer.Q, 1)):
        before, after = layer.padding[axis]
        span = (taps - 1) * layer.dilation[axis] + 1
        starts = range(-before, extent + after - span + 1, layer.stride[axis])
        assert out == len(starts)
    sizes = [int(np.prod(shape)) for shape in (layer.x_shape, layer.w_shape, layer.y_shape)]
    assert layer.macs == sizes[2] * sizes[1] // layer.K
    of_channels = layer.output_channels * (layer.bias + (layer.activation == "prelu"))
    epilogue = int(np.prod(layer.output_shape)) * layer.residual + of_channels
    assert layer.bytes == (sum(sizes) + epilogue) * np.dtype(layer.numpy_dtype).itemsize
    assert layer.arithmetic_intensity == layer.flops / layer.bytes


@given(layers())
@example(ConvLayer(N=3, C=1, H=15, W=2, K=1, R=2, S=2, padding=((0, 1), (2, 0)), stride=(1, 3)))
@example(ConvLayer(N=1, C=1, H=4, W=4, K=1, R=1, S=1, padding=3, stride=8))
def test_what_sees_padding_only_has_no_terms(layer: ConvLayer) -> None:
    terms = reference.convolve(layer.replace(bias=False, residual=False), *(np.ones(s) for s in layer.input_shapes))
    assert layer.sees_padding_only == (not terms.any())


def test_equal_layers_are_equal_however_they_were_spelled() -> None:
    spellings = [
        ConvLayer(**BASE, stride=2, padding=1, dilation=1),
        ConvLayer(**{n: np.int64(v) for n, v in BASE.items()}, stride=(2, 2), padding=(1, 1)),
        ConvLayer(**BASE, stride=[2, 2], padding=((1, 1), (1, 1)), dtype=np.float32, bias=np.bool_(False)),
        ConvLayer(**BASE, stride=np.array([2, 2]), padding=[[1, 1], [1, 1]], dtype=np.dtype("f4")),
        ConvLayer(**BASE, stride=2, padding=1, dtype="float32", output_dtype=np.float32),
    ]
    assert len(set(spellings)) == 1
    assert len({layer.key() for layer in spellings}) == 1


@pytest.mark.parametrize(
    ("extent", "taps", "stride"), [(7, 3, 1), (7, 3, 2), (8, 3, 2), (224, 7, 2), (5, 2, 3), (4, 1, 2)]
)
def test_same_keeps_the_size_divided_by_the_stride(extent: int, taps: int, stride: int) -> None:
    layer = ConvLayer(N=1, C=1, H=extent, W=extent, K=1, R=taps, S=taps, stride=stride, padding="same")
    assert layer.P == layer.Q == -(-extent // stride)
    (top, bottom), _ = layer.padding
    assert bottom - top in (0, 1)
    assert ConvLayer(**BASE, padding="valid") == ConvLayer(**BASE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"N": 0}, "N=0: expected 1 to 2147483647"),
        ({"H": -3}, "H=-3: expected 1 to"),
        ({"C": 2**31}, "C=2147483648: expected 1"),
        ({"K": True}, "K=True: expected an integer, got a truth value"),
        ({"W": 2.0}, "W=2.0: expected an integer, got float"),
        ({"R": "3"}, "R='3': expected an integer, got str"),
        ({"stride": 0}, "stride=0: expected 1"),
        ({"stride": (1, 2, 3)}, "stride=(1, 2, 3): expected one integer or a pair (height, width), got 3 values"),
        ({"dilation": (1, -1)}, "dilation[1]=-1: expected 1"),
        ({"padding": -1}, "padding=-1: expected 0"),
        ({"padding": "full"}, "padding='full': expected one of 'same', 'valid'"),
        ({"padding": "same", "R": 5, "dilation": 2**31 - 1}, "padding=4294967294: expected 0 to 2147483647"),
        ({"padding": ((1, 2), 3, 4)}, "'same' or 'valid', got 3 values"),
        ({"groups": 4}, "groups=4: it must divide C=6"),
        ({"C": 8, "groups": 4}, "groups=4: it must divide K=9"),
        ({"dtype": "int16"}, "dtype='int16': expected one of float32, float64, float16, bfloat16, uint8, int8"),
        ({"dtype": np.int64}, "dtype='int64': expected one of"),
        ({"dtype": object()}, "dtype="),
        ({"dtype": None}, "dtype='None': expected one of float32"),
        ({"output_dtype": np.int8}, "expected 'float32', as the inputs are"),
        ({"dtype": "int8", "output_dtype": [1]}, "output_dtype='[1]': expected one of int32, uint8"),
        ({"layout": "CHWN"}, "layout='CHWN': expected one of 'NCHW', 'NHWC'"),
        ({"direction": "forward"}, "direction='forward': expected one of 'fwd', 'dgrad', 'wgrad'"),
        ({"activation": "swish"}, "activation='swish': expected one of None, 'relu'"),
        ({"activation": "clip:1:1"}, "activation='clip:1:1': expected LOW less than HIGH"),
        ({"activation": "leaky_relu:inf"}, "activation='leaky_relu:inf': expected finite numbers, got 'inf'"),
        ({"bias": 1}, "bias=1: expected True or False"),
        ({"R": 12}, "R=12 with dilation 1 spans 12, more than the padded H of 11: the output is empty"),
        ({"dilation": 6}, "R=3 with dilation 6 spans 13, more than the padded H of 11"),
        (
            {"direction": "wgrad", "bias": True},
            "direction='wgrad': bias, residual and activation are allowed for 'fwd' and 'dgrad' only",
        ),
        ({"direction": "wgrad", "activation": "relu"}, "allowed for 'fwd' and 'dgrad' only"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, object], words: str) -> None:
    with pytest.raises(LayerError) as caught:
        ConvLayer(**(BASE | changes))  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "nonsense",
        "fwd-float32-NCHW-N1-C1-H1-W1-K1-R1",
        "fwd-float32-NCHW-N1-C1-H1-W1-K1-R1-S1-stride1x1",  # not canonical: a default is spelled out
        "fwd-float32-NCHW-N01-C1-H1-W1-K1-R1-S1",
        "fwd-float32-NCHW-N1-C1-H1-W1-K1-R1-S1-groups0",
        "fwd-int16-NCHW-N1-C1-H1-W1-K1-R1-S1",
        "fwd-float32-NCHW-N1-C1-H1-W1-K1-R1-S1-output_float32",
        "fwd-float32-NCHW-N1-C1-H1-W1-K1-R1-S1" + "0" * 400,
        17,
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(LayerError):
        ConvLayer.parse(key)


def test_a_layer_cannot_be_changed_but_can_be_replaced() -> None:
    layer = ConvLayer(**BASE)
    with pytest.raises(AttributeError):
        layer.N = 3  # type: ignore[misc]
    assert layer.replace(N=3).N == 3
    with pytest.raises(LayerError, match="groups=5"):
        layer.replace(groups=5)
