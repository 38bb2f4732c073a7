"""Winograd on generated kernels: every split of a layer, every instruction set, inside its buffers and its bound."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from guards import check_candidate, run_guarded
from layers import EDGES, EPILOGUES, edge, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.algorithm import PADDING_ONLY, Candidate, Params
from autoconv.common.winograd_math import Transforms
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import VECTOR_BYTES, VECTOR_REGISTERS, Module, f32, ptr
from autoconv.cpu.device import CPU
from autoconv.cpu.transform.filters import STREAMED
from autoconv.cpu.winograd.algorithm import Winograd
from autoconv.cpu.winograd.geometry import LARGEST_TILE, minimal
from autoconv.cpu.winograd.kernels import emit
from autoconv.cpu.winograd.matrix import matrix_vector
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
WINOGRAD = Winograd()


run = functools.partial(check_candidate, WINOGRAD)


FITTING = [name for name in EDGES if not WINOGRAD.why_not(edge(name), DEVICE, {"m": "2x2", "rows": 2, "coop": 0})]


def test_most_edges_fit() -> None:
    assert {"remainders", "stem", "strided", "dilated", "dilated strided", "row filter", "five by five"} < set(FITTING)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FITTING)
def test_edges_on_every_instruction_set(name: str, instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    cases = [("NCHW", "fwd", 0), ("NHWC", "dgrad", 2)]
    cases += [("NHWC", "fwd", 2), ("NCHW", "dgrad", 0)] if instruction_set == INSTRUCTION_SETS[0] else []
    for layout, direction, coop in cases:
        layer = edge(name, layout=layout, direction=direction)
        params = {"m": "2x2", "rows": 2, "coop": coop}
        if not WINOGRAD.why_not(layer, device, params):
            run(layer, params, device, "after" if layout == "NCHW" else "before")


@pytest.mark.parametrize("m", ["3x3", "4x4", "5x5", "6x6", "7x7", "4x7", "7x2"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_sizes_of_tiles(m: str, layout: str) -> None:
    run(edge("remainders", layout=layout), {"m": m, "rows": 1, "coop": 0})


@pytest.mark.parametrize("C", [8, 256])
@pytest.mark.parametrize(("m", "R"), [("2x2", 3), ("4x4", 3), ("4x7", 3), ("7x7", 3), ("2x4", 5), ("5x5", 5)])
def test_errs_as_is_usual(C: int, m: str, R: int) -> None:
    layer = ConvLayer(N=2, C=C, H=28, W=28, K=32, R=R, S=R, padding=R // 2)
    x, w, _, _ = given = operands(layer)
    want, magnitude = reference.convolve(layer, x, w), reference.magnitude(layer, x, w)
    params = {"m": m, "rows": 2, "coop": 0}
    got = run_guarded(WINOGRAD, layer, DEVICE, Candidate("winograd", tuple(params.items())), given, "after")
    assert 1 / 3 < reference.error(got, want, magnitude) / WINOGRAD.usual_error(layer, params) < 3


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("C", [64, 150, 512])
def test_finer_forms_err_less_by_as_much_as_is_usual(C: int, instruction_set: str) -> None:
    layer, device = ConvLayer(N=1, C=C, H=21, W=28, K=40, R=3, S=3, padding=1), device_with(instruction_set, 2)
    x, w, _, _ = given = operands(layer)
    want, params = reference.convolve(layer, x, w), {"m": "4x7", "rows": 2, "coop": 0}
    finer = {**params, **WINOGRAD.finer}

    def rms(params: Params) -> float:
        got = run_guarded(WINOGRAD, layer, device, Candidate("winograd", tuple(params.items())), given, "after")
        return float(np.sqrt(np.mean((got - want) ** 2)))

    usual = WINOGRAD.usual_error(layer, finer) / WINOGRAD.usual_error(layer, params)
    assert 0.5 < usual < 0.85
    assert rms(finer) == pytest.approx(usual * rms(params), rel=0.1)


@pytest.mark.parametrize("padding", [0, 1, ((1, 0), (0, 3)), 4])
@pytest.mark.parametrize("W", [7, 8, 9, 17, 32, 47])
def test_rows_of_any_width(W: int, padding: Any) -> None:
    """Whole vectors of the image's own columns, what is left of them, and zeros beside them."""
    for dtype, direction in (("float32", "fwd"), ("float32", "dgrad"), ("bfloat16", "fwd")):
        layer = edge("plain", C=19, H=6, W=W, padding=padding, dtype=dtype, direction=direction)
        run(layer, {"m": "2x3", "rows": 1, "coop": 0})


