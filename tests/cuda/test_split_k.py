"""Split-K: parts of a depth that the last block to come sums, in the same order whoever that is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hosts import cache, cupy, given, right
from layers import hopper_layer, operands
from simt.cases import DEVICE, check, named, only, run
from simt.emulator import MISSING, Emulated
from simt.fake_cupy import FakeCuPy
from simt.planted import Fault, caught

from autoconv.bench.gpu.cases import FULL_EPILOGUE, SCALAR_TILE, SCHEDULES
from autoconv.cuda.common.model import LAUNCH_SECONDS, seconds
from autoconv.cuda.common.split import MOST_AT_ONCE, MOST_PARTS, SplitProduct, fan_in
from autoconv.cuda.device import CUDA
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import plan

__all__ = ["cache", "cupy"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

Case = tuple[str, ConvLayer, dict[str, Any]]

# Two tiles of eleven parts, which are summed in groups of four, the last of three; neighbours in the output are apart.
GROUPED: Case = (
    "gemm",
    ConvLayer(N=1, C=176, H=3, W=3, K=35, R=1, S=1, **FULL_EPILOGUE),
    SCALAR_TILE | {"SPLIT": 11},
)
TENSOR: Case = (
    "gemm.tensor",
    ConvLayer(N=1, C=96, H=3, W=3, K=72, R=1, S=1, layout="NHWC", dtype="float16", bias=True),
    {"BM": 64, "BN": 64, "SPLIT": 3},
)
TF32X3: Case = (
    "gemm.tensor.tf32x3",
    TENSOR[1].replace(C=64, dtype="float32", direction="dgrad", bias=False),
    {"BM": 64, "BN": 64, "SPLIT": 4},
)
BF16X6: Case = ("gemm.tensor.bf16x6", TF32X3[1].replace(direction="wgrad", H=9), {"BM": 64, "BN": 128, "SPLIT": 9})
HOPPER: Case = (  # both warpgroups have a part of each tile
    "gemm.hopper",
    hopper_layer(N=1, C=136, K=72, H=9, R=1, padding=0),
    {"BM": 128, "BN": 64, "STAGES": 4, "SPLIT": 3},
)
IN_TURN: Case = ("gemm.hopper", HOPPER[1], {"BM": 128, "BN": 128, "STAGES": 6, "SPLIT": 3})
IN_PARTS: Case = (
    "gemm.hopper.bf16x6",
    hopper_layer(N=1, C=72, K=40, H=9, R=1, padding=0, direction="dgrad", dtype="float32"),
    {"BM": 64, "BN": 64, "STAGES": 3, "SPLIT": 2},
)
DEPTHWISE: Case = (
    "depthwise.wgrad",
    ConvLayer(N=1, C=6, H=40, W=40, K=6, R=2, S=3, groups=6, direction="wgrad"),
    {"SPLIT": 10},
)
CASES = {"gemm": GROUPED, "tensor": TENSOR, "tf32x3": TF32X3, "bf16x6": BF16X6, "hopper": HOPPER, "in turn": IN_TURN,
         "in parts": IN_PARTS, "depthwise": DEPTHWISE}  # fmt: skip

PLANTED: dict[str, Fault] = {
    "a ticket before all have left their sums": ("sync_some<THREADS_TOGETHER>(barrier);", ";"),
    "no fence before the ticket": ("fence_device();\n            last", "last"),
    "no fence behind it": ("unsigned(count - 1);\n            fence_device();", "unsigned(count - 1);"),
    "a ticket that is not put back": ("take_ticket(ticket, count - 1)", "take_ticket(ticket, count)"),
    "the first for the last": ("== unsigned(count - 1)", "== 0u"),
    "the last but one for the last": ("== unsigned(count - 1)", "== unsigned(count - 2)"),
    "every thread takes a ticket": ("if (thread == 0) {", "{"),
    "the last by its place": ("any_of<THREADS_TOGETHER>(barrier, last);", "parts == nullptr;"),
    "all tiles share tickets": ("tickets + tile * TICKETS}", "tickets}"),
    "a group's sum in the place of the last part": ("leave(sum, first);", "leave(sum, part);"),
    "groups that have one ticket": ("last_of(count, tickets + group)", "last_of(count, tickets)"),
    "a last group as large as the others": ("SPLIT - first < FAN_IN ? SPLIT - first : FAN_IN", "FAN_IN"),
    "parts for groups": ("add_all(sum, 0, SPLIT_GROUPS, FAN_IN)", "add_all(sum, 0, SPLIT_GROUPS, 1)"),
    "the part that is there already comes twice": ("for (int i = 0; i < COUNT; i++) sum[i] = 0;", ";"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_whichever_block_comes_last_the_sum_is_the_same(case: str) -> None:
    """On every schedule: blocks in order or not, stores that wait for their fence or do not."""
    name, layer, params = CASES[case]
    assert not named(name).why_not(layer, Emulated(capability=90), params)
    check(DEVICE, named(name), layer, params)
    first = run(DEVICE, named(name), layer, params)
    for schedule in range(SCHEDULES):
        again = run(Emulated(capability=90, schedule=schedule), named(name), layer, params)
        np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault: str) -> None:
    name, layer, params = GROUPED
    assert caught(PLANTED[fault], named(name), layer, params)


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sums_of_groups_are_clean_under_sanitizers(sanitizer: str) -> None:
    name, layer, params = GROUPED
    check(Emulated(capability=90, sanitizer=sanitizer), named(name), layer, params)


@pytest.mark.parametrize("case", CASES)
def test_the_workspace_is_what_the_parts_take(case: str) -> None:
    """Whole tiles of each part, to the last byte."""
    name, layer, params = CASES[case]
    algorithm = named(name)
    assert isinstance(algorithm, SplitProduct)
    parts = algorithm.parts(layer, params)
    wanted = params["SPLIT"] * parts.tiles * parts.sums * 4
    assert algorithm.workspace_bytes(layer, DEVICE, params) == wanted
    a, b, bias, residual = (None if x is None else DEVICE.asarray(x) for x in operands(layer))
    kernel = algorithm.build(layer, DEVICE, params)
    packed = DEVICE.buffer(kernel.packed_bytes)
    if kernel.packed_bytes:
        kernel.pack(b, packed)
        b = packed
    room, out = DEVICE.buffer(wanted), DEVICE.empty(layer.output_shape, layer.numpy_dtype)
    kernel.run(a, b, out, bias, residual, room)
    assert (room.view(np.uint32) != 0xFFFFFFFF).all()


def test_no_block_sums_many_parts() -> None:
    for split in range(1, MOST_PARTS + 1):
        groups = -(-split // fan_in(split))
        assert fan_in(split) * groups >= split > fan_in(split) * (groups - 1)
        assert max(fan_in(split), groups) <= 12
        assert (groups == 1) == (split <= MOST_AT_ONCE)


def test_a_sum_takes_its_clocks_but_no_launch() -> None:
    name, layer, params = GROUPED
    algorithm = named(name)
    assert isinstance(algorithm, SplitProduct)
    product, groups, total = algorithm.demands(layer, DEVICE, params)
    assert (groups.blocks, total.blocks) == (3 * 2, 2)  # of two tiles
    assert (groups.cached, total.cached) == (4 * 32 * 64 * 4, 3 * 32 * 64 * 4)
    assert [one.launches for one in (product, groups, total)] == [1, 0, 0]
    assert LAUNCH_SECONDS < seconds(DEVICE, [product]) < seconds(DEVICE, [product, groups, total])
    assert len(algorithm.demands(layer, DEVICE, params | {"SPLIT": 1})) == 1


# On a device: tickets that are zero whoever comes next


def test_every_scratch_has_tickets_of_its_own_and_graphs_replay(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "gemm")
    layer = GROUPED[1].replace(bias=False, residual=False, activation=None)
    x, w, *_ = given(cupy, layer)
    made = plan(layer, "gemm[BM=32,BN=64,BK=16,TM=4,TN=4,SPLIT=2]", device="cuda", cache=cache)
    for _ in range(3):
        assert right(layer, made.run(x, w))
    stream = cupy.cuda.Stream(non_blocking=True)
    out = cupy.empty(layer.y_shape)
    with stream:
        stream.begin_capture()
        made.run(x, w, out=out)
        graph = stream.end_capture()
    for _ in range(3):
        out[...] = np.nan
        graph.launch()
        assert right(layer, out)
    of = made.kernel._tickets._of  # type: ignore[attr-defined]
    assert list(of) == [CUDA(0).address(room) for room in made._workspaces.values()]
    assert len({CUDA(0).address(tickets) for tickets in of.values()}) == 2
    assert not any(tickets.any() for tickets in of.values())
    assert all(tickets.nbytes == 4 * 2 for tickets in of.values())  # of two tiles
