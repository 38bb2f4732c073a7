"""Seven products of halves of pixels, channels and filters, on every instruction set, within the arrays."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
from guards import check_guarded, run_guarded, some_runnable
from layers import EPILOGUES, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm_packed.geometry import SEVEN
from autoconv.cpu.gemm_packed.strassen import GemmStrassen
from autoconv.cpu.gemm_packed.strassen_kernels import PRODUCTS
from autoconv.layer import DTYPES, ConvLayer
from autoconv.tuning import reference

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
STRASSEN = GemmStrassen()
SMALL_CACHES = 2048, 65536, 1 << 24  # caches so small that channels, tiles and filters are all cut into several parts


def layer_of(**fields: Any) -> ConvLayer:
    return ConvLayer(**({"N": 2, "C": 66, "H": 7, "W": 7, "K": 64, "R": 1, "S": 1} | fields))


def test_the_products_add_up_to_the_product() -> None:
    """Of 2x2 matrices: every product of two parts counts once where they meet, and cancels elsewhere."""
    assert len(PRODUCTS) == SEVEN
    for p, f, o in itertools.product(range(4), repeat=3):
        found = sum(each.pixels[p] * each.filters[f] * each.outputs[o] for each in PRODUCTS)
        assert found == (p % 2 == f // 2 and o == p // 2 * 2 + f % 2)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_remainder(instruction_set: str) -> None:
    """Tiles of every length in either half, odd planes, odd channels, odd blocks, blocks that lack filters."""
    device = device_with(instruction_set)
    for width, C, K in (
        (2, 64, 32), (4, 65, 63), (10, 64, 240), (13, 67, 64), (23, 99, 64), (25, 96, 127), (50, 80, 95), (65, 18, 31),
    ):  # fmt: skip
        layer = layer_of(N=1, C=C, H=1, W=width, K=K)
        assert check_guarded(STRASSEN, layer, device, operands(layer)), layer


KINDS = {
    **EPILOGUES,
    "groups": {"C": 130, "K": 128, "groups": 2, "H": 6, "W": 5, "bias": True, "activation": "prelu"},
    "stride 2": {"C": 65, "K": 63, "H": 9, "W": 14, "stride": 2},
    "stride 2x3": {"C": 65, "K": 63, "H": 9, "W": 14, "stride": (2, 3)},
    "rows of stride 2": {"N": 1, "C": 67, "K": 64, "H": 23, "W": 23, "stride": 2, "bias": True},
    "rows of stride 2x4": {"C": 70, "K": 64, "H": 23, "W": 45, "stride": (2, 4)},
    "gradient": {"C": 64, "K": 34, "direction": "dgrad"},
    "gradient of groups": {"C": 128, "K": 68, "groups": 2, "direction": "dgrad", "bias": True, "activation": "prelu"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_kinds_of_layers(instruction_set: str, dtype: str, kind: str) -> None:
    layer = layer_of(dtype=dtype, **KINDS[kind])
    assert check_guarded(STRASSEN, layer, device_with(instruction_set), operands(layer))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_parts_of_everything(instruction_set: str) -> None:
    device = device_with(instruction_set, 2, SMALL_CACHES)
    for layer in (layer_of(N=3, C=150, H=9, W=9, K=96), layer_of(N=3, C=151, H=17, W=9, K=160, stride=2, bias=True)):
        assert check_guarded(STRASSEN, layer, device, operands(layer)), layer


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_image_and_meets_one_other_pixel(value: float) -> None:
    """And is lost nowhere: each output that sees it is not finite."""
    device = CPU.current()
    for H in (6, 7):
        layer = layer_of(H=H)
        x, w, *epilogue = operands(layer)
        x[1, 40, 0, 3] = value
        want = np.isfinite(reference.convolve(layer, x, w, *epilogue))
        for candidate in some_runnable(STRASSEN, layer, device, 3):
            got = np.isfinite(run_guarded(STRASSEN, layer, device, candidate, (x, w, *epilogue), "after"))
            assert got[0].all()
            assert not got[~want].any()
            assert (~got[1].all(axis=0)).sum() <= 2


def test_errors_are_those_of_sums_of_twice_the_operands() -> None:
    """Not the four times of the direct sum's cap that its own allows, on operands drawn from a normal distribution."""
    device = CPU.current()
    layer = layer_of(N=1, C=512, H=14, W=14, K=128)
    arrays = operands(layer)
    want, magnitude = reference.convolve(layer, *arrays), reference.magnitude(layer, *arrays)
    for candidate in some_runnable(STRASSEN, layer, device, 3):
        got = run_guarded(STRASSEN, layer, device, candidate, arrays, "before")
        assert reference.error(got, want, magnitude) < 1e-6


