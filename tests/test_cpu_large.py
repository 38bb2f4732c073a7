"""Arrays whose offsets do not fit into 32 bits: 2**31 elements and more, 4 GiB in float16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoconv import ConvLayer
from autoconv.cpu import ALGORITHMS
from autoconv.cpu.device import CPU
from autoconv.reference import convolve

DEVICE = CPU.current()
BIG = ConvLayer(N=1, C=2, H=32776, W=32768, K=2, R=3, S=3, dtype="float16")
TAIL = 40  # rows of the image that the last outputs come from


def available() -> bool:
    return DEVICE.memory_available() > 16 << 30


@pytest.mark.stress
@pytest.mark.skipif(not available(), reason="needs 16 GiB")
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("groups", "stride"), [(1, 8), (2, 8), (1, 1)])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a.vendor is None], ids=lambda a: a.name)
def test_offsets_beyond_32_bits(algorithm, groups, stride, layout):
    layer = replace(BIG, groups=groups, layout=layout, stride=(stride, stride))
    assert np.prod(layer.x_shape) > 2**31
    able = [c.params for c in algorithm.all(layer, DEVICE) if not algorithm.why_not(layer, DEVICE, c.params)]
    modest = [params for params in able if algorithm.workspace_bytes(layer, DEVICE, params) < 2 << 30]
    if not modest:
        pytest.skip("cannot run this layer, or takes too much workspace")
    kernel = algorithm.build(layer, DEVICE, modest[0])
    x = np.zeros(layer.x_shape, np.float16)
    rng = np.random.default_rng(0)
    rows = (slice(None),) * layout.index("H")
    tail = x[(*rows, slice(-TAIL, None))]
    tail[...] = rng.standard_normal(tail.shape, np.float32)
    w = rng.standard_normal(layer.w_shape, np.float32).astype(np.float16)
    weights, y = w, DEVICE.empty(layer.y_shape, np.float16)
    y[...] = np.nan
    if kernel.packed_bytes:
        weights = DEVICE.buffer(kernel.packed_bytes)
        kernel.pack(w, weights)
    kernel.run(x, weights, y, None, None, DEVICE.buffer(max(kernel.workspace_bytes, 1)))
    small = replace(layer, H=TAIL)
    want = convolve(small, np.ascontiguousarray(tail), w)
    head = y[(*rows, slice(-small.P - layer.R))]  # of zeros; a transform may round something into it
    assert -1e-3 < head.min() <= head.max() < 1e-3
    np.testing.assert_allclose(y[(*rows, slice(-small.P, None))], want, rtol=2e-3, atol=2e-2)
