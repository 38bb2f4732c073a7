"""Models of PyTorch become graphs: every operator, against PyTorch in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch_models import Applied, numbers, seeded  # noqa: E402

import autoconv  # noqa: E402
import autoconv.torch  # noqa: E402
from autoconv.common.types import DTYPES  # noqa: E402
from autoconv.cpu.device import CPU  # noqa: E402
from autoconv.networks import translation  # noqa: E402
from autoconv.networks.compiled.network import CompiledNetwork  # noqa: E402
from autoconv.networks.operators import Foreign, foreign_torch  # noqa: E402
from autoconv.networks.passes import optimized  # noqa: E402
from autoconv.networks.reference import evaluate  # noqa: E402
from autoconv.networks.torch_reader import exported, translated  # noqa: E402
from autoconv.networks.torch_reader.reader import CHECKED, LOWERINGS  # noqa: E402
from autoconv.vendors.torch import array  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # PyTorch's own

IMAGES = (2, 4, 7, 6)
VOLUMES = (2, 4, 6, 7, 6)


class Scaled(nn.Module):
    """By what a scalar makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Any) -> Any:
        return x * torch.sigmoid(self.a)


def shuffled(x: Any) -> Any:
    return x.view(2, 2, 2, 7, 6).transpose(1, 2).reshape(x.shape)


