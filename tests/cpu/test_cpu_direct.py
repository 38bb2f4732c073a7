"""The direct algorithm: every layer, on every instruction set, with nothing touched outside the arrays."""

from __future__ import annotations

import itertools
import os
import zlib

import numpy as np
import pytest
from guards import check_guarded, some
from hypothesis import given
from hypothesis import strategies as st
from layers import EDGES, EPILOGUES, edge, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.common.correlation import CorrelationAxis, correlations
from autoconv.cpu.device import CPU
from autoconv.cpu.direct import gradients, gradients_packed, kernels
from autoconv.cpu.direct.algorithm import Direct, _listed
from autoconv.cpu.direct.geometry import TileRun, blockings, tile_runs
from autoconv.cpu.direct.kernels import _inputs
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
DIRECT = Direct()


def test_cutting_a_long_row_looks_at_every_tile_but_not_at_all_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, sees = [], CorrelationAxis.sees
    monkeypatch.setattr(CorrelationAxis, "sees", lambda *asked: (looks.append(asked), sees(*asked))[1])
    row = CorrelationAxis(size=12_000, count=12_000, stride=1, offset=-4, dilation=1, taps=tuple(range(9)))
    assert [(run.tiles, run.pattern == ((True,) * 12,) * 9) for run in tile_runs(row, 12)] == [
        (1, False), (998, True), (1, False)
    ]  # fmt: skip
    assert len(looks) < 5 * 1000


def test_cutting_a_very_long_row_looks_at_its_ends_alone() -> None:
    count = 40_000 * 40_000
    row = CorrelationAxis(size=count, count=count, stride=1, offset=-1, dilation=1, taps=(0, 1, 2))
    runs = tile_runs(row, 14)
    assert len(runs) < 50
    assert [run.start for run in runs[1:]] == [run.start + run.tiles * run.length for run in runs[:-1]]
    assert runs[-1].start + runs[-1].length == count
    assert {run.length for run in runs} == {13, 14}
    assert runs[0].pattern == ((False, *[True] * 12), (True,) * 13, (True,) * 13)


