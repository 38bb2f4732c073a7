"""`autoconv.torch.conv2d`: PyTorch's answers and gradients, and what `torch.library` asks of an operator."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext  # noqa: E402

import autoconv  # noqa: E402
import autoconv.torch  # noqa: E402
from autoconv.cpu import pool  # noqa: E402
from autoconv.torch import operators  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),  # PyTorch's own
]

OURS: dict[str, Any] = {"mode": "heuristic", "vendors": False}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding": 1},
    "strided": {"stride": 2, "padding": (1, 0)},
    "dilated": {"dilation": (2, 1), "padding": "same"},
    "even taps": {"padding": "same", "taps": (2, 4)},
    "grouped": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4, "channels": 4, "padding": "valid"},
}


def operands(channels: int = 6, taps: tuple[int, int] = (3, 3), groups: int = 1, dtype: Any = None, **_: Any) -> Any:
    """Images, filters and bias that want gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, 7, 6), (channels, 4 // groups, *taps), (channels,)
    return [torch.randn(s, generator=generator, dtype=dtype or torch.float32).requires_grad_() for s in shapes]


def geometry(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name not in ("channels", "taps")}


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_answers_and_gradients_are_those_of_pytorch(name: str, channels_last: bool) -> None:
    found, expected = [], []
    for convolve, into in ((autoconv.torch.conv2d, found), (F.conv2d, expected)):
        x, w, b = operands(**CASES[name])
        if channels_last:
            x, w = (t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in (x, w))
        ours = OURS if convolve is autoconv.torch.conv2d else {}
        y = convolve(x, w, b, **geometry(CASES[name]), **ours)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
        into += [y.detach(), x.grad, w.grad, b.grad]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert found[0].is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_gradients_of_every_order_agree_with_differences_in_float64() -> None:
    case = {"stride": 2, "padding": 1, "groups": 2}

    def convolve(x: Any, w: Any, b: Any) -> Any:
        return autoconv.torch.conv2d(x, w, b, **case, mode="direct")

    given = operands(groups=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(convolve, given)
    assert torch.autograd.gradgradcheck(convolve, given)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
def test_pytorch_finds_nothing_wrong_with_the_operators(channels_last: bool) -> None:
    x, w, b = operands(groups=2)
    if channels_last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    rest = [2, 1], [1, 0, 2, 1], [1, 1], 2, "direct", False, False
    dy = operators.conv2d(x, w, b, *rest).detach()
    for operator, arguments in (
        (operators.conv2d, (x, w, b)),
        (operators.conv2d_dgrad, (dy.requires_grad_(), w, x.shape[2:])),
        (operators.conv2d_wgrad, (x, dy, w.shape[2:])),
    ):
        results = torch.library.opcheck(operator, (*arguments, *rest))
        assert set(results.values()) == {"SUCCESS"}


def test_only_gradients_that_are_asked_for_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("conv2d_dgrad", "conv2d_wgrad"):
        original = getattr(autoconv.functional, name)
        monkeypatch.setattr(autoconv.functional, name, lambda *a, n=name, f=original, **o: seen.append(n) or f(*a, **o))
    x, w, _ = operands()
    autoconv.torch.conv2d(x.detach(), w, **OURS).sum().backward()
    assert seen == ["conv2d_wgrad"]
    autoconv.torch.conv2d(x, w.detach(), **OURS).sum().backward()
    assert seen == ["conv2d_wgrad", "conv2d_dgrad"]


def test_it_compiles_whole() -> None:
    def block(x: Any, w: Any) -> Any:
        return autoconv.torch.conv2d(x, w, padding=1, **OURS).relu()

    x, w, _ = operands()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    y = compiled(x, w)
    torch.testing.assert_close(y, block(x, w))
    y.sum().backward()
    expected = torch.autograd.grad(block(x, w).sum(), [x, w])
    torch.testing.assert_close([x.grad, w.grad], list(expected))


def test_torch_fx_traces_modules() -> None:
    layers = [autoconv.torch.Conv2d(4, 3, 3, padding=1), nn.ReLU()]
    layers.append(autoconv.torch.Conv2d(3, 5, 3, stride=[2], padding=1, padding_mode="reflect"))
    model = nn.Sequential(*layers)
    for module in (layers[0], layers[2]):
        module.mode, module.vendors = "heuristic", False
    traced = torch.fx.symbolic_trace(model)
    calls = [node for node in traced.graph.nodes if node.target is autoconv.torch.conv2d]
    assert [call.kwargs for call in calls] == [{"mode": "heuristic", "exact": False, "vendors": False}] * 2
    x = torch.randn(2, 4, 7, 6)
    torch.testing.assert_close(traced(x), model(x))


class Marked(torch.Tensor):
    """A tensor with a type of its own."""


def test_subclasses_of_tensors_have_their_say() -> None:
    x, w, _ = operands()
    y = autoconv.torch.conv2d(x.as_subclass(Marked), w, **OURS)
    assert type(y) is Marked
    torch.testing.assert_close(y.as_subclass(torch.Tensor), autoconv.torch.conv2d(x, w, **OURS))


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_one_integer_in_a_list_stands_for_both(name: str) -> None:
    x, w, b = operands()
    for given in ([2], (2,)):
        found, expected = (convolve(x, w, b, **{name: given}) for convolve in (autoconv.torch.conv2d, F.conv2d))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(autoconv.LayerError, match=rf"{name}=\[\]: expected one integer or a pair"):
        autoconv.torch.conv2d(x, w, b, **{name: []})


def test_shapes_that_change_compile_once_with_their_gradients() -> None:
    compilations = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, w: autoconv.torch.conv2d(x, w, **OURS), fullgraph=True, dynamic=True, backend=compilations
    )
    _, w, _ = operands()
    for extent in (8, 11, 14):  # which filters have not, or they would be taken for the same
        x = torch.randn(2, 4, extent, extent + 1, requires_grad=True)
        found = torch.autograd.grad(compiled(x, w).sum(), [x, w])
        expected = torch.autograd.grad(F.conv2d(x, w).sum(), [x, w])
        torch.testing.assert_close(list(found), list(expected), rtol=1e-4, atol=1e-4)
    assert compilations.frame_count == 1


@pytest.mark.parametrize("dynamic", [False, True], ids=["known sizes", "symbols"])
def test_a_trace_refuses_what_a_run_does(dynamic: bool) -> None:
    x, w, b = (t.detach() for t in operands(groups=2))
    dy = torch.zeros(2, 6, 5, 4)
    rest = [1, 1], [0, 0, 0, 0], [1, 1], 2, "direct", False, False
    fakes = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    symbols = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 4) if dynamic else None

    def traced(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        return fakes.from_tensor(given, symbolic_context=symbols if given.dim() == 4 else None)

    forward, dgrad, wgrad = operators.conv2d, operators.conv2d_dgrad, operators.conv2d_wgrad
    for operator, given in (
        (forward, (x, w[:, :1], b)),
        (forward, (x, w.double(), b)),
        (forward, (x, w, b[:2])),
        (forward, (x, w, b.double())),
        (forward, (x[0], w, b)),
        (forward, (x.byte(), w.to(torch.int8), None)),
        (forward, (x, torch.zeros(6, 2, 8, 3), b)),
        (dgrad, (dy, w, (8, 6))),
        (dgrad, (dy[:, :4], w, (7, 6))),
        (dgrad, (dy.double(), w, (7, 6))),
        (wgrad, (x, dy, (4, 3))),
        (wgrad, (x, dy.double(), (3, 3))),
        (wgrad, (x, dy[:1], (3, 3))),
    ):
        with pytest.raises((autoconv.ArrayError, autoconv.LayerError)) as run:
            operator(*given, *rest)
        with fakes, pytest.raises(run.type):
            operator(*map(traced, given), *rest)
    for operator, given, shape in ((forward, (x, w, b), dy), (dgrad, (dy, w, (7, 6)), x), (wgrad, (x, dy, (3, 3)), w)):
        with fakes:
            assert tuple(operator(*map(traced, given), *rest).shape) == tuple(shape.shape)


def test_gradients_of_a_batch_without_images_have_shapes_that_fit() -> None:
    x, w, _ = (t.detach() for t in operands())
    rest = [1, 1], [0, 0, 0, 0], [1, 1], 1, "direct", False, False
    with pytest.raises(autoconv.ArrayError, match=r"dy: expected float32 \(0, 6, 6, 4\), got float32 \(0, 6, 5, 4\)"):
        operators.conv2d_dgrad(torch.zeros(0, 6, 5, 4), w, (8, 6), *rest)
    with pytest.raises(autoconv.ArrayError, match=r"dy: expected float32 \(0, 6, 5, 4\), got float64 \(0, 6, 5, 4\)"):
        operators.conv2d_wgrad(x[:0], torch.zeros(0, 6, 5, 4).double(), (3, 3), *rest)


def test_one_image_and_other_types() -> None:
    x, w, b = (t.detach() for t in operands())
    one = autoconv.torch.conv2d(x[0], w, b, **OURS)
    torch.testing.assert_close(one, autoconv.torch.conv2d(x, w, b, **OURS)[0])
    half = autoconv.torch.conv2d(x.bfloat16(), w.bfloat16(), **OURS)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), F.conv2d(x, w), rtol=0.1, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(autoconv.torch.conv2d(x, w, **OURS), half)