def overwritten(x: Any) -> Any:
    y = torch.cat([x, x], 1)
    y[:, 1:4, 2:] = y[:, :3, :5] * 2
    y[:, 6] = x[:, :1, :1].tanh()[:, 0]
    return y


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2), IMAGES),
    "conv2d of an image": (lambda: nn.Conv2d(4, 6, 3), IMAGES[1:]),
    "conv2d same": (lambda: nn.Conv2d(4, 6, (2, 3), padding="same", bias=False), IMAGES),
    "conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), IMAGES),
    "conv2d replicate": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="replicate"), IMAGES),
    "conv3d": (
        lambda: nn.Conv3d(4, 6, (3, 2, 3), stride=(2, 1, 2), padding=(1, 0, 2), dilation=(2, 1, 1), groups=2), VOLUMES),
    "conv3d of one volume, same": (lambda: nn.Conv3d(4, 6, (2, 3, 1), padding="same", bias=False), VOLUMES[1:]),
    "conv3d, depthwise": (lambda: nn.Conv3d(4, 4, (3, 3, 3), padding=1, groups=4), VOLUMES),
    "conv3d of frames, then of pixels": (
        lambda: nn.Sequential(nn.Conv3d(4, 5, (1, 3, 3)), nn.ReLU(), nn.Conv3d(5, 6, (3, 1, 1), stride=(2, 1, 1))),
        VOLUMES),
    "max pool 3d": (
        lambda: nn.MaxPool3d((3, 2, 3), (2, 1, 2), padding=(1, 0, 1), dilation=(2, 1, 1), ceil_mode=True), VOLUMES),
    "max pool 3d of all frames": (lambda: nn.MaxPool3d((6, 2, 2)), VOLUMES),
    "average pool 3d of padding and all but a frame": (lambda: nn.AvgPool3d((6, 1, 1), 8, padding=(1, 0, 0)), VOLUMES),
    "average pool 3d": (lambda: nn.AvgPool3d(3, 2, padding=1, ceil_mode=True), VOLUMES),
    "average pool 3d without padding": (
        lambda: nn.AvgPool3d((2, 1, 3), 2, padding=(1, 0, 1), ceil_mode=True, count_include_pad=False), VOLUMES),
    "adaptive 3d": (lambda: nn.AdaptiveAvgPool3d((3, 7, 1)), VOLUMES),
    "adaptive 3d, one": (lambda: nn.AdaptiveAvgPool3d(1), VOLUMES[1:]),
    "adaptive max 3d": (lambda: nn.AdaptiveMaxPool3d((2, 1, 2)), VOLUMES),
    "batch norm 3d": (lambda: nn.BatchNorm3d(4), VOLUMES),
    "transpose 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 9)),
    "transpose, more than the sums reach": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), padding=(1, 0), dilation=(4, 2), output_padding=(3, 1)), IMAGES),
    "transpose": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), IMAGES),
    "ours": (lambda: autoconv.torch.Conv2d(4, 6, 3, padding=1), IMAGES),
    "ours, transposed": (
        lambda: autoconv.torch.ConvTranspose2d(4, 6, 3, stride=2, padding=(1, 0), output_padding=1, groups=2), IMAGES,
    ),
    "ours, transposed, more than the sums reach": (
        lambda: autoconv.torch.ConvTranspose2d(4, 6, 3, padding=(1, 0), dilation=(4, 2), output_padding=(3, 1)), IMAGES,
    ),
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGES),
    "batch norm, plain": (lambda: nn.BatchNorm2d(4, affine=False), IMAGES),
    "layer norm": (lambda: nn.LayerNorm([7, 6]), IMAGES),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGES),
    "linear": (lambda: nn.Linear(6, 5), IMAGES),
    "linear, of a row": (lambda: nn.Linear(6, 5), (6,)),
    "linear, plain": (lambda: nn.Linear(6, 5, bias=False), (3, 6)),
    "max pool": (lambda: nn.MaxPool2d(3, 2, padding=1, dilation=(1, 2), ceil_mode=True), IMAGES),
    "max pool 1d": (lambda: nn.MaxPool1d(2), (2, 4, 9)),
    "average pool": (lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True), IMAGES),
    "average pool without padding": (lambda: nn.AvgPool2d(2, 1, padding=1, count_include_pad=False), IMAGES),
    "average pool 1d": (lambda: nn.AvgPool1d(3), (2, 4, 9)),
    "adaptive": (lambda: nn.AdaptiveAvgPool2d((3, 4)), IMAGES),
    "adaptive, whole windows": (lambda: nn.AdaptiveAvgPool2d((7, 3)), IMAGES),
    "adaptive, one": (lambda: nn.AdaptiveAvgPool2d(1), IMAGES),
    "adaptive max": (lambda: nn.AdaptiveMaxPool2d((1, 1)), IMAGES),
    "upsample nearest": (lambda: nn.Upsample(scale_factor=(2, 3)), IMAGES),
    **{
        f"upsample nearest, {old} to {given}": (functools.partial(nn.Upsample, **given), (1, 1, 1, old))
        for old, given in (
            (14, {"size": (1, 18)}), (2, {"scale_factor": 1.1}), (4, {"scale_factor": 2.1}), (14, {"scale_factor": 2}),
            (29, {"size": (3, 7)}), (5, {"size": (1, 5)}),
        )
    },
    "softplus": (lambda: nn.Softplus(beta=2.5, threshold=30), IMAGES),
    "a scalar parameter": (lambda: Scaled(), IMAGES),
    "upsample linear": (lambda: nn.Upsample(size=(9, 13), mode="bilinear"), IMAGES),
    "upsample aligned": (lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), IMAGES),
    "upsample linear, one axis as it is": (lambda: nn.Upsample(scale_factor=(1.1, 2.3), mode="bilinear"), IMAGES),
    "upsample cubic, one axis as it is": (lambda: nn.Upsample(scale_factor=(2.3, 1.1), mode="bicubic"), IMAGES),
    "upsample cubic": (lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"), IMAGES),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), IMAGES),
    "channel shuffle": (lambda: Applied(shuffled), IMAGES),
    "zero pad": (lambda: nn.ZeroPad2d((1, -2, 3, 0)), IMAGES),
    "constant pad": (lambda: nn.ConstantPad2d(2, 1.5), IMAGES),
    **{type(found).__name__: (lambda found=found: found, IMAGES) for found in (
        nn.ReLU(), nn.ReLU6(), nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(-2, 3),
        nn.LeakyReLU(0.2), nn.ELU(0.5), nn.SELU(), nn.PReLU(4), nn.GELU(), nn.Softplus(), nn.Mish(), nn.Softmax(1),
        nn.LogSoftmax(-1), nn.Dropout(), nn.Flatten(), nn.Identity())},
    "gelu by tanh": (lambda: nn.GELU("tanh"), IMAGES),
    "clamp": (lambda: Applied(lambda x: x.clamp(min=-0.5).clamp_max(0.7)), IMAGES),
    "arithmetic": (lambda: Applied(lambda x: (2 - x) / 3 + (x * x - 1).abs().sqrt() - x.exp().log()), IMAGES),
    "powers": (lambda: Applied(lambda x: (x.abs() + 1).pow(0.5) + x**2 + 1 / (x**2 + 1) + (x * x + 1).rsqrt()), IMAGES),
    "a factor": (lambda: Applied(lambda x: torch.add(x, x.tanh(), alpha=2) - torch.sub(x, 1, alpha=3)), IMAGES),
    "largest and least": (lambda: Applied(lambda x: torch.maximum(x, -x) + torch.minimum(x, x * 2)), IMAGES),
    "sums": (lambda: Applied(lambda x: x.mean() + x.sum((1, 3)) + x.amax(dim=(1, 3)) + x.mean(3)[:, 0]), IMAGES),
    "reshapes": (lambda: Applied(lambda x: x.view(2, -1)[:, None].squeeze().view(4, 4, 21).permute(2, 0, 1)), IMAGES),
    "slices": (lambda: Applied(lambda x: x[:, 1:4:2, :, -3:] + x[:, :2, :, :3] + x[:, 3:, :1, 2:5]), IMAGES),
    "parts": (lambda: Applied(lambda x: sum(x.chunk(2, 1)) + x.split([1, 3], 1)[0] + x.unbind(1)[2][:, None]), IMAGES),
    "joined": (lambda: Applied(lambda x: torch.cat([x, torch.stack([x[:, 0], x[:, 1]], 1)], 1)), IMAGES),
    "repeated": (lambda: Applied(lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 7, 6) + x), IMAGES),
    "products": (lambda: Applied(lambda x: (x @ x.mT).matmul(x) + torch.einsum("nchw,nchv->ncwv", x, x).sum()), IMAGES),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGES),
    "upsample nearest, exact": (lambda: nn.Upsample(size=(11, 9), mode="nearest-exact"), IMAGES),
    "upsample nearest, exact, doubled": (lambda: nn.Upsample(scale_factor=2, mode="nearest-exact"), IMAGES),
    "conv2d circular": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular"), IMAGES),
    "adaptive max, of ours": (lambda: nn.AdaptiveMaxPool2d((7, 3)), IMAGES),
    **{
        f"places overwritten, {name}": (lambda function=function: Applied(function), IMAGES)
        for name, function in {
            "at an end": lambda x: torch.slice_scatter(x, x[:, 1:3] * 2, 1, 0, 2),
            "in the middle": lambda x: torch.slice_scatter(x, x[:, :, 2:4] * 2, 2, -4, 5),
            "every other": lambda x: torch.slice_scatter(x, x[..., :3] * 2, 3, 1, 9, 2),
            "all": lambda x: torch.slice_scatter(x, x * 2, 1),
            "none": lambda x: torch.slice_scatter(x, x[:, :0], 1, 2, 2).relu(),
            "one": lambda x: torch.select_scatter(x, x[:, :, 1] * 2, 2, -1),
        }.items()
    },
    "flipped": (lambda: Applied(lambda x: x.flip(1, -1)), IMAGES),
    "rolled": (lambda: Applied(lambda x: x.roll((2, -1), (3, 2))), IMAGES),
    "several times": (lambda: Applied(lambda x: x.repeat(2, 1, 3, 1, 2)), IMAGES),
    "places": (lambda: Applied(lambda x: x[:, [2, 0, -1]] + x.index_select(2, torch.tensor([1])).mean()), IMAGES),
    "variances": (lambda: Applied(lambda x: x.var((2, 3), keepdim=True) + x.std(1, correction=0)[:, None]), IMAGES),
    "norms": (lambda: Applied(lambda x: F.normalize(x, dim=1) + x.norm(1, dim=3, keepdim=True) + x.norm()), IMAGES),
    "attention": (lambda: Applied(lambda x: F.scaled_dot_product_attention(x, 2 * x, x + 1, scale=0.3)), IMAGES),
    "attention to what came before": (
        lambda: Applied(lambda x: F.scaled_dot_product_attention(x, 2 * x, x + 1, is_causal=True)), IMAGES,
    ),
    "attention by position": (
        lambda: Applied(lambda x: F.scaled_dot_product_attention(x, x, x + 1, torch.arange(14.0).view(2, 1, 1, 7) / 9)),
        IMAGES,
    ),
    "attention to some": (
        lambda: Applied(lambda x: F.scaled_dot_product_attention(x, x[:, :, :5], x[:, :, 2:], torch.eye(7, 5) < 0.5)),
        IMAGES,
    ),
    "overwritten": (lambda: Applied(overwritten), IMAGES),
    "constants": (lambda: Applied(lambda x: x + torch.arange(6.0) + torch.full((7, 1), 2.0)), IMAGES),
    "a constant in another type": (lambda: Applied(lambda x: x + torch.arange(6).to(x.dtype)), IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_graph_agree_in_float64(name: str) -> None:
    make, shape = MODELS[name]
    model, x = seeded(make()), numbers(shape)
    graph = translated(exported(model, (x,)), name)
    model = model if name == "ours" else model.double()
    with torch.no_grad():
        expected = model(x if name == "ours" else x.double()).double().numpy()
    assert not any(isinstance(node.operator, Foreign) for node in graph.nodes.values())
    for found in (graph, optimized(graph)):
        (y,) = evaluate(found, {next(iter(found.inputs)): x.numpy()}).values()
        assert y.shape == expected.shape
        assert np.abs(y - expected).max() <= 1e-6 * np.abs(expected).max()


def test_upsampling_sees_what_pytorch_sees() -> None:
    """Which rounds in several ways: by extents, channels, memory format and type."""

    def upsampled(*arrays: Any) -> list[Any]:
        factors = [{"scale_factor": (1.005, 2.01)}, {"scale_factor": 1.3}, {"size": (187, 235)}]
        modes = ("nearest", "nearest-exact")
        return [F.interpolate(x, **given, mode=mode) for x in arrays for given in factors for mode in modes]

    arrays = [
        torch.arange(C * H * H).reshape(1, C, H, H).remainder(251).to(dtype).contiguous(memory_format=memory_format)
        for C, H in ((3, 20), (3, 64), (4, 64))
        for dtype in (torch.float32, torch.float64, torch.uint8)
        for memory_format in (torch.contiguous_format, torch.channels_last)
    ]
    graph = translated(exported(Applied(upsampled), arrays), "upsampled")
    assert not any(isinstance(node.operator, Foreign) for node in graph.nodes.values())
    found = evaluate(graph, dict(zip(graph.inputs, (x.numpy() for x in arrays), strict=True)))
    for y, expected in zip(found.values(), upsampled(*arrays), strict=True):
        np.testing.assert_array_equal(y, expected.numpy())


def test_a_parameter_may_have_the_name_of_an_input() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([3.0]))

        def forward(self, x: Any, scale: Any) -> Any:
            return x * self.scale + scale

    x, scale = numbers((2, 4)), numbers((4,))
    graph = translated(exported(Both(), (x, scale)), "both")
    assert list(graph.inputs) == ["x", "scale"]
    (y,) = evaluate(optimized(graph), {"x": x.numpy(), "scale": scale.numpy()}).values()
    np.testing.assert_allclose(y, x.numpy() * 3 + scale.numpy(), rtol=1e-6)


