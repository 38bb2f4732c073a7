"""Winograd on generated kernels: every split of a layer, every instruction set, inside its buffers and its bound."""

from __future__ import annotations

import mmap
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from layers import EDGES, TAILS, edge, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.algorithm import Params
from autoconv.cpu import pool
from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.device import CPU
from autoconv.cpu.transform.filters import STREAMED
from autoconv.cpu.transform.geometry import LARGEST_TILE, minimal
from autoconv.cpu.winograd.algorithm import Winograd, plans
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
WINOGRAD = Winograd()


class Fenced:
    """An array that ends, or starts, at a page nobody may touch."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, at_end: bool) -> None:
        import ctypes

        page = mmap.PAGESIZE
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        inside = -(-max(nbytes, 1) // page) * page
        self._map = mmap.mmap(-1, inside + 2 * page)
        raw = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for fence in (0, page + inside):
            assert libc.mprotect(ctypes.c_void_p(raw.ctypes.data + fence), ctypes.c_size_t(page), 0) == 0
        start = page + (inside - nbytes if at_end else 0)
        self.array = raw[start : start + nbytes].view(dtype).reshape(shape)
        self.array.view(np.uint8)[...] = 0xFF


def run(layer: ConvLayer, params: Params, device: CPU = DEVICE, at_end: bool = True) -> None:
    """Computes between fences and holds the answer against the oracle."""
    assert WINOGRAD.why_not(layer, device, params) == []
    kernel = WINOGRAD.build(layer, device, params)
    values = operands(layer)
    fenced: list[Any] = []
    for value in values:
        if value is not None:
            place = Fenced(value.shape, value.dtype, at_end)
            place.array[...] = value
            fenced.append(place)
        else:
            fenced.append(None)
    a, b, bias, residual = (place if place is None else place.array for place in fenced)
    packed, workspace = (Fenced((n,), np.uint8, False) for n in (kernel.packed_bytes, kernel.workspace_bytes))
    out = Fenced(layer.output_shape, layer.numpy_dtype, at_end)
    kernel.pack(b, packed.array)
    kernel.run(a, packed.array, out.array, bias, residual, workspace.array)
    error = reference.error(out.array, reference.convolve(layer, *values), reference.magnitude(layer, *values))
    assert error <= WINOGRAD.bound(layer, params), f"{params} on {layer}"


FITTING = [name for name in EDGES if not WINOGRAD.why_not(edge(name), DEVICE, {"m": "2x2", "rows": 2, "share": 0})]


def test_most_edges_fit() -> None:
    assert {"tails", "stem", "strided", "dilated", "dilated strided", "row filter", "five by five"} < set(FITTING)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FITTING)
def test_edges_on_every_instruction_set(name: str, instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    cases = [("NCHW", "fwd", 0), ("NHWC", "dgrad", 2)]
    cases += [("NHWC", "fwd", 2), ("NCHW", "dgrad", 0)] if instruction_set == INSTRUCTION_SETS[0] else []
    for layout, direction, share in cases:
        layer = edge(name, layout=layout, direction=direction)
        params = {"m": "2x2", "rows": 2, "share": share}
        if not WINOGRAD.why_not(layer, device, params):
            run(layer, params, device, at_end=layout == "NCHW")


@pytest.mark.parametrize("m", ["3x3", "4x4", "5x5", "6x6", "7x7", "4x7", "7x2"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_sizes_of_tiles(m: str, layout: str) -> None:
    run(edge("tails", layout=layout), {"m": m, "rows": 1, "share": 0})


@pytest.mark.parametrize(("rows", "share"), [(1, 0), (3, 0), (100, 0), (1, 1), (2, 3), (3, 100)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_schedules(rows: int, share: int, threads: int) -> None:
    for name in ("many images", "many channels", "grouped"):
        run(edge(name), {"m": "2x2", "rows": rows, "share": share}, CPU.current(threads=threads))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types_and_tails(dtype: str, tail: str) -> None:
    for layout, name in (("NCHW", "tails"), ("NHWC", "tails"), ("NCHW", "dilated")):
        run(edge(name, dtype=dtype, layout=layout, **TAILS[tail]), {"m": "4x4", "rows": 2, "share": 0})


def test_relu_passes_nan_on() -> None:
    layer = edge("plain", N=1, activation="relu", bias=True)
    x, w, bias, _ = operands(layer)
    bias[0] = np.nan
    params = {"m": "4x4", "rows": 1, "share": 0}
    kernel = WINOGRAD.build(layer, DEVICE, params)
    packed, workspace = DEVICE.buffer(kernel.packed_bytes), DEVICE.buffer(kernel.workspace_bytes)
    y = np.empty(layer.y_shape, np.float32)
    kernel.pack(w, packed)
    kernel.run(x, packed, y, bias, None, workspace)
    assert np.isnan(y[:, 0]).all()
    assert (y[:, 1:] >= 0).all()


def test_every_reason_is_given() -> None:
    params = {"m": "7x7", "rows": 1, "share": 0}
    assert "no neighbouring taps" in WINOGRAD.why_not(edge("pointwise"), DEVICE, params)[0]
    assert "single channel" in WINOGRAD.why_not(edge("depthwise"), DEVICE, params)[0]
    assert "at most 9 points" in WINOGRAD.why_not(edge("five by five"), DEVICE, params | {"m": "9x2"})[0]
    few = VECTOR_BYTES[DEVICE.instruction_set] // 4 - 1
    assert "many parts" in WINOGRAD.why_not(edge("large filter", C=few), DEVICE, params)[0]
    assert "wgrad" in WINOGRAD.why_not(edge("plain", direction="wgrad"), DEVICE, params)[0]
    wide = edge("plain", H=40, W=40, dilation=9)
    assert "9 pixels apart" in WINOGRAD.why_not(wide, DEVICE, params)[0]
    assert len(WINOGRAD.why_not(edge("depthwise strided", dilation=5, H=40, W=40), DEVICE, params)) == 2


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


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_large_filters_become_blocks(layout: str) -> None:
    for m, changes in (("5x5", {}), ("2x7", {"stride": 2}), ("3x5", {"C": 17, "dilation": (1, 2), "W": 40})):
        layer = edge("large filter", layout=layout, **changes)
        (cut,) = plans(layer, DEVICE, params := {"m": m, "rows": 2, "share": 0})
        assert cut.rows.blocks * cut.columns.blocks > 1
        run(layer, params)


def test_strides_become_phases_and_dilation_grids() -> None:
    stem, dilated = edge("stem"), edge("dilated")
    params = {"m": "2x2", "rows": 1, "share": 0}
    (cut,) = plans(stem, DEVICE, params)
    assert (cut.parts, cut.rows.r, cut.rows.grids) == (16, 3, 1)
    (cut,) = plans(dilated, DEVICE, params)
    assert (cut.parts, cut.rows.r, cut.rows.grids) == (1, 3, 2)


def test_filters_too_large_for_the_caches_are_written_past_them() -> None:
    layer = ConvLayer(N=1, C=173, H=6, W=7, K=325, R=3, S=3, padding=1)
    params = {"m": "4x5", "rows": 1, "share": 0}
    (cut,) = plans(layer, DEVICE, params)
    assert cut.packed_size * cut.itemsize > STREAMED
    run(layer, params)


def test_with_avx512_a_chunk_that_fills_a_register_tile_is_among_the_candidates() -> None:
    """Where nothing else would name one: chunks like it were timed there."""
    layer = ConvLayer(N=8, C=256, H=14, W=14, K=256, R=3, S=3, padding=1)

    def small(instruction_set: str) -> list[Any]:
        device = device_with(instruction_set)
        cut = [plans(layer, device, params)[0] for params in WINOGRAD.candidates(layer, device)]
        return [plan for plan in cut if plan.pixels // 2 < plan.chunk_tiles <= plan.pixels and plan.share > 1]

    assert len(small("avx512")) == 1
    assert not small("avx2")
