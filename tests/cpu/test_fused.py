"""The kernel of fused layers on every instruction set, with nothing touched outside the arrays."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from guards import guarded
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.device import CPU, host_instruction_set
from autoconv.cpu.fused import kernels, packing
from autoconv.cpu.fused.geometry import Caches, FusedBlocking, FusedLayers, blockings, workspace_bytes
from autoconv.cpu.pool import Entry
from autoconv.layer import ConvLayer
from autoconv.networks.operators import Conv, FusedConv

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]


def layers_of(
    first: dict[str, Any] | None, middle: dict[str, Any], last: dict[str, Any] | None, N: int = 2, C: int = 12
) -> FusedLayers:
    """A 1x1 layer, a depthwise layer of 3x3 filters and another 1x1 layer, but for what is said, or None."""
    H, W = middle.pop("H", 13), middle.pop("W", 11)
    before = None if first is None else ConvLayer(**({"N": N, "C": 5, "H": H, "W": W, "K": C, "R": 1, "S": 1} | first))
    depthwise = ConvLayer(
        **({"N": N, "C": C, "H": H, "W": W, "K": C, "R": 3, "S": 3, "groups": C, "padding": 1} | middle)
    )
    P, Q = depthwise.P, depthwise.Q
    after = None if last is None else ConvLayer(**({"N": N, "C": C, "H": P, "W": Q, "K": 7, "R": 1, "S": 1} | last))
    return FusedLayers(before, depthwise, after)


CASES: dict[str, tuple[Any, ...]] = {
    "three": ({}, {}, {}),
    "epilogues": (
        {"bias": True, "activation": "clip:0:6"},
        {"bias": True, "activation": "silu"},
        {"bias": True, "residual": True, "activation": "relu"},
    ),
    "slopes": (
        {"activation": "prelu"},
        {"bias": True, "activation": "prelu"},
        {"bias": True, "residual": True, "activation": "prelu"},
    ),
    "strided": ({"bias": True}, {"stride": 2, "H": 17, "W": 37}, {"bias": True}),
    "some biases": ({}, {"bias": True, "stride": (2, 1)}, {}),
    "first layer": (
        {"C": 3, "H": 26, "W": 22, "R": 3, "S": 3, "stride": 2, "padding": 1, "bias": True, "activation": "clip:0:6"},
        {"bias": True},
        {"bias": True, "residual": True},
    ),
    "first layer alone": ({"C": 3, "H": 25, "W": 66, "R": 3, "S": 3, "stride": (2, 6), "padding": 1}, {}, None),
    "larger filters": (
        {"H": 15, "R": 5, "S": 3, "padding": ((0, 2), (2, 0))},
        {"stride": 2, "bias": True},
        {},
    ),
    "dilated": ({"H": 14, "R": 3, "S": 2, "padding": ((2, 1), (0, 4)), "dilation": (2, 4)}, {}, {}),
    "1x1 with strides": ({"H": 39, "W": 21, "stride": (3, 2), "bias": True}, {}, {}),
    "padded 1x1": ({"H": 11, "W": 9, "padding": 1, "bias": True}, {}, {}),
    "none before": (None, {"bias": True}, {"residual": True}),
    "none after": ({"activation": "relu"}, {"residual": True, "bias": True}, None),
    "five": ({}, {"R": 5, "S": 5, "padding": 2, "stride": 2, "H": 16, "W": 16}, {}),
    "no padding": ({}, {"padding": 0}, {}),
    "asymmetric": ({}, {"padding": ((0, 2), (3, 0)), "dilation": (2, 1), "R": 2}, {}),
    "padding beyond the image": ({}, {"padding": ((4, 3), (5, 2)), "H": 2, "W": 4, "stride": (2, 3)}, {}),
    "alike": ({"C": 12}, {}, {"K": 12}),
    "one image": ({}, {"H": 7, "W": 7}, {}, 1, 24),
    "long sums before": ({"C": 1030}, {"H": 7, "W": 7}, {}, 1, 24),
    "long sums after": (None, {"H": 7, "W": 7, "bias": True}, {"K": 3}, 1, 1026),
}


def ways(layers: FusedLayers) -> list[FusedBlocking]:
    """Strips that divide the output and that do not, and all channels or some."""
    P, C = layers.depthwise.P, layers.depthwise.C
    heights = sorted({1, min(4, P), -(-P // 2), P})
    return [FusedBlocking(rows, C // (1 + rows % 3)) for rows in heights]


def check(layers: FusedLayers, blocking: FusedBlocking, device: CPU, side: str) -> None:
    """Hold the kernel to the convolutions one by one, in float64."""
    assert not layers.refusals()
    rng, caches = np.random.default_rng(0), Caches.of(device)
    head, last = layers.layers[0], layers.layers[-1]

    def some(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype(np.float32)

    x, filters = some(*head.x_shape), [some(*layer.w_shape) for layer in layers.layers]
    biases = [some(layer.channel_values) if layer.channel_values else None for layer in layers.layers]
    residual = some(*last.y_shape) if last.residual else None
    rest = [array for pair in zip(filters, biases, strict=True) for array in pair if array is not None]
    names = ("stride", "padding", "dilation", "groups", "bias", "residual", "activation")
    operator = FusedConv(tuple(Conv(**{name: getattr(layer, name) for name in names}) for layer in layers.layers))
    inputs = [x, *rest, *([residual] if residual is not None else [])]
    expected = operator.evaluate(*(array.astype(np.float64) for array in inputs))

    instruction_set = device.instruction_set
    run = Entry(compiler.build(kernels.emit, instruction_set, layers, blocking, caches), "run", device.threads)
    packed = packing.packed(instruction_set, layers, blocking, caches, filters)
    bias = np.concatenate([np.zeros(0, np.float32), *(b for b in biases if b is not None)])
    out = guarded(np.full(last.y_shape, np.nan, np.float32), side)
    scratch = np.full(workspace_bytes(instruction_set, layers, blocking, caches), 0xFF, np.uint8)
    a, b, c, d = (None if array is None else guarded(array, side) for array in (x, packed, bias, residual))
    run(a, b, out, c, d, guarded(scratch, "before"))
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max(), (layers, blocking)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_one_kernel_computes_what_the_layers_do(instruction_set: str, name: str) -> None:
    first, middle, last, *extents = CASES[name]
    layers = layers_of(first, dict(middle), last, *extents)
    for n, blocking in enumerate(ways(layers)):
        check(layers, blocking, device_with(instruction_set, 2), ("before", "after")[n % 2])


@pytest.mark.parametrize("name", ["three", "first layer alone", "some biases"])
def test_images_may_lie_apart(name: str) -> None:
    first, middle, last = CASES[name]
    layers, device, rng = layers_of(first, dict(middle), last), CPU.current(), np.random.default_rng(0)
    blocking, caches, instruction_set = ways(layers)[-1], Caches.of(device), device.instruction_set
    images, head, tail = layers.depthwise.N, layers.layers[0], layers.layers[-1]
    filters = [rng.uniform(-1, 1, layer.w_shape).astype(np.float32) for layer in layers.layers]
    packed = packing.packed(instruction_set, layers, blocking, caches, filters)
    bias = rng.uniform(-1, 1, sum(layer.channel_values for layer in layers.layers) + 1).astype(np.float32)
    scratch = np.zeros(workspace_bytes(instruction_set, layers, blocking, caches), np.uint8)
    x = rng.uniform(-1, 1, (images, math.prod(head.x_shape[1:]))).astype(np.float32)
    wide = np.concatenate([x, np.full((images, 5), np.nan, np.float32)], axis=1)
    y = np.empty((images, math.prod(tail.y_shape[1:])), np.float32)
    out = np.full((images, y.shape[1] + 7), np.nan, np.float32)
    for given, placed, into in ((x, layers, y), (wide, layers.apart(wide.shape[1], out.shape[1]), out)):
        program = compiler.build(kernels.emit, instruction_set, placed, blocking, caches)
        Entry(program, "run", device.threads)(given, packed, into, bias, None, scratch)
    np.testing.assert_array_equal(out[:, :-7], y)
    assert np.isnan(out[:, -7:]).all()


def test_refusals_name_the_layer() -> None:
    """Each is refused for one reason."""
    plain = layers_of({}, {}, {})
    assert not plain.refusals()
    middle, wide = plain.depthwise, plain.before
    assert wide is not None
    assert plain.after is not None
    cases = {
        "expected a layer before it, or a 1x1 layer after it": FusedLayers(None, middle, None),
        "float32 in NCHW": FusedLayers(None, middle, plain.after.replace(dtype="float64")),
        "no residual but of the last": FusedLayers(wide.replace(residual=True), middle, None),
        "one filter of at most 25 taps": FusedLayers(wide, middle.replace(R=6, S=6, padding=((2, 3), (2, 3))), None),
        "expected one group": FusedLayers(wide.replace(C=6, groups=2), middle, None),
        "expected 1x1 filters": FusedLayers(None, middle, plain.after.replace(R=3, S=3, padding=1)),
        "expected an input (2, 12, 13, 11)": FusedLayers(None, middle, plain.after.replace(C=8)),
    }
    for reason, layers in cases.items():
        (found,) = layers.refusals()
        assert reason in found


def test_blockings_leave_a_task_for_every_thread_and_fit_the_last_cache() -> None:
    device = device_with(host_instruction_set(), 2)
    for H, N in ((112, 1), (112, 8), (14, 1), (7, 1)):
        layers = layers_of({"C": 16}, {"H": H, "W": H}, {}, N, 96)
        found = blockings(layers, device)
        assert found
        assert len(set(found)) == len(found)
        for rows, channels in found:
            assert N * -(-H // rows) >= 2
            assert 96 % channels == 0
            needed = workspace_bytes(device.instruction_set, layers, FusedBlocking(rows, channels), Caches.of(device))
            assert needed <= device.machine.caches[-1]
    small = device_with(host_instruction_set(), 2, (256, 256, 256))
    assert not blockings(layers, small)
