"""Winograd's products on tiles, emulated: right on every kind of layer, as exact as is said; and AMX's code."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import numpy as np
import pytest
from assembly import assembly, functions_of
from guards import check_candidate, run_guarded
from layers import EDGES, EPILOGUES, edge, operands
from vectors import INSTRUCTION_SETS, modelled, tile_device

from autoconv.algorithm import Algorithm, Candidate
from autoconv.cpu import permission, pool
from autoconv.cpu.codegen.ir import X86
from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.device import CPU
from autoconv.cpu.winograd.algorithm import Winograd
from autoconv.cpu.winograd.matrix_unit import WinogradMatrix, WinogradMatrixX3, emit
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
X6, X3 = WinogradMatrix(), WinogradMatrixX3()
AMX = CPU(threads=2, instruction_set="avx512", matrix_unit="amx")


FITTING = [name for name in EDGES if not X6.why_not(edge(name), tile_device(), {"m": "2x2", "rows": 2, "coop": 0})]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FITTING)
def test_edges_on_every_instruction_set(name: str, instruction_set: str) -> None:
    device = tile_device(instruction_set)
    for layout, direction, coop in (("NCHW", "fwd", 0), ("NHWC", "dgrad", 2)):
        layer = edge(name, layout=layout, direction=direction)
        params = {"m": "2x2", "rows": 2, "coop": coop}
        if not X6.why_not(layer, device, params):
            check_candidate(X6, layer, params, device, "after" if layout == "NCHW" else "before")


@pytest.mark.parametrize("C", [16, 23, 33, 48, 64, 91])
@pytest.mark.parametrize("K", [5, 16, 17, 40, 64])
def test_channels_that_fill_lines_and_tiles_or_do_not(C: int, K: int) -> None:
    """What a line has beyond the last channel is cleared: the workspace holds NaN before."""
    layer = ConvLayer(N=1, C=C, H=9, W=11, K=K, R=3, S=3, padding=1)
    for algorithm in (X6, X3):
        check_candidate(algorithm, layer, {"m": "2x4", "rows": 2, "coop": 0}, tile_device())


@pytest.mark.parametrize("m", ["3x3", "4x4", "5x5", "6x6", "7x7", "4x7"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_sizes_of_tiles(m: str, layout: str) -> None:
    layer = ConvLayer(N=1, C=40, H=17, W=19, K=20, R=3, S=3, padding=1, layout=layout)
    check_candidate(X6, layer, {"m": m, "rows": 1, "coop": 0}, tile_device())
    if max(map(int, m.split("x"))) <= 4:
        check_candidate(X3, layer, {"m": m, "rows": 1, "coop": 0}, tile_device())


@pytest.mark.parametrize(("rows", "coop"), [(1, 0), (3, 0), (100, 0), (1, 1), (2, 3), (3, 100)])
def test_schedules(rows: int, coop: int) -> None:
    """Chunks of one tile of the unit and of several, the last one of another size."""
    for name in ("many images", "grouped"):
        check_candidate(X6, edge(name), {"m": "2x2", "rows": rows, "coop": coop}, tile_device())


@pytest.mark.parametrize("coop", [0, 1, 2])
@pytest.mark.parametrize("K", [70, 96, 150, 256])
def test_blocks_of_filters_abreast(K: int, coop: int) -> None:
    """All of a task's, and what is left of them in the last."""
    layer = ConvLayer(N=1, C=20, H=9, W=11, K=K, R=3, S=3, padding=1, bias=True, activation="relu")
    check_candidate(X3, layer, {"m": "2x2", "rows": 2, "coop": coop}, tile_device())


@pytest.mark.parametrize(
    ("K", "threads", "coop", "abreast"),
    [
        *[(512, 2, 1, 4), (384, 2, 1, 3), (128, 2, 1, 2), (128, 2, 2, 4), (160, 2, 1, 1)],
        *[(512, 16, 1, 1), (2048, 16, 1, 4), (160, 2, 0, 4), (64, 2, 0, 2), (32, 2, 0, 1)],
    ],
)
def test_threads_that_share_an_image_have_equal_work(K: int, threads: int, coop: int, abreast: int) -> None:
    layer = ConvLayer(N=1, C=32, H=28, W=28, K=K, R=3, S=3, padding=1)
    (tiling,) = X3.tilings(layer, replace(AMX, threads=threads), {"m": "4x4", "rows": 3, "coop": coop})
    assert (tiling.chunks, tiling.abreast) == (3, abreast)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", X3.dtypes)