def test_autocast_leaves_float64_as_it_is() -> None:
    x, w, b = (t.detach() for t in operands(dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = autoconv.torch.conv2d(x, w, b, **OURS), F.conv2d(x, w, b)
    assert expected.dtype is torch.float64
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
def test_a_batch_without_images(channels_last: bool) -> None:
    case = {"stride": 2, "padding": 1, "groups": 2}
    x, w, b = operands(groups=2)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = x.detach()[:0].contiguous(memory_format=memory_format).requires_grad_()
    y = autoconv.torch.conv2d(x, w, b, **case, **OURS)
    expected = F.conv2d(x, w, b, **case)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype) == ((0, 6, 4, 3), torch.float32)
    y.sum().backward()
    assert x.grad.shape == x.shape
    for given in (w, b):
        torch.testing.assert_close(given.grad, torch.zeros_like(given), rtol=0, atol=0)
    with pytest.raises(autoconv.ArrayError, match=r"w: expected float32 \(6, 4, 3, 3\), got float32 \(6, 2, 3, 3\)"):
        autoconv.torch.conv2d(x, w, b, **OURS)
    with pytest.raises(autoconv.ArrayError, match=r"bias: expected float32 \(6,\), got float64 \(6,\)"):
        autoconv.torch.conv2d(x, w, b.double(), **case, **OURS)
    with pytest.raises(autoconv.LayerError, match="groups=3"):
        autoconv.torch.conv2d(x, w, b, groups=3, **OURS)


def test_memory_is_shared_and_pytorchs_settings_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(x: Any, w: Any, bias: Any, **options: Any) -> Any:
        seen.update(options, x=x.ctypes.data)
        return original(x, w, bias, **options)

    original = autoconv.functional.conv2d
    monkeypatch.setattr(autoconv.functional, "conv2d", spy)
    x, w, _ = (t.detach() for t in operands())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        autoconv.torch.conv2d(x, w, **OURS)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)
    assert seen["x"] == x.data_ptr()
    assert seen["device"].threads == 1
    assert seen["deterministic"]


