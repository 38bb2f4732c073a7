"""What `autoconv bench` measures against: PyTorch in both memory formats, and ONNX Runtime.

Each is called as its own users call it, at its default settings but for the thread count, and gets its
tensors in its own format before the clock starts.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.vendors.base import installed, release
from autoconv.vendors.onnxruntime import bound_arrays, onnx_session
from autoconv.vendors.torch import tensor, torch_convolution, uneven_padding

Run = Callable[[], Array]

# What restricts PyTorch to fewer vector instructions than the processor has; ONNX Runtime has nothing of the kind.
RESTRICTIONS = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "ATEN_CPU_CAPABILITY": "avx512"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "generic": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


@dataclass(frozen=True)
class Problem:
    """One layer with operands: normal numbers, the filters scaled so that the output's are about as large."""

    layer: ConvLayer
    a: Array
    b: Array
    bias: Array | None
    residual: Array | None

    @classmethod
    def draw(cls, layer: ConvLayer, device: CPU, seed: int = 0) -> Problem:
        """Operands from a seed."""
        generator = np.random.default_rng(seed)

        def normal(shape: tuple[int, ...], scale: float = 1.0) -> Array:
            array = device.empty(shape, np.float32)
            generator.standard_normal(dtype=np.float32, out=array)
            array *= np.float32(scale)
            return array

        terms = math.prod(layer.w_shape[1:]) if layer.direction == "fwd" else layer.macs / math.prod(layer.output_shape)
        a, b = layer.input_shapes
        return cls(
            layer,
            normal(a),
            normal(b, 1 / math.sqrt(terms)),
            normal((layer.K,)) if layer.bias else None,
            normal(layer.y_shape) if layer.residual else None,
        )


@dataclass(frozen=True)
class Baseline:
    """A library to measure against.

    Parameters
    ----------
    name : str
        What options and results call it.
    label : str
        What people call it.
    packages : tuple of str
        What has to be installed; the first is the library.
    prepare : callable
        `prepare(problem, device, constant, fresh)` gives one run of it: `constant` says whether filters may be
        transformed beforehand, `fresh` whether the output is a new array every time.
    directions : tuple of str
        What it can compute.
    """

    name: str
    label: str
    packages: tuple[str, ...]
    prepare: Callable[[Problem, CPU, bool, bool], Run]
    directions: tuple[str, ...] = ("fwd",)

    @property
    def version(self) -> str:
        """Of the library."""
        return release(self.packages[0])

    def missing(self) -> list[str]:
        """The packages it lacks."""
        return [package for package in self.packages if not installed(package)]


def _torch(channels_last: bool) -> Callable[[Problem, CPU, bool, bool], Run]:
    def prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Run:
        import torch

        layer = problem.layer
        if (uneven := uneven_padding(layer)) is not None:
            raise PlanError(uneven)
        if torch.get_num_threads() != device.threads:
            torch.set_num_threads(device.threads)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        a, b = (tensor(array).contiguous(memory_format=memory_format) for array in (problem.a, problem.b))
        bias = None if problem.bias is None else tensor(problem.bias)
        residual = None
        if problem.residual is not None:
            residual = tensor(problem.residual).contiguous(memory_format=memory_format)

        def run() -> Array:
            with torch.inference_mode():
                return torch_convolution(layer, a, b, bias, residual).numpy()

        return run

    return prepare


def _onnxruntime(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Run:
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
        return lambda: session.run(["conv.y"], inputs)[0]
    out = device.empty(problem.layer.y_shape, np.float32)
    binding = bound_arrays(session, inputs, {"conv.y": out})

    def run() -> Array:
        session.run_with_iobinding(binding)
        return out

    return run


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


BASELINES = {
    baseline.name: baseline
    for baseline in (
        Baseline("torch", "torch, NCHW", ("torch",), _torch(channels_last=False), ("fwd", "dgrad", "wgrad")),
        Baseline("torch_cl", "torch, channels_last", ("torch",), _torch(channels_last=True), ("fwd", "dgrad", "wgrad")),
        Baseline("onnxruntime", "ONNX Runtime", ("onnxruntime", "onnx"), _onnxruntime),
    )
}


def restrict(instruction_set: str) -> dict[str, str]:
    """Restrict the libraries that allow it to an instruction set.

    Returns
    -------
    dict
        The environment variables that do so, which are now set.

    Raises
    ------
    PlanError
        When torch was imported before: it reads them once.
    """
    if "torch" in sys.modules:
        raise PlanError(
            f"instruction set {instruction_set}: torch has been imported already, and reads its limits only then"
        )
    os.environ.update(RESTRICTIONS[instruction_set])
    return RESTRICTIONS[instruction_set]
