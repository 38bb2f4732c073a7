"""What an optimised module takes for an example, and in its calls: what is the same, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_models import Applied, numbers, seeded  # noqa: E402

import autoconv  # noqa: E402
import autoconv.torch  # noqa: E402
from autoconv.cpu import pool  # noqa: E402

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


def optimized(model: Any, *example: Any) -> Any:
    return autoconv.torch.optimize(model.eval(), example, mode="heuristic")


class Keeping(nn.Module):
    """A model with a parameter, a buffer and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("count", torch.full((2, 3), 2.0))
        self.plain = torch.full((2, 3), 3.0)

    def forward(self, x: Any) -> Any:
        return x + 10 * self.weight + 100 * self.count + 1000 * self.plain


@pytest.mark.parametrize(
    "again", [lambda x: x, lambda x: x.detach(), lambda x: x.view_as(x)], ids=["itself", "detached", "a view"]
)
def test_a_tensor_that_stands_twice_in_the_example_is_two_inputs(again: Any) -> None:
    x, a, b = numbers((2, 3)), torch.full((2, 3), 5.0), torch.full((2, 3), 7.0)
    found = optimized(Applied(lambda a, b: a - 2 * b), x, again(x))(a, b)
    torch.testing.assert_close(found, a - 2 * b)
    nested = optimized(Applied(lambda given: given["a"] - 2 * given["b"][0]), {"a": x, "b": [again(x)]})
    torch.testing.assert_close(nested({"a": a, "b": [b]}), a - 2 * b)


def test_an_example_of_self_attention_takes_other_keys_and_values() -> None:
    model = seeded(nn.MultiheadAttention(8, 2, batch_first=True))
    q, *given = numbers((4, 1, 5, 8))
    with torch.no_grad():
        found, expected = optimized(model, q, q, q)(*given), model(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["weight", "count", "plain"])
def test_an_example_that_is_the_models_own_tensor_is_an_input(name: str) -> None:
    model, x = Keeping(), numbers((2, 3))
    fast = optimized(model, getattr(model, name))
    torch.testing.assert_close(fast(x), model(x).detach())
    torch.testing.assert_close(optimized(model, getattr(model, name).detach())(x), model(x).detach())


def test_an_example_keeps_its_memory_format_and_requires_nothing() -> None:
    x = numbers((1, 2, 4, 4)).contiguous(memory_format=torch.channels_last).requires_grad_()
    fast = optimized(Applied(lambda a: a.relu() if a.is_contiguous(memory_format=torch.channels_last) else -a), x)
    torch.testing.assert_close(fast(x.detach()), x.detach().relu())


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")  # PyTorch's own
def test_a_trace_of_it_is_refused() -> None:
    x = numbers((2, 3))
    for model in (optimized(nn.ReLU(), x), nn.Sequential(optimized(nn.ReLU(), x))):
        with pytest.raises(autoconv.ArrayError, match=r"ReLU: expected a call outside torch\.jit\.trace"):
            torch.jit.trace(model, x)
        with pytest.raises(autoconv.ArrayError, match="ReLU: expected a call outside make_fx"):
            make_fx(model)(x)


@pytest.mark.parametrize(
    ("constant", "others"),
    [(2, [2.0, True]), (2.0, [2]), (True, [1, 1.0]), (1, [True]), (0.0, [-0.0, 0]), (-0.0, [0.0]), ("a", ["b", None])],
    ids=str,
)
def test_constants_of_the_example_are_the_very_same(constant: Any, others: list[Any]) -> None:
    x = numbers((2, 3))
    fast = optimized(Applied(lambda a, n: a if isinstance(n, str) else a + n), x, constant)
    torch.testing.assert_close(fast(x, constant), x if constant == "a" else x + constant)
    for other in others:
        with pytest.raises(autoconv.ArrayError, match=rf"expected {constant!r} as in the example, got {other!r}$"):
            fast(x, other)


def test_a_tensor_in_the_place_of_none_is_told_without_its_values() -> None:
    x = numbers((2, 3))
    fast = optimized(Applied(lambda a, b: a if b is None else a + b), x, None)
    torch.testing.assert_close(fast(x, None), x)
    with pytest.raises(autoconv.ArrayError, match=r"expected None as in the example, got Tensor of float32 \(2, 3\)$"):
        fast(x, x)


class Named(torch.Tensor):
    """A tensor of another class, with memory of its own."""


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    x = numbers((2, 3))
    fast = optimized(nn.ReLU(), x)
    torch.testing.assert_close(fast(x.as_subclass(Named)), x.relu())
    torch.testing.assert_close(fast(nn.Parameter(x, requires_grad=False)), x.relu())
    refused = "ReLU: expected a dense tensor on the CPU, got a FakeTensor"
    with FakeTensorMode() as mode:
        for given in (torch.zeros(2, 3), mode.from_tensor(x)):
            with pytest.raises(autoconv.ArrayError, match=refused):
                fast(given)
    with pytest.raises(autoconv.ConfigError, match=f"Sequential: torch.export cannot trace it: .*{refused}"):
        optimized(nn.Sequential(fast, nn.ReLU()), x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own
def test_tensors_within_a_derivative_of_torch_func_are_refused() -> None:
    x, one = numbers((2, 3)), torch.ones(())
    fast = optimized(nn.ReLU(), x)
    refused = r"ReLU: expected a tensor of its own, got one within a transform of torch\.func"
    for derivative in (
        lambda: torch.func.grad(lambda scale: (scale * fast(x)).sum())(one),
        lambda: torch.func.jvp(lambda scale: scale * fast(x), (one,), (one,)),
    ):
        with pytest.raises(autoconv.ArrayError, match=refused):
            derivative()
