"""Pixels as lanes: pointwise layers and stems on every instruction set, with nothing touched outside the arrays."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from guards import check_guarded, some_runnable
from layers import EPILOGUES, operands
from vectors import INSTRUCTION_SETS, device_with, machine_named

from autoconv.cpu import pool
from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.common.grid import register_tiles
from autoconv.cpu.common.panel import segments_of
from autoconv.cpu.device import CPU, host_instruction_set
from autoconv.cpu.gemm import kernels
from autoconv.cpu.gemm.algorithm import Gemm
from autoconv.cpu.gemm.geometry import GemmBlocking, odd_pixels, pixel_tiles, tasks_of
from autoconv.layer import DTYPES, ConvLayer

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
GEMM = Gemm()
PARAMS = {"TK": 4, "NV": 3, "BC": 5, "nt": 0}


def pointwise(**fields: Any) -> ConvLayer:
    return ConvLayer(**({"N": 2, "C": 11, "H": 7, "W": 7, "K": 19, "R": 1, "S": 1} | fields))


SMALL_CACHES = 1024, 2048, 1 << 24  # caches so small that filters are cut into several chunks


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_remainder(instruction_set: str, threads: int) -> None:
    device = device_with(instruction_set, threads)
    for width in (1, 3, 16, 17, 31, 33, 47, 49, 50, 51, 97, 98, 113):
        for K in (1, 8, 37):
            layer = pointwise(N=1, C=5, H=1, W=width, K=K)
            assert check_guarded(GEMM, layer, device, operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_types_epilogues_groups_and_gradients(instruction_set: str, dtype: str) -> None:
    device = device_with(instruction_set)
    layers = [pointwise(dtype=dtype, **epilogue) for epilogue in EPILOGUES.values()]
    layers += [pointwise(dtype=dtype, C=12, K=18, groups=3, H=9, W=9, bias=True)]
    layers += [pointwise(dtype=dtype, direction="dgrad", groups=g, C=10, K=16) for g in (1, 2)]
    for layer in layers:
        assert check_guarded(GEMM, layer, device, operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_sums_in_parts(instruction_set: str) -> None:
    """Of equal channels and not, with single pixels and without, of more filters than a task has sums for."""
    device = device_with(instruction_set, 2)
    for fields in (
        {"N": 1, "C": 200, "K": 700, "H": 5, "W": 10},
        {"C": 193, "K": 21, **EPILOGUES["bias residual relu"]},
        {"C": 256, "K": 12, "H": 8, "W": 16},
        {"C": 6, "K": 400, "groups": 2, "direction": "dgrad", "H": 3, "W": 3},
        {"C": 150, "K": 9, "dtype": "float16"},
    ):
        layer = pointwise(**fields)
        assert check_guarded(GEMM, layer, device, operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_sums_of_a_block_that_lacks_filters_have_room(instruction_set: str) -> None:
    """It has whole vectors of sums where a whole block has single pixels."""
    device = device_with(instruction_set, 2, SMALL_CACHES)
    layer = pointwise(C=70, K=47)
    parts = [c.params for c in GEMM.all(layer, device) if c.params["NV"] == 1 and c.params["BC"] != layer.C]
    sizes = {
        TK for TK in (int(params["TK"]) for params in parts) if odd_pixels(instruction_set, TK, 1) and layer.K % TK
    }
    names = {str(c) for c in GEMM.all(layer, device) if (c.params["TK"], c.params["NV"]) == (max(sizes), 1)}
    assert check_guarded(GEMM, layer, device, operands(layer), names)


@pytest.mark.parametrize("pixels", [49, 52])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_narrow_tiles_over_several_blocks_of_filters(instruction_set: str, pixels: int) -> None:
    """Groups of blocks, blocks that are left over, and a last one of fewer channels; sums in one range and in two."""
    TK = 8 if instruction_set == "avx512" else 4
    names = [f"gemm[TK={TK},NV=3,BC={BC},nt=0]" for BC in (20, 40)]
    layer = pointwise(N=1, C=40, K=53, H=1, W=pixels, **EPILOGUES["bias residual relu"])
    for caches in ((), (SMALL_CACHES,)):
        assert check_guarded(GEMM, layer, device_with(instruction_set, 2, *caches), operands(layer), names) == 2


STEMS: dict[str, dict[str, Any]] = {
    "pointwise strided": {"C": 12, "R": 1, "S": 1, "stride": 2, "H": 15, "W": 27},
    "pointwise strided apart": {"C": 9, "R": 1, "S": 1, "stride": (3, 5), "H": 17, "W": 24, "groups": 3, "K": 12},
    "pointwise padded": {"R": 1, "S": 1, "padding": 1},
    "planes of whole vectors, rows of broken ones": {"R": 1, "S": 1, "padding": ((0, 0), (4, 3)), "H": 8, "W": 3},
    "vgg": {"padding": 1, "H": 10, "W": 70},
    "resnet": {"R": 7, "S": 7, "padding": 3, "stride": 2, "H": 17, "W": 40},
    "alexnet": {"R": 11, "S": 11, "stride": 4, "H": 35, "W": 35},
    "asymmetric": {"padding": ((0, 2), (3, 0)), "K": 20},
    "dilated": {"dilation": (3, 2), "padding": (3, 2), "stride": (2, 3), "H": 19, "W": 25},
    "padding beyond the filter": {"padding": ((4, 3), (5, 2)), "R": 2, "S": 2, "H": 3, "W": 4, "stride": (2, 3)},
    "row": {"R": 1, "S": 9, "padding": (0, 4), "H": 3, "W": 40},
    "very wide": {"N": 1, "padding": 1, "H": 4, "W": 700},
    "very wide and strided": {"N": 1, "stride": 2, "padding": (1, 40), "H": 5, "W": 1217},
    "few filters": {"C": 37, "K": 3, "padding": 1, "H": 11, "W": 50},
    "one filter": {"C": 20, "K": 1, "R": 5, "S": 5, "padding": 2, "stride": (1, 2), "H": 8, "W": 70},
    "few filters of groups": {"C": 30, "K": 9, "groups": 3, "dilation": 2, "padding": 2, "H": 7, "W": 34},
    "few filters, sums in parts": {"N": 1, "C": 200, "K": 5, "padding": 1, "H": 4, "W": 21},
    "column": {"R": 5, "S": 1, "padding": (2, 0), "C": 6, "groups": 3, "K": 9},
}


@pytest.mark.parametrize("name", STEMS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_panels(instruction_set: str, name: str) -> None:
    layer = ConvLayer(**({"N": 2, "C": 3, "H": 9, "W": 13, "K": 11, "R": 3, "S": 3, "bias": True} | STEMS[name]))
    device = device_with(instruction_set, 2)
    assert check_guarded(GEMM, layer, device, operands(layer))
    small = device_with(instruction_set, 1, SMALL_CACHES)
    assert check_guarded(GEMM, layer, small, operands(layer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_of_every_type(dtype: str) -> None:
    layer = ConvLayer(
        N=1, C=3, H=12, W=30, K=9, R=3, S=3, stride=2, padding=1, dtype=dtype, **EPILOGUES["bias residual relu"]
    )
    assert check_guarded(GEMM, layer, CPU.current(), operands(layer))


def test_filters_larger_than_the_cache() -> None:
    device = device_with(host_instruction_set(), 2, SMALL_CACHES)
    for layer in (pointwise(C=70, K=45), pointwise(N=3, C=40, K=48, groups=2), pointwise(C=600, K=9)):
        assert check_guarded(GEMM, layer, device, operands(layer))


@pytest.mark.parametrize(
    "fields",
    [
        {"N": 2, "C": 11, "H": 8, "W": 14, "K": 19, "R": 1, "S": 1, "bias": True},
        {"N": 2, "C": 11, "H": 16, "W": 28, "K": 19, "R": 1, "S": 1, "bias": True, "stride": 2},
        {"N": 2, "C": 3, "H": 5, "W": 64, "K": 19, "R": 3, "S": 3, "bias": True, "padding": 1},
    ],
)
def test_stores_past_the_caches(fields: dict[str, Any]) -> None:
    """Only to whole aligned vectors; an output that starts elsewhere is stored as usual."""
    device = device_with(host_instruction_set(), 2, SMALL_CACHES)
    layer = ConvLayer(**fields)
    streaming = [c for c in GEMM.all(layer, device) if c.params["nt"] and not GEMM.why_not(layer, device, c.params)]
    assert streaming
    assert check_guarded(GEMM, layer, device, operands(layer))
    x, w, bias, _ = operands(layer)
    kernel = GEMM.build(layer, device, streaming[0].params)
    packed = device.buffer(kernel.packed_bytes)
    kernel.pack(w, packed)
    room = device.buffer(np.prod(layer.y_shape) * 4 + 64)
    outputs = []
    for shift in (0, 4, 32):
        out = room[shift:][: np.prod(layer.y_shape) * 4].view(np.float32).reshape(layer.y_shape)
        kernel.run(x, packed, out, bias, None, device.buffer(kernel.workspace_bytes))
        outputs.append(out.copy())
    assert (outputs[0] == outputs[1]).all()
    assert (outputs[0] == outputs[2]).all()


def test_relu_passes_nan_on_and_nothing_else_sees_it() -> None:
    device = CPU.current()
    layer = pointwise(activation="relu")
    x, w, _, _ = operands(layer)
    x[1, 3, 2, 5] = np.nan
    for candidate in some_runnable(GEMM, layer, device):
        kernel = GEMM.build(layer, device, candidate.params)
        packed, out = device.buffer(kernel.packed_bytes), device.empty(layer.y_shape, "float32")
        kernel.pack(w, packed)
        kernel.run(x, packed, out, None, None, device.buffer(0))
        assert np.isnan(out[1, :, 2, 5]).all()
        assert np.isnan(out).sum() == layer.K


def test_segments_cover_every_pixel_once() -> None:
    for pixels in range(1, 300):
        for odd in (0, 1, 3):
            segments = segments_of(pixels, 16, 3, odd)
            covered = [
                one.start + n * one.pixels + i for one in segments for n in range(one.times) for i in range(one.pixels)
            ]
            assert covered == list(range(pixels))
            assert all(one.pixels <= 48 + odd for one in segments)
    assert [run.pixels for run in segments_of(49, 16, 3, 1)] == [49]
    assert [(run.times, run.pixels) for run in segments_of(196, 16, 3, 1)] == [(4, 49)]


def tile_of(TK: int, NV: int, l1_bytes: int = 1 << 15) -> GemmBlocking:
    """A tile of a machine whose first cache has so many bytes."""
    return GemmBlocking(TK, NV, 64, False, 2, l1_bytes, 1 << 19)


def test_blocks_side_by_side_are_as_many_as_a_set_of_the_first_cache_holds_pages() -> None:
    blocks = {size: pixel_tiles("avx2", 8, 49, tile_of(4, 3, size))[-1].blocks for size in (1 << 12, 1 << 14, 48 << 10)}
    assert blocks == {1 << 12: 1, 1 << 14: 4, 48 << 10: 12}


@pytest.mark.parametrize("instruction_set", VECTOR_BYTES)
def test_tiles_cover_every_pixel_once_and_fit_the_registers(instruction_set: str) -> None:
    lanes = VECTOR_BYTES[instruction_set] // 4
    for NV, TK in register_tiles(instruction_set):
        for pixels in range(1, 6 * NV * lanes):
            tiles = pixel_tiles(instruction_set, lanes, pixels, tile_of(TK, NV))
            starts = [t.start + n * t.pixels for t in tiles for n in range(t.times)]
            sizes = [t.pixels for t in tiles for _ in range(t.times)]
            assert starts == [sum(sizes[:n]) for n in range(len(sizes))]
            assert sum(sizes) == pixels
            for tile in tiles:
                if tile.odd in (0, tile.pixels):
                    vectors = -(-TK // lanes) * tile.odd if tile.odd else TK * -(-tile.pixels // lanes)
                    assert tile.blocks * vectors <= TK * NV


def test_the_planes_of_small_images_leave_little_to_waste() -> None:
    avx2 = [(tile.times, tile.pixels, tile.odd, tile.blocks) for tile in pixel_tiles("avx2", 8, 49, tile_of(4, 3))]
    assert avx2 == [(2, 24, 0, 1), (1, 1, 1, 8)]
    avx512 = [(tile.times, tile.pixels, tile.odd, tile.blocks) for tile in pixel_tiles("avx512", 16, 49, tile_of(8, 3))]
    assert avx512 == [(1, 49, 1, 1)]
    assert [(tile.pixels, tile.blocks) for tile in pixel_tiles("avx2", 8, 196, tile_of(4, 3))] == [(24, 1), (4, 3)]


def test_an_estimate_counts_the_lanes_beyond_a_plane_but_not_single_pixels() -> None:
    machine = machine_named("synthetic-fed")  # arithmetic is all that counts
    device = CPU(machine.threads, "avx512", model=machine.text)

    def cost(side: int) -> float:
        """Of a plane's pixels, each."""
        layer = pointwise(C=512, K=512, H=side, W=side)
        return GEMM.estimate(layer, device, {"TK": 8, "NV": 3, "BC": 64, "nt": 0}) / layer.flops

    assert cost(7) < 1.05 * cost(16)  # three vectors and a pixel
    assert cost(5) > 1.2 * cost(16)  # a vector and most of another


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_six_register_tiles_and_several_cache_tiles(instruction_set: str) -> None:
    device = device_with(instruction_set)
    grid = [c.params for c in GEMM.all(pointwise(C=256, K=256), device)]
    assert len({(params["TK"], params["NV"]) for params in grid}) >= 6
    assert len({params["BC"] for params in grid}) >= 4


