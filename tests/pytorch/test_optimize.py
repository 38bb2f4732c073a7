"""`autoconv.torch.optimize`: the same answers, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_models import Small, seeded  # noqa: E402

import autoconv  # noqa: E402
import autoconv.torch  # noqa: E402
from autoconv.bench.networks.models import unet  # noqa: E402
from autoconv.cpu import pool  # noqa: E402

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


@pytest.fixture(scope="module")
def model() -> Any:
    return seeded(Small())


@pytest.fixture(scope="module")
def fast(model: Any) -> Any:
    return autoconv.torch.optimize(model, torch.zeros(2, 3, 18, 14), mode="heuristic")


def test_the_answers_are_those_of_the_model_in_float64(model: Any, fast: Any) -> None:
    x = torch.randn(2, 3, 18, 14)
    found = fast(x)
    expected = seeded(Small()).double()(x.double())
    assert list(found) == list(expected) == ["scores", "up"]
    for name, value in expected.items():
        assert found[name].dtype is torch.float32
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max()


def agrees(model: Any, x: Any) -> Any:
    """The network of a model, whose answer errs little more than PyTorch's."""
    fast = autoconv.torch.optimize(model, x, mode="heuristic")
    with torch.no_grad():
        ours, theirs = fast(x), model(x)
        expected = model.double()(x.double())
    error = float((theirs - expected).abs().max())
    assert 0 < error < 1e-4 * float(expected.abs().max())
    assert float((ours - expected).abs().max()) <= 10 * error
    return fast


def test_a_unet() -> None:
    fast = agrees(seeded(unet(width=4, depth=2)), torch.randn(1, 3, 24, 16))
    kinds = [node.operator.kind for node in fast.network.graph.nodes.values()]
    assert [kinds.count(kind) for kind in ("ConvTranspose", "Concat", "Conv")] == [2, 2, 11]


def test_efficientnet() -> None:
    models = pytest.importorskip("torchvision", reason="NOT CHECKED: torchvision is not installed").models
    fast = agrees(seeded(models.efficientnet_b0(weights=None)), torch.randn(1, 3, 64, 64))
    assert not fast.network.foreign
    assert "BatchNorm" not in fast.network.explain()


def test_everything_is_fused_into_few_kernels_of_ours(fast: Any) -> None:
    explained = fast.network.explain()
    assert "numpy" not in explained.lower()
    kinds = [node.operator.kind for node in fast.network.graph.nodes.values()]
    assert "BatchNorm" not in explained
    assert kinds.count("Conv") == 5
    assert "gate.0" in explained


def test_parameters_are_constant_and_outputs_are_new(fast: Any) -> None:
    x = torch.randn(2, 3, 18, 14)
    first = fast(x)
    kept = first["up"].clone()
    fast(torch.zeros_like(x))
    torch.testing.assert_close(first["up"], kept, rtol=0, atol=0)
    model = seeded(nn.Sequential(nn.Conv2d(1, 2, 1), nn.PReLU()))
    other = autoconv.torch.optimize(model, torch.ones(1, 1, 4, 4), mode="heuristic")
    before = other(torch.ones(1, 1, 4, 4))
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    torch.testing.assert_close(other(torch.ones(1, 1, 4, 4)), before, rtol=0, atol=0)


@pytest.mark.parametrize("ours", [autoconv.torch.Conv2d, autoconv.torch.ConvTranspose2d])
@pytest.mark.parametrize("exact", [False, True])
def test_a_model_with_an_exact_convolution_is_exact(exact: bool, ours: Any) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), ours(8, 8, 3), nn.ReLU()).eval()
    model[1].exact = exact
    for options, expected in (({}, exact), ({"exact": False}, False), ({"exact": True}, True)):
        plans = autoconv.torch.optimize(model, torch.zeros(1, 8, 9, 9), mode="heuristic", **options).network.plans
        assert len(plans) == 2
        assert {made.limits.exact for made in plans.values()} == {expected}


def test_copies_are_the_module_itself_and_files_are_its_networks(fast: Any) -> None:
    copied = copy.deepcopy(nn.Sequential(fast))
    assert copied[0] is copy.copy(fast) is fast
    with pytest.raises(autoconv.ConfigError, match=r"Small: cannot be pickled: network.save\(path\)"):
        pickle.dumps(copied)


def test_views_that_are_yet_to_be_negated() -> None:
    fast = autoconv.torch.optimize(nn.ReLU().eval(), torch.zeros(2, 3), mode="heuristic")
    x = torch.randn(2, 3, dtype=torch.complex64).conj()
    assert x.imag.is_neg()
    torch.testing.assert_close(fast(x.imag), x.imag.clamp(min=0), rtol=0, atol=0)
    with pytest.raises(autoconv.ArrayError, match=r"planned for float32 \(2, 3\), got complex64"):
        fast(x)


