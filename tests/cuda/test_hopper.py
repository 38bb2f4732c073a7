"""Implicit GEMM by Hopper's own means: the passes it makes, what it refuses, and what its kernel must not lack."""

from __future__ import annotations

import math
from typing import Any

import pytest
from layers import hopper_layer
from simt.cases import check
from simt.emulator import MISSING, Emulated, EmulationError
from simt.planted import Planted, caught

from autoconv.cuda.codegen.occupancy import register_cap
from autoconv.cuda.codegen.tensor_map import TensorMap
from autoconv.cuda.hopper.hopper import (
    CAPABILITY,
    PRODUCER_REGISTERS,
    TILES,
    WARPGROUP,
    Hopper,
    pass_axes,
    passes,
    pixel_map,
)
from autoconv.layer import DIRECTIONS

needs_compiler = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
SCHEDULES = range(16)
DEVICE = Emulated(capability=CAPABILITY)
HOPPER = Hopper()


def walked(tensor_map: TensorMap, tap: tuple[int, int]) -> list[tuple[int, int, int]]:
    """The pixels (image, row, column) that im2col copies go through for one tap, by the manual's words."""
    width, height, images = tensor_map.extents[1:]
    rows = range(tensor_map.lower[1], height + tensor_map.upper[1], tensor_map.pixel_strides[1])
    columns = range(tensor_map.lower[0], width + tensor_map.upper[0], tensor_map.pixel_strides[0])
    return [(n, h + tap[0], w + tap[1]) for n in range(images) for h in rows for w in columns]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"padding": ((0, 2), (1, 0)), "stride": (2, 1)},
        {"dilation": (2, 3), "padding": (2, 4), "stride": (1, 2)},
        {"R": 1, "S": 1, "stride": 2, "padding": 0},
        {"R": 2, "S": 5, "padding": (3, 4), "dilation": (3, 1), "stride": (2, 2)},
    ],
)
def test_a_pass_goes_through_the_pixels_that_its_taps_meet(fields: dict[str, Any], direction: str) -> None:
    """All passes together bring every product of the convolution once, each to the right output."""
    layer = hopper_layer(direction=direction, **fields)
    found = set()
    for rows, columns in passes(layer):
        for i in range(rows.taps):
            for j in range(columns.taps):
                places = walked(pixel_map(layer, (rows, columns), 64), (i * rows.tap_stride, j * columns.tap_stride))
                assert len(places) == layer.N * rows.pixels * columns.pixels
                for number, (n, h, w) in enumerate(places):
                    y, x = divmod(number % (rows.pixels * columns.pixels), columns.pixels)
                    tap = rows.first_tap + i * rows.next_tap, columns.first_tap + j * columns.next_tap
                    if direction == "dgrad":
                        out = rows.offset + y * layer.stride[0], columns.offset + x * layer.stride[1]
                        if 0 <= h < layer.P and 0 <= w < layer.Q:
                            found.add((n, *out, h, w, *tap))
                    elif 0 <= h < layer.H and 0 <= w < layer.W:
                        found.add((n, h, w, y, x, *tap))
    wanted = {
        (n, h, w, p, q, r, s)
        for n in range(layer.N)
        for p in range(layer.P)
        for q in range(layer.Q)
        for r in range(layer.R)
        for s in range(layer.S)
        for h in [p * layer.stride[0] - layer.padding[0][0] + r * layer.dilation[0]]
        for w in [q * layer.stride[1] - layer.padding[1][0] + s * layer.dilation[1]]
        if 0 <= h < layer.H and 0 <= w < layer.W
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"C": 12}, "stride of the copy engine: expected a multiple of 16 bytes below 2**40, got 24"),
        ({"stride": 9, "H": 40, "W": 40}, "pixel stride of the copy engine: expected 1 to 8, got 9"),
        ({"padding": (130, 1)}, "corner of the copy engine: expected -128 to 127, got -130"),
        ({"padding": ((1, 200), (1, 1))}, "corner of the copy engine: expected -128 to 127, got 198"),
        ({"R": 1, "S": 5, "dilation": (1, 70), "W": 300}, "filter taps: expected at most 255 pixels apart, got 280"),
        ({"layout": "NCHW"}, "layout: expected NHWC, got NCHW"),
        ({"dtype": "float32"}, "dtype: expected float16 or bfloat16, got float32"),
        ({"C": 96, "groups": 3, "K": 48}, "C/groups=32: expected a multiple of 64"),
        ({"C": 48, "groups": 3, "K": 36, "direction": "wgrad"}, "K/groups=12: expected a multiple of 8"),
        (
            {"direction": "dgrad", "stride": 3, "H": 20, "W": 20},
            "stride: expected at most 4 passes in dgrad, one to each component, got 9 for 3x3",
        ),
    ],
)
def test_what_the_copy_engine_cannot_do_is_said(fields: dict[str, Any], reason: str) -> None:
    layer, params = hopper_layer(**fields), {"BM": 64, "BN": 64, "STAGES": 4, "SPLIT": 1}
    reasons = HOPPER.why_not(layer, DEVICE, params)
    assert any(reason in each for each in reasons), reasons


def test_it_is_for_one_capability() -> None:
    for capability in (75, 80, 86, 89, 90, 100, 120):
        params = {"BM": 64, "BN": 64, "STAGES": 4, "SPLIT": 1}
        reasons = HOPPER.why_not(hopper_layer(), Emulated(capability=capability), params)
        assert bool(reasons) == (capability != CAPABILITY)
    assert HOPPER.why_not(hopper_layer(), DEVICE, params | {"STAGES": 9})
    assert HOPPER.why_not(hopper_layer(), DEVICE, params | {"SPLIT": 999})


