"""1x1 layers in NCHW on tiles whose rows are filters: right on every kind of layer, and nothing is transposed."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from guards import check_guarded, run_guarded
from layers import EPILOGUES, operands
from vectors import INSTRUCTION_SETS, tile_device

from autoconv.algorithm import Candidate
from autoconv.cpu import pool
from autoconv.cpu.common.tiles.algorithm import FEWEST_TERMS
from autoconv.cpu.device import CPU
from autoconv.cpu.matrix.algorithm import Matrix, blockings_of
from autoconv.cpu.matrix.pointwise import MOST_STRIDE, MatrixPointwise, MatrixX3Pointwise
from autoconv.cpu.matrix.pointwise_kernels import emit
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
POINTWISE, X3 = MatrixPointwise(), MatrixX3Pointwise()
WHOLE = ConvLayer(N=2, C=64, H=6, W=8, K=64, R=1, S=1)
LAYERS = {
    "whole tiles": WHOLE,
    "remainders": WHOLE.replace(C=67, K=37, H=7, W=7),
    "a pixel": WHOLE.replace(N=1, C=3, K=1, H=1, W=1),
    "a single tile of filters": WHOLE.replace(C=33, K=9),
    "stride 2": WHOLE.replace(C=40, H=9, W=11, stride=2),
    "even rows of stride 2": WHOLE.replace(N=3, H=8, W=40, stride=2),
    "strides": WHOLE.replace(H=9, W=71, stride=(2, 3)),
    "groups": WHOLE.replace(groups=3, C=60, K=45),
    "a long row": WHOLE.replace(N=1, C=16, H=1, W=300),
    "many pixels": WHOLE.replace(N=1, C=8, K=8, H=40, W=31),
    "many images": WHOLE.replace(N=9, C=32, K=48, H=3, W=5),
}


@pytest.mark.parametrize("dtype", POINTWISE.dtypes)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_forward(instruction_set: str, name: str, dtype: str) -> None:
    layer = LAYERS[name].replace(dtype=dtype)
    assert check_guarded(POINTWISE, layer, tile_device(instruction_set), operands(layer))


@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if layer.stride == (1, 1)])
def test_gradient_of_the_input(name: str) -> None:
    layer = LAYERS[name].replace(direction="dgrad")
    assert check_guarded(POINTWISE, layer, tile_device(), operands(layer))
    if layer.K // layer.groups >= FEWEST_TERMS:
        assert check_guarded(X3, layer, tile_device(), operands(layer))


@pytest.mark.parametrize("dtype", POINTWISE.dtypes)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue: str, dtype: str) -> None:
    layer = LAYERS["remainders"].replace(dtype=dtype, **EPILOGUES[epilogue])
    assert check_guarded(POINTWISE, layer, tile_device(), operands(layer))


@pytest.mark.parametrize("name", [n for n, layer in LAYERS.items() if layer.C // layer.groups >= FEWEST_TERMS])
def test_three_products_of_float32_keep_their_bound(name: str) -> None:
    assert check_guarded(X3, LAYERS[name], tile_device(), operands(LAYERS[name]))


@pytest.mark.parametrize("strip", [16, 32, 48, 96])
@pytest.mark.parametrize("BC", [32, 64, 96, 130])
def test_strips_and_blocks_of_channels(strip: int, BC: int) -> None:
    """Of images, of rows, of parts of rows; the last of each does some of its neighbour's work again."""
    shapes: list[dict[str, Any]] = [{"N": 5, "H": 3, "W": 3}, {"H": 7, "W": 18, "stride": 2}, {"N": 1, "H": 2, "W": 71}]
    for fields in shapes:
        layer = WHOLE.replace(C=130, K=90, **fields)
        candidate = Candidate(POINTWISE.name, (("products", 6), ("strip", strip), ("BC", BC)))
        assert not POINTWISE.why_not(layer, tile_device(), candidate.params)
        got = run_guarded(POINTWISE, layer, tile_device(), candidate, operands(layer), "after")
        want, magnitude = (f(layer, *operands(layer)) for f in (reference.convolve, reference.magnitude))
        assert reference.error(got, want, magnitude) <= POINTWISE.bound(layer, candidate.params)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(number: float) -> None:
    layer = LAYERS["remainders"]
    x, w, *_ = operands(layer)
    w = np.where(w == 0, np.float32(0.5), w)
    spoilt = x.copy()
    spoilt[1, 66, 4, 3] = number  # of the last channel, which stands for those that do not exist
    for family in (POINTWISE, X3):
        candidate = family.all(layer, tile_device())[0]
        clean, got = (
            run_guarded(family, layer, tile_device(), candidate, (a, w, None, None), "after") for a in (x, spoilt)
        )
        assert not np.isfinite(got[1, :, 4, 3]).any()
        got[1, :, 4, 3] = clean[1, :, 4, 3]
        np.testing.assert_array_equal(got, clean)


def test_it_is_thought_quicker_than_what_transposes() -> None:
    for layer in (LAYERS["whole tiles"], LAYERS["stride 2"]):
        (first, *_), device = POINTWISE.all(layer, tile_device()), tile_device()
        assert POINTWISE.estimate(layer, device, first.params) < Matrix().estimate(layer, device, first.params)


def test_without_a_matrix_unit_there_are_no_candidates() -> None:
    assert not POINTWISE.all(WHOLE, CPU(threads=2, instruction_set="avx2"))


def test_nothing_is_transposed() -> None:
    """Neither pixels nor sums: at stride 1 no vector is shuffled."""
    device = tile_device("avx512")
    module = emit("avx512", "amx", WHOLE, blockings_of(WHOLE, device, POINTWISE.all(WHOLE, device)[0].params))
    moving = [str(function) for function in module.functions if function.name.startswith(("row", "store"))]
    assert moving
    assert "llvm.x86.tdpbf16ps" in str(module)
    assert not any("shufflevector" in text for text in moving)


def test_who_is_refused_and_why() -> None:
    params = {"products": 6, "strip": 128, "BC": 64}
    assert POINTWISE.why_not(WHOLE, tile_device(), params) == []
    for fields, reason in (
        ({"R": 3, "S": 3, "padding": 1}, "R, S and padding: expected a filter of 1x1 without padding, got 3x3 with"),
        ({"padding": 1}, "R, S and padding: expected a filter of 1x1 without padding, got 1x1 with ((1, 1), (1, 1))"),
        ({"stride": 2, "direction": "dgrad"}, "stride=(2, 2): expected (1, 1) for dgrad"),
        ({"stride": 5}, f"stride=(5, 5): expected at most {MOST_STRIDE} columns"),
        ({"layout": "NHWC"}, "NHWC"),
    ):
        (found,) = POINTWISE.why_not(WHOLE.replace(**fields), tile_device(), params)
        assert reason in found