def test_a_scalar_is_timed_alone() -> None:
    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    x = torch.tensor(1.5)
    fast = autoconv.torch.optimize(Twice().eval(), x, mode="heuristic")
    torch.testing.assert_close(fast(x), x * 2)
    steps = fast.network.profile(x, repeat=1, alone=True)
    assert any(fast.network.graph.types[step.name].shape == () for step in steps)


def test_any_memory_format_and_several_threads(fast: Any) -> None:
    x = torch.randn(2, 3, 18, 14)
    expected = fast(x)["up"]
    given = [x.contiguous(memory_format=torch.channels_last), *[x] * 7]
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(fast, given):
            torch.testing.assert_close(found["up"], expected, rtol=0, atol=0)


def test_it_is_tuned_saved_and_loaded(tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()))
    x = torch.randn(1, 2, 6, 6)
    fast = autoconv.torch.optimize(model, (x,), budget=0.01)
    (made,) = fast.network.plans.values()
    assert any(facts.timed for facts in made.facts.values())
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    fast.network.save(tmp_path / "net.autoconv")
    loaded = autoconv.load(tmp_path / "net.autoconv", device=fast.network.device)  # PyTorch's threads may be fewer
    assert loaded.explain() == fast.network.explain()
    np.testing.assert_allclose(loaded.run(x.numpy()), fast(x).numpy())


def test_only_mode_hybrid_has_a_budget_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        autoconv.CompiledNetwork, "tune", lambda self, mode, **given: asked.append((mode, given)) or self
    )
    model = seeded(nn.Sequential(nn.Conv2d(1, 2, 1)))
    for options in ({}, {"mode": "profile"}, {"mode": "profile", "budget": 1.0}):
        autoconv.torch.optimize(model, torch.ones(1, 1, 4, 4), **options)
    assert asked == [("hybrid", {"budget": 0.2}), ("profile", {"budget": None}), ("profile", {"budget": 1.0})]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own
def test_other_inputs_are_refused(fast: Any) -> None:
    x = torch.zeros(2, 3, 18, 14)
    with pytest.raises(
        autoconv.ArrayError, match=r"planned for float32 \(2, 3, 18, 14\), got float32 \(1, 3, 18, 14\)"
    ):
        fast(x[:1])
    with pytest.raises(autoconv.ArrayError, match="got float64"):
        fast(x.double())
    with pytest.raises(autoconv.ArrayError, match="expected inputs like the example"):
        fast(x, x)
    with pytest.raises(autoconv.ArrayError, match="expected a dense tensor on the CPU, got ndarray"):
        fast(x.numpy())
    with pytest.raises(autoconv.ArrayError, match="got one on meta"):
        fast(x.to("meta"))
    with pytest.raises(autoconv.ArrayError, match="got one of layout torch"):
        fast(x.to_sparse())
    with pytest.raises(autoconv.ArrayError, match=r"of its own, got one within a transform of torch\.func"):
        torch.func.vmap(fast)(x[None])
    with pytest.raises(autoconv.ArrayError, match=r"without a gradient.*no_grad"):
        fast(x.requires_grad_())
    with torch.no_grad():
        fast(x)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(autoconv.ArrayError, match="without a gradient"):
        fast(forward_ad.make_dual(x.detach(), x.detach()))


def test_infinities_stay_what_they_are_in_windows_of_several_sizes() -> None:
    model, x = nn.AdaptiveAvgPool2d((4, 3)), torch.zeros(1, 1, 6, 5)
    x[0, 0, 1, 1] = torch.inf
    y = autoconv.torch.optimize(model.eval(), x, mode="heuristic")(x)
    torch.testing.assert_close(y, model(x))


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_types_within_a_model(wide: Any) -> None:
    class Widened(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.to(wide).mul(2).to(x.dtype), x.softmax(1, dtype=torch.float32)

    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(2)).half()
    found, expected = autoconv.torch.optimize(Widened().eval(), x, mode="heuristic")(x), Widened()(x)
    torch.testing.assert_close(found, expected, rtol=1e-2 if wide is torch.bfloat16 else 1e-3, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_sees_nothing_of_what_a_mask_leaves_out(causal: bool) -> None:
    """Kernels take scores of minus infinity, which weigh nothing."""
    others = torch.eye(37) < 0.5

    class Masked(nn.Module):
        def forward(self, x: Any) -> Any:
            mask = None if causal else others
            return nn.functional.scaled_dot_product_attention(x, x, x + 1, mask, is_causal=causal)

    x = torch.randn(2, 3, 37, 8, generator=torch.Generator().manual_seed(2))
    fast = autoconv.torch.optimize(Masked().eval(), x, mode="heuristic")
    assert not fast.network.foreign
    torch.testing.assert_close(fast(x), Masked()(x), rtol=1e-5, atol=1e-5)


def test_what_pytorch_runs_keeps_its_types_under_autocast() -> None:
    """A network has types of its own, whatever the caller does meanwhile."""

    class Masked(nn.Module):
        def forward(self, x: Any) -> Any:
            return nn.functional.scaled_dot_product_attention(x, x, x, x @ x.mT)

    x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(2))
    fast = autoconv.torch.optimize(Masked().eval(), x, mode="heuristic")
    assert fast.network.foreign
    expected = fast(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("random", [False, True], ids=["refuses numbers that are made up", "draws numbers"])
def test_networks_with_what_pytorch_runs_are_tuned(random: bool, tmp_path: Path) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
            self.table = nn.Embedding(1, 4)

        def forward(self, x: Any, places: Any) -> Any:
            y = self.layers(x)
            return y + torch.rand_like(y) if random else y.mean() + self.table(places)

    given = torch.randn(8, 8, 64, 64), torch.zeros(8, dtype=torch.long)
    cache = autoconv.TuningCache(tmp_path)
    fast = autoconv.torch.optimize(seeded(Looking()), given, budget=0.01, cache=cache)
    assert not fast.network.images
    assert fast(*given).isfinite().all()


class Joined(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.cat([x, x + 1])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU()), (0, 6)),
        (lambda: nn.Linear(0, 3), (2, 0)),
        (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), (0, 2, 5, 5)),
        (lambda: nn.ConstantPad1d((2, 0), 1.5), (3, 0)),
        (lambda: Joined(), (0, 3)),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # PyTorch's own