def test_types_and_epilogues(dtype: str, epilogue: str) -> None:
    for layout in ("NCHW", "NHWC"):
        layer = edge("remainders", C=24, dtype=dtype, layout=layout, **EPILOGUES[epilogue])
        check_candidate(X3, layer, {"m": "4x4", "rows": 2, "coop": 0}, tile_device())


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("algorithm", [Polyphase(X6), Polyphase(X3)], ids=lambda algorithm: algorithm.name)
def test_a_strided_gradient_by_polyphase_components(algorithm: Algorithm[CPU], layout: str) -> None:
    fields = {"R": 4, "S": 4, "stride": 2, "padding": 1, "layout": layout, "direction": "dgrad"}
    layer = ConvLayer(N=1, C=20, H=12, W=14, K=24, **fields)
    check_candidate(algorithm, layer, {"m": "2x2", "rows": 1, "coop": 0}, tile_device())


@pytest.mark.parametrize(("m", "least", "most"), [("2x2", 1e-7, 4e-6), ("3x3", 2e-7, 8e-6), ("4x4", 5e-7, 1.5e-5)])
def test_six_products_err_no_more_than_float32_does(m: str, least: float, most: float) -> None:
    """On normal operands: in tiles of any size six products lose nothing, three a multiple."""
    layer = ConvLayer(N=1, C=64, H=12, W=12, K=32, R=3, S=3, padding=1)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in layer.input_shapes)
    want, magnitude = reference.convolve(layer, x, w), reference.magnitude(layer, x, w)

    def error(algorithm: Algorithm[CPU]) -> float:
        candidate = Candidate(algorithm.name, (("m", m), ("rows", 3), ("coop", 0)))
        got = run_guarded(algorithm, layer, tile_device(), candidate, (x, w, None, None), "after")
        return reference.error(got, want, magnitude)

    assert error(X6) <= error(Winograd())
    assert least < error(X3) < most


@pytest.mark.parametrize("algorithm", [X6, X3], ids=lambda algorithm: algorithm.name)
def test_what_is_not_finite_stays_so_within_its_tiles(algorithm: Algorithm[CPU]) -> None:
    """And finite numbers near the largest, whose sums are finite, stay finite where transforms do not overflow."""
    layer = ConvLayer(N=2, C=40, H=9, W=10, K=20, R=3, S=3, padding=1)
    x, w, *_ = operands(layer)
    candidate = Candidate(algorithm.name, (("m", "2x2"), ("rows", 1), ("coop", 0)))
    for value in (np.inf, -np.inf, np.nan):
        spoilt = x.copy()
        spoilt[1, 5, 4, 3] = value
        clean, got = (
            run_guarded(algorithm, layer, tile_device(), candidate, (a, w, None, None), "after") for a in (x, spoilt)
        )
        assert not np.isfinite(got[1, :, 3:6, 2:5]).any()
        np.testing.assert_array_equal(got[0], clean[0])
    big = np.zeros_like(x)
    big[0, 3, 4, 4] = 2.0**125
    got = run_guarded(algorithm, layer, tile_device(), candidate, (big, w, None, None), "after")
    want, magnitude = reference.convolve(layer, big, w), reference.magnitude(layer, big, w)
    assert reference.error(got, want, magnitude) < 4e-5  # of one term


