"""Depthwise layers on every instruction set, with nothing touched outside the arrays."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from guards import check_guarded
from layers import TAILS, edge, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv import reference
from autoconv.cpu import compiler
from autoconv.cpu.depthwise import Depthwise
from autoconv.cpu.device import CPU, host_instruction_set
from autoconv.layer import DTYPES, LAYOUTS, ConvLayer

pytestmark = [
    pytest.mark.skipif(not compiler.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
DEPTHWISE = Depthwise()


def depthwise(**fields: Any) -> ConvLayer:
    fields = {"N": 2, "C": 5, "H": 11, "W": 9, "R": 3, "S": 3, "padding": 1} | fields
    return ConvLayer(**({"K": fields["C"], "groups": fields["C"]} | fields))


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
    "row": {"R": 1, "S": 40, "padding": (0, 20), "H": 3, "W": 50},
}


def channels_last(fields: dict[str, Any]) -> dict[str, Any]:
    """The same problem in NHWC, with a channel multiplier of 1, short filters and more than a vector of channels."""
    return fields | {"layout": "NHWC", "C": 37, "K": 37, "groups": 37, "S": min(fields.get("S", 3), 15)}


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
def test_types_and_tails(instruction_set: str, dtype: str) -> None:
    device = device_with(instruction_set, 1)
    layers = [depthwise(dtype=dtype, layout=layout, **tail) for tail in TAILS.values() for layout in LAYOUTS]
    layers += [depthwise(dtype=dtype, direction="dgrad", stride=2)]
    for layer in layers:
        assert check_guarded(DEPTHWISE, layer, device, operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_columns_of_a_strided_gradient_are_woven_together(instruction_set: str, dtype: str) -> None:
    """Rows of even length by whole vectors, others one by one; by tasks of whole planes and of parts of them."""
    for width, planes, S in ((66, 3, 3), (67, 3, 3), (66, 16, 3), (64, 16, 1), (64, 16, 2)):
        shape = {"N": 1, "C": planes, "K": planes, "groups": planes, "H": 6, "W": width, "S": S}
        layer = depthwise(**shape, direction="dgrad", stride=2, dtype=dtype)
        assert check_guarded(DEPTHWISE, layer, device_with(instruction_set, 2), operands(layer))


class SmallCaches(CPU):
    """Caches so small that a plane is cut into several strips."""

    @property
    def facts(self) -> dict[str, Any]:  # type: ignore[override]
        return super().facts | {"l1_bytes": 256, "l2_bytes": 0}


def test_planes_in_strips() -> None:
    device = SmallCaches(threads=2, instruction_set=host_instruction_set())
    for fields in ({"H": 45}, {"H": 45, "stride": 2}, {"H": 61, "R": 13, "S": 13, "padding": 6, "W": 13}):
        layer = depthwise(**fields)
        assert check_guarded(DEPTHWISE, layer, device, operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_stores_past_the_caches(instruction_set: str) -> None:
    """Whatever the alignment of the output and the length of a row block."""
    device = SmallCaches(threads=2, instruction_set=instruction_set)
    for width in (1, 7, 14, 16, 33):
        for dtype in ("float32", "float64"):
            layer = depthwise(W=width, dtype=dtype, bias=True, residual=True, C=3, K=3, groups=3)
            runnable = [c for c in DEPTHWISE.all(layer, device) if not DEPTHWISE.why_not(layer, device, c.params)]
            assert any(c.params["nt"] for c in runnable)
            assert check_guarded(DEPTHWISE, layer, device, operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_channels_stored_past_the_caches(instruction_set: str) -> None:
    """Whole aligned vectors only; an output that starts elsewhere is stored as usual."""
    device = SmallCaches(threads=2, instruction_set=instruction_set)
    layer = depthwise(C=64, layout="NHWC", bias=True)
    x, w, bias, _ = operands(layer)
    size = math.prod(layer.y_shape) * 4
    room = device.buffer(size + 64)
    for candidate in DEPTHWISE.all(layer, device):
        assert not DEPTHWISE.why_not(layer, device, candidate.params)
        kernel = DEPTHWISE.build(layer, device, candidate.params)
        packed = device.buffer(kernel.packed_bytes)
        kernel.pack(w, packed)
        outputs = []
        for shift in (0, 4, 32):
            out = room[shift:][:size].view(np.float32).reshape(layer.y_shape)
            out[...] = np.nan
            kernel.run(x, packed, out, bias, None, device.buffer(0))
            outputs.append(out.copy())
        want, magnitude = reference.convolve(layer, x, w, bias), reference.magnitude(layer, x, w, bias)
        assert all(reference.error(out, want, magnitude) <= DEPTHWISE.bound(layer, {}) for out in outputs)


@pytest.mark.parametrize("name", ["plain", "large", "strided"])
def test_nan_reaches_its_receptive_field_only(name: str) -> None:
    device = CPU.current()
    layer = depthwise(**PROBLEMS[name], activation="relu")
    x, w, _, _ = operands(layer)
    x[1, 3, 2, 5] = np.nan
    seen = np.isnan(np.pad(x, ((0, 0), (0, 0), *layer.padding)))
    windows = np.lib.stride_tricks.sliding_window_view(seen, (layer.R, layer.S), (2, 3))
    want = windows[:, :, :: layer.stride[0], :: layer.stride[1]].any((-1, -2))
    for candidate in DEPTHWISE.all(layer, device):
        if DEPTHWISE.why_not(layer, device, candidate.params):
            continue
        kernel = DEPTHWISE.build(layer, device, candidate.params)
        out = device.empty(layer.y_shape, "float32")
        kernel.run(x, w, out, None, None, device.buffer(kernel.workspace_bytes))
        assert (np.isnan(out) == want).all()


def test_reasons_come_all_at_once() -> None:
    layer = edge("grouped", direction="wgrad")
    reasons = DEPTHWISE.why_not(layer, CPU.current(), {"BH": 99, "NV": 1, "nt": 0})
    for word in ("BH=99", "wgrad", "groups=3"):
        assert any(word in reason for reason in reasons), word
    layer = depthwise(layout="NHWC", K=10, S=17, padding=8)
    reasons = DEPTHWISE.why_not(layer, CPU.current(), {"BQ": 4, "NV": 99, "nt": 1})
    for word in ("NV=99", "K=10", "S=17", "second-level", "whole vectors"):
        assert any(word in reason for reason in reasons), word