def test_every_lowering_is_an_operator_of_pytorch() -> None:
    for name in (*LOWERINGS, *CHECKED):
        space, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        assert hasattr(getattr(getattr(torch.ops, space), operator), overload or "default"), name


def test_nodes_bear_the_names_of_modules() -> None:
    model = seeded(nn.Sequential(nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU()), nn.Conv2d(6, 2, 1)))
    graph = translated(exported(model, (numbers(IMAGES),)), "net")
    assert [name for name in graph.nodes if not name[-1].isdigit() or "." not in name] == ["1"]
    assert {"0.0", "0.1", "1"} <= graph.nodes.keys()
    assert {"0.0.weight", "1.weight"} <= graph.constants.keys()


def test_a_parameter_of_two_modules_is_one_constant() -> None:
    first, second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    second.weight = first.weight
    graph = translated(exported(nn.Sequential(first, second).eval(), (numbers((2, 6)),)), "tied")
    assert len(graph.constants) == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[x > 0], r"net: node 'index' \(aten.index.Tensor\): .* the shape of its output 0 is not known"),
        (lambda x: x + torch.randn(6), "expected no random numbers"),
        (lambda x: x.as_strided((2, 2), (1, 2)), "expected an operator that computes new arrays"),
        (lambda x: x + torch.ones(6, 7).mT.as_strided((6,), (1,)), "expected an operator that computes new arrays"),
        (lambda x: x.to_sparse().sum().to_dense(), r"expected dense arrays .* got torch.float32 \(torch.sparse_coo\)"),
        (lambda x: torch.native_dropout(x, 0.5, True), "expected one output of random numbers"),
        (
            lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
            r"node 'quantize_per_tensor' .* got quantised ones",
        ),
        (
            lambda x: x + torch.arange(6.0)[torch.tensor([7])],
            "did not compute it from constants: index 7 is out of bounds",
        ),
    ],
)
def test_what_nobody_can_run_is_named(function: Any, message: str) -> None:
    with pytest.raises(autoconv.ConfigError, match=message):
        translated(exported(Applied(function).eval(), (numbers(IMAGES),)), "net")


