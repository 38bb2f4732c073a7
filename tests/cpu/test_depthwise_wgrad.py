"""Gradients of depthwise filters: every instruction set and type, inside guard pages, images split or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from guards import check_guarded
from layers import EDGES, edge, operands
from vectors import INSTRUCTION_SETS, device_with

from autoconv.cpu import pool
from autoconv.cpu.depthwise.gradients import DepthwiseWgrad
from autoconv.cpu.device import CPU

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
ALGORITHM = DepthwiseWgrad()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_edges_on_every_instruction_set(instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    layers = [edge(name, direction="wgrad", layout=layout) for name in EDGES for layout in ("NCHW", "NHWC")]
    checked = [check_guarded(ALGORITHM, layer, device, operands(layer)) for layer in layers]
    assert sum(map(bool, checked)) >= 4


WIDE = [
    edge("depthwise", direction="wgrad", W=37, H=21, K=48),
    edge("depthwise", direction="wgrad", R=7, S=9, padding=(3, 4), stride=(2, 1), W=40),
    edge("depthwise", direction="wgrad", C=2, K=2, groups=2, N=7, dilation=2, padding=2),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types_and_several_blocks(dtype: str) -> None:
    for layer in WIDE:
        narrow = layer.replace(dtype=dtype)
        assert check_guarded(ALGORITHM, narrow, DEVICE, operands(narrow))


def test_the_answer_does_not_depend_on_who_ran_the_tasks() -> None:
    for layer in WIDE:
        params = next(iter(ALGORITHM.candidates(layer, DEVICE)))
        kernel = ALGORITHM.build(layer, DEVICE, params)
        a, b, _, _ = operands(layer)
        outs = []
        for _ in range(5):
            out = np.full(layer.output_shape, np.nan, layer.numpy_dtype)
            kernel.run(a, b, out, None, None, DEVICE.buffer(kernel.workspace_bytes))
            outs.append(out)
        assert all((out == outs[0]).all() for out in outs)


def test_every_reason_is_given() -> None:
    def reasons(name: str, TP: int = 2, **changes: Any) -> str:
        return "; ".join(ALGORITHM.why_not(edge(name, **({"direction": "wgrad"} | changes)), DEVICE, {"TP": TP}))

    assert "channels: expected depthwise, got dense" in reasons("plain")
    assert "layout: expected NCHW, got NHWC" in reasons("depthwise", layout="NHWC")
    assert "S=11: expected at most 10 taps" in reasons("depthwise", S=11, padding=5)
    assert "R=20, S=9: expected at most 128 taps" in reasons("depthwise", R=20, S=9, padding=10)
    assert "direction: expected wgrad, got fwd" in reasons("depthwise", direction="fwd")
    assert "TP=5: expected 2 or 3 or 4 or 6" in reasons("depthwise", TP=5)
