"""What an optimised module takes for an example, and in its calls: what is the same, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

from torch import nn  # noqa: E402
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