@pytest.mark.parametrize("places", [[5], [-1], [-4], [2, 0]], ids=str)
@pytest.mark.parametrize(
    "function", [lambda x, at: x[:, at], lambda x, at: x.index_select(1, at)], ids=["[]", "select"]
)
def test_places_are_there_or_pytorch_refuses_them(function: Any, places: list[int]) -> None:
    x, at = numbers((2, 3)), torch.tensor(places)
    net = CompiledNetwork(
        translated(exported(Applied(lambda x: function(x, at)).eval(), (x,)), "net"), CPU.current(), {}
    )
    try:
        expected = function(x, at)
    except (IndexError, RuntimeError):
        with pytest.raises(autoconv.ArrayError, match=r"net: node .*out of (bounds|DATA bounds)"):
            net.run(x.numpy())
    else:
        assert not net.foreign
        np.testing.assert_array_equal(net.run(x.numpy()), expected.numpy())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.mT,
        lambda x: F.linear(x, x),
        lambda x: torch.addmm(torch.zeros(4, dtype=x.dtype), x, x.mT),
        lambda x: torch.cat([x, x]).view(2, -1),
    ],
    ids=["product", "linear", "addmm", "shapes"],
)
def test_floats_of_8_bits_overflow_as_in_pytorch(function: Any) -> None:
    x = (30 * numbers((4, 8))).to(torch.float8_e4m3fn)
    fast = autoconv.torch.optimize(Applied(function).eval(), x, mode="heuristic")
    torch.testing.assert_close(fast(x).float(), function(x).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_constants_are_cast_as_by_pytorch(dtype: Any) -> None:
    model = Applied(lambda x: x + (torch.arange(6.0) * 1e5).to(dtype).float())
    x = numbers((2, 6))
    found = autoconv.torch.optimize(model.eval(), x, mode="heuristic")(x)
    torch.testing.assert_close(found, model(x), equal_nan=True)


@pytest.mark.parametrize(
    ("function", "operators"),
    [
        (lambda x: x.relu().cumsum(0) * 2, ["aten::cumsum"]),
        (lambda x: torch.where(x > 0, x, -2 * x), ["aten::gt.Scalar", "aten::where.self"]),
        (lambda x: x.topk(2, 1)[1], ["aten::topk"]),
        (lambda x: F.max_pool2d(x, 2, return_indices=True), ["aten::max_pool2d_with_indices"] * 2),
        (lambda x: F.avg_pool2d(x, 2, divisor_override=3), ["aten::avg_pool2d"]),
        (lambda x: F.adaptive_max_pool2d(x, (3, 3)), ["aten::adaptive_max_pool2d"]),
        (lambda x: F.conv_transpose3d(x[:, None], torch.ones(1, 1, 1, 2, 2)), ["aten::convolution"]),
        (lambda x: F.adaptive_avg_pool3d(x[:, None], (3, 2, 2)), ["aten::adaptive_avg_pool3d"]),
        (lambda x: (x * 1e9).long() + (2**60 + 1), ["aten::_to_copy", "aten::add.Tensor"]),
        (lambda x: torch.fft.rfft2(x).abs() + 1, ["aten::_fft_r2c", "aten::abs"]),
        (lambda x: x[:, [[0, 1], [2, 3]]], ["aten::index.Tensor"]),
        (
            lambda x: F.interpolate((x * 99).abs().byte(), scale_factor=2, mode="bilinear"),
            ["aten::_to_copy", "aten::upsample_bilinear2d.vec"],
        ),
        (lambda x: F.scaled_dot_product_attention(x, x, x, x @ x.mT), ["aten::scaled_dot_product_attention"]),
        (
            lambda x: F.scaled_dot_product_attention(x, x, x, torch.arange(7)[:, None].expand(7, 7) > 0),
            ["aten::scaled_dot_product_attention"],
        ),
        (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(7)), ["aten::linalg_cholesky"]),
        (lambda x: torch.linalg.inv(x @ x.mT + torch.eye(7)).relu(), ["aten::linalg_inv"]),
        (lambda x: x.to(torch.float8_e5m2).float(), ["aten::_to_copy"] * 2),
        (lambda x: x[:, :1, :1, :1].repeat(1, 1, 1, 70000), ["aten::repeat"]),
    ],
)
def test_pytorch_runs_what_has_no_kernel(function: Any, operators: list[str]) -> None:
    x = numbers(IMAGES)
    net = CompiledNetwork(translated(exported(Applied(function).eval(), (x,)), "net"), CPU.current(), {})
    assert [n.operator.kind for n in net.graph.nodes.values() if isinstance(n.operator, Foreign)] == operators
    assert net.explain().count("PyTorch") == len(operators)
    y, expected = net.run(x.numpy()), function(x)
    several = isinstance(y, dict)
    for found, wanted in zip(y.values() if several else [y], expected if several else [expected], strict=True):
        assert found.dtype == wanted.numpy().dtype
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-5)


