"""Arrays whose offsets do not fit into 32 bits: 2**31 elements and more, 4 GiB in float16."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autoconv import ConvLayer, registry
from autoconv.cpu.device import CPU
from autoconv.layer import DIRECTIONS, LAYOUTS
from autoconv.tuning import reference

DEVICE = CPU.current()
BIG = ConvLayer(N=1, C=2, H=32776, W=32768, K=2, R=3, S=3, dtype="float16")
EXTENTS = (3, 1)  # of the filters: some algorithms take no 3x3
KINDS = ((1, 8), (2, 8), (1, 2), (2, 2), (1, 1))  # groups and strides, the quickest first
TAIL = 40  # rows of the image that hold anything but zeros


def available() -> bool:
    return DEVICE.memory_available() > 16 << 30


def first_able(algorithm, direction, layout):
    """The quickest layer that the algorithm takes, and its first candidate without a huge workspace."""
    for extent, (groups, stride) in itertools.product(EXTENTS, KINDS):
        changes = {"R": extent, "S": extent, "groups": groups, "stride": (stride, stride)}
        layer = replace(BIG, layout=layout, direction=direction, **changes)
        for candidate in algorithm.all(layer, DEVICE):
            params = candidate.params
            able = not algorithm.why_not(layer, DEVICE, params)
            if able and algorithm.workspace_bytes(layer, DEVICE, params) < 2 << 30:
                return layer, params
    return pytest.skip("takes no such layer, or too much workspace")


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not available(), reason="needs 16 GiB")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "algorithm", [a for a in registry.algorithms(DEVICE) if a.vendor is None], ids=lambda a: a.name
)
def test_offsets_beyond_32_bits(algorithm, direction, layout):
    layer, params = first_able(algorithm, direction, layout)
    assert np.prod(layer.x_shape) > 2**31
    small = replace(layer, H=TAIL)
    rng = np.random.default_rng(0)

    def last_rows(array, rows):
        return array[:, :, -rows:] if layout == "NCHW" else array[:, -rows:]

    def mostly_zeros(shape, rows):
        """An array, and its last rows, which hold numbers."""
        array = np.zeros(shape, np.float16)
        tail = last_rows(array, rows)
        tail[...] = rng.standard_normal(tail.shape, np.float32)
        return array, np.ascontiguousarray(tail)

    images = {"x": (layer.x_shape, TAIL), "y": (layer.y_shape, small.P)}
    a, a_tail = mostly_zeros(*images["y" if direction == "dgrad" else "x"])
    if direction == "wgrad":
        b, b_tail = mostly_zeros(*images["y"])
    else:
        b = b_tail = rng.standard_normal(layer.w_shape, np.float32).astype(np.float16)
    kernel = algorithm.build(layer, DEVICE, params)
    if kernel.packed_bytes:
        packed = DEVICE.buffer(kernel.packed_bytes)
        kernel.pack(b, packed)
        b = packed
    out = DEVICE.empty(layer.output_shape, np.float16)
    out[...] = np.nan
    kernel.run(a, b, out, None, None, DEVICE.buffer(max(kernel.workspace_bytes, 1)))
    if direction != "wgrad":
        rows = images["x" if direction == "dgrad" else "y"][1]
        head = out[:, :, : -rows - layer.R] if layout == "NCHW" else out[:, : -rows - layer.R]
        assert -1e-3 < head.min() <= head.max() < 1e-3  # a transform may round something into it
        out = last_rows(out, rows)
    tails = small, a_tail, b_tail
    error = reference.error(out, reference.convolve(*tails), reference.magnitude(*tails))
    assert error <= algorithm.bound(layer, params)
