"""Operators that are not known here, as `ForeignTorch` ones: with all that they are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoconv.networks.operators.base import TensorType
from autoconv.networks.operators.foreign_torch import ARRAY, CONSTANT, DEVICE, ForeignTorch
from autoconv.networks.torch_reader.call import Call, Value
from autoconv.vendors.torch import array

# What reads memory, and not arrays: all of ours are contiguous.
OF_STRIDES = ("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter")
# What gives quantised tensors, which the tensors of a trace do not tell: they are plain ones.
QUANTISING = (
    "aten::quantize_",
    "aten::_empty_affine_quantized",
    "aten::_empty_per_channel_affine_quantized",
    "aten::_make_per_channel_quantized_tensor",
    "aten::_make_per_tensor_quantized_tensor",
)


def type_of(fake: Any) -> TensorType:
    """Shape and type of a tensor."""
    return TensorType(tuple(map(int, fake.shape)), str(fake.dtype).removeprefix("torch."))


def check_computes(call: Call, target: Any) -> None:
    """Refuse what does anything else than to compute new arrays from what is in others."""
    if target._schema.is_mutable or target.name() in OF_STRIDES:
        call.fail("expected an operator that computes new arrays from what is in others")
    if target.name().startswith(QUANTISING):
        call.fail("no kernel here: expected dense arrays of NumPy's types, got quantised ones for its output 0")


def foreign(call: Call, target: Any, arguments: Mapping[str, Any], fakes: Sequence[Any]) -> list[str]:
    """The outputs of such an operator, of which PyTorch expects `fakes`."""
    check_computes(call, target)
    inputs: list[str] = []
    text = json.dumps({name: _written(call, name, value, inputs) for name, value in arguments.items()})
    types = []
    for n, fake in enumerate(fakes):
        if not isinstance(fake, torch.Tensor):
            call.fail(f"no kernel here: expected arrays, got {type(fake).__name__} for its output {n}")
        if not all(isinstance(extent, int) for extent in fake.shape):
            call.fail(f"no kernel here, and the shape of its output {n} is not known before it runs")
        if not _has_array(fake):
            kind = f"{fake.dtype} ({fake.layout})"
            call.fail(f"no kernel here: expected dense arrays of NumPy's types, got {kind} for its output {n}")
        types.append(type_of(fake))
    takes = tuple((call.graph.types[name].shape, call.graph.types[name].dtype) for name in inputs)
    return [
        call.add(ForeignTorch(target.name(), n, takes, found.shape, found.dtype, text), *inputs)
        for n, found in enumerate(types)
    ]


def _has_array(fake: Any) -> bool:
    """Whether NumPy has arrays for such a tensor: for none that is sparse, or quantised."""
    try:
        array(torch.empty(0, dtype=fake.dtype, device="cpu"))
    except (RuntimeError, TypeError):
        return False
    return bool(fake.layout is torch.strided)


def _written(call: Call, name: str, value: Any, inputs: list[str]) -> Any:
    """An argument as `ForeignTorch` has it; arrays go to the inputs."""
    if isinstance(value, Value):
        if value not in inputs:
            inputs.append(str(value))
        return {ARRAY: inputs.index(value)}
    if isinstance(value, list):
        return [_written(call, name, each, inputs) for each in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {CONSTANT: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device) and value.type == "cpu":
        return {DEVICE: "cpu"}
    if not isinstance(value, bool | int | float | str | None):
        call.fail(f"no kernel here: {name}: expected real numbers, arrays or names, got {value!r}")
    return value
