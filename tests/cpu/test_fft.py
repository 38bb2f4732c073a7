"""Tiled Fourier convolution on generated kernels: every length, every split of a layer, inside buffers and bound."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from guards import run_guarded
from hypothesis import given, settings
from layers import EDGES, TAILS, edge, layers, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.algorithm import Candidate, Params
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module, ptr
from autoconv.cpu.common.correlation import correlations
from autoconv.cpu.device import CPU
from autoconv.cpu.fft.algorithm import TiledFFT
from autoconv.cpu.fft.dft import Transform, factors, get, put
from autoconv.cpu.fft.geometry import circle
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
ALGORITHM = TiledFFT()
LENGTHS = [n for n in range(1, 101) if factors(n)]


def emit_transform(instruction_set: str, dtype: str, n: int, fold: bool, pairs: bool) -> Module:
    """`transform(x, X)` of n numbers of as many sequences as lanes, as `[number][part][lane]`."""
    m = Module(instruction_set)
    real = DTYPES[dtype]
    lanes = m.lanes(real)
    k = m.function("transform", ptr(real), ptr(real))
    x, y = k.args
    transform = Transform(k, real, lanes, n, fold=fold, pairs=pairs)
    transform.write(
        lambda i, j: get(k, x + (i + j) * (2 * lanes), lanes, lanes),
        lambda i, j, value: put(value, y + (i + j) * (2 * lanes), lanes),
    )
    return m


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", LENGTHS)
def test_transforms_of_every_length(n: int, dtype: str) -> None:
    instruction_set = INSTRUCTION_SETS[n % len(INSTRUCTION_SETS)]
    lanes = Module(instruction_set).lanes(DTYPES[dtype])
    x = np.random.default_rng(n).normal(size=(n, 2, lanes)).astype(dtype)
    want = np.fft.fft(x[:, 0].astype(complex) + 1j * x[:, 1], axis=0)
    for steps in ("", "a", "b"):
        if (n % 2 and steps) or factors(n, steps) is None:
            continue
        program = compiler.build(emit_transform, instruction_set, dtype, n, steps == "a", steps == "b")
        got = np.empty_like(x)
        program.function("transform", ctypes.c_void_p, ctypes.c_void_p)(x.ctypes.data, got.ctypes.data)
        error = np.abs(got[:, 0] + 1j * got[:, 1] - want).max() / np.abs(want).max()
        assert error < 8 * np.finfo(dtype).eps


def run(layer: ConvLayer, params: Params, device: CPU = DEVICE, side: str = "after") -> None:
    """Computes between guards and holds the answer against the oracle."""
    assert ALGORITHM.why_not(layer, device, params) == []
    values = operands(layer)
    got = run_guarded(ALGORITHM, layer, device, Candidate("fft", tuple(params.items())), values, side)
    error = reference.error(got, reference.convolve(layer, *values), reference.magnitude(layer, *values))
    assert error <= ALGORITHM.bound(layer, params), f"{params} on {layer}"


def chosen(layer: ConvLayer, device: CPU = DEVICE) -> list[Params]:
    """The candidates that can run."""
    return [params for params in ALGORITHM.candidates(layer, device) if not ALGORITHM.why_not(layer, device, params)]


FITTING = [name for name in EDGES if chosen(edge(name))]


def test_most_edges_fit() -> None:
    assert {"tails", "stem", "strided", "dilated", "dilated strided", "row filter", "large filter", "depthwise"} < set(
        FITTING
    )


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FITTING)
def test_edges_on_every_instruction_set(name: str, instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    cases = [("NCHW", "fwd", 0), ("NHWC", "dgrad", 2)]
    cases += [("NHWC", "fwd", 2), ("NCHW", "dgrad", 0)] if instruction_set == INSTRUCTION_SETS[0] else []
    for layout, direction, share in cases:
        layer = edge(name, layout=layout, direction=direction)
        for params in chosen(layer, device)[:1]:
            run(
                layer,
                params if name == "depthwise" else {**params, "share": share},
                device,
                "after" if layout == "NCHW" else "before",
            )


@pytest.mark.parametrize("tile", ["4x4", "6x4", "8x16", "18x20", "30x8", "12x36"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_sizes_of_tiles(tile: str, layout: str) -> None:
    run(edge("tails", layout=layout), {"tile": tile, "rows": 1, "share": 0})


@pytest.mark.parametrize(("rows", "share"), [(1, 0), (3, 0), (100, 0), (1, 1), (2, 3), (3, 100)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_schedules(rows: int, share: int, threads: int) -> None:
    for name in ("many images", "many channels", "grouped"):
        run(edge(name), {"tile": "6x6", "rows": rows, "share": share}, CPU.current(threads=threads))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types_and_tails(dtype: str, tail: str) -> None:
    for layout in ("NCHW", "NHWC"):
        run(edge("tails", dtype=dtype, layout=layout, **TAILS[tail]), {"tile": "8x8", "rows": 2, "share": 0})


def test_relu_passes_nan_on() -> None:
    layer = edge("plain", N=1, activation="relu", bias=True)
    x, w, bias, _ = operands(layer)
    bias[0] = np.nan
    y = run_guarded(ALGORITHM, layer, DEVICE, ALGORITHM.all(layer, DEVICE)[0], (x, w, bias, None), "after")
    assert np.isnan(y[:, 0]).all()
    assert (y[:, 1:] >= 0).all()


def test_padding_is_shared_by_the_ends_of_a_circle() -> None:
    layer = ConvLayer(N=1, C=4, H=64, W=30, K=4, R=15, S=9, padding=(7, 4))
    down, across = correlations(layer)[0].rows, correlations(layer)[0].columns
    shared, apart = circle(down, 72), circle(down, 70)
    assert shared is not None
    assert apart is not None
    assert (shared.tiles, shared.m, shared.r) == (1, 64, 9)  # of 78 inputs, 7 at either end are padding
    assert apart.tiles == 2
    assert circle(across, 4) is None
    for tile in ("72x36", "72x24", "36x36"):
        run(layer, {"tile": tile, "rows": 1, "share": 0})


def test_every_reason_is_given() -> None:
    params = {"tile": "16x16", "rows": 1, "share": 0}
    assert "no neighbouring taps" in ALGORITHM.why_not(edge("pointwise"), DEVICE, params)[0]
    assert "phases" in ALGORITHM.why_not(edge("depthwise strided"), DEVICE, params)[0]
    assert "share=2" in ALGORITHM.why_not(edge("depthwise"), DEVICE, params | {"share": 2})[0]
    assert "wgrad" in ALGORITHM.why_not(edge("plain", direction="wgrad"), DEVICE, params)[0]
    assert "tiles of 15" in ALGORITHM.why_not(edge("plain"), DEVICE, params | {"tile": "16x15"})[0]
    assert "rows=0" in ALGORITHM.why_not(edge("plain"), DEVICE, params | {"rows": 0})[0]
    fewer = ALGORITHM.why_not(edge("strided", direction="dgrad"), DEVICE, params)
    assert "falls into 4 correlations" in fewer[0]
    small = ALGORITHM.why_not(edge("large filter", padding=0), DEVICE, params | {"tile": "12x12"})
    assert "filters of 13x15 leave nothing of tiles of 12x12" in small[0]
    wide = edge("plain", H=40, W=40, dilation=9)
    assert "9 pixels apart" in ALGORITHM.why_not(wide, DEVICE, params)[0]
    deep = ConvLayer(N=1, C=2048, H=64, W=64, K=2048, R=3, S=3)
    assert "spectra take 4160 MiB" in ALGORITHM.why_not(deep, DEVICE, params)[0]
    long = ConvLayer(N=1, C=4, H=99, W=99, K=4, R=80, S=80)
    assert "of stack" in ALGORITHM.why_not(long, DEVICE, params | {"tile": "100x100"})[0]


@settings(max_examples=25, deadline=None)
@given(layers(dtype="float32"))
def test_any_layer(layer: ConvLayer) -> None:
    for params in chosen(layer)[:1]:
        run(layer, params)
