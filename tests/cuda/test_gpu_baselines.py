"""How PyTorch is called as a baseline on a GPU, on a module that only notes what it is asked for."""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from layers import edge

from autoconv.bench.gpu import baselines
from autoconv.vendors.torch import torch_convolution

GPU = "cuda:3"


class Tensor:
    """As much of a tensor as is looked at."""

    device, dtype = GPU, "float32"

    def is_contiguous(self, memory_format: object) -> bool:
        return True


def backends(convolutions: str = "none", products: str = "ieee") -> Any:
    """PyTorch's settings, with the precision that it says is in force."""
    cudnn = SimpleNamespace(allow_tf32=True, conv=SimpleNamespace(fp32_precision=convolutions))
    return SimpleNamespace(cudnn=cudnn, cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision=products)))


def test_nothing_is_computed_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(backends=backends())
    monkeypatch.setitem(sys.modules, "torch", fake)
    baselines.settle()
    assert fake.backends.cudnn.benchmark
    assert not fake.backends.cudnn.allow_tf32
    assert not fake.backends.cuda.matmul.allow_tf32
    fake.backends = backends("tf32", "tf32")
    with pytest.raises(RuntimeError, match="allows it for convolutions and products"):
        baselines.settle()


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


def test_every_answer_of_a_graph_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives the memory of a dropped tensor to the next one: all would be written to one block, in the L2."""
    made: list[weakref.ref[Any]] = []

    class Answer(Tensor):
        def clone(self, **_: Any) -> Answer:
            return self

        permute = contiguous = clone

    def convolution(*_: Any, **__: Any) -> Answer:
        made.append(weakref.ref(answer := Answer()))
        return answer

    def at_replay() -> None:
        alive.append(sum(answer() is not None for answer in made))

    alive: list[int] = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda stop: 1.0)
    cuda = SimpleNamespace(
        synchronize=made.clear,  # before the capture
        CUDAGraph=lambda: SimpleNamespace(replay=at_replay),
        graph=lambda graph: nullcontext(),
        Event=lambda enable_timing: event,
    )
    fake = SimpleNamespace(
        backends=backends(),
        utils=SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=lambda array: Answer())),
        inference_mode=nullcontext,
        channels_last="channels_last",
        contiguous_format="contiguous",
        cuda=cuda,
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(baselines, "torch_convolution", convolution)
    layer = edge("plain")
    device: Any = SimpleNamespace(facts={"l2_bytes": 0}, adopt=lambda array, name: array)
    a, b = (np.zeros(shape, np.float32) for shape in layer.input_shapes)
    sample, answer = baselines.Baseline(channels_last=False).prepare(layer, device, a, b)
    del answer
    sample()
    assert set(alive) == {baselines.LEAST_LAUNCHES}