def test_options_are_checked_before_anything_is_done() -> None:
    model, module = nn.Sequential(nn.Conv2d(1, 1, 1)), nn.ReLU().eval()
    for options, message in (
        ({"mode": "nonsense"}, "mode='nonsense': expected profile, hybrid, heuristic, cached, an algorithm"),
        ({"mode": 3}, "mode=3: expected a str"),
        ({"exact": "no"}, "exact='no': expected True or False"),
        ({"vendors": 1}, "vendors=1: expected True or False"),
    ):
        with pytest.raises(autoconv.PlanError, match=message):
            autoconv.torch.replace_convolutions(model, **options)
        assert type(model[0]) is nn.Conv2d
    for mode in ("nonsense", None):
        with pytest.raises(autoconv.PlanError, match=f"mode={mode!r}: expected profile"):
            autoconv.torch.optimize(module, torch.zeros(1), mode=mode)
    assert autoconv.torch.replace_convolutions(model, mode="numpy.gemm")[0].mode == "numpy.gemm"
    before = pool._runtime
    with pytest.raises(autoconv.ConfigError, match="shared='no': expected True or False"):
        autoconv.torch.share_threads("no")  # type: ignore[arg-type]
    assert pool._runtime == before


def test_kernels_run_on_the_threads_of_pytorch() -> None:
    x, w, _ = (t.detach() for t in operands())
    expected = autoconv.torch.conv2d(x, w, **OURS)
    if not autoconv.torch.share_threads():
        pytest.skip("NOT CHECKED: PyTorch is built without OpenMP")
    assert pool._runtime != (0, 0)
    torch.testing.assert_close(autoconv.torch.conv2d(x, w, **OURS), expected, rtol=0, atol=0)
    assert not autoconv.torch.share_threads(False)
    assert pool._runtime == (0, 0)
    torch.testing.assert_close(autoconv.torch.conv2d(x, w, **OURS), expected, rtol=0, atol=0)
    autoconv.torch.share_threads()


