"""Depthwise planes as single runs of pixels, on every instruction set, with nothing touched outside the arrays."""

from __future__ import annotations

import os
from typing import Any

import pytest
from guards import check_guarded
from layers import EPILOGUES, depthwise, edge, operands
from vectors import INSTRUCTION_SETS, device_with, machine_named

from autoconv.cpu import pool
from autoconv.cpu.depthwise.algorithm import Depthwise
from autoconv.cpu.depthwise.flat import DepthwiseFlat
from autoconv.cpu.device import CPU
from autoconv.layer import DTYPES, ConvLayer

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
FLAT = DepthwiseFlat()


def small(**fields: Any) -> ConvLayer:
    return depthwise(**({"H": 7, "W": 7} | fields))


PROBLEMS: dict[str, dict[str, Any]] = {
    "seven": {},
    "one pixel": {"H": 1, "W": 1},
    "single rows": {"N": 1, "C": 1, "H": 5, "W": 16, "R": 1},
    "fewer rows": {"H": 9, "W": 5, "padding": (0, 1)},
    "more rows": {"H": 4, "W": 6, "padding": (3, 1)},
    "five": {"R": 5, "S": 5, "padding": 2},
    "dilated": {"dilation": (3, 2), "padding": (2, 2), "H": 8},
    "uneven": {"padding": ((0, 2), (2, 0)), "H": 6, "W": 11},
    "multiplier": {"K": 15},
    "many planes": {"C": 70},
}


@pytest.mark.parametrize("direction", ["fwd", "dgrad"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_problems(instruction_set: str, name: str, direction: str) -> None:
    layer, device = small(**PROBLEMS[name], direction=direction), device_with(instruction_set, 2)
    if direction == "dgrad" and name == "multiplier":
        assert FLAT.why_not(layer, device, {}) == ["dgrad: expected one filter for each channel, got 3"]
    else:
        assert check_guarded(FLAT, layer, device, operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_types_and_epilogues(instruction_set: str, dtype: str) -> None:
    for epilogue in EPILOGUES.values():
        layer = small(dtype=dtype, **epilogue)
        assert check_guarded(FLAT, layer, device_with(instruction_set, 1), operands(layer))


def test_what_it_refuses() -> None:
    device = CPU.current()
    for layer, reason in (
        (small(stride=2), "stride: expected 1x1, got 2x2"),
        (small(padding=0), "columns: expected as many of the output as of the input, got 5 and 7"),
        (small(layout="NHWC"), "layout: expected NCHW, got NHWC"),
        (edge("plain"), "channels: expected depthwise, got dense"),
    ):
        assert reason in FLAT.why_not(layer, device, {})
    (reason,) = FLAT.why_not(small(H=112, W=112), device, {})
    assert reason.startswith("vectors of a plane by taps: expected at most 512, written out, got ")


def test_it_is_expected_to_gain_where_rows_are_short() -> None:
    machine = machine_named("epyc-zen5")
    device = CPU(machine.threads, "avx512", model=machine.text)
    for extent, taps, gains in ((7, 3, True), (7, 5, True), (14, 5, False), (28, 3, False)):
        layer = small(N=1, C=512, H=extent, W=extent, R=taps, S=taps, padding=taps // 2)
        rows = min(Depthwise().estimate(layer, device, params) for params in Depthwise().candidates(layer, device))
        assert (FLAT.estimate(layer, device, {}) < rows) is gains
