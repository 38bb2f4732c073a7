"""Depthwise layers on every instruction set, with nothing touched outside the arrays."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from guards import check_guarded, some, some_runnable
from layers import EPILOGUES, depthwise, edge, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.depthwise.algorithm import Depthwise
from autoconv.cpu.device import CPU, host_instruction_set
from autoconv.layer import DTYPES, LAYOUTS, ConvLayer
from autoconv.tuning import reference

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
DEPTHWISE = Depthwise()


PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide": {"H": 6, "W": 71},
    "valid": {"padding": 0, "H": 3, "W": 18},
    "seven": {"H": 7, "W": 7, "C": 9, "K": 9, "groups": 9},
    "fourteen": {"H": 14, "W": 14},
    "strided": {"H": 16, "W": 35, "stride": 2},
    "same strided": {"H": 16, "W": 33, "stride": 2, "padding": "same"},
    "stride skips pixels": {"R": 2, "S": 1, "stride": (4, 3), "H": 17, "W": 20, "padding": 0},
    "five strided": {"R": 5, "S": 5, "padding": 2, "H": 13, "W": 40, "stride": (1, 2)},
    "dilated": {"dilation": (2, 3), "padding": (2, 3), "H": 14, "W": 20},
    "asymmetric": {"padding": ((0, 2), (3, 0)), "H": 9, "W": 17},
    "padding beyond the filter": {"padding": ((4, 3), (5, 2)), "R": 2, "S": 2, "H": 3, "W": 4, "stride": (2, 3)},
    "multiplier": {"K": 15, "H": 8, "W": 19},
    "large": {"R": 13, "S": 15, "padding": (6, 7), "H": 20, "W": 22},
    "large strided": {"R": 11, "S": 9, "padding": (5, 4), "H": 21, "W": 30, "stride": 2},
    "large dilated": {"R": 9, "S": 9, "padding": 8, "H": 19, "W": 18, "dilation": 2},
    "filter beyond the image": {"R": 9, "S": 7, "padding": (4, 3), "H": 3, "W": 2},
    "very wide": {"N": 1, "C": 2, "H": 3, "W": 611},
    "very wide and strided": {"N": 1, "C": 2, "H": 4, "W": 1217, "stride": 2, "padding": (1, 40)},
    "row": {"R": 1, "S": 40, "padding": (0, 20), "H": 3, "W": 50},
}


def channels_last(fields: dict[str, Any]) -> dict[str, Any]:
    """The same problem in NHWC, with a channel multiplier of 1, short filters and more than a vector of channels."""
    return fields | {
        "layout": "NHWC",
        "C": 37,
        "K": 37,
        "groups": 37,
        "W": min(fields.get("W", 9), 80),
        "S": min(fields.get("S", 3), 15),
    }


@pytest.mark.parametrize("direction", ["fwd", "dgrad"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_problems(instruction_set: str, name: str, layout: str, direction: str) -> None:
    fields = PROBLEMS[name] if layout == "NCHW" else channels_last(PROBLEMS[name])
    layer = depthwise(**fields, direction=direction)
    assert check_guarded(DEPTHWISE, layer, device_with(instruction_set, 2), operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_types_and_epilogues(instruction_set: str, dtype: str) -> None:
    device = device_with(instruction_set, 1)
    layers = [
        depthwise(dtype=dtype, layout=layout, **epilogue) for epilogue in EPILOGUES.values() for layout in LAYOUTS
    ]
    layers += [depthwise(dtype=dtype, direction="dgrad", stride=2)]
    for layer in layers:
        assert check_guarded(DEPTHWISE, layer, device, operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_columns_of_a_strided_gradient_are_interleaved(instruction_set: str, dtype: str) -> None:
    """Rows of any length, columns that see nothing; by tasks of whole planes and of parts of them."""
    for width, planes, S, stride in ((66, 3, 3, 2), (67, 3, 3, 2), (66, 16, 3, 2), (64, 16, 1, 2), (67, 3, 3, (1, 5))):
        shape = {"N": 1, "C": planes, "K": planes, "groups": planes, "H": 6, "W": width, "S": S}
        layer = depthwise(**shape, direction="dgrad", stride=stride, dtype=dtype)
        assert check_guarded(DEPTHWISE, layer, device_with(instruction_set, 2), operands(layer))


COMPONENTS: dict[str, dict[str, Any]] = {
    "all of them blind": {"H": 7, "W": 2, "S": 1, "padding": (1, 2), "stride": 4},
    "of other gaps": {"R": 10, "S": 7, "dilation": 2, "H": 25, "W": 40, "stride": 3, "padding": 4},
    "in loops": {"R": 23, "S": 12, "padding": 9, "H": 20, "W": 47, "stride": 2},
    "in loops, of other gaps": {"R": 20, "S": 19, "dilation": 2, "H": 37, "W": 41, "stride": 3, "padding": 6},
}


@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_phases(instruction_set: str, name: str) -> None:
    """Components that begin apart, whose taps lie differently far apart, or that have none."""
    layer = depthwise(**COMPONENTS[name], direction="dgrad")
    assert check_guarded(DEPTHWISE, layer, device_with(instruction_set, 2), operands(layer))


SMALL_CACHES = 256, 256, 1 << 24  # caches so small that a plane is cut into several strips


def test_planes_in_strips() -> None:
    device = device_with(host_instruction_set(), 2, SMALL_CACHES)
    for fields in ({"H": 45}, {"H": 45, "stride": 2}, {"H": 61, "R": 13, "S": 13, "padding": 6, "W": 13}):
        layer = depthwise(**fields)
        assert check_guarded(DEPTHWISE, layer, device, operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_stores_past_the_caches(instruction_set: str) -> None:
    """Whatever the alignment of the output, where blocks of rows are whole cache lines if it is aligned."""
    device = device_with(instruction_set, 2, SMALL_CACHES)
    remainders: dict[str, Any] = {"H": 12, "W": 16, "bias": True, "residual": True}
    for fields in (remainders, {"H": 16, "W": 28}, {"H": 16, "W": 56, "direction": "dgrad", "stride": 2}):
        for dtype in ("float32", "float64"):
            layer = depthwise(**fields, dtype=dtype, C=3)
            streaming = [c for c in DEPTHWISE.all(layer, device) if c.params["nt"]]
            streaming = [c for c in streaming if not DEPTHWISE.why_not(layer, device, c.params)]
            assert streaming
            assert check_guarded(DEPTHWISE, layer, device, operands(layer))
            for candidate in some(streaming):
                check_shifted(layer, device, candidate.params, (layer.itemsize, 16, 32))
    for width in (14, 33):
        layer = depthwise(H=15, W=width)
        for candidate in DEPTHWISE.all(layer, device):
            reasons = DEPTHWISE.why_not(layer, device, candidate.params)
            assert any("cache lines" in reason for reason in reasons) == bool(candidate.params["nt"])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_channels_stored_past_the_caches(instruction_set: str) -> None:
    """Whole aligned vectors only; an output that starts elsewhere is stored as usual."""
    device = device_with(instruction_set, 2, SMALL_CACHES)
    layer = depthwise(C=64, layout="NHWC", bias=True)
    for candidate in some_runnable(DEPTHWISE, layer, device, 6):
        check_shifted(layer, device, candidate.params, (0, 4, 32))


def check_shifted(layer: ConvLayer, device: CPU, params: Any, shifts: tuple[int, ...]) -> None:
    """An output so many bytes beyond the beginning of a cache line."""
    a, b, bias, residual = operands(layer)
    size = math.prod(layer.output_shape) * layer.itemsize
    kernel = DEPTHWISE.build(layer, device, params)
    filters = device.buffer(kernel.packed_bytes) if kernel.packed_bytes else b
    if kernel.packed_bytes:
        kernel.pack(b, filters)
    want = reference.convolve(layer, a, b, bias, residual)
    magnitude = reference.magnitude(layer, a, b, bias, residual)
    for shift in shifts:
        room = device.buffer(size + 2 * 64)
        room[...] = 0xFF
        out = room[shift:][:size].view(layer.numpy_dtype).reshape(layer.output_shape)
        kernel.run(a, filters, out, bias, residual, device.buffer(kernel.workspace_bytes))
        assert reference.error(out, want, magnitude) <= DEPTHWISE.bound(layer, {})
        assert (room[:shift] == 0xFF).all()
        assert (room[shift + size :] == 0xFF).all()


@pytest.mark.parametrize("name", ["plain", "large", "strided"])
def test_nan_reaches_its_receptive_field_only(name: str) -> None:
    device = CPU.current()
    layer = depthwise(**PROBLEMS[name], activation="relu")
    x, w, _, _ = operands(layer)
    x[1, 3, 2, 5] = np.nan
    seen = np.isnan(np.pad(x, ((0, 0), (0, 0), *layer.padding)))
    windows = np.lib.stride_tricks.sliding_window_view(seen, (layer.R, layer.S), (2, 3))
    want = windows[:, :, :: layer.stride[0], :: layer.stride[1]].any((-1, -2))
    for candidate in some_runnable(DEPTHWISE, layer, device):
        kernel = DEPTHWISE.build(layer, device, candidate.params)
        out = device.empty(layer.y_shape, "float32")
        kernel.run(x, w, out, None, None, device.buffer(kernel.workspace_bytes))
        assert (np.isnan(out) == want).all()


def test_reasons_come_all_at_once() -> None:
    outside = DEPTHWISE.why_not(edge("grouped", direction="wgrad"), CPU.current(), {})
    assert outside == [
        "direction: expected fwd or dgrad, got wgrad",
        "channels: expected depthwise, got grouped",
    ]
    (other,) = DEPTHWISE.why_not(edge("depthwise"), CPU.current(), {"TP": 99, "NV": 1, "nt": 0})
    assert other.startswith("TP=99,NV=1: expected TP=")
    sparse = depthwise(W=90, stride=(1, 17))
    assert "stride: expected at most 16 columns, got 17" in DEPTHWISE.why_not(
        sparse, CPU.current(), {"TP": 1, "NV": 1, "nt": 0}
    )
    wrong = {"TQ": 4, "NV": 99, "nt": 1}
    cases: list[tuple[dict[str, int], tuple[str, ...]]] = [
        ({"K": 10, "S": 17, "padding": 8}, ("K=10", "S=17")),
        ({}, ("NV=99", "L2 cache", "whole vectors")),
    ]
    for fields, words in cases:
        reasons = DEPTHWISE.why_not(depthwise(layout="NHWC", **fields), CPU.current(), wrong)
        assert all(word in reason for word, reason in zip(words, reasons, strict=True))


def test_a_single_channel_is_depthwise_too() -> None:
    layer = ConvLayer(N=1, C=1, H=9, W=9, K=1, R=3, S=3)
    assert check_guarded(DEPTHWISE, layer, CPU.current(), operands(layer))