def test_a_module_takes_the_place_of_pytorchs() -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", groups=2)
    )
    x = torch.randn(2, 3, 6, 5)
    expected, parameters = theirs(x), dict(theirs.named_parameters())
    ours = autoconv.torch.replace_convolutions(theirs, **OURS)
    assert ours is theirs
    assert [type(m) for m in ours] == [autoconv.torch.Conv2d, nn.ReLU, autoconv.torch.Conv2d]
    assert all(value is parameters[name] for name, value in ours.named_parameters())
    torch.testing.assert_close(ours(x), expected)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    before = float(ours(x).detach().square().sum())
    for _ in range(3):
        optimizer.zero_grad()
        ours(x).square().mean().backward()
        optimizer.step()
    assert float(ours(x).detach().square().sum()) < before


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_no_convolution_is_refused() -> None:
    x, w, b = (t.detach() for t in operands())
    conv2d = autoconv.torch.conv2d
    with pytest.raises(autoconv.ArrayError, match="weight: expected a dense tensor on the CPU, got one on meta"):
        conv2d(x, w.to("meta"))
    with pytest.raises(autoconv.ArrayError, match="input: expected a dense tensor on the CPU, got ndarray"):
        conv2d(x.numpy(), w)
    for given, name in (((None, w), "input"), ((x, None), "weight")):
        with pytest.raises(autoconv.ArrayError, match=f"{name}: expected a dense tensor on the CPU, got NoneType"):
            conv2d(*given)
    with pytest.raises(autoconv.ArrayError, match="input: expected a dense tensor on the CPU, got NoneType"):
        autoconv.torch.Conv2d(3, 4, 3)(None)
    with pytest.raises(autoconv.ArrayError, match="input: expected a dense tensor on the CPU, got one of layout"):
        conv2d(x.to_sparse(), w)
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([*x])
    with pytest.raises(autoconv.ArrayError, match="input: expected a dense tensor on the CPU, got a nested one"):
        conv2d(nested, w)
    with pytest.raises(autoconv.ArrayError, match="input: expected a dense tensor on the CPU, got one of type torch"):
        conv2d(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), w)
    with pytest.raises(autoconv.LayerError, match="dtype='float8_e5m2': expected one of"):
        conv2d(x.to(torch.float8_e5m2), w.to(torch.float8_e5m2))
    with pytest.raises(autoconv.ArrayError, match=r"expected input \(N, C, H, W\) .* got \(4,\)"):
        conv2d(x[0, :, 0, 0], w)
    with pytest.raises(autoconv.ArrayError, match=r"padding='same': expected a stride of 1"):
        conv2d(x, w, padding="same", stride=2)
    with pytest.raises(autoconv.ArrayError, match=r"padding='twice'"):
        conv2d(x, w, padding="twice")
    with pytest.raises(autoconv.LayerError, match="stride"):
        conv2d(x, w, stride=0, **OURS)
    with pytest.raises(autoconv.LayerError, match=r"dilation=\(1, 1, 1\): expected one integer or a pair"):
        conv2d(x, w, dilation=(1, 1, 1), **OURS)
    with pytest.raises(autoconv.LayerError, match=r"padding=\[1, 2, 3\]: expected one integer or a pair"):
        conv2d(x, w, padding=[1, 2, 3], **OURS)
    with pytest.raises(autoconv.ArrayError, match="w: expected float32"):
        conv2d(x, w.double(), **OURS)
    with pytest.raises(autoconv.ArrayError, match="bias: expected float32"):
        conv2d(x, w, b[:2], **OURS)
    with pytest.raises(autoconv.PlanError, match="sideways"):
        conv2d(x, w, mode="sideways")
    for name, given in (("mode", 3), ("exact", "yes"), ("vendors", None)):
        with pytest.raises(autoconv.PlanError, match=f"{name}={given!r}: expected"):
            conv2d(x, w, **{name: given})
    with pytest.raises(autoconv.ConfigError, match=r"model: expected a torch\.nn\.Module, got str"):
        autoconv.torch.replace_convolutions("model")
    with pytest.raises(autoconv.LayerError, match=r"groups=1\.0: expected an integer, got float"):
        conv2d(x, w, groups=1.0, **OURS)
    with pytest.raises(autoconv.ArrayError, match="arrays of uint8: expected floating point; conv2d_q"):
        conv2d(x.byte(), w.to(torch.int8), **OURS)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own