@pytest.mark.parametrize(("rows", "coop"), [(1, 0), (3, 0), (100, 0), (1, 1), (2, 3), (3, 100)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_schedules(rows: int, coop: int, threads: int) -> None:
    for name in ("many images", "many channels", "grouped"):
        run(edge(name), {"m": "2x2", "rows": rows, "coop": coop}, CPU.current(threads=threads))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types_and_epilogues(dtype: str, epilogue: str) -> None:
    for layout, name in (("NCHW", "remainders"), ("NHWC", "remainders"), ("NCHW", "dilated")):
        run(edge(name, dtype=dtype, layout=layout, **EPILOGUES[epilogue]), {"m": "4x4", "rows": 2, "coop": 0})


def test_relu_passes_nan_on() -> None:
    layer = edge("plain", N=1, activation="relu", bias=True)
    x, w, bias, _ = operands(layer)
    bias[0] = np.nan
    params = {"m": "4x4", "rows": 1, "coop": 0}
    candidate = Candidate("winograd", tuple(params.items()))
    y = run_guarded(WINOGRAD, layer, DEVICE, candidate, (x, w, bias, None), "after")
    assert np.isnan(y[:, 0]).all()
    assert (y[:, 1:] >= 0).all()


def test_every_reason_is_given() -> None:
    params = {"m": "7x7", "rows": 1, "coop": 0}

    def reasons(layer: ConvLayer, m: str = "7x7") -> list[str]:
        return WINOGRAD.why_not(layer, DEVICE, params | {"m": m})

    assert "filter: expected neighbouring taps" in reasons(edge("pointwise"))[0]
    assert reasons(edge("depthwise")) == ["channels: expected dense or grouped, got depthwise"]
    assert "channels of a group: expected at least 2" in reasons(edge("plain", C=1))[0]
    assert "m: expected less than 9" in reasons(edge("five by five"), "9x2")[0]
    few = VECTOR_BYTES[DEVICE.instruction_set] // 4 - 1
    assert "that several subfilters share: expected at most 16" in reasons(edge("large filter", C=few))[0]
    assert reasons(edge("plain", direction="wgrad")) == ["direction: expected fwd or dgrad, got wgrad"]
    assert "expected at most 4 correlations, got 9" in reasons(edge("plain", stride=3, direction="dgrad"))[0]
    assert "expected taps that see every input" in reasons(edge("pointwise strided", direction="dgrad"))[0]
    assert reasons(edge("plain", W=1, padding=((1, 1), (9, 0)), stride=(1, 2))) == [PADDING_ONLY]
    assert "expected at most 36 inputs apart, got 37" in reasons(edge("plain", H=80, W=80, dilation=37))[0]
    assert len(reasons(edge("pointwise", C=1, H=40, W=40, stride=37))) == 3


def test_chunks_have_a_row_where_it_has_more_tiles_than_a_chunk_should() -> None:
    wide = edge("plain", H=1080, W=1920)
    cuts = [candidate.params for candidate in WINOGRAD.all(wide, DEVICE)]
    assert {params["rows"] for params in cuts if params["m"] == "2x2"} == {1}  # of 960 tiles
    assert max(WINOGRAD.tilings(wide, DEVICE, params)[0].chunk_tiles for params in cuts) == 960


def test_no_candidate_where_the_layer_itself_is_refused() -> None:
    assert WINOGRAD.all(edge("pointwise"), DEVICE) == []
    assert WINOGRAD.all(edge("pointwise strided", direction="dgrad"), DEVICE) == []


def test_transforms_are_exact_on_their_points() -> None:
    for m in range(1, LARGEST_TILE + 1):
        for r in range(1, LARGEST_TILE + 2 - m):
            f = minimal(m, r)
            x, w = [Fraction(3 * i * i - 7, i + 1) for i in range(f.tile)], [Fraction(i + 2, 5) for i in range(r)]
            s = [
                sum(g * v for g, v in zip(G, w, strict=True)) * sum(b * v for b, v in zip(B, x, strict=True))
                for G, B in zip(f.G, f.BT, strict=True)
            ]
            y = [sum(a * v for a, v in zip(A, s, strict=True)) for A in f.AT]
            assert y == [sum(w[t] * x[i + t] for t in range(r)) for i in range(m)]


def every_tile(r: int) -> list[Transforms]:
    """F(m, r) for every m."""
    return [minimal(m, r) for m in range(1, LARGEST_TILE + 2 - r)]


def emit_transforms(instruction_set: str, *tiles: Transforms) -> Module:
    """`x -> G x, BT x, AT x` of each F(m, r), a function each."""
    m = Module(instruction_set)
    for f in tiles:
        for name, matrix in (("G", f.G), ("BT", f.BT), ("AT", f.AT)):
            k = m.function(f"{name}{f.m}", ptr(f32), ptr(f32))
            lanes = m.lanes(f32)
            xs = [k.load(k.args[0] + n * lanes, lanes) for n in range(len(matrix[0]))]
            for n, value in enumerate(matrix_vector(k, matrix, xs)):
                k.store(value, k.args[1] + n * lanes)
    return m


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("r", [2, 3, 5])
def test_transforms_as_code_are_the_matrices(instruction_set: str, r: int) -> None:
    program = compiler.build(emit_transforms, instruction_set, *every_tile(r))
    lanes = VECTOR_BYTES[instruction_set] // 4
    random = np.random.default_rng(r)
    for f in every_tile(r):
        for name, matrix in (("G", f.G), ("BT", f.BT), ("AT", f.AT)):
            exact = np.array(matrix, float)
            x, y = (np.empty((n, lanes), np.float32) for n in exact.T.shape)
            x[:] = random.standard_normal(x.shape)
            function: Callable[..., None] = program.function(f"{name}{f.m}", ctypes.c_void_p, ctypes.c_void_p)
            function(x.ctypes.data, y.ctypes.data)
            assert np.all(np.abs(y - exact @ x) <= 1e-6 * (np.abs(exact) @ np.abs(x))), (name, f.m)


def test_factors_of_the_largest_transforms_are_shared() -> None:
    def factors(instruction_set: str, name: str) -> int:
        text = str(emit_transforms(instruction_set, *every_tile(3)))
        (body,) = re.findall(rf"define [^\n]*@{name}\(.*?\n}}", text, re.DOTALL)
        return len({number.lstrip("-") for number in re.findall(r"-?\d\.\d+e[-+]\d+|0x\w+", body)})

    assert factors("avx2", "AT7") <= VECTOR_REGISTERS["avx2"] < factors("avx512", "AT7")


def test_threads_fetch_the_channels_that_they_transform_next() -> None:
    def fetches(**params: str | int) -> bool:
        text = str(
            emit("avx2", layer, WINOGRAD.tilings(layer, device_with("avx2", 2), {"m": "4x4", "rows": 1, **params}))
        )
        (gather,) = re.findall(r"define [^\n]*@gather0\(.*?\n}", text, re.DOTALL)
        return "llvm.prefetch" in gather

    layer = ConvLayer(N=1, C=32, H=20, W=20, K=16, R=3, S=3)
    assert fetches(coop=0)
    assert not fetches(coop=1)  # another thread may do that


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_large_filters_are_decomposed(layout: str) -> None:
    for m, changes in (("5x5", {}), ("2x7", {"stride": 2}), ("3x5", {"C": 17, "dilation": (1, 2), "W": 40})):
        layer = edge("large filter", layout=layout, **changes)
        (cut,) = WINOGRAD.tilings(layer, DEVICE, params := {"m": m, "rows": 2, "coop": 0})
        assert cut.rows.blocks * cut.columns.blocks > 1
        run(layer, params)


def test_strides_become_components_and_dilation_residue_classes() -> None:
    stem, dilated = edge("stem"), edge("dilated")
    params = {"m": "2x2", "rows": 1, "coop": 0}
    (cut,) = WINOGRAD.tilings(stem, DEVICE, params)
    assert (cut.subfilters, cut.rows.r, cut.rows.residues) == (16, 3, 1)
    (cut,) = WINOGRAD.tilings(dilated, DEVICE, params)
    assert (cut.subfilters, cut.rows.r, cut.rows.residues) == (1, 3, 2)


def test_filters_too_large_for_the_caches_are_written_past_them() -> None:
    layer = ConvLayer(N=1, C=173, H=6, W=7, K=325, R=3, S=3, padding=1)
    params = {"m": "4x5", "rows": 1, "coop": 0}
    (cut,) = WINOGRAD.tilings(layer, DEVICE, params)
    assert cut.packed_size * cut.itemsize > STREAMED
    run(layer, params)


def test_chunks_are_nearly_alike() -> None:
    for rows in range(1, 14):
        (tiling,) = WINOGRAD.tilings(edge("plain"), DEVICE, {"m": "2x2", "rows": rows, "coop": 0})
        chunks = [tiling.chunk_at(n) for n in range(tiling.chunks)]
        sizes = [size for _, size in chunks]
        assert [first for first, _ in chunks] == [sum(sizes[:n]) for n in range(len(sizes))]
        assert sum(sizes) == tiling.tile_rows
        assert max(sizes) == tiling.chunk <= rows
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("coop", [1, 3])
def test_sections_of_a_chunk_keep_threads_equally_busy(coop: int) -> None:
    device = CPU.current(threads=5)
    params: Params = {"m": "2x2", "rows": 4, "coop": coop}
    layer = edge("many images", N=5)
    (tiling,) = WINOGRAD.tilings(layer, device, params)
    assert tiling.sections > 1
    run(layer, params, device)
