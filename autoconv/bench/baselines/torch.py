"""PyTorch's convolution, in both memory formats, and in 16 bits with filters in oneDNN's own format, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoconv.bench.baselines.base import Baseline, Prepared, Problem
from autoconv.common.text import one_line
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import DIRECTIONS
from autoconv.vendors.torch import array, tensor, torch_convolution, uneven_padding


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

        return Prepared(run, array)

    return prepare


def _packed(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
    """As `torch.compile` calls oneDNN for a frozen model: by operators that are no public interface."""
    import torch

    layer = problem.layer
    if (uneven := uneven_padding(layer)) is not None:
        raise PlanError(uneven)
    pin(device.threads)
    geometry = [before for before, _ in layer.padding], list(layer.stride), list(layer.dilation), layer.groups
    a = tensor(problem.a).contiguous(memory_format=torch.channels_last)
    bias = None if problem.bias is None else tensor(problem.bias)
    residual = None
    if problem.residual is not None:
        residual = tensor(problem.residual).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        filters = tensor(problem.b).to_mkldnn()
        try:
            packed = torch._C._nn.mkldnn_reorder_conv2d_weight(filters, *geometry, list(a.shape))
        except RuntimeError as refusal:  # of a type that the processor lacks instructions for
            raise PlanError(f"dtype={layer.dtype!r}: {one_line(refusal)}") from None
    activation = layer.activation if residual is None else None

    def run() -> Any:
        with torch.inference_mode():
            found = torch.ops.mkldnn._convolution_pointwise(a, packed, bias, *geometry, activation or "none", [], "")
            if residual is None:
                return found
            found.add_(residual)
            return found.relu_() if layer.activation == "relu" else found

    return Prepared(run, array)


WIDE_AND_NARROW = "float32", "float16", "bfloat16"
BASELINES = (
    Baseline("torch", "torch, NCHW", ("torch",), _in_format(channels_last=False), DIRECTIONS, dtypes=WIDE_AND_NARROW),
    Baseline(
        "torch_cl",
        "torch, channels_last",
        ("torch",),
        _in_format(channels_last=True),
        DIRECTIONS,
        tensors="channels_last",
        dtypes=WIDE_AND_NARROW,
    ),
    Baseline(
        "torch_packed",
        "torch, filters packed",
        ("torch",),
        _packed,
        varying=False,
        tensors="channels_last",
        dtypes=WIDE_AND_NARROW[1:],
    ),
)