def test_what_pytorch_runs_is_made_ready_once() -> None:
    """And stays so where there is more of it than the cache holds, which then is as if empty."""
    x = numbers(IMAGES)
    net = CompiledNetwork(translated(exported(Applied(lambda x: x.cumsum(0)).eval(), (x,)), "net"), CPU.current(), {})
    foreign_torch._runner.cache_clear()
    np.testing.assert_allclose(net.run(x.numpy()), x.cumsum(0).numpy(), rtol=1e-6)
    assert foreign_torch._runner.cache_info().misses == 0


def test_outputs_of_one_call_are_computed_once_and_equal_calls_each(monkeypatch: pytest.MonkeyPatch) -> None:
    called, calls = foreign_torch.called, []
    monkeypatch.setattr(foreign_torch, "called", lambda *given: calls.append(given[0].name()) or called(*given))
    x = numbers(IMAGES)
    model = Applied(lambda x: (*x.sort(1), torch.rand_like(x) - torch.rand_like(x)))
    net = CompiledNetwork(translated(exported(model.eval(), (x,)), "net"), CPU.current(), {})
    calls.clear()
    values, places, drawn = net.run(x.numpy()).values()
    assert sorted(calls) == ["aten::rand_like", "aten::rand_like", "aten::sort"]
    np.testing.assert_array_equal(values, x.sort(1)[0].numpy())
    np.testing.assert_array_equal(places, x.sort(1)[1].numpy())
    assert drawn.any()


