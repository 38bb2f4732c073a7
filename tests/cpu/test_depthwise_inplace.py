"""Depthwise rows read in place, on every instruction set, with nothing touched outside the arrays."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from guards import check_guarded, some, some_runnable
from layers import EPILOGUES, depthwise, edge, operands
from vectors import INSTRUCTION_SETS, device_with, machine_named

from autoconv.cpu import pool
from autoconv.cpu.depthwise import kernels_inplace
from autoconv.cpu.depthwise.algorithm import Depthwise
from autoconv.cpu.depthwise.inplace import DepthwiseInPlace, _blocking
from autoconv.cpu.device import CPU
from autoconv.layer import DTYPES

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
INPLACE = DepthwiseInPlace()

PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide": {"H": 6, "W": 71},
    "whole vectors": {"H": 5, "W": 112},
    "valid": {"padding": 0, "H": 3, "W": 18},
    "strided": {"H": 16, "W": 35, "stride": 2},
    "wide and strided": {"H": 7, "W": 224, "stride": 2},
    "strided, with an odd image": {"H": 16, "W": 97, "stride": 2, "padding": "same"},
    "stride skips pixels": {"R": 2, "S": 1, "stride": (4, 3), "H": 17, "W": 20, "padding": 0},
    "five strided": {"R": 5, "S": 5, "padding": 2, "H": 13, "W": 140, "stride": (1, 3)},
    "dilated": {"dilation": (2, 3), "padding": (2, 3), "H": 14, "W": 60},
    "dilated and strided": {"dilation": 3, "padding": 4, "H": 14, "W": 80, "stride": 2},
    "dilated beyond a vector": {"dilation": (1, 35), "padding": (1, 35), "H": 4, "W": 90, "stride": (1, 2)},
    "asymmetric": {"padding": ((0, 2), (3, 0)), "H": 9, "W": 17},
    "padding beyond the filter": {"padding": ((4, 3), (5, 2)), "R": 2, "S": 2, "H": 3, "W": 4, "stride": (2, 3)},
    "padding of vectors": {"padding": ((0, 0), (40, 37)), "H": 4, "W": 5},
    "multiplier": {"K": 15, "H": 8, "W": 19},
    "many planes": {"C": 70},
    "one pixel": {"H": 1, "W": 1},
}


@pytest.mark.parametrize("direction", ["fwd", "dgrad"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_problems(instruction_set: str, name: str, direction: str) -> None:
    layer, device = depthwise(**PROBLEMS[name], direction=direction), device_with(instruction_set, 2)
    if direction == "dgrad" and (name == "multiplier" or layer.stride != (1, 1)):
        (reason,) = INPLACE.why_not(layer, device, next(iter(Depthwise().candidates(layer, device))))
        assert reason.startswith("dgrad: expected one ")
    else:
        assert check_guarded(INPLACE, layer, device, operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_vectors_around_the_row_of_zeros_are_the_workspaces_own(
    monkeypatch: pytest.MonkeyPatch, instruction_set: str, name: str, dtype: str
) -> None:
    """What masks leave out there is read for every channel, and slow where the process has no memory."""
    layer, device = depthwise(**PROBLEMS[name], dtype=dtype), device_with(instruction_set, 1)
    places: list[tuple[int, int]] = []
    load = kernels_inplace._Row._load

    def seen(row: Any, column: int) -> Any:
        first = row.segment.start * row.columns.stride + column
        last = first + (row.segment.times - 1) * row.segment.pixels * row.columns.stride
        if any(first + lane >= 0 and last + lane < row.columns.size for lane in range(row.lanes)):
            places.append((first, last + row.lanes))
        return load(row, column)

    monkeypatch.setattr(kernels_inplace._Row, "_load", seen)
    params = next(iter(INPLACE.candidates(layer, device)))
    kernels_inplace.emit(instruction_set, layer, _blocking(device, params))
    room = INPLACE.workspace_bytes(layer, device, params) // layer.itemsize
    margin = kernels_inplace._margin(layer)
    assert places
    assert all(-margin <= low and high <= room - margin for low, high in places)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_types_and_epilogues(instruction_set: str, dtype: str) -> None:
    for stride in (1, 2):
        for epilogue in EPILOGUES.values():
            layer = depthwise(dtype=dtype, stride=stride, W=41, **epilogue)
            assert check_guarded(INPLACE, layer, device_with(instruction_set, 1), operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_stores_past_the_caches(instruction_set: str) -> None:
    """Where blocks of rows are whole cache lines."""
    device = device_with(instruction_set, 2, (256, 256, 1 << 24))
    for fields in ({"H": 12, "W": 16, "bias": True, "residual": True}, {"H": 32, "W": 56, "stride": 2}):
        layer = depthwise(**fields, C=3)
        streaming = [c for c in INPLACE.all(layer, device) if c.params["nt"]]
        streaming = [c for c in streaming if not INPLACE.why_not(layer, device, c.params)]
        assert check_guarded(INPLACE, layer, device, operands(layer), [str(c) for c in some(streaming)])
    layer = depthwise(H=15, W=33)
    for candidate in INPLACE.all(layer, device):
        reasons = INPLACE.why_not(layer, device, candidate.params)
        assert any("cache lines" in reason for reason in reasons) == bool(candidate.params["nt"])


@pytest.mark.parametrize(("stride", "lines"), [(1, 4 * 7), (2, 8 * 14)])
def test_a_block_fetches_the_rows_that_another_two_blocks_below_sees_first(stride: int, lines: int) -> None:
    """Once each, though the block sees some rows more than that, as the one above it does."""
    layer = depthwise(H=112, W=112 * stride, stride=stride)
    blocking = kernels_inplace.InPlaceBlocking(TP=4, NV=7, nt=False, threads=1)
    functions = kernels_inplace.emit("avx512", layer, blocking).functions
    fetched = {f.name: str(f).count("@llvm.prefetch") for f in functions if f.name.startswith("task_")}
    assert fetched == {"task_4_0": lines}


@pytest.mark.parametrize("stride", [1, 2])
def test_nan_reaches_its_receptive_field_only(stride: int) -> None:
    device = CPU.current()
    layer = depthwise(W=40, activation="relu", stride=stride)
    x, w, _, _ = operands(layer)
    x[1, 3, 2, 5] = np.nan
    seen = np.isnan(np.pad(x, ((0, 0), (0, 0), *layer.padding)))
    windows = np.lib.stride_tricks.sliding_window_view(seen, (layer.R, layer.S), (2, 3))
    want = windows[:, :, ::stride, ::stride].any((-1, -2))
    for candidate in some_runnable(INPLACE, layer, device):
        kernel = INPLACE.build(layer, device, candidate.params)
        out = device.empty(layer.y_shape, "float32")
        kernel.run(x, w, out, None, None, device.buffer(kernel.workspace_bytes))
        assert (np.isnan(out) == want).all()


def test_what_it_refuses() -> None:
    device, tile = CPU.current(), {"TP": 1, "NV": 1, "nt": 0}
    for layer, reason in (
        (depthwise(layout="NHWC"), "layout: expected NCHW, got NHWC"),
        (edge("plain"), "channels: expected depthwise, got dense"),
        (depthwise(R=7, S=4, padding=3), "filters: expected at most 25 taps, written out, got 28"),
        (depthwise(direction="dgrad", stride=2), "dgrad: expected one correlation, got 4, as of strides"),
    ):
        assert reason in INPLACE.why_not(layer, device, tile)
    (reason,) = INPLACE.why_not(depthwise(), device, tile | {"TP": 99})
    assert reason.startswith("TP=99,NV=1: expected TP=")


def test_it_is_expected_to_gain_where_rows_are_long() -> None:
    machine = machine_named("epyc-zen5")
    device = CPU(machine.threads, "avx512", model=machine.text)
    for stride in (1, 2):
        layer = depthwise(N=1, C=32, H=112, W=112, stride=stride)
        copied, inplace = (
            min(family.estimate(layer, device, params) for params in family.candidates(layer, device))
            for family in (Depthwise(), INPLACE)
        )
        assert inplace < copied
