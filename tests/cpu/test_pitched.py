"""Layers whose input and output lie in larger arrays: every family stores the same there, and nothing beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from layers import edge, operands

from autoconv import registry
from autoconv.algorithm import Kernel
from autoconv.cpu import pool
from autoconv.cpu.common.algorithm import NativeKernel
from autoconv.cpu.common.correlation import pitched, pitches
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
EMULATED = CPU(2, DEVICE.instruction_set, matrix_unit="emulated")
FAMILIES = [a for a in registry.algorithms(DEVICE) if a.vendor is None and {"fwd", "dgrad"} & set(a.directions)]
BEFORE, BETWEEN = 5, 11  # elements in front of the output's first image, and behind each
BEYOND = 13  # behind each image of the input
SENTINEL = 77.0
SMALL = ("remainders", "pointwise", "stem", "strided", "dilated strided", "grouped", "depthwise", "depthwise strided")
LARGE = (  # for families that take no small ones
    ConvLayer(N=3, C=40, H=9, W=10, K=40, R=3, S=3, padding=1),
    ConvLayer(N=2, C=256, H=16, W=16, K=256, R=1, S=1),
    ConvLayer(N=2, C=40, H=18, W=20, K=40, R=5, S=5, stride=2, padding=2),
    ConvLayer(N=3, C=24, H=12, W=10, K=40, R=2, S=2, stride=2),
)


def run(kernel: Kernel, layer: ConvLayer, given: tuple[Any, ...], out: Any) -> None:
    """A run with packed filters, where the kernel wants some."""
    a, b, bias, residual = given
    if kernel.packed_bytes:
        packed = DEVICE.buffer(kernel.packed_bytes)
        kernel.pack(b, packed)
        b = packed
    kernel.run(a, b, out, bias, residual, DEVICE.buffer(max(kernel.workspace_bytes, 1)))


def check(family: Any, layer: ConvLayer, device: CPU, params: Any) -> bool:
    """Hold a candidate that stores images apart against itself; False where it is no kernel of ours."""
    kernel = family.build(layer, device, params)
    if not isinstance(kernel, NativeKernel):
        return False
    given = operands(layer)
    expected = np.empty(layer.output_shape, layer.numpy_dtype)
    run(kernel, layer, given, expected)
    image = math.prod(layer.output_shape[1:])
    array = np.full(BEFORE + layer.N * (image + BETWEEN), SENTINEL, layer.numpy_dtype)
    source = np.full((layer.N, math.prod(given[0].shape[1:]) + BEYOND), SENTINEL, layer.numpy_dtype)
    source[:, :-BEYOND] = given[0].reshape(layer.N, -1)
    apart = pitched(layer, source.shape[1], image + BETWEEN)
    run(family.build(apart, device, params), layer, (source, *given[1:]), array[BEFORE:])
    images = array[BEFORE:].reshape(layer.N, image + BETWEEN)
    np.testing.assert_array_equal(images[:, :image].reshape(layer.output_shape), expected)
    assert (array[:BEFORE] == SENTINEL).all()
    assert (images[:, image:] == SENTINEL).all()
    return True


@pytest.mark.parametrize("direction", ["fwd", "dgrad"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_kernel_stores_images_apart(family: Any, direction: str) -> None:
    device, found, ours = DEVICE if "matrix" not in family.name else EMULATED, 0, 0
    small = SMALL if "matrix" not in family.name else ()  # whose kernels take long to compile
    for layer in (*(edge(name, N=3, bias=True, activation="relu") for name in small), *LARGE):
        layer = layer.replace(direction=direction)
        able = [c.params for c in family.all(layer, device) if not family.why_not(layer, device, c.params)]
        for params in able[:1] if "matrix" in family.name else able[:1] + able[-1:]:
            found += 1
            ours += check(family, layer, device, params)
    assert ours == (0 if family.name.startswith("numpy.") else found)
    assert (found > 0) == (direction in family.directions and "float32" in family.dtypes)


def test_a_pitch_is_no_part_of_what_the_layer_is() -> None:
    layer = edge("plain")
    apart = pitched(layer, 6000, 5000)
    assert apart != layer
    assert repr(apart) != repr(layer)
    assert (apart.key(), apart.output_shape) == (layer.key(), layer.output_shape)
    assert pitched(apart) == pitched(apart, *pitches(layer)) == layer
    assert pitched(apart, 6000, 5000) == apart.replace() == apart
    assert pitches(pitched(layer, output_pitch=5000)) == (pitches(layer)[0], 5000)
