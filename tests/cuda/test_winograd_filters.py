"""The gradient of filters by Winograd around products on tensor cores: how exact, on every schedule, faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simt.cases import DEVICE, check, run
from simt.emulator import MISSING, Emulated
from simt.planted import caught

from autoconv.bench.gpu.cases import CAPABILITY, SCHEDULES
from autoconv.common.split_products import SPLIT_PRODUCTS
from autoconv.cuda.common.algorithm import aligned
from autoconv.cuda.winograd.wgrad import WinogradHopperWgrad, WinogradTF32x3Wgrad, WinogradWgrad
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import plan
from autoconv.tuning.reference import convolve, error, magnitude

needs_compiler = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
FAMILIES: dict[str, tuple[WinogradWgrad, dict[str, int]]] = {
    "tf32x3": (WinogradTF32x3Wgrad(), {"BM": 64, "BN": 64}),
    "bf16x6": (WinogradHopperWgrad(), {"BM": 64, "BN": 64, "STAGES": 3}),
}
families = pytest.mark.parametrize("family", FAMILIES)
SMALL = ConvLayer(N=2, C=11, H=7, W=6, K=13, R=3, S=3, padding=1, direction="wgrad")
DEEP = ConvLayer(N=8, C=8, H=24, W=24, K=8, R=3, S=3, padding=1, direction="wgrad")
PLANTED = {
    "gradients beyond the edge": ("first.w + j < Q;", "true;"),
    "filters of the next group for zeros": ("<static_cast<int>(ROWS), ROWS_PADDED>", "<ROWS_PADDED, ROWS_PADDED>"),
    "a filter that is none": ("|| row >= ROWS", ""),
    "points in another order": ("M[(i * AW + j) * ALL + at]", "M[(j * AH + i) * ALL + at]"),
    "rows of taps for columns": ("depth, r, s)] = taps[s]", "depth, s, r)] = taps[s]"),
}


@needs_compiler
@families
@pytest.mark.parametrize("m", [2, 4, 6])
def test_its_error_is_that_of_the_transforms(family: str, m: int) -> None:
    """Positive data, whose sums drift in tensor cores: a quarter of the bound."""
    generator = np.random.default_rng(0)
    a, b = (generator.uniform(1, 2, shape).astype(np.float32) for shape in DEEP.input_shapes)
    algorithm, tile = FAMILIES[family]
    params = {"m": m, "SPLIT": 1} | tile
    out = run(DEVICE, algorithm, DEEP, params, (a, b, None, None))
    assert error(out, convolve(DEEP, a, b), magnitude(DEEP, a, b)) <= algorithm.bound(DEEP, params) / 4


@needs_compiler
@families
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_every_schedule_is_right(family: str, layout: str, schedule: int) -> None:
    algorithm, tile = FAMILIES[family]
    device, layer = Emulated(capability=CAPABILITY, schedule=schedule), SMALL.replace(layout=layout)
    check(device, algorithm, layer, {"m": 2, "SPLIT": 1 + schedule % 2} | tile)


@needs_compiler
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault: str) -> None:
    algorithm, tile = FAMILIES["tf32x3"]
    layer = SMALL.replace(C=10, K=12, S=2, groups=2)
    assert caught(PLANTED[fault], algorithm, layer, {"m": 2, "SPLIT": 1} | tile)


@families
def test_the_product_is_the_gradient_of_one_tap(family: str) -> None:
    """A pixel to each tile, a group to each point, channels and filters in whole runs; one array behind the other."""
    algorithm, tile = FAMILIES[family]
    params = {"m": 4, "SPLIT": 1} | tile
    tiles, points = 2 * 2 * 2, 36
    parts = algorithm.parts(SMALL, params)
    assert parts == tuple(4 * points * n for n in (tiles * 16, tiles * 16, 16 * 16))
    in_parts = {"tf32x3": 0, "bf16x6": 3 * 2 * points * tiles * 16}[family]
    assert algorithm.workspace_bytes(SMALL, DEVICE, params) == sum(map(aligned, parts)) + in_parts
    assert algorithm.packed_bytes(SMALL, DEVICE, params) == 0


@families
@pytest.mark.parametrize("m", [-1, 0, 3, 99])
def test_an_unknown_tile_is_refused_with_a_reason(family: str, m: int) -> None:
    algorithm, tile = FAMILIES[family]
    (reason,) = algorithm.why_not(SMALL, Emulated(capability=CAPABILITY), {"m": m, "SPLIT": 1} | tile)
    assert reason.startswith(f"m={m}: expected 2 or 4 or 6")


@families
def test_the_bound_is_of_the_points(family: str) -> None:
    """Of 2 and 5 taps, gradients of 4 x 4 outputs have up to eight points along an axis."""
    algorithm, _ = FAMILIES[family]
    bounds = [algorithm.bound(SMALL.replace(S=S), {"m": m}) for m, S in ((2, 3), (4, 2), (2, 5), (4, 5), (6, 3))]
    assert bounds == [4e-6, 1e-5, 1e-5, 3e-5, 3e-5]


@families
def test_who_wants_no_split_products_gets_none(family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, cache, device = FAMILIES[family][0].name, TuningCache(tmp_path), Emulated(capability=CAPABILITY)
    assert plan(SMALL, name, device=device, cache=cache).candidate.algorithm == name
    with pytest.raises(PlanError, match=f"exact=True leaves {name} out"):
        plan(SMALL, name, device=device, cache=cache, exact=True)
    monkeypatch.setenv(SPLIT_PRODUCTS, "0")
    with pytest.raises(PlanError, match=f"{SPLIT_PRODUCTS}=0: expected no products of parts"):
        plan(SMALL, name, device=device, cache=cache, budget=1.0)