def test_precision_fades_where_parts_of_numbers_are_subnormal() -> None:
    """As of `matrix`: with operands of 2**-100 as ever, and then within the absolute term."""
    layer = ConvLayer(N=1, C=64, H=6, W=6, K=16, R=3, S=3, padding=1)
    x, w, *_ = operands(layer)
    candidate = Candidate(X6.name, (("m", "2x2"), ("rows", 1), ("coop", 0)))
    for exponent, bound in ((-60, 4e-6), (-100, 4e-6), (-118, 2e-3)):
        small = np.ldexp(x, exponent)
        want, magnitude = reference.convolve(layer, small, w), reference.magnitude(layer, small, w)
        got = run_guarded(X6, layer, tile_device(), candidate, (small, w, None, None), "after")
        assert reference.error(got, want, magnitude) <= bound, exponent
        allowed = X6.absolute_bound(layer, candidate.params, float(np.abs(w).max()))
        assert np.abs(got - want).max() <= bound * magnitude.max() + allowed


@pytest.mark.skipif(not X86, reason="instructions of x86")
@pytest.mark.parametrize(("algorithm", "products"), [(X6, 6), (X3, 3)])
def test_the_code_for_amx(algorithm: WinogradMatrix, products: int) -> None:
    layer = ConvLayer(N=2, C=64, H=28, W=28, K=64, R=3, S=3, padding=1)
    tilings = algorithm.tilings(layer, AMX, {"m": "4x4", "rows": 7, "coop": 0})
    functions = functions_of(assembly(emit("avx512", layer, tilings), "sapphirerapids"))
    assert functions["product_of_32_0"].count("tdpbf16ps") == 4 * products
    assert functions["product_of_32_0"].count("tileloadd") == {3: 8, 6: 14}[products]
    fetched = functions["product_of_32_0"].count("prefetcht1")  # its share of filters and of the next point's image
    assert fetched == {3: 32 + 32, 6: 48 + 48}[products]
    outer = re.findall(r"ldtilecfg|tilerelease|call|ret[q\n]", functions["product_7_0"])
    assert (outer[0], outer[-2]) == ("ldtilecfg", "tilerelease")
    transform = functions["transform_rows0"]
    parts = {3: 2, 6: 3}[products]
    assert transform.count("vcvtneps2bf16") == 6 * parts  # a part of a point, which nothing shuffles
    assert not re.search(r"vperm|vpunpck|vpack|vshuf", transform)


def test_who_is_refused_and_why() -> None:
    layer, params = ConvLayer(N=1, C=32, H=8, W=8, K=8, R=3, S=3), {"m": "2x2", "rows": 1, "coop": 0}
    assert X3.why_not(layer, tile_device(), params) == []
    (few,) = X3.why_not(layer.replace(C=15), tile_device(), params)
    assert few == "terms of a sum: expected at least 16, got 15"
    (large,) = X3.why_not(layer, tile_device(), params | {"m": "2x5"})
    assert large == "m=2x5: expected at most 4 outputs and 6 points of a tile, as there are three products of parts"
    assert all(c.params["m"] in {"2x2", "2x3", "2x4", "3x3", "3x4", "4x4"} for c in X3.all(layer, tile_device()))
    (no_unit,) = X6.why_not(layer, CPU(threads=2, instruction_set="avx2"), params)
    assert no_unit == "matrix_unit=None: expected a processor with a matrix unit (AMX)"
    assert X6.all(layer, CPU(threads=2, instruction_set="avx2")) == []


def test_a_refused_permission_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "granted", lambda: False)
    layer = ConvLayer(N=1, C=32, H=8, W=8, K=8, R=3, S=3)
    for algorithm in (X6, X3):
        with pytest.raises(PlanError, match="matrix_unit='amx': expected a process that may use tiles"):
            algorithm.build(layer, AMX, {"m": "2x2", "rows": 1, "coop": 0})


def test_estimates_count_products() -> None:
    """Six take longer than three; twice the images or filters about twice as long."""
    layer, params = ConvLayer(N=8, C=64, H=28, W=28, K=64, R=3, S=3, padding=1), {"m": "4x4", "rows": 7, "coop": 0}

    device = CPU(2, "avx2", matrix_unit="emulated", model=modelled("avx2", 2).text)

    def estimated(algorithm: Algorithm[CPU], **fields: int) -> float:
        return algorithm.estimate(layer.replace(**fields), device, params)

    assert estimated(X3) < estimated(X6)
    for fields in ({"N": 16}, {"K": 128}):
        assert 1.4 < estimated(X6, **fields) / estimated(X6) < 2.3