def test_derivatives_in_forward_mode_are_refused() -> None:
    x, w, _ = (t.detach() for t in operands())

    def ours(filters: torch.Tensor) -> Any:
        return autoconv.torch.conv2d(x, filters, **OURS)

    with pytest.raises(autoconv.ArrayError, match="weight: expected a tensor without a tangent"):
        torch.func.jvp(ours, (w,), (w,))
    with pytest.raises(autoconv.ArrayError, match="weight: expected a tensor without a tangent"):
        torch.func.jacfwd(ours)(w)
    with forward_ad.dual_level():
        assert ours(w).shape == torch.conv2d(x, w).shape
        with pytest.raises(autoconv.ArrayError, match="weight: expected a tensor without a tangent"):
            ours(forward_ad.make_dual(w, w))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own
def test_derivatives_of_transforms_are_refused_at_any_depth() -> None:
    x, w, _ = (t.detach() for t in operands())
    one = torch.ones(())

    def total(filters: torch.Tensor) -> Any:
        return autoconv.torch.conv2d(x, filters, **OURS).sum()

    def scaled(filters: torch.Tensor) -> Any:  # whose inner derivative is by the scale alone
        return torch.func.jvp(lambda scale: scale * total(filters), (one,), (one,))[1]

    for derivative in (
        lambda: torch.func.grad(total)(w),
        lambda: torch.func.jvp(scaled, (w,), (w,)),
        lambda: torch.func.grad(lambda filters: torch.func.vmap(total)(filters[None]).sum())(w),
    ):
        with pytest.raises(autoconv.ArrayError, match=r"weight: expected one by which torch\.func does not"):
            derivative()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own
def test_within_derivatives_by_other_tensors_it_is_a_call_like_any_other() -> None:
    x, w, b = operands()
    one = torch.ones(())

    def found(convolve: Any, derivative: Any, image: Any) -> Any:
        return derivative(lambda scale: scale * convolve(image, w, b).sum(), one)

    for derivative in (
        lambda f, s: torch.func.grad(f)(s),
        lambda f, s: torch.func.vjp(f, s)[1](s)[0],
        lambda f, s: torch.func.jvp(f, (s,), (s,))[1],
        lambda f, s: torch.func.grad(torch.func.grad(lambda s: s * f(s)))(s),
    ):
        for image in (x, x[0]):
            ours = found(lambda *given: autoconv.torch.conv2d(*given, **OURS), derivative, image)
            theirs = found(F.conv2d, derivative, image)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            gradients = (torch.autograd.grad(y, [x, w, b], retain_graph=True) for y in (ours, theirs))
            for one_gradient, other in zip(*gradients, strict=True):
                torch.testing.assert_close(one_gradient, other, rtol=1e-4, atol=1e-3)

    def batched(image: Any) -> Any:
        return found(lambda *given: autoconv.torch.conv2d(*given, **OURS), lambda f, s: torch.func.grad(f)(s), image)

    with torch.no_grad(), pytest.raises(autoconv.ArrayError, match="input: expected one that vmap does not batch"):
        torch.func.vmap(batched)(x[None])


def test_a_view_that_is_negated_lazily_keeps_its_sign() -> None:
    x, w = torch.randn(1, 2, 5, 5, dtype=torch.complex64).conj().imag, torch.randn(3, 2, 3, 3)
    assert x.is_neg()
    torch.testing.assert_close(autoconv.conv2d(x, w, mode="heuristic"), torch.conv2d(x, w), rtol=1e-4, atol=1e-5)


def test_nothing_is_written_to_a_copy_of_a_view_that_is_negated_lazily() -> None:
    x, w, out = torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), torch.zeros(1, 3, 3, 3, dtype=torch.complex64)
    made = autoconv.plan(autoconv.ConvLayer(N=1, C=2, H=5, W=5, K=3, R=3, S=3), "heuristic")
    for convolve in (made.run, functools.partial(autoconv.conv2d, mode="heuristic")):
        with pytest.raises(autoconv.ArrayError, match="out: expected an array that holds its own values, got a view"):
            convolve(x, w, out=out.conj().imag)