def test_the_producer_leaves_what_the_consumers_ask_for() -> None:
    """A block starts with as many registers as its launch bounds allow; those given away must be enough."""
    for tile in TILES:
        start = register_cap(tile.threads, tile.blocks)
        asked = WARPGROUP * (PRODUCER_REGISTERS + tile.CONSUMERS * tile.consumer_registers)
        assert PRODUCER_REGISTERS < start < tile.consumer_registers
        assert asked <= start * tile.threads
        rows = tile.BM if tile.ALTERNATE else tile.BM // tile.CONSUMERS
        assert tile.consumer_registers >= rows // 64 * tile.BN // 2 + 24  # the sums fit


DEEP = hopper_layer(C=72, K=72)  # 18 slices of the depth, two tiles to some blocks: every stage goes round
PLANTED = {
    "no wait for the copies": ("await(ring.full[turn.stage], turn.parity);", ";"),
    "no wait for a free stage": ("await(ring.empty[turn.stage], turn.parity ^ 1);", ";"),
    "a stage returned while products read it": (
        "arrive(ring.empty[used]);\n        used",
        "arrive(ring.empty[turn.stage]);\n        used",
    ),
    "the parity never changes": ("parity ^= 1;", ";"),
    "the producer begins in the wrong phase": ("turn.parity ^ 1);", "turn.parity);"),
    "no wait for the products before a stage returns": ("wait_products<1>();", ";"),
    "no wait for the last products": ("wait_products<0>();", ";"),
    "no commit": ("commit_products();\n        wait", "wait"),
    "no fence before the products": ("fence_products();\n        multiply", "multiply"),
    "too few bytes announced": ("sizeof(Stage));\n", "sizeof(Stage) / 2);\n"),
    "the barriers are not made known": ("        fence_barriers();\n", ""),
    "the barriers are used before they are initialised": (
        "__syncthreads();\n    if (threadIdx.x >=",
        ";\n    if (threadIdx.x >=",
    ),
    "another swizzle": ("swizzled = Word(LINE_BYTES / line) << 62", "swizzled = Word(2) << 62"),
    "a wrong distance of atoms": ("atom = 8 * line >> 4", "atom = 8 * line >> 3"),
    "a wrong step along the depth": ("further(depth * (B_ACROSS", "further(2 * depth * (B_ACROSS"),
}
OUT_OF_TURN = {
    "a warpgroup begins before its turn": (
        "await(ring.multiplied[(tile - 1) % TOGETHER], (tile - 1) / TOGETHER & 1);",
        ";",
    ),
    "the wrong warpgroup goes first": ("tile % TOGETHER != warpgroup", "tile % TOGETHER == warpgroup"),
    "stages of the others are not left out": ("turn.skip(at.last() - at.first());", ";"),
    "nobody says that the tile is multiplied": ("arrive(ring.multiplied[warpgroup]);", ";"),
}


PARAMS = {"BM": 64, "BN": 64, "STAGES": 4, "SPLIT": 1}
ALTERNATING = {"BM": 64, "BN": 256, "STAGES": 5, "SPLIT": 4}  # three tiles to a block, its warpgroups in turn


@needs_compiler
@pytest.mark.parametrize("params", [PARAMS, ALTERNATING], ids=["together", "alternating"])
def test_the_kernel_is_right_on_every_schedule(params: dict[str, int]) -> None:
    for schedule in SCHEDULES:
        check(Emulated(capability=CAPABILITY, schedule=schedule), HOPPER, DEEP, params)


@needs_compiler
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault: str) -> None:
    assert caught(PLANTED[fault], HOPPER, DEEP, PARAMS)


@needs_compiler
@pytest.mark.parametrize("fault", OUT_OF_TURN)
def test_warpgroups_out_of_turn_are_caught(fault: str) -> None:
    assert caught(OUT_OF_TURN[fault], HOPPER, DEEP, ALTERNATING)


@needs_compiler
@pytest.mark.parametrize("fault", ["no wait for the copies", "no wait for the products before a stage returns"])
def test_thread_sanitizer_names_the_race(fault: str) -> None:
    with pytest.raises(EmulationError, match="data race"):  # in an order that brings no wrong answer before
        check(Planted(fault=PLANTED[fault], sanitizer="thread", schedule=0), HOPPER, DEEP, PARAMS)


@needs_compiler
@pytest.mark.stress
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.BM}x{t.BN}x{t.STAGES}")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_tile(direction: str, tile: Any) -> None:
    """With the depth in one part and in three."""
    layer = hopper_layer(C=136, K=136, stride=(1, 2), direction=direction)
    for split in (1, 3):
        params = {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES, "SPLIT": split}
        assert not HOPPER.why_not(layer, DEVICE, params)
        check(DEVICE, HOPPER, layer, params)


def test_work_is_the_tiles_of_the_output() -> None:
    """No tile is launched that would be empty."""
    for direction in DIRECTIONS:
        layer = hopper_layer(C=72, K=136, direction=direction, groups=1)
        for params in HOPPER.candidates(layer, DEVICE):
            covered = sum(unit.grid[0] for unit in HOPPER.units(layer, params) if unit.persistent) // int(
                params["SPLIT"]
            )
            least = math.prod(layer.output_shape) / (int(params["BM"]) * int(params["BN"]))
            assert least <= covered <= 4 * least + 9 * len(pass_axes(layer, 0))
