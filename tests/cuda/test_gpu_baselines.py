"""How PyTorch is called as a baseline on a GPU, on a module that only notes what it is asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from layers import edge

from autoconv.vendors.torch import torch_convolution

GPU = "cuda:3"


class Tensor:
    """As much of a tensor as is looked at."""

    device, dtype = GPU, "float32"

    def is_contiguous(self, memory_format: object) -> bool:
        return True


@pytest.mark.parametrize(("direction", "place"), [("dgrad", 1), ("wgrad", 2)])
def test_the_gradients_third_operand_lies_with_the_others(
    direction: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on the CPU among two on the GPU is an error of PyTorch's."""
    called: list[Any] = []

    def backward(*given: Any) -> list[Any]:
        called.append(given)
        return list(given[:3])

    fake = SimpleNamespace(
        channels_last="channels_last",
        contiguous_format="contiguous",
        empty=lambda shape, *, device="cpu", **_: SimpleNamespace(shape=shape, device=device),
        ops=SimpleNamespace(aten=SimpleNamespace(convolution_backward=backward)),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    layer = edge("plain", direction=direction)
    torch_convolution(layer, Tensor(), Tensor(), None, None)
    operands = called[0][:3]
    assert [operand.device for operand in operands] == [GPU] * 3
    assert operands[place].shape == layer.output_shape