@pytest.mark.parametrize("function", [lambda x: x**-0.5, lambda x: torch.addmm(x * torch.nan, x, x, beta=0, alpha=2)])
def test_what_is_no_number_comes_of_what_it_does_in_pytorch(function: Any) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, -0.0], [4.0, 0.0, 1.0], [9.0, 1.0, 0.25]])
    net = CompiledNetwork(translated(exported(Applied(function).eval(), (x,)), "net"), CPU.current(), {})
    np.testing.assert_allclose(net.run(x.numpy()), function(x).numpy(), rtol=1e-6)


def test_parameters_beyond_the_room_for_constants_stay_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "LARGEST_CONSTANTS", 1 << 17)
    model = seeded(nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), Applied(lambda x: x + torch.arange(512.0))))
    graph = translated(exported(model, (numbers((2, 512)),)), "net")
    assert not any(isinstance(node.operator, Foreign) for node in graph.nodes.values())


def test_bytes_are_cast_by_a_kernel() -> None:
    x = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    graph = translated(exported(Applied(lambda x: x.float() / 255).eval(), (x,)), "net")
    assert not any(isinstance(node.operator, Foreign) for node in graph.nodes.values())
    y = CompiledNetwork(graph, CPU.current(), {}).run(x.numpy())
    np.testing.assert_allclose(y, x.numpy() / np.float32(255), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm([7, 6]), lambda: nn.GroupNorm(2, 4), lambda: nn.LogSoftmax(1)])
