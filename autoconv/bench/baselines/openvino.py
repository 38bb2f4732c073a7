"""OpenVINO's convolution (oneDNN's, with changes of its own)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.bench.baselines.base import Baseline, Prepared, Problem
from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.cpu.device import CPU


def _prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
    import openvino

    # Its kernels compute in channels_last, so that tensors in that format are used as they are. Those that vary from
    # run to run, the filters among them if they do, are the model's inputs.
    def channels_last(array: Array) -> Array:
        found = device.empty(tuple(array.shape[axis] for axis in CHANNELS_LAST), np.float32)
        found[...] = array.transpose(CHANNELS_LAST)
        return found

    inputs = [channels_last(problem.a)]
    if not constant:
        inputs.append(problem.b)
    if problem.residual is not None:
        inputs.append(channels_last(problem.residual))
    request = core().compile_model(_model(problem, constant), "CPU", settings(device.threads)).create_infer_request()
    tensors = [openvino.Tensor(array, shared_memory=True) for array in inputs]
    for place, tensor in enumerate(tensors):
        request.set_input_tensor(place, tensor)
    shape = tuple(problem.layer.y_shape[axis] for axis in CHANNELS_LAST)

    def bind(out: Array) -> Array:
        request.set_output_tensor(0, openvino.Tensor(out, shared_memory=True))
        return out

    once = None if fresh else bind(device.empty(shape, np.float32))

    def run(_kept: object = tensors) -> Array:  # the request itself does not keep their memory
        out = bind(np.empty(shape, np.float32)) if once is None else once
        request.infer(share_outputs=True)  # or it copies them
        return out

    return Prepared(run, lambda y: y.transpose(CHANNELS_FIRST))


@functools.cache
def core() -> Any:
    """What reads and compiles models."""
    import openvino

    return openvino.Core()


def settings(threads: int) -> dict[str, Any]:
    """Float32, so many threads, one run at a time."""
    return {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }


def _model(problem: Problem, constant: bool) -> Any:
    import openvino
    from openvino import opset13 as ops

    layer, float32 = problem.layer, np.float32
    parameters = [ops.parameter([layer.x_shape[axis] for axis in CHANNELS_LAST], float32)]
    x = ops.transpose(parameters[0], ops.constant([*CHANNELS_FIRST]))
    if constant:
        w = ops.constant(problem.b)
    else:
        w = ops.parameter(layer.w_shape, float32)
        parameters.append(w)
    (top, bottom), (left, right) = layer.padding
    geometry = list(layer.stride), [top, left], [bottom, right], list(layer.dilation)
    if layer.groups > 1:
        K, *rest = layer.w_shape
        y = ops.group_convolution(x, ops.reshape(w, [layer.groups, K // layer.groups, *rest], False), *geometry)
    else:
        y = ops.convolution(x, w, *geometry)
    if problem.bias is not None:
        y = ops.add(y, ops.constant(problem.bias.reshape(1, -1, 1, 1)))
    if layer.residual:
        residual = ops.parameter([layer.y_shape[axis] for axis in CHANNELS_LAST], float32)
        parameters.append(residual)
        y = ops.add(y, ops.transpose(residual, ops.constant([*CHANNELS_FIRST])))
    if layer.activation == "relu":
        y = ops.relu(y)
    return openvino.Model([ops.transpose(y, ops.constant([*CHANNELS_LAST]))], parameters, "convolution")


BASELINES = (Baseline("openvino", "OpenVINO", ("openvino",), _prepare, tensors="channels_last", reuses=True),)
