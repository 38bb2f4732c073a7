"""Tiled Fourier convolution on generated kernels: every length, every split of a layer, inside buffers and bound."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from guards import check_candidate, run_guarded
from hypothesis import given
from layers import EDGES, EPILOGUES, edge, layers, operands
from vectors import INSTRUCTION_SETS, device_with, machine_named

from autoconv.algorithm import Params
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module, ptr
from autoconv.cpu.common.correlation import correlations
from autoconv.cpu.device import CPU
from autoconv.cpu.fft import algorithm
from autoconv.cpu.fft.algorithm import TiledFFT
from autoconv.cpu.fft.dft import FourierTransform, factors, get, put
from autoconv.cpu.fft.geometry import circular
from autoconv.layer import ConvLayer

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
    transform = FourierTransform(k, real, lanes, n, fold=fold, pairs=pairs)
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


run = functools.partial(check_candidate, ALGORITHM)


def chosen(layer: ConvLayer, device: CPU = DEVICE) -> Iterator[Params]:
    """The candidates that can run."""
    return (c.params for c in ALGORITHM.all(layer, device) if not ALGORITHM.why_not(layer, device, c.params))


FITTING = [name for name in EDGES if any(True for _ in chosen(edge(name)))]


def test_most_edges_fit() -> None:
    assert {
        "remainders",
        "stem",
        "strided",
        "dilated",
        "dilated strided",
        "row filter",
        "large filter",
        "depthwise",
    } < set(FITTING)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FITTING)
def test_edges_on_every_instruction_set(name: str, instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    cases = [("NCHW", "fwd", 0), ("NHWC", "dgrad", 2)]
    cases += [("NHWC", "fwd", 2), ("NCHW", "dgrad", 0)] if instruction_set == INSTRUCTION_SETS[0] else []
    for layout, direction, coop in cases:
        layer = edge(name, layout=layout, direction=direction)
        for params in itertools.islice(chosen(layer, device), 1):
            run(
                layer,
                params if name == "depthwise" else {**params, "coop": coop},
                device,
                "after" if layout == "NCHW" else "before",
            )


@pytest.mark.parametrize("tile", ["4x4", "6x4", "8x16", "18x20", "30x8", "12x36"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_sizes_of_tiles(tile: str, layout: str) -> None:
    run(edge("remainders", layout=layout), {"tile": tile, "rows": 1, "coop": 0})


@pytest.mark.parametrize(("machine", "instruction_set"), [("epyc-zen3", "avx2"), ("epyc-zen5", "avx512")])
def test_the_most_promising_size_is_listed(machine: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many images that of least estimate has chunks of more than one row of tiles, and of fewer than may be."""
    layer = ConvLayer(N=32, C=96, H=27, W=27, K=256, R=5, S=5, padding=2)

    def best() -> tuple[float, Params]:
        anew = str(algorithm.MOST_SIZES)  # no memory of the other time
        model = dataclasses.replace(machine_named(machine), when=anew)
        device = CPU(model.threads, instruction_set, model=model.text)
        every = ALGORITHM.candidates(layer, device)
        return min(((ALGORITHM.estimate(layer, device, one), one) for one in every), key=lambda each: each[0])

    listed = best()
    monkeypatch.setattr(algorithm, "MOST_SIZES", 100)
    assert listed == best()
    assert 1 < listed[1]["rows"] < algorithm.MOST_TILES


def test_channels_that_are_not_summed() -> None:
    """They have a schedule and products of their own."""
    for threads in (1, 2):
        run(edge("depthwise"), {"tile": "6x6", "rows": 2, "coop": 0}, CPU.current(threads=threads))


@pytest.mark.parametrize(("rows", "coop"), [(1, 0), (3, 0), (100, 0), (1, 1), (2, 3), (3, 100)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_schedules(rows: int, coop: int, threads: int) -> None:
    for name in ("many images", "many channels", "grouped"):
        run(edge(name), {"tile": "6x6", "rows": rows, "coop": coop}, CPU.current(threads=threads))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types_and_epilogues(dtype: str, epilogue: str) -> None:
    for layout in ("NCHW", "NHWC"):
        run(
            edge("remainders", dtype=dtype, layout=layout, **EPILOGUES[epilogue]), {"tile": "8x8", "rows": 2, "coop": 0}
        )


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
    shared, apart = circular(down, 72), circular(down, 70)
    assert shared is not None
    assert apart is not None
    assert (shared.tiles, shared.m, shared.r) == (1, 64, 9)  # of 78 inputs, 7 at either end are padding
    assert apart.tiles == 2
    assert circular(across, 4) is None
    for tile in ("72x36", "72x24", "36x36"):
        run(layer, {"tile": tile, "rows": 1, "coop": 0})


def test_every_reason_is_given() -> None:
    params = {"tile": "16x16", "rows": 1, "coop": 0}

    def reasons(layer: ConvLayer, **changes: int | str) -> str:
        return "; ".join(ALGORITHM.why_not(layer, DEVICE, params | changes))

    assert "filter: expected neighbouring taps" in reasons(edge("pointwise"))
    assert "depthwise: expected one polyphase component" in reasons(edge("depthwise strided"))
    assert "coop of a depthwise layer: expected 0" in reasons(edge("depthwise"), coop=2)
    assert reasons(edge("plain", direction="wgrad")) == "direction: expected fwd or dgrad, got wgrad"
    assert "every tap falls on padding" in reasons(edge("padding only"))
    assert reasons(edge("plain"), tile="16x15").endswith("got 15")
    assert "rows, coop: expected at least 1 and 0, got 0 and 0" in reasons(edge("plain"), rows=0)
    assert "expected at most 2 correlations, got 4" in reasons(edge("strided", direction="dgrad"))
    assert "larger than filters of 13x15, got 12x12" in reasons(edge("large filter", padding=0), tile="12x12")
    assert "expected at most 36 inputs apart, got 37" in reasons(edge("plain", H=80, W=80, dilation=37))
    assert "stack for a filter" in reasons(ConvLayer(N=1, C=4, H=99, W=99, K=4, R=80, S=80), tile="100x100")
    longer = ConvLayer(N=1, C=4, H=300, W=300, K=4, R=120, S=3)
    assert "filter: expected to fit tiles of 100x100, got 120x3" in reasons(longer)
    deep = ConvLayer(N=1, C=2048, H=64, W=64, K=2048, R=3, S=3)
    assert "spectra: expected at most 256 MiB, got 4160" in reasons(deep)
    named = [ALGORITHM.why_not(deep, DEVICE, params) for params in ALGORITHM.candidates(deep, DEVICE)]
    assert named
    assert all("spectra" in against for (against,) in named)


@given(layers(dtype="float32"))
def test_any_layer(layer: ConvLayer) -> None:
    for params in itertools.islice(chosen(layer), 1):
        run(layer, params)
