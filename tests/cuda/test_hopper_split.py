"""float32 in parts on Hopper's units: every tile, every schedule, and what the kernel must not lack."""

from __future__ import annotations

import pytest
from simt.cases import DEVICE, check
from simt.emulator import MISSING, Emulated, EmulationError
from simt.planted import Planted, caught

from autoconv.cuda.codegen.source import wide
from autoconv.cuda.hopper.hopper import CAPABILITY
from autoconv.cuda.hopper.split import BK, PARTS, TILES, HopperBF16x6, PartsTile
from autoconv.layer import DIRECTIONS, ConvLayer

needs_compiler = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
SPLIT = HopperBF16x6()
PARAMS = {"BM": 64, "BN": 64, "STAGES": 3, "SPLIT": 1}
# 18 slices of the depth, or 5 in wgrad, two tiles to some blocks: every stage goes round
DEEP = ConvLayer(N=2, C=36, H=9, W=8, K=68, R=3, S=3, padding=1, layout="NHWC")

PLANTED = {
    "no wait for the copies": ("await(ring.full[turn.stage], turn.parity);", ";"),
    "no wait for a free stage": ("await(ring.empty[turn.stage], turn.parity ^ 1);", ";"),
    "no wait for the products": ("wait_products<0>();", ";"),
    "no commit": ("commit_products();\n    wait", "wait"),
    "no fence before the products": ("fence_products();\n    multiply", "multiply"),
    "a stage returned before it is read": (
        "Stage& stage = ring.stage[turn.stage];",
        "Stage& stage = ring.stage[turn.stage]; if (lane == 0) arrive(ring.empty[turn.stage]);",
    ),
    "the filters' depth in the order of memory": ("held(place % STEP + i)", "place % STEP + i"),
    "the sums before count": ("multiply_held<B_ACROSS, true>", "multiply_held<B_ACROSS, false>"),
    "the second step reads the first one's columns": ("further(depth * (B_ACROSS", "further(0 * (B_ACROSS"),
    "parts one after the other too soon": ("PARTS * PART) + line", "PART) + line"),
}


def test_parts_that_32_bits_do_not_reach_are_refused() -> None:
    """Filled up with channels they may be more than the elements of any array, by which positions have 32 bits."""
    pixels = ConvLayer(N=2048, C=3, H=256, W=256, K=96, R=4, S=4, stride=4, direction="wgrad", layout="NHWC")
    filters = ConvLayer(N=1, C=4, H=16, W=16, K=2**17, R=16, S=16, layout="NHWC")
    for layer, smaller in ((pixels, {"N": 2047}), (filters, {"K": 2**16})):
        assert not wide(layer)
        assert "elements of 3 parts, filled up: expected places below 2**31, got" in str(SPLIT.unfit(layer, PARAMS))
        assert not SPLIT.unfit(layer.replace(**smaller), PARAMS)
    large = pixels.replace(C=8)
    assert wide(large)
    assert not SPLIT.unfit(large, PARAMS)


@needs_compiler
@pytest.mark.parametrize("schedule", range(16))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_kernel_is_right_on_every_schedule(direction: str, schedule: int) -> None:
    check(Emulated(capability=CAPABILITY, schedule=schedule), SPLIT, DEEP.replace(direction=direction), PARAMS)


@needs_compiler
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault: str) -> None:
    assert caught(PLANTED[fault], SPLIT, DEEP, PARAMS)


@needs_compiler
@pytest.mark.parametrize("fault", ["no wait for the copies", "a stage returned before it is read"])
def test_thread_sanitizer_names_the_race(fault: str) -> None:
    with pytest.raises(EmulationError, match=r"data race|more arrivals"):
        check(Planted(fault=PLANTED[fault], sanitizer="thread"), SPLIT, DEEP, PARAMS)


@needs_compiler
@pytest.mark.stress
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.BM}x{t.BN}x{t.STAGES}")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_tile(direction: str, tile: PartsTile) -> None:
    """With the depth in one part and in three."""
    layer = ConvLayer(
        N=2, C=132, H=9, W=8, K=132, R=3, S=3, padding=1, stride=(1, 2), layout="NHWC", direction=direction
    )
    for split in (1, 3):
        params = {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES, "SPLIT": split}
        assert not SPLIT.why_not(layer, DEVICE, params)
        check(DEVICE, SPLIT, layer, params)


def test_what_is_kept_in_parts() -> None:
    """Filters, packed, channels in whole slices; x for wgrad, in the workspace, in whole runs of eight channels."""
    for direction, columns, depth in (("fwd", 68, 36), ("dgrad", 36, 68)):
        packed = SPLIT.packed_bytes(DEEP.replace(direction=direction), DEVICE, PARAMS)
        assert packed == 2 * PARTS * 9 * columns * -(-depth // BK) * BK
    wgrad = DEEP.replace(direction="wgrad")
    assert SPLIT.packed_bytes(wgrad, DEVICE, PARAMS) == 0
    sums = 2 * 9 * 64 * 64 * 4  # of whole tiles: two rows of them, a column to each tap
    parts = 2 * PARTS * 2 * 9 * 8 * 40
    assert SPLIT.workspace_bytes(wgrad, DEVICE, PARAMS) == parts
    assert SPLIT.workspace_bytes(wgrad, DEVICE, PARAMS | {"SPLIT": 2}) == 2 * sums + parts