def test_reasons_come_all_at_once() -> None:
    device = CPU.current()

    def reasons(params: dict[str, int], **fields: Any) -> str:
        return "; ".join(
            GEMM.why_not(ConvLayer(**{"N": 1, "C": 5, "H": 9, "W": 9, "K": 7, "R": 3, "S": 3} | fields), device, params)
        )

    outside = reasons(PARAMS, layout="NHWC", direction="wgrad")
    for word in ("layout: expected NCHW, got NHWC", "direction: expected fwd or dgrad, got wgrad"):
        assert word in outside
    assert "channels: expected dense or grouped, got depthwise" in reasons(PARAMS, C=7, groups=7)
    against = reasons({"TK": 99, "NV": 1, "BC": 3, "nt": 1}, R=1, S=1)
    for word in ("TK=99,NV=1: expected", "BC=3: expected 5", "nt=1: expected an output of at least"):
        assert word in against
    assert "at most 4 channels in a group, or 15 filters, got 5 and 16" in reasons(PARAMS, K=16)
    assert "dgrad: expected 1x1 filters" in reasons(PARAMS, C=3, direction="dgrad")
    assert "expected at most 256 taps" in reasons(PARAMS, C=1, H=20, W=20, R=17, S=17)


@pytest.mark.parametrize("more", [{}, {"R": 3, "S": 3, "padding": 1}, {"stride": 2}, {"N": 8}, {"K": 600, "C": 100}])
def test_estimates_count_the_tasks_that_there_are(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one which a single thread does takes as long as if there were no other."""
    counts: list[int] = []
    monkeypatch.setattr(kernels, "launch", lambda run, context, task, count: counts.append(count))
    layer = pointwise(**({"N": 1, "C": 3, "H": 9, "W": 9, "K": 12} | more))
    for TK, NV, BC, threads in ((8, 3, layer.C, 2), (4, 2, 2, 7)):
        blocking = GemmBlocking(TK, NV, BC, False, threads, *SMALL_CACHES[:2])
        kernels.emit("avx512", layer, blocking)
        assert counts[-1] == tasks_of("avx512", layer, blocking)
