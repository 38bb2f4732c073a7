"""Winograd's transforms around products on tensor cores: how exact, on every schedule, and what they must not lack."""

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
from autoconv.cuda.winograd.tensor import WinogradHopper, WinogradTensor, WinogradTF32x3
from autoconv.cuda.winograd.winograd import Winograd
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import plan
from autoconv.tuning.reference import convolve, error, magnitude

needs_compiler = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
FAMILIES: dict[str, tuple[WinogradTensor, dict[str, int]]] = {
    "tf32x3": (WinogradTF32x3(), {"BM": 64, "BN": 64}),
    "bf16x6": (WinogradHopper(), {"BM": 64, "BN": 64, "STAGES": 3}),
}
families = pytest.mark.parametrize("family", FAMILIES)
SMALL = ConvLayer(N=1, C=37, H=7, W=6, K=35, R=3, S=3, padding=1)
DEEP = ConvLayer(N=1, C=512, H=6, W=6, K=8, R=3, S=3, padding=1)
PLANTED = {
    "a column is read before it is whole": ("points[i];\n        __syncthreads();", "points[i];"),
    "one place for all columns": ("columns.at[j % 2][i][to.row]", "columns.at[0][i][to.row]"),
    "columns come back as they went": ("[i][to.row][to.lane]", "[i][from.row][from.lane]"),
    "channels of the next group for zeros": (
        "group < GROUPS && depth < CHANNELS && from.tile",
        "group < GROUPS && from.tile",
    ),
    "points in another order": ("line[(long long)(i * AW + j) * LINE]", "line[(long long)(j * AH + i) * LINE]"),
}


def found(name: str, layer: ConvLayer, m: int, a: Any, b: Any) -> float:
    """The error of a family, or of scalar products."""
    algorithm, tile = FAMILIES.get(name, (Winograd(), {"BM": 64, "BN": 64}))
    out = run(DEVICE, algorithm, layer, {"m": m} | tile, (a, b, None, None))
    return error(out, convolve(layer, a, b), magnitude(layer, a, b))


@needs_compiler
@families
@pytest.mark.parametrize("m", [2, 4, 6])
def test_its_error_is_that_of_the_transforms(family: str, m: int) -> None:
    """Positive data, whose sums drift in tensor cores: a quarter of the bound, and less than scalar products'."""
    generator = np.random.default_rng(0)
    a, b = (generator.uniform(1, 2, shape).astype(np.float32) for shape in DEEP.input_shapes)
    algorithm, tile = FAMILIES[family]
    ours, scalar = (found(name, DEEP, m, a, b) for name in (family, "scalar"))
    assert ours <= algorithm.bound(DEEP, {"m": m} | tile) / 4
    assert ours <= scalar


@needs_compiler
@families
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_every_schedule_is_right(family: str, layout: str, schedule: int) -> None:
    algorithm, tile = FAMILIES[family]
    check(Emulated(capability=CAPABILITY, schedule=schedule), algorithm, SMALL.replace(layout=layout), {"m": 2} | tile)


@needs_compiler
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault: str) -> None:
    algorithm, tile = FAMILIES["tf32x3"]
    layer = SMALL.replace(C=34, K=36, groups=2)
    assert caught(PLANTED[fault], algorithm, layer, {"m": 2} | tile)


@families
def test_the_product_is_a_layer_of_one_tap(family: str) -> None:
    """A pixel to each tile, a group to each point, its channels in whole runs; the arrays are those of the kernels."""
    algorithm, tile = FAMILIES[family]
    params = {"m": 4} | tile
    product = algorithm.product(SMALL, params)
    channels = {"tf32x3": 40, "bf16x6": 64}[family]
    assert (product.groups, product.W, product.C, product.K) == (36, 2 * 2, 36 * channels, 36 * 35)
    inputs, sums, filters = algorithm.parts(SMALL, params)
    assert inputs == aligned(4 * 4 * 36 * channels)
    assert sums == aligned(4 * 4 * 36 * 35)
    assert filters == aligned(4 * 36 * 35 * channels)
    assert algorithm.workspace_bytes(SMALL, DEVICE, params) == inputs + sums
    packed = {"tf32x3": filters, "bf16x6": 3 * 2 * 36 * 35 * 64}[family]
    assert algorithm.packed_bytes(SMALL, DEVICE, params) == packed


@families
def test_who_wants_no_split_products_gets_none(family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, cache = FAMILIES[family][0].name, TuningCache(tmp_path)
    assert plan(SMALL, name, device=DEVICE, cache=cache).candidate.algorithm == name
    with pytest.raises(PlanError, match=f"exact=True leaves {name} out"):
        plan(SMALL, name, device=DEVICE, cache=cache, exact=True)
    monkeypatch.setenv(SPLIT_PRODUCTS, "0")
    with pytest.raises(PlanError, match=f"{SPLIT_PRODUCTS}=0: expected no products of parts"):
        plan(SMALL, name, device=DEVICE, cache=cache, budget=1.0)
