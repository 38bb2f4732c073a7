"""Images fetched while products are computed: the right places of them, each line once, and the same answers."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
from guards import check_candidate
from layers import edge
from vectors import INSTRUCTION_SETS, device_with

from autoconv.algorithm import Params
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import LINE, Module, f32, i64, ptr
from autoconv.cpu.transform.ahead import Region, fetch_part, input_region, new_input, output, output_region
from autoconv.cpu.winograd.algorithm import Winograd
from autoconv.layer import ConvLayer

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
WINOGRAD = Winograd()
START: Any = 0
SMALL = (256, 512, 1024)  # caches that no image fits into
LAYERS = {
    "plain": ConvLayer(N=3, C=20, H=17, W=19, K=37, R=3, S=3, padding=1),
    "channels last": ConvLayer(N=2, C=20, H=17, W=19, K=37, R=3, S=3, padding=1, layout="NHWC"),
    "strided": ConvLayer(N=2, C=9, H=18, W=15, K=16, R=3, S=3, stride=2, padding=1),
    "without padding": ConvLayer(N=2, C=16, H=12, W=33, K=8, R=5, S=5),
    "gradient": ConvLayer(N=2, C=12, H=18, W=16, K=9, R=3, S=3, stride=2, padding=1, direction="dgrad"),
}


def tilings(layer: ConvLayer) -> Any:
    device = device_with(INSTRUCTION_SETS[0], 2, SMALL)
    return WINOGRAD.tilings(layer, device, {"m": "3x3", "rows": 2, "coop": 0})


def numbers(stop: int) -> Any:
    """Places are plain numbers here."""
    return range(stop)


def elements(start: Any, region: Region) -> np.ndarray[Any, Any]:
    outer = np.arange(region.outer)[:, None, None] * region.outer_stride
    inner = np.arange(region.inner)[:, None] * region.inner_stride
    return (start + outer + inner + np.arange(region.length)).ravel()


def within(size: int, parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Which of so many elements are in any of the parts."""
    places = np.concatenate(parts)
    found = np.zeros(size, bool)
    found[places[(places >= 0) & (places < size)]] = True
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_every_output_lies_in_the_region_of_its_tiles(name: str) -> None:
    layer = LAYERS[name]
    parts = [
        elements(output(tiling, START, row, block), output_region(tiling, layer.layout == "NHWC"))
        for tiling in tilings(layer)
        for row in numbers(tiling.tile_rows)
        for block in numbers(tiling.k_blocks)
    ]
    assert within(math.prod(layer.output_shape), parts).all()


@pytest.mark.parametrize("name", LAYERS)
def test_every_input_but_the_first_rows_is_new_to_some_tile(name: str) -> None:
    layer = LAYERS[name]
    last, shape = layer.layout == "NHWC", layer.input_shapes[0]
    for tiling in tilings(layer):
        rows, region = tiling.rows, input_region(tiling, last)
        parts = [elements(new_input(tiling, START, row), region) for row in numbers(tiling.tile_rows)]
        found = within(math.prod(shape), parts).reshape(shape)
        overlap = max(0, (rows.r - 1) * rows.period + rows.axis.offset)
        assert (found if last else found.swapaxes(1, 2))[:, overlap:].all()
        inner = [part for row, part in enumerate(parts) if row % rows.tiles < rows.tiles - 1]  # not below the image
        assert len(np.unique(inner)) == np.size(inner) > 0


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", ["many images", "strided", "remainders", "five by five"])
def test_answers_are_the_same(name: str, instruction_set: str) -> None:
    for layout, direction, coop in (("NCHW", "fwd", 0), ("NHWC", "fwd", 2), ("NCHW", "dgrad", 1)):
        layer, device = edge(name, layout=layout, direction=direction), device_with(instruction_set, 2, SMALL)
        params: Params = {"m": "3x3", "rows": 2, "coop": coop}
        assert not WINOGRAD.tilings(layer, device_with(instruction_set, 2), params)[0].ahead
        assert WINOGRAD.tilings(layer, device, params)[0].ahead
        check_candidate(WINOGRAD, layer, params, device)


@pytest.mark.parametrize("name", ["dilated", "grouped", "many channels"])
def test_what_chunks_do_not_follow_and_what_takes_little_beside_the_products_is_left_alone(name: str) -> None:
    device = device_with(INSTRUCTION_SETS[0], 2, SMALL)
    assert not WINOGRAD.tilings(edge(name), device, {"m": "2x2", "rows": 2, "coop": 0})[0].ahead


def emit_marks(instruction_set: str, region: Region, parts: int) -> Module:
    """`marks(array, part)` counts where `fetch_part` would fetch."""
    m = Module(instruction_set)
    k = m.function("marks", ptr(f32), i64)
    array, part = k.args

    def prefetch(p: Any, **_: Any) -> None:
        k.store(k.load(p) + k.const(f32, 1), p)

    k.prefetch = prefetch  # type: ignore[method-assign]
    fetch_part(k, array, region, part, parts, LINE // 4, write=False)
    return m


@pytest.mark.parametrize("parts", [1, 3, 7, 40, 1000])
@pytest.mark.parametrize("length", [5, 16, 70, 224])
def test_parts_of_a_region_are_its_lines_once_each(length: int, parts: int) -> None:
    region = Region(3, 4 * 256, 4, 256, length)
    array = np.zeros(3 * 4 * 256 + 256, np.float32)
    marks = compiler.build(emit_marks, INSTRUCTION_SETS[0], region, parts).function(
        "marks", ctypes.c_void_p, ctypes.c_int64
    )
    for part in range(parts):
        marks(array.ctypes.data, part)
    lines = -(-length // 16)
    counts = array[: 3 * 4 * 256].reshape(12, 256)
    assert (counts[:, : 16 * lines : 16] == 1).all()
    assert array.sum() == counts[:, : 16 * (lines + 3) : 16].sum()  # few lines beyond a row
    assert set(np.unique(counts)) <= {0, 1}
