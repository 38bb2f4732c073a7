"""Strided gradients as one convolution of unit stride: between guard pages, in every layout, type and split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from guards import check_candidate, run_guarded
from layers import EDGES, edge, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.common.polyphase.geometry import unit_stride_layer
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.registry import algorithms
from autoconv.tuning import reference

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
FOUND = {one.inner.name: one for one in algorithms(DEVICE) if isinstance(one, Polyphase)}
DIRECT, WINOGRAD, DEPTHWISE = (FOUND[name] for name in ("direct", "winograd", "depthwise"))


def check(algorithm: Polyphase, layer: ConvLayer, device: CPU = DEVICE, side: str = "after") -> bool:
    """Holds the first candidate that can run against the oracle; whether there was one."""
    able = (c for c in algorithm.all(layer, device) if not algorithm.why_not(layer, device, c.params))
    candidate = next(able, None)
    if candidate is None:
        return False
    check_candidate(algorithm, layer, candidate.params, device, side)
    return True


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_edges_on_every_instruction_set(layout: str, instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    for algorithm, least in ((DIRECT, 5), (DEPTHWISE, 1 if layout == "NCHW" else 0)):
        layers = {name: edge(name, direction="dgrad", layout=layout) for name in EDGES}
        sides = ("before", "after") if algorithm is DEPTHWISE else ("after",)
        assert sum(check(algorithm, layer, device, side) for layer in layers.values() for side in sides) >= least
    assert check(WINOGRAD, edge("stem", direction="dgrad", layout=layout), device, "before")


def reshaped(**changes: Any) -> ConvLayer:
    fields: dict[str, Any] = {
        "N": 3,
        "C": 6,
        "H": 18,
        "W": 21,
        "K": 8,
        "R": 4,
        "S": 4,
        "padding": 1,
        "stride": 2,
        "direction": "dgrad",
    }
    return ConvLayer(**({"direction": "dgrad"} | fields | changes))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types_groups_and_strides(dtype: str, layout: str) -> None:
    for changes in (
        {"groups": 2},
        {"stride": (1, 3), "W": 70, "S": 5, "padding": ((2, 0), (3, 1))},
        {"stride": (4, 2), "R": 7, "padding": ((5, 1), (0, 2))},
        {"R": 2, "S": 2, "padding": 0},
        {"stride": 9, "R": 9, "S": 9, "H": 40, "W": 47, "padding": ((3, 2), (4, 0))},
        {"stride": (2, 16), "R": 3, "S": 32, "W": 5, "padding": ((1, 0), (14, 15))},
    ):
        assert check(DIRECT, reshaped(dtype=dtype, layout=layout, **changes))


def test_images_are_interleaved_while_they_are_in_cache() -> None:
    layer = reshaped(N=6, C=8, H=32, W=32, R=4)

    room = 4 * 2 * 4 * 32 * 17 * 17 + 4096
    small = device_with(DEVICE.instruction_set, DEVICE.threads, (1 << 10, 1 << 12, room))
    params = next(iter(DIRECT.candidates(layer, small)))
    whole, part = (DIRECT.workspace_bytes(layer, device, params) for device in (DEVICE, small))
    assert whole == 3 * part
    assert check(DIRECT, layer, small)


def test_the_inner_algorithm_s_family_is_its_own() -> None:
    assert len(FOUND) == 7
    for name, algorithm in FOUND.items():
        assert (algorithm.name, algorithm.version) == (f"{name}.polyphase", algorithm.inner.version)
        assert (algorithm.exact, algorithm.dtypes) == (algorithm.inner.exact, algorithm.inner.dtypes)


def test_any_number_of_images_is_planned() -> None:
    """Of a billion divisors, those that are too large to matter are not looked at."""
    layer, few = reshaped(N=3 << 29), reshaped(N=3)
    params = next(iter(DIRECT.candidates(few, DEVICE)))
    assert DIRECT.packed_bytes(layer, DEVICE, params) == DIRECT.packed_bytes(few, DEVICE, params)


def test_the_unit_stride_layer_has_the_filters_taps() -> None:
    inner = unit_stride_layer(edge("stem", direction="dgrad"))
    assert (inner.K, inner.R, inner.S, inner.stride) == (3 * 16, 3, 3, (1, 1))
    ones = edge("stem", direction="dgrad", N=1, K=1)
    candidate = DIRECT.all(ones, DEVICE)[0]
    kernel = DIRECT.build(ones, DEVICE, candidate.params)
    packed, out = DEVICE.buffer(kernel.packed_bytes), np.empty(ones.x_shape, np.float32)
    kernel.pack(np.ones(ones.w_shape, np.float32), packed)
    kernel.run(np.ones(ones.y_shape, np.float32), packed, out, None, None, DEVICE.buffer(kernel.workspace_bytes))
    assert (out[0, :, 0, 0] == 1).all()  # the corner is seen once
    assert out.sum() == ones.P * ones.Q * 11 * 11 * 3


@pytest.mark.parametrize("algorithm", [DIRECT, WINOGRAD], ids=lambda algorithm: algorithm.name)
def test_errs_as_is_usual(algorithm: Polyphase) -> None:
    layer = reshaped(N=1, K=64, R=3, S=3)
    candidate = next(c for c in algorithm.all(layer, DEVICE) if not algorithm.why_not(layer, DEVICE, c.params))
    a, b, *_ = operands(layer)
    got = run_guarded(algorithm, layer, DEVICE, candidate, (a, b, None, None), "after")
    want, magnitude = reference.convolve(layer, a, b), reference.magnitude(layer, a, b)
    assert 1 / 3 < reference.error(got, want, magnitude) / algorithm.usual_error(layer, candidate.params) < 3


def test_zeros_are_no_terms_of_a_sum() -> None:
    layer = reshaped(K=1024, R=3, S=3)
    params = DIRECT.all(layer, DEVICE)[0].params
    assert DIRECT.usual_error(layer, params) == DIRECT.inner.usual_error(layer, params)
    assert DIRECT.usual_error(layer, params) > DIRECT.inner.usual_error(unit_stride_layer(layer), params)


def test_every_reason_is_given() -> None:
    def reasons(algorithm: Polyphase, layer: ConvLayer) -> str:
        return "; ".join(algorithm.why_not(layer, DEVICE, {"TK": 16, "TP": 1, "TQ": 4, "BC": 16, "filters": "packed"}))

    assert "direction: expected dgrad, got fwd" in reasons(DIRECT, edge("strided"))
    assert "got that of stride 1x1" in reasons(DIRECT, edge("plain", direction="dgrad"))
    assert "dilation: expected 1x1, got 3x2" in reasons(DIRECT, edge("dilated strided", direction="dgrad"))
    assert "got depthwise" in reasons(DIRECT, edge("depthwise strided", direction="dgrad"))
    assert "expected depthwise, got dense" in reasons(DEPTHWISE, edge("stem", direction="dgrad"))
    assert "got 4.0" in reasons(DIRECT, edge("pointwise strided", direction="dgrad"))
    assert "every output sees some input" in reasons(DIRECT, edge("padding beyond the filter", direction="dgrad"))
    assert "at most 4096 polyphase components, got 4225" in reasons(
        DIRECT, reshaped(H=130, W=130, R=65, S=65, stride=65)
    )
    assert "C=1: expected several channels" in reasons(DIRECT, reshaped(C=1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bits_are_not_stored_before_their_bias(dtype: str) -> None:
    """Rounded, or beyond the type's largest, they would be another answer than with bias and all in one pass."""
    for algorithm in (DIRECT, WINOGRAD):
        assert not algorithm.unsupported(reshaped(dtype=dtype))
        (reason,) = algorithm.unsupported(reshaped(dtype=dtype, bias=True))
        assert reason == f"dtype: expected no epilogue of sums that are stored as {dtype} before it"
        assert not algorithm.unsupported(reshaped(bias=True))
