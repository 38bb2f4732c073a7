"""The gradient of the filters of few channels on tensor cores: what the cases of all kernels do not come by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layers import operands
from simt.cases import DEVICE, check, named, run
from simt.emulator import MISSING
from simt.planted import Fault, caught
from test_gate import disassembler, main_loop

from autoconv.bench.gpu.cases import NominalGPU, planned
from autoconv.cuda.codegen.compiler import CompileError, nvrtc
from autoconv.cuda.common.algorithm import tile_of
from autoconv.cuda.stem.tensor_wgrad import TILES, DirectTensorWgrad, _area, _patch, _places, slice_slots
from autoconv.layer import ConvLayer
from autoconv.tuning.reference import convolve

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

FAMILY = named(DirectTensorWgrad.name)
FIRST = ConvLayer(N=32, C=3, H=224, W=224, K=64, R=3, S=3, padding=1, direction="wgrad")
PARAMS = {"BM": 32, "BN": 32, "WM": 32, "TP": 8, "TQ": 16, "SPLIT": 3}
# Two tiles to a row, and two rows of them; both have pixels beyond the image, where some tap meets numbers.
RAGGED = ConvLayer(N=1, C=2, H=16, W=24, K=5, R=3, S=3, direction="wgrad", stride=(1, 1))

PLANTED: dict[str, Fault] = {
    "a patch is multiplied before it is whole": ("__syncthreads();  \n        tile = next;", "tile = next;"),
    "every tile has the patch of the one before": ("current = 1 - current;", ";"),
    "what comes next is of this tile": ("Tile(here, tile, next)", "tile"),
    "a pair of what one pixel sees": ("from[STRIDE_W] : 0.0f", "from[0] : 0.0f"),
    "sums are read before all are there": ("[my.warp_n * WARP_COLUMNS + j * 8 + my.lane % 4 * 2 + e % 2] = "
                                           "sum[i][j][e];\n        __syncthreads();",
                                           "[my.warp_n * WARP_COLUMNS + j * 8 + my.lane % 4 * 2 + e % 2] = "
                                           "sum[i][j][e];"),
    "the smallest part is left out": ("smaller = PARTS - 1; smaller >= 0", "smaller = 0; smaller >= 0"),
    "all tiles share tickets": ("tickets + block * TICKETS}", "tickets}"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault: str) -> None:
    layer = RAGGED.replace(N=3, K=40)
    check(DEVICE, FAMILY, layer, PARAMS)
    assert caught(PLANTED[fault], FAMILY, layer, PARAMS)


@pytest.mark.parametrize("width", [19, 20, 24, 34, 35])
def test_what_no_output_sees_spoils_no_sum(width: int) -> None:
    """A NaN in x spoils the taps that meet it and no others, also where it is the neighbour of what they meet."""
    layer = RAGGED.replace(W=width, H=11)
    a, b, *_ = operands(layer)
    for column in (0, width // 2, width - 2, width - 1):
        spoilt = a.copy()
        spoilt[0, 1, 10, column] = np.nan
        out = run(DEVICE, FAMILY, layer, PARAMS, (spoilt, b, None, None))
        np.testing.assert_array_equal(np.isnan(out), np.isnan(convolve(layer, spoilt, b)))


def test_small_numbers_count_and_parts_are_all_of_a_float() -> None:
    """Sums of products of few bits are exact, whatever their sizes: no part of a number is left out."""
    layer = ConvLayer(N=1, C=1, H=4, W=4, K=16, R=1, S=1, direction="wgrad")
    a, b, *_ = operands(layer)
    a[...], b[...] = 0.0, 0.0
    a[0, 0, 1, 2] = 1 + 2.0**-11 + 2.0**-23
    b[0, :, 1, 2] = 2.0 ** np.arange(-8, 8)
    out = run(DEVICE, FAMILY, layer, PARAMS | {"SPLIT": 1}, (a, b, None, None))
    np.testing.assert_array_equal(out[:, 0, 0, 0], a[0, 0, 1, 2] * b[0, :, 1, 2])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"C": 5}, "C=5: expected at most 4"),
        ({"layout": "NHWC"}, "layout: expected NCHW, got NHWC"),
        ({"dtype": "float16"}, "dtype: expected float32, got float16"),
        ({"C": 4, "groups": 2}, "channels: expected dense, got grouped"),
        ({"direction": "fwd"}, "direction: expected wgrad, got fwd"),
    ],
    ids=str,
)
def test_what_it_does_not_take(changes: dict[str, int | str], reason: str) -> None:
    assert FAMILY.why_not(FIRST.replace(**changes), DEVICE, PARAMS) == [reason]


def test_what_its_parameters_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = FAMILY.why_not(FIRST, DEVICE, PARAMS | {"TP": 72})
    assert refused == ["TPxTQ: expected 1 to 8 times 8 slices of 16, got 72x16"]
    assert FAMILY.why_not(FIRST, DEVICE, PARAMS | {"BM": 48}) == [
        "BMxBNxWM: expected " + " or ".join(f"{t.BM}x{t.BN}x{t.WM}" for t in TILES) + ", got 48x32x32"
    ]
    (far,) = FAMILY.why_not(FIRST.replace(dilation=40, padding=40), DEVICE, PARAMS | {"TP": 64})
    assert far.startswith("shared memory of tensor_wgrad: expected at most 232448 bytes, got ")
    (old,) = FAMILY.why_not(FIRST, NominalGPU(capability=75), PARAMS)
    assert old == "compute capability: expected 8.0 or above, got 7.5"
    monkeypatch.setenv("AUTOCONV_SPLIT_PRODUCTS", "0")
    assert FAMILY.why_not(FIRST, DEVICE, PARAMS) == [
        "AUTOCONV_SPLIT_PRODUCTS=0: expected no products of parts that err more than sums in float32"
    ]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_first_layers_have_candidates_everywhere(capability: int) -> None:
    device = NominalGPU(capability=capability)
    stems = {"R": 7, "S": 7, "stride": 2, "padding": 3}, {"R": 11, "S": 11, "stride": 4, "K": 96, "padding": 2}
    for layer in (FIRST, *(FIRST.replace(**stem) for stem in stems), FIRST.replace(C=1, H=28, W=28)):
        found = [one.params for one in FAMILY.all(layer, device)]
        assert found
        assert not any(FAMILY.why_not(layer, device, params) for params in found)


def test_lanes_meet_few_of_each_others_banks() -> None:
    """Where neighbours in a row are two or four pixels apart, none; else at most one of them."""
    assert _places(37, 35, 3, (7, 7), (1, 1), 8)[2] < 1.1
    assert _places(39, 67, 3, (11, 11), (1, 1), 8)[2] < 1.1
    assert _patch(FIRST, _area({"TP": 8, "TQ": 112})).conflicts <= 2


@pytest.mark.parametrize("taps", [3, 7, 11])
def test_main_loops_are_what_the_model_says(taps: int) -> None:
    """Of every candidate, and no value of them is kept in local memory; numbers come sixteen bytes at a time."""
    try:
        nvrtc()
    except CompileError as error:
        pytest.skip(f"NOT CHECKED: {error}; CI installs nvidia-cuda-nvrtc")
    disassembler()
    stride = {3: 1, 7: 2, 11: 4}[taps]
    layer = FIRST.replace(R=taps, S=taps, stride=stride, padding=taps // 2, K=96 if taps == 11 else 64)
    areas = {frozenset({**one.params, "SPLIT": 2}.items()): one.params for one in FAMILY.all(layer, DEVICE)}
    for params in areas.values():
        (unit,) = FAMILY.units(layer, params)
        loop = main_loop(unit, 90)
        rows, columns = tile_of(TILES, params, "BM", "BN", "WM").fragments
        assert loop.count("HMMA") == 6 * rows * columns
        assert not {"LDL", "STL"} & set(loop)
        assert slice_slots(layer, params) == pytest.approx(len(loop), rel=0.08)


def test_the_same_bits_in_however_many_blocks_at_once() -> None:
    layer, params, _ = next(case for case in planned(FAMILY) if case[1]["SPLIT"] == 11)
    first = run(DEVICE, FAMILY, layer, params)
    for schedule in (3, 8):
        np.testing.assert_array_equal(run(replace(DEVICE, schedule=schedule), FAMILY, layer, params), first)
