"""Winograd's gradient of the filters: every split of a layer, every instruction set, inside its buffers and bound."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from guards import check_candidate
from layers import EDGES, edge, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.algorithm import PADDING_ONLY, Params
from autoconv.cpu import pool
from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.device import CPU
from autoconv.cpu.winograd.gradients import WinogradWgrad, tiling_of

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
ALGORITHM = WinogradWgrad()
SMALL: Params = {"m": "2x2", "rows": 2, "slices": 2}


run = functools.partial(check_candidate, ALGORITHM)


FITTING = [name for name in EDGES if not ALGORITHM.why_not(edge(name, direction="wgrad"), DEVICE, SMALL)]


def test_most_edges_fit() -> None:
    assert {"remainders", "stem", "strided", "dilated strided", "row filter", "large filter", "grouped"} < set(FITTING)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FITTING)
def test_edges_on_every_instruction_set(name: str, instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    for layout, side in (("NCHW", "after"), ("NHWC", "before"))[: 2 if instruction_set == INSTRUCTION_SETS[0] else 1]:
        run(edge(name, direction="wgrad", layout=layout), SMALL, device, side)


@pytest.mark.parametrize("m", ["3x3", "4x4", "5x5", "6x6", "7x7", "4x7", "7x2"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_sizes_of_tiles(m: str, layout: str) -> None:
    run(edge("remainders", layout=layout, direction="wgrad"), {"m": m, "rows": 1, "slices": 1})


@pytest.mark.parametrize(("rows", "slices"), [(1, 1), (3, 2), (100, 1), (1, 7)])
def test_the_answer_does_not_depend_on_the_threads(rows: int, slices: int) -> None:
    for name in ("many images", "many channels", "grouped"):
        layer = edge(name, direction="wgrad")
        params: Params = {"m": "2x2", "rows": rows, "slices": slices}
        run(layer, params)
        a, b, _, _ = operands(layer)
        found = []
        for threads in (1, 2, 5):
            kernel = ALGORITHM.build(layer, CPU.current(threads=threads), params)
            out = np.full(layer.output_shape, np.nan, layer.numpy_dtype)
            kernel.run(a, b, out, None, None, DEVICE.buffer(kernel.workspace_bytes))
            found.append(out)
        assert all((out == found[0]).all() for out in found)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_types(dtype: str, layout: str) -> None:
    for name in ("remainders", "stem"):
        run(edge(name, dtype=dtype, layout=layout, direction="wgrad"), SMALL)


@pytest.mark.parametrize("channels", [17, 40, 48, 80])
def test_blocks_of_one_two_and_three_vectors(channels: int) -> None:
    layer = edge("plain", direction="wgrad", C=channels, K=70)
    assert tiling_of(layer, DEVICE, SMALL).filter_blocks >= 2
    run(layer, SMALL)


def test_every_reason_is_given() -> None:
    params: Params = {"m": "7x7", "rows": 1, "slices": 1}

    def reasons(name: str, **changes: Any) -> str:
        return "; ".join(ALGORITHM.why_not(edge(name, **({"direction": "wgrad"} | changes)), DEVICE, params))

    assert "filter: expected neighbouring taps" in reasons("pointwise")
    assert reasons("depthwise") == "channels: expected dense or grouped, got depthwise"
    assert "channels of a group: expected at least 2" in reasons("plain", K=1)
    (against,) = ALGORITHM.why_not(edge("plain", direction="wgrad"), DEVICE, {**params, "m": "9x9"})
    assert "m: expected less than 9" in against
    few = VECTOR_BYTES[DEVICE.instruction_set] // 4 - 1
    wide = reasons("large filter", C=few, R=17, S=15, padding=9)
    assert "that several subfilters share: expected at most 16" in wide
    assert reasons("plain", W=1, padding=((1, 1), (9, 0)), stride=(1, 2)) == PADDING_ONLY
    assert reasons("plain", direction="fwd") == "direction: expected wgrad, got fwd"
    assert "expected at most 36 inputs apart, got 37" in reasons("plain", H=80, W=80, dilation=37)
