"""ncnn's convolution."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.bench.baselines.base import Baseline, Prepared, Problem
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

MAGIC = 7767517  # which a description begins with
REDUCED = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_packed", "use_bf16_storage")
PACKING = ["Input x 0 1 x", "Split split 1 1 x y"]  # what its input is packed into: as many channels as a vector holds
AS_IT_IS = 1  # leave an output in the format that the layer wrote


def _prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
    empty = np.empty(0, np.float32)
    packing = _net(PACKING, empty, device.threads)
    net = _net(_description(problem.layer), _weights(problem), device.threads)
    inputs = {"x": problem.a}
    if problem.residual is not None:
        inputs["residual"] = problem.residual
    mats = {name: _output(packing, {"x": _mat(array)}) for name, array in inputs.items()}

    def run(_kept: object = inputs) -> Any:  # what needs no packing is read where it lies, and not kept
        return _output(net, mats)

    return Prepared(run, _array)


def empty_net(threads: int) -> Any:
    """One that will compute with float32 alone."""
    import ncnn

    net = ncnn.Net()
    options = net.opt
    for name in REDUCED:
        setattr(options, name, False)
    options.num_threads = threads
    net.opt = options
    return net


def _net(description: list[str], weights: Array, threads: int) -> Any:
    """A network of these lines, with float32 alone."""
    net = empty_net(threads)
    blobs = {blob for line in description for blob in line.split()[4 : 4 + sum(map(int, line.split()[2:4]))]}
    if net.load_param_mem("\n".join([str(MAGIC), f"{len(description)} {len(blobs)}", *description, ""])):
        raise RuntimeError(f"ncnn does not take the network {'; '.join(description)}")
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:  # a buffer would have to outlive the network
        Path(file.name).write_bytes(weights.tobytes())
        if net.load_model(file.name):
            raise RuntimeError(f"ncnn does not take {weights.nbytes} bytes of weights")
    return net


def _description(layer: ConvLayer) -> list[str]:
    (top, bottom), (left, right) = layer.padding
    values = {0: layer.K, 1: layer.S, 11: layer.R, 2: layer.dilation[1], 12: layer.dilation[0]}
    values |= {3: layer.stride[1], 13: layer.stride[0], 4: left, 15: right, 14: top, 16: bottom}
    values |= {5: int(layer.bias), 6: int(np.prod(layer.w_shape))}
    kind = "Convolution"
    if layer.groups > 1:
        kind, values[7] = "ConvolutionDepthWise", layer.groups  # grouped ones of any kind
    relu = layer.activation == "relu"
    lines = ["Input x 0 1 x"]
    if not layer.residual:
        values[9] = int(relu)
    parameters = " ".join(f"{key}={value}" for key, value in values.items())
    if not layer.residual:
        return [*lines, f"{kind} conv 1 1 x y {parameters}"]
    lines += ["Input residual 0 1 residual", f"{kind} conv 1 1 x product {parameters}"]
    lines.append(f"BinaryOp add 2 1 product residual {'sum' if relu else 'y'} 0=0")
    return [*lines, "ReLU relu 1 1 sum y"] if relu else lines


def _weights(problem: Problem) -> Array:
    """The file's content: a flag that says float32, the filters, the bias."""
    parts = [np.zeros(1, np.float32), problem.b.ravel()]
    return np.concatenate(parts if problem.bias is None else [*parts, problem.bias])


def _mat(array: Array) -> Any:
    import ncnn

    return ncnn.Mat(array[0]) if len(array) == 1 else ncnn.Mat(array, batch_index=0)


def _output(net: Any, inputs: dict[str, Any]) -> Any:
    import ncnn

    extractor = net.create_extractor()
    for name, mat in inputs.items():
        extractor.input(name, mat)
    y = ncnn.Mat()
    failed = extractor.extract("y", y, AS_IT_IS)  # without an array to extract into, it copies
    if failed:
        raise RuntimeError(f"ncnn failed with {failed}")
    return y


def _array(mat: Any) -> Array:
    import ncnn

    if mat.elempack > 1:
        packed, mat = mat, ncnn.Mat()
        ncnn.convert_packing(packed, mat, 1)
    return np.stack([np.array(mat.batch(image)) for image in range(mat.n)])


BASELINES = (Baseline("ncnn", "ncnn", ("ncnn",), _prepare, varying=False, tensors="blocks of channels"),)