def test_arrays_without_elements(make: Any, shape: tuple[int, ...]) -> None:
    model, x = seeded(make()), torch.zeros(shape)
    with torch.no_grad():
        torch.testing.assert_close(autoconv.torch.optimize(model, x, mode="heuristic")(x), model(x))


def test_inputs_without_elements_are_loaded_again(tmp_path: Path) -> None:
    x = torch.zeros(0, 3)
    autoconv.torch.optimize(Joined().eval(), x, mode="heuristic").network.save(tmp_path / "net.autoconv")
    assert autoconv.load(tmp_path / "net.autoconv").run(x.numpy()).shape == (0, 3)


def test_numbers_of_the_example_are_constant() -> None:
    fast = autoconv.torch.optimize(seeded(Small()), (torch.zeros(1, 3, 10, 10), 3.0), mode="heuristic")
    fast(torch.zeros(1, 3, 10, 10), 3.0)
    with pytest.raises(autoconv.ArrayError, match=r"expected 3.0 as in the example, got Tensor of float32 \(2,\)"):
        fast(torch.zeros(1, 3, 10, 10), torch.zeros(2))
    with pytest.raises(autoconv.ArrayError, match=r"expected 3.0 as in the example, got 4.0"):
        fast(torch.zeros(1, 3, 10, 10), 4.0)
    with pytest.raises(autoconv.ArrayError, match=r"expected 3.0 as in the example, got ndarray of float64 \(2,\)"):
        fast(torch.zeros(1, 3, 10, 10), np.full(2, 3.0))
    scaled = autoconv.torch.optimize(seeded(Small()), (torch.zeros(1, 3, 10, 10), np.nan), mode="heuristic")
    assert scaled(torch.zeros(1, 3, 10, 10), float("nan"))["scores"].isnan().any()


def test_models_that_cannot_be_taken_are_refused() -> None:
    x = torch.ones(1, 2, 4, 4)
    with pytest.raises(autoconv.ConfigError, match=r"Small: expected a model in evaluation mode: call model.eval\(\)"):
        autoconv.torch.optimize(Small().train(), x)
    with pytest.raises(autoconv.ConfigError, match=r"model: expected a torch.nn.Module, got int"):
        autoconv.torch.optimize(3, x)  # type: ignore[arg-type]

    class Positive(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[x > 0]

    outer = nn.Sequential(nn.ReLU(), Positive()).eval()
    with pytest.raises(autoconv.ConfigError, match=r"Sequential: node '1' \(aten.index.Tensor\): no kernel here, and"):
        autoconv.torch.optimize(outer, x)

    with pytest.raises(autoconv.ConfigError, match=r"Conv2d: weight: expected a dense tensor on the CPU: .* meta"):
        autoconv.torch.optimize(nn.Conv2d(2, 2, 1).to("meta").eval(), x)

    class Printing(nn.Module):
        def forward(self, x: Any) -> Any:
            torch.ops.aten._print("x")
            return x

    with pytest.raises(autoconv.ConfigError, match="Printing: expected a model without other effects"):
        autoconv.torch.optimize(Printing().eval(), x)

    class Branching(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(autoconv.ConfigError, match=r"Branching: torch.export cannot trace it"):
        autoconv.torch.optimize(Branching().eval(), x)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.count += 1
            return x + self.count

    with pytest.raises(autoconv.ConfigError, match="count: expected a model that changes nothing"):
        autoconv.torch.optimize(Counting().eval(), x)
