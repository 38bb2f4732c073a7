"""ONNX Runtime's convolution, and a graph of all those of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.bench.baselines.base import Baseline, Prepared, Problem
from autoconv.cpu.device import CPU
from autoconv.vendors.onnxruntime import bound_arrays, onnx_session


def _prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
    inputs, constants = problem.operands("conv", constant)
    session = onnx_session({"conv": problem.layer}, constants, device.threads)
    if fresh:
        return Prepared(lambda: session.run(["conv.y"], inputs)[0])
    out = device.empty(problem.layer.y_shape, np.float32)
    binding = bound_arrays(session, inputs, {"conv.y": out})

    def run(_kept: object = inputs) -> Array:  # a binding does not keep their memory
        session.run_with_iobinding(binding)
        return out

    return Prepared(run)


def onnxruntime_network(problems: Mapping[str, Problem], outs: Mapping[str, Array], threads: int) -> Callable[[], Any]:
    """One run of a single graph with all these convolutions, each on its own input; filters are constant."""
    inputs, constants = dict[str, Array](), dict[str, Array]()
    for name, problem in problems.items():
        for found, own in zip((inputs, constants), problem.operands(name), strict=True):
            found.update(own)
    session = onnx_session({name: problem.layer for name, problem in problems.items()}, constants, threads)
    binding = bound_arrays(session, inputs, {f"{name}.y": out for name, out in outs.items()})
    return lambda: session.run_with_iobinding(binding)


BASELINES = (Baseline("onnxruntime", "ONNX Runtime", ("onnxruntime", "onnx"), _prepare, reuses=True),)
