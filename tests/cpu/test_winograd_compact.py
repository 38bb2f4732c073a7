"""Winograd that transforms its filters as it goes: every split of a layer, inside its buffers and its bound."""

from __future__ import annotations

import functools

import pytest
from guards import check_candidate
from layers import EDGES, edge
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.common.correlation import CorrelationAxis
from autoconv.cpu.device import CPU
from autoconv.cpu.winograd.algorithm import Winograd
from autoconv.cpu.winograd.compact import FEWEST_TILES, CompactAxis, WinogradCompact
from autoconv.cpu.winograd.geometry import WinogradAxis

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
COMPACT = WinogradCompact()
PARAMS = {"m": "2x2", "rows": 2, "coop": 0, "terms": 8}
FITTING = [name for name in EDGES if not COMPACT.why_not(edge(name), DEVICE, PARAMS)]
DEEP = {"C": 40, "K": 24, "N": 1}  # several pieces of at most 16 terms, the last one smaller


run = functools.partial(check_candidate, COMPACT)


def test_fits_what_winograd_fits() -> None:
    winograd = Winograd()
    assert [name for name in EDGES if not winograd.why_not(edge(name), DEVICE, PARAMS)] == FITTING
    assert len(FITTING) > 6


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FITTING)
def test_edges_on_every_instruction_set(name: str, instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    for layout, direction, coop in (("NCHW", "fwd", 2), ("NHWC", "dgrad", 0)):
        layer, params = edge(name, layout=layout, direction=direction), PARAMS | {"coop": coop}
        if not COMPACT.why_not(layer, device, params):
            run(layer, params, device, "after" if layout == "NCHW" else "before")


@pytest.mark.parametrize(("m", "terms", "coop"), [("3x3", 8, 1), ("4x7", 16, 0), ("7x2", 16, 1), ("3x3", 100, 0)])
def test_pieces(m: str, terms: int, coop: int) -> None:
    run(edge("plain", **DEEP), {"m": m, "rows": 1, "coop": coop, "terms": terms})


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_types(dtype: str) -> None:
    run(edge("remainders", dtype=dtype), PARAMS | {"m": "4x4"})


def test_packs_as_many_numbers_as_the_filters_have() -> None:
    layer = edge("plain", C=32, K=32)
    assert COMPACT.packed_bytes(layer, DEVICE, PARAMS) == 4 * layer.K * layer.C * layer.R * layer.S
    assert Winograd().packed_bytes(layer, DEVICE, PARAMS) == 16 / 9 * COMPACT.packed_bytes(layer, DEVICE, PARAMS)


def test_candidates_have_tiles_to_multiply_a_filter_with() -> None:
    deep = edge("plain", C=512, K=512, H=14, W=14, N=1)
    params = [dict(candidate.params) for candidate in COMPACT.all(deep, DEVICE)]
    assert len(params) > 10
    assert all(COMPACT.tilings(deep, DEVICE, p)[0].chunk_tiles >= FEWEST_TILES for p in params)
    assert COMPACT.all(edge("plain", H=2, W=2, N=1), DEVICE) == []


@pytest.mark.parametrize(("m", "r"), [(2, 3), (4, 3), (5, 4), (7, 3)])
def test_divided_filters_give_the_same_outputs(m: int, r: int) -> None:
    axis = CorrelationAxis(size=9, count=9, stride=1, offset=-1, dilation=1, taps=tuple(range(r)))
    plain, divided = (kind(axis, m).transforms for kind in (WinogradAxis, CompactAxis))
    assert divided.BT == plain.BT
    assert all(next(filter(None, row)) == 1 for row in divided.G)
    for point in range(m + r - 1):
        weights = [[row[point] * tap for row in t.AT for tap in t.G[point]] for t in (plain, divided)]
        assert weights[0] == weights[1]
