"""What the texts of implicit GEMM must not lack: every schedule is right, and each fault planted in them is caught."""

from __future__ import annotations

from typing import Any

import pytest
from layers import hopper_layer
from simt.cases import check, named
from simt.emulator import MISSING, Emulated
from simt.planted import Fault, caught

from autoconv.bench.gpu.cases import SCALAR_TILE, SCHEDULES, planned
from autoconv.cuda.hopper.hopper import CAPABILITY
from autoconv.layer import ConvLayer

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

Case = tuple[ConvLayer, dict[str, Any]]

# Sums of 1044 products in two stretches; neighbours in the output are not together, nor are those in the input.
STRETCHED: Case = (
    ConvLayer(N=1, C=116, H=5, W=5, K=35, R=3, S=3, padding=1),
    SCALAR_TILE | {"SPLIT": 1},
)
# Two rows of nine tiles, in two strips.
RASTER: Case = (
    ConvLayer(N=1, C=8, H=9, W=8, K=520, R=1, S=1, layout="NHWC", dtype="float16"),
    {"BM": 64, "BN": 64, "SPLIT": 1},
)
# Three runs of channels to each of three taps, two to a tile: the last tile has columns of no tap.
TAPS: Case = (
    hopper_layer(C=136, K=72, R=1, padding=(0, 1), direction="wgrad"),
    {"BM": 64, "BN": 128, "STAGES": 4, "SPLIT": 1},
)
TAPS_IN_PARTS: Case = (TAPS[0].replace(dtype="float32"), {"BM": 64, "BN": 128, "STAGES": 3, "SPLIT": 1})


def _staged(name: str) -> Case:
    """The first that is planned, with channels beyond one square: from NCHW, and back."""
    layer, params, _ = next(planned(named(name)))
    return layer.replace(C=43), params


CASES: dict[str, tuple[str, Case]] = {
    "stretches": ("gemm", STRETCHED),
    "raster": ("gemm.tensor", RASTER),
    "taps": ("gemm.hopper", TAPS),
    "taps in parts": ("gemm.hopper.bf16x6", TAPS_IN_PARTS),
    "staged": ("gemm.hopper.staged", _staged("gemm.hopper.staged")),
    "staged in parts": ("gemm.hopper.bf16x6.staged", _staged("gemm.hopper.bf16x6.staged")),
}
OVER_TAPS = {
    "every run of columns is of the first tap": ("return {column / WIDTH / PER_TAP,", "return {0,"),
    "every run of columns is of the first channels": ("column / WIDTH % PER_TAP * WIDTH", "0"),
    "all taps go where the first does": ("start + tap + x,", "start + x,"),
    "columns of no tap are written": ("if (first.tap >= TAPS) break;", ""),
}
PLANTED: dict[str, dict[str, Fault]] = {
    "stretches": {
        "a stretch forgets those before it": ("if (!first) before", "if (false) before"),
        "a stretch is kept for nobody": ("if (SPLIT == 1 && last)\n", "if (true)\n"),
        "the first stretch adds what was there": ("if (!first) before", "before"),
        "stretches share slices": ("if constexpr (STRETCHES > 1) __syncthreads();", ""),
        "single floats are not waited for": ("commit_copies();\n        wait_copies<0>();", "commit_copies();"),
        "single floats that do not exist are read": ("from + run.at, run.exists);", "from + run.at, true);"),
        "a strip is read before it is whole": ("sync_warp();  \n            write_strip", "write_strip"),
    },
    "raster": {
        "rows for columns": (
            "return {within / width, strip * STRIP + within % width};",
            "return {within % width, strip * STRIP + within / width};",
        ),
        "the last strip as wide as the others": (
            "COLUMNS - strip * STRIP < STRIP ? COLUMNS - strip * STRIP : STRIP",
            "STRIP",
        ),
        "every strip is the first": ("strip * STRIP + within % width}", "within % width}"),
        "a slice too early": ("wait_copies<STAGES - 2>();", "wait_copies<STAGES - 1>();"),
    },
    "taps": OVER_TAPS,
    "taps in parts": OVER_TAPS | {"each part is the first": ("slice * BK + part * PIXELS", "slice * BK + 0 * PIXELS")},
    "staged": {
        "a square is read before it is whole": (
            "__syncthreads();\n#pragma unroll\n    for (int i = 0; i < AREA",
            "#pragma unroll\n    for (int i = 0; i < AREA",
        ),
        "places for channels": ("at[mine.channel][mine.place] = there", "at[mine.place % DEEP][mine.channel] = there"),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_schedule_is_right(case: str) -> None:
    name, (layer, params) = CASES[case]
    assert not named(name).why_not(layer, Emulated(capability=CAPABILITY), params)
    for schedule in range(SCHEDULES):
        check(Emulated(capability=CAPABILITY, schedule=schedule), named(name), layer, params)


@pytest.mark.parametrize(("case", "fault"), [(case, fault) for case, faults in PLANTED.items() for fault in faults])
def test_a_planted_fault_is_caught(case: str, fault: str) -> None:
    name, (layer, params) = CASES[case]
    assert caught(PLANTED[case][fault], named(name), layer, params)