@given(st.integers(1, 400), st.integers(1, 20), st.integers(-12, 6), st.integers(0, 7), st.integers(1, 4))
def test_a_row_is_cut_as_if_every_tile_were_looked_at(
    count: int, length: int, offset: int, taps: int, dilation: int
) -> None:
    row = CorrelationAxis(count, count, 1, offset, dilation, tuple(range(taps)))
    number = -(-count // length)
    edges = [count * n // number for n in range(number + 1)]
    tiles = [(b - a, None if length == 1 else row.pattern(a, b - a)) for a, b in itertools.pairwise(edges)]
    runs = [(kind, len(list(same))) for kind, same in itertools.groupby(tiles)]
    assert [(run.kind, run.tiles) for run in tile_runs(row, length)] == runs


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, direction: str) -> None:
    """Each edge with a layout, type, epilogue, instruction set and thread count of its own."""
    pick = zlib.crc32(f"{name} {direction}".encode())
    layout, dtype = LAYOUTS[pick % 2], ("float32", "float32", *DTYPES)[pick // 2 % 6]
    epilogue = list(EPILOGUES.values())[pick // 16 % 4] if direction == "fwd" else {}
    device = device_with(INSTRUCTION_SETS[pick // 256 % len(INSTRUCTION_SETS)], 1 + pick // 64 % 3)
    layer = edge(name, direction=direction, layout=layout, dtype=dtype, **epilogue)
    assert check_guarded(DIRECT, layer, device, operands(layer))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_remainders_of_channels_and_pixels(instruction_set: str, layout: str, direction: str) -> None:
    device = device_with(instruction_set)
    for C, K, W in ((1, 1, 1), (3, 17, 13), (18, 33, 30), (5, 64, 29)):
        problem = {"N": 1, "C": C, "H": 3, "W": W, "K": K, "R": 3, "S": 3, "padding": 1}
        layer = ConvLayer(**problem, layout=layout, direction=direction)
        assert check_guarded(DIRECT, layer, device, operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_sums_go_over_channels_whose_filters_fit_the_first_cache(instruction_set: str, dtype: str) -> None:
    device = device_with(instruction_set)
    for C, R, H, groups in ((300, 3, 7, 1), (1030, 1, 5, 1), (260, 5, 3, 2), (90, 3, 61, 1)):
        layer = ConvLayer(
            N=2, C=C, H=H, W=9, K=6 * groups, R=R, S=R, padding=R // 2, groups=groups, dtype=dtype, **EPILOGUES["bias"]
        )
        # those that sum over all at once are every other test's
        names = {str(c) for c in some([c for c in DIRECT.all(layer, device) if int(c.params["BC"]) < C // groups])}
        assert names, f"{layer} is summed over all channels at once"
        assert check_guarded(DIRECT, layer, device, operands(layer), names) == len(names)
    wide = ConvLayer(N=1, C=300, H=100, W=900, K=6, R=1, S=1)  # its sums would fill a larger cache
    assert {c.params["BC"] for c in DIRECT.all(wide, device)} == {300}


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("direction", ["fwd", "dgrad"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_thread_has_neighbouring_pixels_where_channels_are_neighbours(
    instruction_set: str, direction: str, threads: int
) -> None:
    """As others do that read them; where that makes many more tiles, or filters are most of it, it has filters."""
    device = device_with(instruction_set, threads)
    epilogue = list(EPILOGUES.values())[-1] if direction == "fwd" else {}
    layer = ConvLayer(N=1, C=20, H=6, W=14, K=37, R=1, S=1, layout="NHWC", direction=direction, **epilogue)
    cut = {str(c): blockings(layer, device, c.params)[0] for c in DIRECT.all(layer, device)}
    apart = {name for name, b in cut.items() if b.parts > 1}
    assert bool(apart) == (threads > 1)
    assert all(b.parts % threads == 0 and b.rows <= b.parts // threads for name, b in cut.items() if name in apart)
    chosen = apart & {str(c) for c in some([c for c in DIRECT.all(layer, device) if str(c) in apart])}
    assert check_guarded(DIRECT, layer, device, operands(layer), chosen) == len(chosen)
    for other in (
        {"N": threads},
        {"layout": "NCHW"},
        {"H": 5, "W": 7},
        {"C": 200, "K": 200},
        {"R": 3, "padding": (1, 0)},
    ):
        changed = layer.replace(**other)  # type: ignore[arg-type]
        assert {blockings(changed, device, c.params)[0].parts for c in DIRECT.all(changed, device)} == {1}, other


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_some_candidate_needs_no_memory_even_for_enormous_filters(direction: str) -> None:
    device = CPU.current()
    layer = ConvLayer(N=1, C=2, H=3, W=900, K=3, R=1, S=801, padding=(0, 400), direction=direction)
    able = [c for c in DIRECT.all(layer, device) if not DIRECT.why_not(layer, device, c.params)]
    ways = (DIRECT.workspace_bytes, DIRECT.packed_bytes)
    assert 0 in [sum(bytes_of(layer, device, c.params) for bytes_of in ways) for c in able]
    assert check_guarded(DIRECT, layer, device, operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_no_tile_is_named_that_is_unrolled_too_far(instruction_set: str) -> None:
    device = device_with(instruction_set)
    for C, R, groups in ((8, 31, 8), (4, 15, 1)):
        layer = ConvLayer(N=1, C=C, H=64, W=32, K=40, R=R, S=R, padding=R // 2, groups=groups)
        named = DIRECT.all(layer, device)
        known = [dict(c.params) for c in named]
        assert any(int(c.params["TP"]) * int(c.params["TQ"]) >= 4 for c in named)
        assert not any(DIRECT.why_not(layer, device, c.params) for c in named)
        listed = [dict(params) for params in _listed(layer, device)]
        too_much = next(params for params in listed if params not in known)
        (reason,) = DIRECT.why_not(layer, device, too_much)
        assert "multiply-adds in the unrolled program" in reason


def test_single_columns_are_stored_without_masks() -> None:
    """Of hundreds of stores whose masks have a single lane LLVM makes code for minutes."""
    layer = ConvLayer(N=1, C=16, H=64, W=64, K=32, R=15, S=15, padding=7)
    params = {"TK": 16, "TP": 28, "TQ": 1, "BC": 16, "filters": "packed"}
    module = kernels.emit("avx512", layer, blockings(layer, CPU(1, "avx512"), params))
    assert "masked.store" not in str(module)


@pytest.mark.parametrize("direction", ["fwd", "dgrad"])
def test_an_estimate_tells_sums_over_some_channels_from_those_over_all(direction: str) -> None:
    device = device_with("avx512")
    layer = ConvLayer(N=1, C=64, H=28, W=28, K=192, R=3, S=3, padding=1, direction=direction)
    all_of_them = layer.C if direction == "fwd" else layer.K
    parts: dict[tuple[object, ...], list[float]] = {}
    whole: dict[tuple[object, ...], float] = {}
    for c in DIRECT.all(layer, device):
        if c.params["filters"] == "packed":
            tile, seconds = (
                tuple(c.params[name] for name in ("TK", "TP", "TQ")),
                DIRECT.estimate(layer, device, c.params),
            )
            if int(c.params["BC"]) == all_of_them:
                whole[tile] = seconds
            else:
                parts.setdefault(tile, []).append(seconds)
    assert parts
    assert all(min(parts[tile]) < whole[tile] for tile in parts)


def test_answers_do_not_depend_on_threads() -> None:
    for direction in DIRECTIONS:
        layer = edge("many channels", direction=direction)
        a, b, *_ = operands(layer)
        params = DIRECT.all(layer, CPU.current(1))[-1].params  # others may have other blocks: their caches are measured
        answers = []
        for threads in (1, 2, 5):
            device = CPU.current(threads)
            out = np.full(layer.output_shape, np.nan, np.float32)
            kernel = DIRECT.build(layer, device, params)
            assert not kernel.packed_bytes
            kernel.run(a, b, out, None, None, device.buffer(kernel.workspace_bytes))
            answers.append(out)
        for answer in answers[1:]:
            np.testing.assert_array_equal(answer, answers[0], err_msg=f"{params} on {layer}")


def test_tiles_cover_an_axis_once_and_merge_what_is_alike() -> None:
    axis = CorrelationAxis(size=56, count=56, stride=1, offset=-1, dilation=1, taps=(0, 1, 2))
    runs = tile_runs(axis, 14)
    assert [(run.start, run.tiles, run.length) for run in runs] == [(0, 1, 14), (14, 2, 14), (42, 1, 14)]
    assert runs[0].pattern == ((False, *[True] * 13), (True,) * 14, (True,) * 14)
    covered = [r.start + n for r in tile_runs(axis, 9) for n in range(r.tiles * r.length)]
    assert covered == list(range(56))


def test_what_is_fetched_is_what_a_tile_sees() -> None:
    """Of taps far apart only what each sees, and nothing of the padding; else a whole row, line by line, to its end."""
    far = CorrelationAxis(33, 33, 1, -24, 24, (0, 1, 2))
    seen = [_inputs(run, far, 1) for run in tile_runs(far, 7) if run.pattern is not None]
    assert seen
    assert max(map(len, seen)) <= 3 * 7
    assert _inputs(TileRun(0, 1, 7, None), far, 16) == [0, 24, 48, 54]
    near = CorrelationAxis(100, 98, 1, 0, 1, (0, 1, 2))
    (inside,) = {tuple(_inputs(run, near, 1)) for run in tile_runs(near, 14) if run.length == 14}
    assert inside == tuple(range(16))
    assert _inputs(TileRun(0, 1, 40, None), near, 16) == [0, 16, 32, 41]


def test_the_part_of_taps_that_outputs_see() -> None:
    for axis in (CorrelationAxis(33, 33, 1, -24, 24, (0, 1, 2)), CorrelationAxis(9, 5, 2, -1, 1, (0, 1, 2))):
        pairs = list(itertools.product(range(axis.count), range(3)))
        assert axis.seen == pytest.approx(sum(axis.sees(p, t) for p, t in pairs) / len(pairs))


def test_a_strided_gradient_is_one_correlation_for_each_residue() -> None:
    layer = edge("strided", direction="dgrad")
    parts = correlations(layer)
    assert len(parts) == 4
    assert sum(c.rows.count * c.columns.count for c in parts) == layer.H * layer.W
    assert sum(len(c.rows.taps) * len(c.columns.taps) for c in parts) == layer.R * layer.S


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_filter_gradients_in_many_panels(instruction_set: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((gradients, "ROW_BYTES"), (gradients_packed, "PANEL_BYTES")):
        monkeypatch.setattr(module, name, 1024)
    device = device_with(instruction_set, 2)
    layer = edge("dilated strided", C=18, K=21, N=3, dtype=dtype, direction="wgrad")
    assert check_guarded(DIRECT, layer, device, operands(layer)) == 2


def test_gradients_of_enormous_strides_are_left_to_others() -> None:
    """Every polyphase component has a kernel of its own: compiling 1024 of them took most of a minute."""
    device = CPU.current()
    for stride, layout in itertools.product((16, 64), LAYOUTS):
        extents = {"N": 1, "C": 2, "H": 130, "W": 130, "K": 2, "R": stride, "S": stride}
        layer = ConvLayer(**extents, stride=stride, layout=layout, direction="dgrad")
        (reason,) = DIRECT.unsupported(layer)
        assert f"got {stride**2} of stride {stride}x{stride}" in reason
        assert DIRECT.why_not(layer, device, {}) == [reason]
    narrow = ConvLayer(N=1, C=2, H=66, W=2, K=2, R=8, S=2, stride=(8, 64), direction="dgrad")
    assert check_guarded(DIRECT, narrow, device, operands(narrow))
