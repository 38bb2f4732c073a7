"""Filters of one tap in NCHW on Hopper's units: every schedule, what is refused, and what the kernels must not lack."""

from __future__ import annotations

from typing import Any

import pytest
from simt.cases import DEVICE, check
from simt.emulator import MISSING, Emulated, EmulationError
from simt.planted import Fault, Planted, caught

from autoconv.algorithm import Params
from autoconv.bench.gpu.cases import SCHEDULES
from autoconv.cuda.codegen.tensor_map import LINE
from autoconv.cuda.hopper import split
from autoconv.cuda.hopper.hopper import CAPABILITY, TILES, HopperTile
from autoconv.cuda.hopper.pointwise import HopperBF16x6Pointwise, HopperPointwise
from autoconv.layer import ConvLayer

needs_compiler = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
HALVES, PARTS = HopperPointwise(), HopperBF16x6Pointwise()
families = pytest.mark.parametrize("algorithm", [HALVES, PARTS], ids=lambda one: one.name)
directions = pytest.mark.parametrize("direction", HALVES.directions)


def params(algorithm: HopperPointwise, SPLIT: int = 1) -> Params:
    """Of a tile of several runs, which end in it or in the next."""
    tile = next(tile for tile in algorithm.tiles if (tile.BM, tile.BN) == (128, 64))
    return {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES, "SPLIT": SPLIT}


def deep(algorithm: HopperPointwise, **fields: Any) -> ConvLayer:
    """Every stage goes round, the last of a few channels; images end within a run of pixels, the last within a tile."""
    line = LINE // (4 if algorithm is PARTS else 2)
    problem = {"N": 3, "C": 5 * line + 8, "H": 9, "W": 16, "K": 5 * line + 8, "R": 1, "S": 1}
    return ConvLayer(**(problem | {"dtype": algorithm.dtypes[0]} | fields))  # type: ignore[arg-type]


PLANTED: dict[str, Fault] = {
    "every run is of the first image": ("slice * BK, run / RUNS);", "slice * BK, 0);"),
    "an image's runs go on in no other": ("run % RUNS * LINE", "run * LINE"),
    "runs are all the first": ("run % RUNS * LINE", "0"),
    "slices are all the first": ("LINE, slice * BK, run", "LINE, 0, run"),
    "pixels stay where they are": ("turn(v, lane);", ""),
    "pixels change places once": ("bit < 4; bit *= 2) {\n        const bool high = lane / 4", "bit < 2; bit *= 2) {\n"
                                  "        const bool high = lane / 4"),
    "pixels come from the next lane": ("v[i | bit], 4 * bit)", "v[i | bit], bit)"),
    "a filter in the place of its neighbour": ("lane % 4 * 2 + mine % 2;", "lane % 4 * 2 + 1 - mine % 2;"),
    "lines lie along the depth": ("ROWS_ACROSS = WEIGHTS || POINTWISE", "ROWS_ACROSS = WEIGHTS"),
    "the residual of another place": ("to.residual, k, start + e", "to.residual, k, start / 8 * 8 + e"),
}  # fmt: skip
BEYOND: dict[str, Fault] = {
    "pixels of no image are written": ("image >= N || ", ""),
    "pixels behind an image are written": ("place >= PLACES || ", ""),
    "filters behind the last are written": (" || k >= COLUMNS", ""),
}
OF_PARTS: dict[str, Fault] = {
    "no swizzle": ("mine % LINE / 4 ^ line % 8", "mine % LINE / 4"),
    "lanes read the first run alone": ("mine / LINE * (LINE * BK) + ", ""),
    "the filters' depth as for rows along it": ("ROWS_ACROSS ? place : depth_at", "depth_at"),
}


@needs_compiler
@families
@directions
def test_the_kernel_is_right_on_every_schedule(algorithm: HopperPointwise, direction: str) -> None:
    layer = deep(algorithm, direction=direction)
    for schedule in range(SCHEDULES):
        given = params(algorithm, 1 + schedule % 2)
        assert not algorithm.why_not(layer, DEVICE, given)
        check(Emulated(capability=CAPABILITY, schedule=schedule), algorithm, layer, given)


@needs_compiler
@pytest.mark.parametrize(
    ("algorithm", "fault"),
    [*((one, fault) for one in (HALVES, PARTS) for fault in PLANTED), *((PARTS, fault) for fault in OF_PARTS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_planted_fault_is_caught(algorithm: HopperPointwise, fault: str) -> None:
    layer = deep(algorithm, K=67, residual=True)
    assert caught((PLANTED | OF_PARTS)[fault], algorithm, layer, params(algorithm))


@needs_compiler
@families
@pytest.mark.parametrize("fault", BEYOND)
def test_a_sanitizer_names_what_is_written_beyond_the_array(algorithm: HopperPointwise, fault: str) -> None:
    with pytest.raises(EmulationError, match=r"overflow|SEGV"):
        check(Planted(fault=BEYOND[fault], sanitizer="address"), algorithm, deep(algorithm, K=67), params(algorithm))


@needs_compiler
@pytest.mark.stress
@pytest.mark.parametrize(
    ("algorithm", "tile"),
    [*((HALVES, tile) for tile in TILES), *((PARTS, tile) for tile in split.TILES)],
    ids=lambda value: getattr(value, "name", value) if not isinstance(value, tuple) else "x".join(map(str, value[:4])),
)
@directions
def test_every_tile(algorithm: HopperPointwise, tile: HopperTile, direction: str) -> None:
    """With the depth in one part and in three, and images that fill no run, one and a part, or several."""
    for SPLIT, (H, W) in ((1, (2, 4)), (3, (5, 8)), (1, (14, 16))):
        layer = deep(algorithm, H=H, W=W, direction=direction)
        check(DEVICE, algorithm, layer, {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES, "SPLIT": SPLIT})


@families
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"R": 3, "S": 1}, "filter: expected 1x1, got 3x1"),
        ({"stride": (1, 2)}, "stride: expected 1x1, got 1x2"),
        ({"padding": ((0, 1), (0, 0))}, "padding: expected 0x0, got 1x0"),
        ({"H": 7, "W": 7}, "pixels of an image: expected a multiple of {unit}, got 49"),
        ({"layout": "NHWC"}, "layout: expected NCHW, got NHWC"),
        ({"direction": "wgrad"}, "direction: expected fwd or dgrad, got wgrad"),
        ({"groups": 2}, "channels: expected dense, got grouped"),
        ({"dtype": "float64"}, "got float64"),
    ],
)
def test_what_it_is_not_for_is_said(algorithm: HopperPointwise, fields: dict[str, Any], reason: str) -> None:
    reasons = algorithm.why_not(deep(algorithm, **fields), DEVICE, params(algorithm))
    assert any(reason.format(unit=4 if algorithm is PARTS else 8) in each for each in reasons), reasons


def test_a_tile_takes_runs_of_any_image() -> None:
    """Of 14x14 pixels, 196, seven runs of 32 come to an image: an eighth of the rows is empty."""
    layer = ConvLayer(N=32, C=256, H=14, W=14, K=64, R=1, S=1)
    ((rows, columns),) = PARTS.passes(layer)
    assert (rows.pixels, columns.pixels) == (1, 224)
    unit = PARTS.units(layer, {"BM": 128, "BN": 64, "STAGES": 4, "SPLIT": 1})[0]
    assert unit.grid == (32 * 224 // 128, 1, 1)
    pixels, _ = unit.maps
    assert (pixels.extents, pixels.box) == ((196, 256, 32), (32, 32, 1))
