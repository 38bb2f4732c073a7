"""Operators of PyTorch that nothing here computes, run by PyTorch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoconv.common.text import one_line
from autoconv.errors import ConfigError
from autoconv.networks.operators.base import TensorType
from autoconv.networks.operators.foreign import Foreign, Runner
from autoconv.vendors.torch import array, as_given, tensor

ARRAY, DEVICE, CONSTANT = "array", "device", "torch"  # what stands in the arguments for what JSON has no word for


@dataclass(frozen=True)
class ForeignTorch(Foreign):
    """A call of one of PyTorch's operators.

    Parameters
    ----------
    arguments : str
        By the names of the operator's schema, as JSON: an array is `{"array": n}` for the n-th input, a type or memory
        format of PyTorch's `{"torch": name}`, the processor `{"device": "cpu"}`.
    """

    arguments: str = field(repr=False)

    @property
    def by(self) -> str:
        return "PyTorch"

    def runner(self, threads: int) -> Runner:
        return self._made

    @functools.cached_property
    def _made(self) -> Runner:  # kept here, too: a network may have more of them than the cache
        return _runner(self.operator, self.arguments, self.takes)

    @property
    def is_core(self) -> bool:
        """Whether it is one of those to which PyTorch reduces all others: they compute, and do nothing else."""
        target = target_of(self.operator)  # first, as it says what is missing
        import torch

        return torch.Tag.core in target.tags and not target._schema.is_mutable


def target_of(operator: str) -> Any:
    """An operator of PyTorch by its name, as `aten::var.correction`.

    Raises
    ------
    ConfigError
        When there is none, or no PyTorch.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError(f"{operator}: no kernel here: expected torch to be installed") from None
    space, _, rest = operator.partition("::")
    name, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, space, None), name, None), overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ConfigError(f"{operator}: expected an operator of PyTorch's, or of a package that is imported")
    return found


def called(target: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an operator gives for arguments by name: one thing or several."""
    import torch

    positional = [arguments[a.name] for a in target._schema.arguments if not a.kwarg_only]
    with torch.no_grad(), as_given():
        found = target(*positional, **{a.name: arguments[a.name] for a in target._schema.arguments if a.kwarg_only})
    return tuple(found) if isinstance(found, list | tuple) else (found,)


@functools.lru_cache(maxsize=1024)
def _runner(operator: str, arguments: str, takes: tuple[tuple[tuple[int, ...], str], ...]) -> Runner:
    """A call, whose outputs' types PyTorch tells without computing them."""
    target = target_of(operator)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(tensors: Sequence[Any]) -> tuple[Any, ...]:
        return called(target, {name: _read(value, tensors) for name, value in given.items()})

    try:
        given = json.loads(arguments)
        with FakeTensorMode():
            inputs = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in takes]
            gives = [
                TensorType(tuple(map(int, found.shape)), str(found.dtype).removeprefix("torch."))
                for found in call(inputs)
            ]
    except Exception as error:  # of any kind: PyTorch's, for what its operator does not take
        raise ConfigError(f"{operator}: PyTorch does not take it: {one_line(error)}") from None

    def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [array(found) for found in call([*map(tensor, arrays)])]

    return Runner(run, [TensorType(*taken) for taken in takes], gives)


def _read(value: Any, tensors: Sequence[Any]) -> Any:
    """An argument from what JSON makes of it."""
    if isinstance(value, list):
        return [_read(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    import torch

    ((kind, given),) = value.items()
    if kind == ARRAY:
        return tensors[given]
    found = torch.device("cpu") if (kind, given) == (DEVICE, "cpu") else getattr(torch, given)
    if not isinstance(found, torch.device | torch.dtype | torch.layout | torch.memory_format):
        raise ConfigError(f"expected an array or a constant of PyTorch's, got {value}")
    return found
