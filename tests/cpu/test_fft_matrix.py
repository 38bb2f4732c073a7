"""Products of spectra on tiles, emulated: right on every kind of layer, as exact as in float32; and AMX's code."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from assembly import assembly, functions_of
from guards import check_candidate, run_guarded
from layers import EDGES, EPILOGUES, edge
from vectors import INSTRUCTION_SETS, tile_device

from autoconv.algorithm import Algorithm, Candidate
from autoconv.cpu import pool
from autoconv.cpu.codegen.ir import X86
from autoconv.cpu.device import CPU
from autoconv.cpu.fft.algorithm import TiledFFT
from autoconv.cpu.fft.matrix_unit import FourierMatrix, FourierMatrixX3, emit
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
X6, X3 = FourierMatrix(), FourierMatrixX3()
PARAMS = {"tile": "12x12", "rows": 2, "coop": 0}


FITTING = [name for name in EDGES if not X6.why_not(edge(name), tile_device(), PARAMS)]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FITTING)
def test_edges_on_every_instruction_set(name: str, instruction_set: str) -> None:
    device = tile_device(instruction_set)
    for algorithm, layout, direction, coop in ((X6, "NCHW", "fwd", 0), (X3, "NHWC", "dgrad", 2)):
        layer = edge(name, layout=layout, direction=direction)
        if not algorithm.why_not(layer, device, params := PARAMS | {"coop": coop}):
            check_candidate(algorithm, layer, params, device, "after" if layout == "NCHW" else "before")


@pytest.mark.parametrize("tile", ["6x6", "8x20", "20x16", "24x24"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_sizes_of_tiles(tile: str, layout: str) -> None:
    layer = ConvLayer(N=1, C=40, H=21, W=23, K=33, R=5, S=5, padding=2, layout=layout)
    for algorithm in (X6, X3):
        check_candidate(algorithm, layer, {"tile": tile, "rows": 3, "coop": 0}, tile_device())


def test_products_of_several_blocks_of_filters_have_room() -> None:
    """Those of all blocks by which a point is multiplied before the next one."""
    layer = ConvLayer(N=1, C=40, H=9, W=9, K=139, R=3, S=3, padding=1)
    for algorithm, coop in ((X6, 0), (X3, 2)):
        check_candidate(algorithm, layer, PARAMS | {"coop": coop}, tile_device())


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_types_and_epilogues(epilogue: str) -> None:
    for layout in ("NCHW", "NHWC"):
        check_candidate(
            X3, edge("remainders", dtype="float16", layout=layout, **EPILOGUES[epilogue]), PARAMS, tile_device()
        )


def test_six_products_err_no_more_than_float32_does() -> None:
    layer = ConvLayer(N=1, C=64, H=16, W=16, K=32, R=7, S=7, padding=3)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in layer.input_shapes)
    want, magnitude = reference.convolve(layer, x, w), reference.magnitude(layer, x, w)

    def error(algorithm: Algorithm[CPU]) -> float:
        candidate = Candidate(algorithm.name, (("tile", "24x24"), ("rows", 1), ("coop", 0)))
        got = run_guarded(algorithm, layer, tile_device(), candidate, (x, w, None, None), "after")
        return reference.error(got, want, magnitude)

    assert error(X6) <= error(TiledFFT())
    assert 5e-8 < error(X3) < 2e-6


def test_a_filter_whose_spectra_fill_the_stack_is_refused() -> None:
    layer = ConvLayer(N=1, C=64, H=70, W=70, K=32, R=15, S=15, padding=7)
    (reason,) = X6.why_not(layer, tile_device(), {"tile": "40x40", "rows": 1, "coop": 0})
    assert re.fullmatch(r"stack for a filter: expected at most 256 KiB, got \d+", reason)
    assert any(not X6.why_not(layer, tile_device(), c.params) for c in X6.all(layer, tile_device()))


@pytest.mark.skipif(not X86, reason="instructions of x86")
@pytest.mark.parametrize(("algorithm", "products"), [(X6, 6), (X3, 3)])
def test_the_code_for_amx(algorithm: FourierMatrix, products: int) -> None:
    layer = ConvLayer(N=1, C=64, H=24, W=24, K=64, R=5, S=5, padding=2)
    device = CPU(threads=2, instruction_set="avx512", matrix_unit="amx")
    tilings = algorithm.tilings(layer, device, {"tile": "8x8", "rows": 6, "coop": 0})
    functions = functions_of(assembly(emit("avx512", layer, tilings), "sapphirerapids"))
    assert functions["product_of_32_0"].count("tdpbf16ps") == 4 * products
    assert functions["transform_rows0"].count("vcvtneps2bf16") % (3 * {3: 2, 6: 3}[products]) == 0


def test_estimates_count_products() -> None:
    layer, params = ConvLayer(N=8, C=64, H=28, W=28, K=64, R=5, S=5, padding=2), PARAMS | {"rows": 4}
    assert X3.estimate(layer, tile_device(), params) < X6.estimate(layer, tile_device(), params)
    assert (
        1.4 < X6.estimate(layer.replace(K=128), tile_device(), params) / X6.estimate(layer, tile_device(), params) < 2.3
    )