def test_what_squares_and_sums_does_so_in_float32(make: Any, dtype: str) -> None:
    """Squares of numbers around 1000 do not fit into float16."""
    kind = getattr(torch, dtype)
    model, x = seeded(make()).to(kind), (1000 * numbers(IMAGES)).to(kind)
    graph = translated(exported(model, (x,)), "net")
    net = CompiledNetwork(graph, CPU.current(), {"vendors": False})
    y = net.run(x.float().numpy().astype(DTYPES[dtype]))
    with torch.no_grad():
        expected = model.double()(x.double()).numpy()
    assert y.dtype == DTYPES[dtype]
    error = np.abs(y.astype(np.float64) - expected)
    assert (error <= 0.51 * torch.finfo(kind).eps * np.abs(expected) + 2e-6).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_lose_no_more_than_in_pytorch(dtype: Any) -> None:
    """Means that are large beside the deviations, and scores of attention."""
    norm, (q, k, v) = seeded(nn.BatchNorm2d(4)), 4 * numbers((3, 1, 2, 64, 32))
    norm.running_mean += 100
    for model, given in (
        (norm, [numbers(IMAGES) + 100]),
        (Applied(F.scaled_dot_product_attention), [q, k, v]),
    ):
        model, given = model.to(dtype).eval(), [x.to(dtype) for x in given]
        net = CompiledNetwork(translated(exported(model, given), "net"), CPU.current(), {"vendors": False})
        assert not any(isinstance(node.operator, Foreign) for node in net.graph.nodes.values())
        y = torch.from_numpy(net.run(*map(array, given)).astype(np.float64))
        with torch.no_grad():
            expected = model.double()(*(x.double() for x in given))
        assert (y - expected).abs().max() <= 1.5 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(min=1),
        lambda x: x.clamp(-(2**62) - 1, 2**62 + 1),
        lambda x: F.pad(x, (1, 2), value=2**62 + 1),
    ],
)
def test_integers_are_held_and_padded_exactly(function: Any) -> None:
    limits = torch.iinfo(torch.int64)
    x = torch.tensor([[limits.max, limits.min, 0, 5]])
    graph = translated(exported(Applied(function).eval(), (x,)), "net")
    y = CompiledNetwork(graph, CPU.current(), {}).run(x.numpy())
    np.testing.assert_array_equal(y, function(x).numpy())
