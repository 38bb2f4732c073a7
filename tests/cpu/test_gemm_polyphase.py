"""Strided gradients as one matrix product: every way of interleaving, on every instruction set, between guard pages."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from guards import check_guarded
from layers import operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm.polyphase import GemmPolyphase
from autoconv.layer import DTYPES, ConvLayer

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
POLYPHASE = GemmPolyphase()


def transposed(P: int = 6, Q: int = 8, **fields: Any) -> ConvLayer:
    """A gradient whose layer has outputs P x Q; of 2x2 filters and stride 2 unless told."""
    given = {"N": 2, "C": 6, "K": 9, "R": 2, "S": 2, "stride": 2} | fields
    down, across = given["stride"] if isinstance(given["stride"], tuple) else (given["stride"],) * 2
    return ConvLayer(**({"H": P * down, "W": Q * across, "direction": "dgrad"} | given))


CASES: dict[str, dict[str, Any]] = {
    "rows of whole vectors": {"Q": 16},
    "rows of half vectors": {"Q": 12},
    "rows of pairs": {"Q": 14},
    "rows of odd pixels": {"P": 7, "Q": 7},
    "one pixel": {"N": 1, "P": 1, "Q": 1},
    "zeros between": {"R": 1, "S": 1},
    "zeros between, the last missing": {"R": 1, "S": 1, "H": 11, "W": 15},
    "rows of zeros": {"R": 1, "stride": (3, 2), "H": 16},
    "columns of zeros": {"S": 2, "stride": (2, 3), "Q": 7},
    "columns alone": {"R": 1, "stride": (1, 2)},
    "rows alone": {"S": 1, "stride": (2, 1)},
    "thirds": {"R": 3, "S": 3, "stride": 3, "Q": 5},
    "groups": {"groups": 3, "C": 12, "K": 15},
    "many channels": {"N": 1, "C": 40, "K": 150},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_way_of_interleaving(instruction_set: str, name: str) -> None:
    layer = transposed(**CASES[name])
    assert check_guarded(POLYPHASE, layer, device_with(instruction_set, 2), operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_type(instruction_set: str, dtype: str) -> None:
    for fields in ({"dtype": dtype, "Q": 14}, {"dtype": dtype, "R": 1, "S": 1, "W": 15}):
        layer = transposed(**fields)
        assert check_guarded(POLYPHASE, layer, device_with(instruction_set), operands(layer))


def test_filters_larger_than_the_cache() -> None:
    device = device_with(CPU.current().instruction_set, 2, (1024, 2048, 1 << 24))
    layer = transposed(C=24, K=70)
    assert check_guarded(POLYPHASE, layer, device, operands(layer))


def test_what_no_tap_reaches_is_zero_whatever_the_operands_are() -> None:
    layer = transposed(R=1, S=1)
    dy, w, _, _ = operands(layer)
    dy[:] = np.nan
    device = CPU.current()
    kernel = POLYPHASE.build(layer, device, next(iter(POLYPHASE.candidates(layer, device))))
    packed, dx = device.buffer(kernel.packed_bytes), device.empty(layer.x_shape, "float32")
    kernel.pack(w, packed)
    kernel.run(dy, packed, dx, None, None, device.buffer(kernel.workspace_bytes))
    assert np.isnan(dx[:, :, ::2, ::2]).all()
    assert (dx[:, :, 1::2] == 0).all()
    assert (dx[:, :, :, 1::2] == 0).all()


def test_every_reason_is_given() -> None:
    device = device_with("avx2")

    def reasons(layer: ConvLayer, **params: int) -> str:
        return "; ".join(POLYPHASE.why_not(layer, device, {"TK": 6, "NV": 2, "BC": 9} | params))

    assert reasons(transposed()) == ""
    assert reasons(transposed(), TK=3, NV=3) == "TK=3: expected whole rows of taps, a multiple of S=2"
    assert "TK=5,NV=2: expected" in reasons(transposed(), TK=5)
    assert "direction: expected dgrad, got fwd" in reasons(transposed(direction="fwd"))
    outside = reasons(transposed(R=3, H=14, padding=(1, 0), stride=(2, 9), W=73))
    for reason in (
        "padding: expected none, got ((1, 1), (0, 0))",
        "R: expected at most the stride's 2 taps, got 3",
        "W: expected at most 9 for each output, 72, got 73",
    ):
        assert reason in outside
    wide = transposed(S=3, stride=(2, 17), W=136)
    assert "stride: expected at most 8 columns, got 17" in reasons(wide, TK=6)
    avx512 = POLYPHASE.why_not(wide, device_with("avx512"), {"TK": 6, "NV": 2, "BC": 9})
    assert "stride: expected at most 16 columns, got 17" in avx512
    assert "stride: expected more than one polyphase component" in reasons(transposed(R=1, S=1, stride=1))
