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
    inputs = {"conv.x": problem.a, "conv.w": problem.b}
    if problem.bias is not None:
        inputs["conv.bias"] = problem.bias
    if problem.residual is not None:
        inputs["conv.residual"] = problem.residual
    constants = {
        name: array for name, array in inputs.items() if name == "conv.bias" or (constant and name == "conv.w")
    }
    inputs = {name: array for name, array in inputs.items() if name not in constants}
    session = onnx_session({"conv": problem.layer}, constants, device.threads)
    if fresh:
        return Prepared(lambda: session.run(["conv.y"], inputs)[0])
    out = device.empty(problem.layer.y_shape, np.float32)
    binding = bound_arrays(session, inputs, {"conv.y": out})

    def run() -> Array:
        session.run_with_iobinding(binding)
        return out

    return Prepared(run)


def onnxruntime_network(problems: Mapping[str, Problem], outs: Mapping[str, Array], threads: int) -> Callable[[], Any]:
    """One run of a single graph with all these convolutions, each on its own input; filters are constant."""
    inputs, constants = {}, {}
    for name, problem in problems.items():
        inputs[f"{name}.x"] = problem.a
        constants[f"{name}.w"] = problem.b
        if problem.bias is not None:
            constants[f"{name}.bias"] = problem.bias
        if problem.residual is not None:
            inputs[f"{name}.residual"] = problem.residual
    session = onnx_session({name: problem.layer for name, problem in problems.items()}, constants, threads)
    binding = bound_arrays(session, inputs, {f"{name}.y": out for name, out in outs.items()})
    return lambda: session.run_with_iobinding(binding)


BASELINES = (Baseline("onnxruntime", "ONNX Runtime", ("onnxruntime", "onnx"), _prepare, reuses=True),)
