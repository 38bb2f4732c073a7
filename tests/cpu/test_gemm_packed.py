"""Products of copied pixels and packed filters, on every instruction set, with nothing touched outside the arrays."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from guards import check_guarded
from layers import EPILOGUES, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm_packed.algorithm import GemmPacked
from autoconv.layer import DTYPES, ConvLayer

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
PACKED = GemmPacked()


def layer_of(**fields: Any) -> ConvLayer:
    return ConvLayer(**({"N": 2, "C": 67, "H": 7, "W": 7, "K": 19, "R": 1, "S": 1} | fields))


SMALL_CACHES = 2048, 32768, 1 << 24  # caches so small that channels, tiles and filters are all cut into several parts


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_remainder(instruction_set: str) -> None:
    device = device_with(instruction_set)
    for width, K in ((1, 33), (2, 16), (5, 1), (6, 15), (7, 17), (13, 32), (14, 31), (29, 3), (49, 16)):
        layer = layer_of(N=1, C=65, H=1, W=width, K=K)
        assert check_guarded(PACKED, layer, device, operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_types_epilogues_groups_strides_and_gradients(instruction_set: str, dtype: str) -> None:
    device = device_with(instruction_set)
    layers = [layer_of(dtype=dtype, **epilogue) for epilogue in EPILOGUES.values()]
    layers += [layer_of(dtype=dtype, C=201, K=57, groups=3, H=3, W=5, stride=stride) for stride in (1, (2, 3))]
    layers += [
        layer_of(dtype=dtype, direction="dgrad", groups=g, C=10, K=64 * g, H=6, stride=stride)
        for g, stride in ((1, 1), (2, 1), (2, 2), (1, (1, 3)))
    ]
    for layer in layers:
        assert check_guarded(PACKED, layer, device, operands(layer))


@pytest.mark.parametrize(("H", "W", "stride"), [
    (1, 1, 2), (1, 67, 2), (8, 56, 2), (15, 27, 2), (9, 30, (2, 3)), (4, 71, (1, 2)), (11, 7, (3, 1)), (17, 90, (8, 8)),
])  # fmt: skip
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_zeros_of_a_strided_gradient(instruction_set: str, H: int, W: int, stride: int | tuple[int, int]) -> None:
    """Between pixels, at the ends of rows, below; in panels that begin and end anywhere, of several images."""
    device = device_with(instruction_set, 1, SMALL_CACHES)  # its workspace ends where nobody may touch
    layer = layer_of(N=3, C=18, K=150, H=H, W=W, stride=stride, direction="dgrad")
    assert check_guarded(PACKED, layer, device, operands(layer))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("stride", [(2, 2), (1, 3), (3, 4), (2, 5), (3, 1)])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_strided_pixels_of_whole_tiles_in_a_row(instruction_set: str, stride: tuple[int, int], dtype: str) -> None:
    """Up to four columns apart they are copied as vectors, which read what lies between and nothing beyond an image."""
    H, W = 1 + 3 * stride[0], 1 + 11 * stride[1]
    layer = layer_of(C=140, groups=2, K=22, H=H, W=W, stride=stride, bias=True, dtype=dtype)
    assert (layer.P, layer.Q) == (4, 12)
    assert check_guarded(PACKED, layer, device_with(instruction_set), operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_parts_of_everything(instruction_set: str) -> None:
    device = device_with(instruction_set, 2, SMALL_CACHES)
    for layer in (layer_of(N=3, C=150, H=9, W=9, K=70), layer_of(N=3, C=150, H=17, W=9, K=35, stride=2, bias=True)):
        assert check_guarded(PACKED, layer, device, operands(layer))


def test_no_tile_leaves_a_third_of_its_lanes_empty_where_one_vector_would_not() -> None:
    device = device_with("avx512")
    for K, most in ((16, 1), (17, 1), (48, 4), (64, 5), (80, 7)):
        tiles = {int(c.params["TK"]) // 16 for c in PACKED.all(layer_of(K=K), device)}
        assert min(tiles) == 1, K
        assert max(tiles) <= most, K


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_six_register_tiles_and_several_cache_tiles(instruction_set: str) -> None:
    device = device_with(instruction_set)
    grid = [c.params for c in PACKED.all(layer_of(C=512, K=512, H=28, W=28), device)]
    assert len({(params["TK"], params["TQ"]) for params in grid}) >= 6
    assert len({(params["BC"], params["panels"]) for params in grid}) >= 6


def test_no_panel_of_the_run_before_is_taken_for_this_one_s() -> None:
    device = CPU.current()
    layer = layer_of(C=256, K=256)
    kernel = PACKED.build(layer, device, PACKED.all(layer, device)[0].params)
    packed, workspace = (
        device.empty((kernel.packed_bytes,), np.uint8),
        device.empty((kernel.workspace_bytes,), np.uint8),
    )
    a, b, *_ = operands(layer)
    kernel.pack(b, packed)
    for scale in (1, 2, 4):
        out = np.full(layer.output_shape, np.nan, layer.numpy_dtype)
        kernel.run(a * layer.numpy_dtype.type(scale), packed, out, None, None, workspace)
        if scale == 1:
            first = out
        np.testing.assert_array_equal(out, first * scale)


def test_who_is_refused_and_why() -> None:
    device = CPU.current()
    params = PACKED.all(layer_of(), device)[0].params
    for fields, reason in (
        ({"R": 3}, "R=3, S=1: expected 1x1 filters"),
        ({"padding": 1}, "padding=((1, 1), (1, 1)): expected none"),
        ({"layout": "NHWC"}, "layout: expected NCHW, got NHWC"),
        ({"direction": "wgrad"}, "direction: expected fwd or dgrad, got wgrad"),
        ({"C": 19, "groups": 19}, "channels: expected dense or grouped, got depthwise"),
        ({"direction": "dgrad", "stride": (9, 1)}, "expected strides up to 8, whose zeros are written out, got 9x1"),
        ({"direction": "dgrad", "stride": (2, 9)}, "expected strides up to 8, whose zeros are written out, got 2x9"),
    ):
        assert any(reason in one for one in PACKED.why_not(layer_of(**fields), device, params)), fields
    tile, panels = PACKED.why_not(layer_of(), device, params | {"TK": 3, "panels": 999})
    assert tile.startswith("TK=3: expected ")
    assert panels.startswith("panels=999: expected ")
