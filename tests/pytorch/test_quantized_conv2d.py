"""`conv2d_quantized` gives what PyTorch's quantised convolution does, bit by bit, where that is defined.

Of its two libraries for x86 that is FBGEMM's answer; oneDNN adds the zero point before it rounds, so that a tie may go
to the other side. FBGEMM's kernels for processors without VNNI add two products of bytes in 16 bits, which saturate:
inputs are of 7 bits here, as PyTorch's own settings for x86 make them. A bias is of float32 there, and added before
rounding: it is a whole number of `x_scale * w_scale` here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

import autoconv  # noqa: E402

ENGINE = "fbgemm"
OFFERED = ENGINE in torch.backends.quantized.supported_engines and hasattr(torch, "quantize_per_tensor")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded, strided": {"padding": (1, 2), "stride": (2, 1)},
    "dilated": {"dilation": 2, "padding": 2},
    "1x1": {"taps": 1},
    "grouped": {"groups": 4},
    "depthwise": {"groups": 32, "channels": 32, "padding": 1},
    "depthwise, strided": {"groups": 32, "channels": 32, "padding": 1, "stride": 2},
}


def _pair(value: int | tuple[int, int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


@pytest.mark.skipif(not OFFERED, reason="NOT CHECKED: this PyTorch has no quantised kernels")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("relu", [False, True], ids=["", "ReLU"])
@pytest.mark.parametrize("each", [False, True], ids=["one scale", "a scale for each filter"])
@pytest.mark.parametrize("case", CASES)
def test_the_answers_are_those_of_pytorch(case: str, each: bool, relu: bool) -> None:
    fields = {"channels": 16, "taps": 3, "groups": 1, "stride": 1, "padding": 0, "dilation": 1} | CASES[case]
    rng = np.random.default_rng(len(case))
    K, taps, groups = fields["channels"], fields["taps"], fields["groups"]
    x = rng.integers(0, 127, (2, 32, 9, 11), np.uint8, endpoint=True)
    w = rng.integers(-127, 127, (K, 32 // groups, taps, taps), np.int8, endpoint=True)
    x_scale, x_zero, y_scale, y_zero = 0.0625, 61, 0.37, 113
    scales = rng.uniform(0.001, 0.01, K).astype(np.float32) if each else np.full(K, 2.0**-9, np.float32)
    y_scale *= float(np.sqrt(w[0].size) * 10 * scales.mean())
    bias = rng.integers(-3000, 3000, K) if not each else np.zeros(K, np.int64)  # whole numbers of a power of 2
    strides = [_pair(fields[name]) for name in ("stride", "padding", "dilation")]

    given = torch.quantize_per_tensor(
        torch.from_numpy((x - np.float32(x_zero)) * x_scale), x_scale, x_zero, torch.quint8
    )
    if each:
        exact = torch.from_numpy(scales).double(), torch.zeros(K, dtype=torch.int64)
        filters = torch._make_per_channel_quantized_tensor(torch.from_numpy(w), *exact, 0)
    else:
        filters = torch._make_per_tensor_quantized_tensor(torch.from_numpy(w), float(scales[0]), 0)
    assert (given.int_repr().numpy() == x).all()
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINE
    try:
        in_float = torch.from_numpy((bias * np.float64(x_scale) * scales).astype(np.float32))
        packed = torch.ops.quantized.conv2d_prepack(filters, in_float, *strides, groups)
        convolve = torch.ops.quantized.conv2d_relu if relu else torch.ops.quantized.conv2d
        wanted = convolve(given, packed, y_scale, y_zero).int_repr().numpy()
    finally:
        torch.backends.quantized.engine = engine
    y = autoconv.conv2d_quantized(
        x, w, bias, x_scale=x_scale, x_zero_point=x_zero, w_scale=scales if each else float(scales[0]), y_scale=y_scale,
        y_zero_point=y_zero, output_dtype="uint8", groups=groups, stride=fields["stride"], padding=fields["padding"],
        dilation=fields["dilation"], activation="relu" if relu else None, mode="heuristic", vendors=False,
    )  # fmt: skip
    assert len(np.unique(wanted)) > 50
    np.testing.assert_array_equal(y, wanted)


def test_what_becomes_of_a_tensor_later_changes_nothing() -> None:
    layer = autoconv.ConvLayer(N=1, C=1, H=1, W=1, K=1, R=1, S=1, dtype="uint8")
    bias, scale = torch.tensor([5]), torch.tensor([1.0])
    meaning = autoconv.Quantization(scale=scale, bias=bias)
    bias[0], scale[0] = 99, 9.0
    assert (meaning.operand(layer) == autoconv.Quantization(bias=[5]).operand(layer)).all()
