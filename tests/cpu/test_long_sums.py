"""Long sums of one sign, whose errors add up: as many products are added in parts as would err more in one row."""

from __future__ import annotations

import numpy as np
import pytest

from autoconv import registry
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.tuning import reference
from autoconv.tuning.planner import plan

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
LAYERS = {
    "a long row": ConvLayer(N=1, C=6, H=1, W=160000, K=5, R=1, S=1, direction="wgrad"),
    "a long row of pixels": ConvLayer(N=1, C=6, H=1, W=160000, K=5, R=1, S=1, direction="wgrad", layout="NHWC"),
    "three taps of one": ConvLayer(N=1, C=3, H=1, W=160000, K=5, R=1, S=3, padding=(0, 1), direction="wgrad"),
    "many images": ConvLayer(N=40, C=4, H=40, W=50, K=5, R=3, S=3, padding=1, direction="wgrad"),
    "large images, depthwise": ConvLayer(N=9, C=2, H=256, W=256, K=2, R=3, S=3, padding=1, groups=2, direction="wgrad"),
    "a long row, depthwise": ConvLayer(N=1, C=2, H=1, W=160000, K=2, R=1, S=3, groups=2, direction="wgrad"),
}


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("float16", 5e-4)])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_filters(name: str, dtype: str, allowed: float) -> None:
    layer = LAYERS[name].replace(dtype=dtype)
    x, dy = (np.full(shape, 0.1, dtype) for shape in (layer.x_shape, layer.y_shape))
    want, checked = reference.convolve(layer, x, dy), set()
    for algorithm in registry.algorithms(DEVICE):
        if algorithm.exact and algorithm.name in ("direct", "depthwise.wgrad"):
            for candidate in algorithm.all(layer, DEVICE):
                if not algorithm.why_not(layer, DEVICE, candidate.params):
                    got = plan(layer, str(candidate), device=DEVICE).run(x, dy)
                    assert np.abs(got / want - 1).max() < allowed, candidate
                    checked.add(algorithm.name)
    assert checked == ({"direct", "depthwise.wgrad"} if layer.layout == "NCHW" and layer.groups > 1 else {"direct"})
