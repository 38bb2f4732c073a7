"""`autoconv.torch.conv_transpose2d` and its module: PyTorch's answers and gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402

import autoconv  # noqa: E402
import autoconv.torch  # noqa: E402
from autoconv.cpu import pool  # noqa: E402
from autoconv.torch import operators  # noqa: E402

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")

OURS: dict[str, Any] = {"mode": "heuristic", "vendors": False}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "as of a U-Net": {"stride": 2, "taps": (2, 2)},
    "as of a DCGAN": {"stride": 2, "padding": 1, "taps": (4, 4)},
    "a larger result": {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2)},
    "grouped": {"groups": 2, "stride": [2], "padding": 1},
    "dilated": {"dilation": (2, 1), "padding": (2, 1)},
    "without bias": {"stride": 2, "bias": False},
    "larger than the sums reach": {"dilation": (4, 2), "padding": (1, 0), "output_padding": (3, 1), "groups": 2},
    "more below than the stride": {"stride": (2, 3), "dilation": (4, 1), "padding": 2, "output_padding": (3, 2)},
}


def operands(
    taps: tuple[int, int] = (3, 3), groups: int = 1, bias: bool = True, dtype: Any = None, **_: Any
) -> list[Any]:
    """Images, filters and bias that want gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 7, 6), (4, 6 // groups, *taps), *[(6,)] * bias]
    return [torch.randn(s, generator=generator, dtype=dtype or torch.float32).requires_grad_() for s in shapes]


def geometry(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name not in ("taps", "bias")}


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_answers_and_gradients_are_those_of_pytorch(name: str, channels_last: bool) -> None:
    found, expected = [], []
    for convolve, into in ((autoconv.torch.conv_transpose2d, found), (F.conv_transpose2d, expected)):
        x, w, *bias = operands(**CASES[name])
        if channels_last:
            x, w = (t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in (x, w))
        ours = OURS if convolve is autoconv.torch.conv_transpose2d else {}
        y = convolve(x, w, *bias, **geometry(CASES[name]), **ours)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
        into += [y.detach(), *(t.grad for t in (x, w, *bias))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert found[0].is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_gradients_of_every_order_agree_with_differences_in_float64() -> None:
    case = {"stride": 2, "padding": 1, "output_padding": (0, 1), "groups": 2}

    def convolve(x: Any, w: Any, b: Any) -> Any:
        return autoconv.torch.conv_transpose2d(x, w, b, **case, mode="direct")

    given = operands(groups=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(convolve, given)
    assert torch.autograd.gradgradcheck(convolve, given)


def test_pytorch_finds_nothing_wrong_with_the_operator() -> None:
    x, w, b = operands(groups=2)
    rest = [0, 1], [2, 2], [1, 1, 0, 0], [1, 1], 2, "direct", False, False
    for bias in (b, None):
        results = torch.library.opcheck(operators.conv_transpose2d, (x, w, bias, *rest))
        assert set(results.values()) == {"SUCCESS"}


def test_a_network_compiles_whole_and_is_traced() -> None:
    model = nn.Sequential(autoconv.torch.ConvTranspose2d(4, 3, 2, stride=2), nn.ReLU())
    model[0].mode, model[0].vendors = "heuristic", False
    x = torch.randn(2, 4, 5, 6)
    for other in (
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        torch.fx.symbolic_trace(model),
        torch.export.export(model, (x,)).module(),
    ):
        torch.testing.assert_close(other(x), model(x))


@pytest.mark.parametrize("output_size", [None, [10, 12], [11, 13], [2, 3, 10, 13]])
def test_the_module_gives_the_size_that_is_asked_for(output_size: list[int] | None) -> None:
    theirs = nn.ConvTranspose2d(4, 3, 2, stride=2)
    ours = autoconv.torch.ConvTranspose2d(4, 3, 2, stride=2)
    ours.load_state_dict(theirs.state_dict())
    ours.mode = "heuristic"
    x = torch.randn(2, 4, 5, 6)
    torch.testing.assert_close(ours(x, output_size), theirs(x, output_size), rtol=1e-4, atol=1e-4)


def test_modules_of_a_model_are_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 3, 2, stride=2), nn.ConvTranspose1d(3, 2, 3))
    expected = [type(module) for module in autoconv.torch.replace_convolutions(model, mode="direct", exact=True)]
    assert expected == [autoconv.torch.Conv2d, autoconv.torch.ConvTranspose2d, nn.ConvTranspose1d]
    assert (model[1].mode, model[1].exact, model[1].vendors) == ("direct", True, True)


def test_one_image_and_none() -> None:
    x, w, b = operands()
    for images in (x[0], x[:0]):
        found = autoconv.torch.conv_transpose2d(images, w, b, stride=2, **OURS)
        torch.testing.assert_close(found, F.conv_transpose2d(images, w, b, stride=2), rtol=1e-4, atol=1e-4)


def test_autocast_converts_first() -> None:
    x, w, b = operands()
    with torch.autocast("cpu", torch.bfloat16):
        y = autoconv.torch.conv_transpose2d(x, w, b, **OURS)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), F.conv_transpose2d(x, w, b), rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"output_padding": 2, "stride": 2},
            autoconv.ArrayError,
            r"output_padding=\(2, 2\): expected less than the stride",
        ),
        ({"output_padding": -1}, autoconv.LayerError, "output_padding=-1"),
        ({"padding": 9}, autoconv.LayerError, r"padding=\(9, 9\): expected to leave something of 9x8 pixels"),
        ({"padding": "same"}, autoconv.LayerError, "padding='same': expected an integer"),
        ({"stride": 0}, autoconv.LayerError, "stride=0"),
        ({"mode": "sideways"}, autoconv.PlanError, "sideways"),
        ({"exact": 1}, autoconv.PlanError, "exact=1: expected True or False"),
        ({"bias": torch.zeros(5)}, autoconv.ArrayError, r"bias is float32 \(5,\): expected float32 \(6,\)"),
        (
            {"weight": torch.zeros(3, 6, 3, 3)},
            autoconv.ArrayError,
            r"w has shape \(3, 6, 3, 3\): expected 4 in the first",
        ),
        ({"weight": torch.zeros(3, 3)}, autoconv.ArrayError, r"weight \(C, K/groups, R, S\), got .* and \(3, 3\)"),
        ({"weight": None}, autoconv.ArrayError, "weight: expected a dense tensor on the CPU, got NoneType"),
    ],
)
def test_what_is_no_transposed_convolution_is_refused(given: dict[str, Any], error: type, message: str) -> None:
    x, w, b = operands()
    options = {"weight": w, "bias": b, "mode": "heuristic"} | given
    with pytest.raises(error, match=message):
        autoconv.torch.conv_transpose2d(x, options.pop("weight"), **options)


@pytest.mark.parametrize("given", [{"output_padding": [2, 2]}, {"padding": [9, 9, 9, 9]}, {"bias": torch.zeros(5)}])
def test_a_trace_refuses_what_a_run_does(given: dict[str, Any]) -> None:
    x, w, b = operands()
    sizes = {"bias": b, "output_padding": [0, 0], "padding": [1, 1, 1, 1]} | given
    rest = sizes["output_padding"], [2, 2], sizes["padding"], [1, 1], 1, "direct", False, False
    with pytest.raises((autoconv.ArrayError, autoconv.LayerError)):
        operators.conv_transpose2d(x.to("meta"), w.to("meta"), sizes["bias"].to("meta"), *rest)