def test_the_same_bits_every_time() -> None:
    """Whoever ran which task, and though an odd plane's halves are of unlike lengths."""
    device = CPU.current()
    layer = layer_of(N=3, C=128, K=128)
    arrays = operands(layer)
    for candidate in some_runnable(STRASSEN, layer, device, 2):
        first, *others = (run_guarded(STRASSEN, layer, device, candidate, arrays, "after") for _ in range(3))
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_who_is_refused_and_why() -> None:
    device = CPU.current()
    params = STRASSEN.all(layer_of(), device)[0].params
    for fields, reason in (
        ({"R": 3}, "R=3, S=1: expected 1x1 filters"),
        ({"padding": 1}, "padding=((1, 1), (1, 1)): expected none"),
        ({"layout": "NHWC"}, "layout: expected NCHW, got NHWC"),
        ({"direction": "wgrad"}, "direction: expected fwd or dgrad, got wgrad"),
        ({"direction": "dgrad", "stride": 2}, "stride=(2, 2): expected 1x1 of a gradient"),
        ({"K": 3}, "halves: expected less to multiply by seven products of them, got 49 pixels, 66 channels and 3"),
        ({"H": 1, "W": 1}, "halves: expected less to multiply by seven products of them, got 1 pixels, 66 channels"),
    ):
        assert any(reason in one for one in STRASSEN.why_not(layer_of(**fields), device, params)), fields
    tile, panels = STRASSEN.why_not(layer_of(), device, params | {"TK": 3, "panels": 999})
    assert tile.startswith("TK=3: expected ")
    assert panels.startswith("panels=999: expected ")


def test_packed_filters_are_seven_quarters_of_the_filters_and_scales() -> None:
    layer, device = layer_of(C=256, K=256), CPU.current()
    whole = [c for c in STRASSEN.all(layer, device) if 256 % (2 * int(c.params["TK"])) == 0]
    assert whole
    for candidate in whole:
        elements = 256 * 256 * 7 // 4 + 256  # the last are scales
        assert STRASSEN.packed_bytes(layer, device, candidate.params) == 4 * elements


@pytest.mark.parametrize("spread", [1, 3])
def test_channels_of_unlike_size_err_no_more(spread: int) -> None:
    """Where the input's channels are large and the filters' small, in turn: sums of both would lose what cancels."""
    device = CPU.current()
    layer = layer_of(N=1, C=512, K=128)
    x, w, *epilogue = operands(layer)
    sizes = np.exp(spread * np.random.default_rng(0).standard_normal(512)).astype(np.float32)
    x, w = x * sizes[:, None, None], w / sizes[:, None, None]
    want, magnitude = reference.convolve(layer, x, w), reference.magnitude(layer, x, w)
    for candidate in some_runnable(STRASSEN, layer, device, 2):
        got = run_guarded(STRASSEN, layer, device, candidate, (x, w, *epilogue), "after")
        assert reference.error(got, want, magnitude) < 1e-6


def test_filters_of_any_size_have_a_scale() -> None:
    """Channels without a filter but 0, of the least and of the largest numbers; and what is not finite stays so."""
    device = CPU.current()
    layer = layer_of()
    x, w, *epilogue = operands(layer)
    w[:, 3], w[:, 40], x[:, 40] = 0, 2e-38, 0.5
    w[:, 41] *= 1e37
    x[:, 41] = 1e-3
    want, magnitude = reference.convolve(layer, x, w), reference.magnitude(layer, x, w)
    candidate = some_runnable(STRASSEN, layer, device, 1)[0]
    got = run_guarded(STRASSEN, layer, device, candidate, (x, w, *epilogue), "after")
    assert reference.error(got, want, magnitude) < 1e-6
    w[5, 3] = np.inf
    got = run_guarded(STRASSEN, layer, device, candidate, (x, w, *epilogue), "after")
    assert not np.isfinite(got[:, 5]).any()
    assert (~np.isfinite(got).all(axis=(0, 2, 3))).sum() <= 2  # it, and the filter that it was added to
