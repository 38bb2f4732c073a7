"""PyTorch's convolution, in both memory formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoconv.bench.baselines.base import Baseline, Prepared, Problem
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import DIRECTIONS
from autoconv.vendors.torch import tensor, torch_convolution, uneven_padding


def pin(threads: int) -> None:
    """Have it compute in float32, rather than bfloat16 or TF32 where the user allows them, on so many threads."""
    import torch

    torch.backends.mkldnn.conv.fp32_precision = "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _in_format(channels_last: bool) -> Callable[[Problem, CPU, bool, bool], Prepared]:
    def prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
        import torch

        layer = problem.layer
        if (uneven := uneven_padding(layer)) is not None:
            raise PlanError(uneven)
        pin(device.threads)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        a, b = (tensor(array).contiguous(memory_format=memory_format) for array in (problem.a, problem.b))
        bias = None if problem.bias is None else tensor(problem.bias)
        residual = None
        if problem.residual is not None:
            residual = tensor(problem.residual).contiguous(memory_format=memory_format)

        def run() -> Any:
            with torch.inference_mode():
                return torch_convolution(layer, a, b, bias, residual)

        return Prepared(run, lambda y: y.numpy())

    return prepare


BASELINES = (
    Baseline("torch", "torch, NCHW", ("torch",), _in_format(channels_last=False), DIRECTIONS),
    Baseline(
        "torch_cl",
        "torch, channels_last",
        ("torch",),
        _in_format(channels_last=True),
        DIRECTIONS,
        tensors="channels_last",
    ),
)
