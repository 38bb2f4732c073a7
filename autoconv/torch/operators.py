"""Convolution and its gradients as operators that `torch.compile`, `torch.export` and autograd know.

The gradients of a convolution are two others, so that gradients of gradients exist as well: with `y = conv2d(x, w)`,
`dx` is linear in `dy` and `w`, and `dw` in `x` and `dy`, by the same sums; and a transposed convolution is `dx` with a
bias.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from autoconv import functional
from autoconv.cpu.device import CPU
from autoconv.errors import ArrayError, LayerError, PlanError
from autoconv.layer import ConvLayer
from autoconv.registry import this_device
from autoconv.vendors.torch import array, tensor


def device_in_force() -> CPU:
    """This machine's processor, with no more threads than PyTorch is told to use."""
    found, threads = this_device(), torch.get_num_threads()
    if not isinstance(found, CPU):
        raise PlanError(f"device: expected a CPU, got {found.name}")
    return found if threads >= found.threads else _fewer(found, threads)


def has_tangent(given: Tensor) -> bool:
    """Whether a derivative in forward mode is carried along, which operators of `torch.library` would lose."""
    return forward_ad.unpack_dual(given).tangent is not None


def is_differentiated(given: Tensor) -> bool:
    """Whether `torch.func` differentiates by a tensor, at any depth: operators of `torch.library` have no rule for it.

    Where that is compiled, PyTorch itself says so.
    """
    if torch.compiler.is_compiling():
        return False
    if not is_wrapped(given):
        return False
    transforms, given = torch._C._functorch, torch._C._functorch.unwrap_if_dead(given)
    return bool(transforms.is_gradtrackingtensor(given)) or is_differentiated(transforms.get_unwrapped(given))


def is_wrapped(given: Tensor) -> bool:
    """Whether a transform of `torch.func` that still goes on has put another tensor in its place."""
    transforms = torch._C._functorch
    return bool(transforms.is_functorch_wrapped_tensor(transforms.unwrap_if_dead(given)))


def within_derivative() -> bool:
    """Whether `torch.func` differentiates by anything at all, where operators with gradients of their own have no rule.

    Where that is compiled, PyTorch itself says so.
    """
    if torch.compiler.is_compiling():
        return False
    transforms = torch._C._functorch
    if not (levels := transforms.get_interpreter_stack()):  # as nearly always
        return False
    kinds = transforms.TransformType.Grad, transforms.TransformType.Jvp
    return any(level.key() in kinds for level in levels)


def not_taken(given: Any) -> str:
    """What is given, where it is no tensor whose memory can be read here; nothing where it is one."""
    if not isinstance(given, Tensor):
        return type(given).__name__
    if given.device.type != "cpu":
        return f"one on {given.device}"
    if given.is_quantized:
        return f"one of type {given.dtype}"
    if given.layout is not torch.strided:
        return f"one of layout {given.layout}"
    return "a nested one" if given.is_nested else ""  # several tensors, of shapes that may differ


def without_memory(given: Tensor) -> str:
    """What a tensor is, where it is of a class that stands for others, as the `FakeTensor` of `torch.export` does."""
    of_its_own = type(given).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return f"a {type(given).__name__}" if of_its_own else ""


@functools.lru_cache
def _fewer(device: CPU, threads: int) -> CPU:
    return dataclasses.replace(device, threads=threads)


# What all three are told beside tensors and sizes, in the order of the arguments of `_options`.
REST = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, str mode, bool exact, bool vendors"
# Not by `torch.library.custom_op`: a call that is differentiated took half as long again, as much as a small layer.
_library = torch.library.Library("autoconv", "DEF")


def _operator(name: str, first: str) -> Callable[[Callable[..., Tensor]], Any]:
    """Have PyTorch know a function, whose first arguments are these; what is given back calls it through PyTorch."""

    def register(function: Callable[..., Tensor]) -> Any:
        _library.define(f"{name}({first}, {REST}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, function, "CPU")
        return getattr(torch.ops.autoconv, name).default

    return register


@_operator("conv2d", "Tensor x, Tensor w, Tensor? bias")
def conv2d(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """`conv2d` of `autoconv`, with the padding of top, bottom, left and right."""
    if not x.shape[0]:
        return _like_output(x, w, bias, *rest)
    b = None if bias is None else array(bias)
    return tensor(functional.conv2d(array(x), array(w), b, **_options(*rest)))


@_operator("conv2d_dgrad", "Tensor dy, Tensor w, SymInt[] input_size")
def conv2d_dgrad(dy: Tensor, w: Tensor, input_size: Sequence[int], *rest: Any) -> Tensor:
    """The gradient of `conv2d` with respect to `x`."""
    if not dy.shape[0]:
        return _like_input(dy, w, input_size, *rest)
    return tensor(functional.conv2d_dgrad(array(dy), array(w), input_size=_pair(input_size), **_options(*rest)))


@_operator("conv_transpose2d", "Tensor x, Tensor w, Tensor? bias, SymInt[] output_padding")
def conv_transpose2d(x: Tensor, w: Tensor, bias: Tensor | None, output_padding: Sequence[int], *rest: Any) -> Tensor:
    """`conv_transpose2d` of `autoconv`, with as much padding at the bottom as at the top, and right as left."""
    if not x.shape[0]:
        return _like_transposed(x, w, bias, output_padding, *rest)
    options = _options(*rest)
    options["padding"] = tuple(before for before, _ in options["padding"])
    b = None if bias is None else array(bias)
    return tensor(functional.conv_transpose2d(array(x), array(w), b, output_padding=_pair(output_padding), **options))


@_operator("conv2d_wgrad", "Tensor x, Tensor dy, SymInt[] filter_size")
def conv2d_wgrad(x: Tensor, dy: Tensor, filter_size: Sequence[int], *rest: Any) -> Tensor:
    """The gradient of `conv2d` with respect to `w`."""
    if not x.shape[0]:  # a sum over no images
        return _like_filters(x, dy, filter_size, *rest).zero_()
    return tensor(functional.conv2d_wgrad(array(x), array(dy), filter_size=_pair(filter_size), **_options(*rest)))


def _pair(values: Sequence[int]) -> tuple[int, int]:
    height, width = values
    return height, width


def _options(
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    mode: str,
    exact: bool,
    vendors: bool,
) -> dict[str, Any]:
    """What the functions of `autoconv.functional` are told beside arrays."""
    top, bottom, left, right = padding
    return {
        "stride": _pair(stride),
        "padding": ((top, bottom), (left, right)),
        "dilation": _pair(dilation),
        "groups": groups,
        "mode": mode,
        "exact": exact,
        "vendors": "loaded" if vendors else False,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": device_in_force(),
    }


def _name(of: torch.dtype) -> str:
    """Of a type, as NumPy calls it."""
    return str(of).removeprefix("torch.")


def _empty(first: Tensor, shape: Sequence[int]) -> Tensor:
    """A new tensor in the memory format of an operator's first operand: what the operator gives while it is traced."""
    last = not first.is_contiguous() and first.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=memory_format)


def _output_size(
    dtype: torch.dtype, x: Sequence[int], w: Sequence[int], geometry: Sequence[Any], groups: int
) -> tuple[int, ...]:
    """The shape of `y` for those of `x` and `w`, which may be symbols; what is no convolution is refused."""
    (N, C, H, W), (K, _, R, S) = x, w
    stride, padding, dilation = geometry
    if not dtype.is_floating_point:
        raise ArrayError(f"tensors of {_name(dtype)}: expected floating point")
    if all(isinstance(n, int) for n in (C, H, W, K, R, S, *stride, *padding, *dilation, groups)):
        top, bottom, left, right = padding
        options: dict[str, Any] = {"padding": ((top, bottom), (left, right)), "groups": groups}
        pairs: dict[str, Any] = {"stride": _pair(stride), "dilation": _pair(dilation)}
        extents: dict[str, Any] = {"C": C, "H": H, "W": W, "K": K, "R": R, "S": S}
        layer = ConvLayer(N=1, **extents, dtype=_name(dtype), **pairs, **options)  # N itself may be 0
        return (N, *layer.y_shape[1:])
    sizes = [
        (extent + padding[2 * n] + padding[2 * n + 1] - (taps - 1) * dilation[n] - 1) // stride[n] + 1
        for n, (extent, taps) in enumerate(((H, R), (W, S)))
    ]
    for taps, size in zip((R, S), sizes, strict=True):
        torch._check_with(LayerError, size >= 1, lambda n=taps: f"filters of {n} taps: the output is empty")
    return (N, K, *sizes)


def _expect(name: str, given: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Refuse an operand of another type or shape, of which either may have symbols."""

    def refusal() -> str:
        return f"{name}: expected {_name(dtype)} {tuple(shape)}, got {_name(given.dtype)} {tuple(given.shape)}"

    if given.dtype != dtype or given.dim() != len(shape):
        raise ArrayError(refusal())
    for found, wanted in zip(given.shape, shape, strict=True):
        torch._check_with(ArrayError, found == wanted, refusal)


def _expect_four(**given: Tensor) -> None:
    for name, operand in given.items():
        if operand.dim() != 4:
            raise ArrayError(f"{name} has shape {tuple(operand.shape)}: expected four dimensions (NCHW)")


# These four are also how the operators are traced, where they refuse what they do in a run.
@torch.library.register_fake("autoconv::conv2d", lib=_library)
def _like_output(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: Any, *_: Any
) -> Tensor:
    """A new tensor of the shape that `conv2d` gives."""
    _expect_four(x=x, w=w)
    size = _output_size(x.dtype, x.shape, w.shape, (stride, padding, dilation), groups)
    _expect("w", w, x.dtype, (w.shape[0], x.shape[1] // groups, *w.shape[2:]))
    if bias is not None:
        _expect("bias", bias, x.dtype, (w.shape[0],))
    return _empty(x, size)


@torch.library.register_fake("autoconv::conv2d_dgrad", lib=_library)
def _like_input(
    dy: Tensor, w: Tensor, input_size: Any, stride: Any, padding: Any, dilation: Any, groups: Any, *_: Any
) -> Tensor:
    """A new tensor of the shape that `conv2d_dgrad` gives."""
    _expect_four(dy=dy, w=w)
    size = (dy.shape[0], w.shape[1] * groups, *_pair(input_size))
    _expect("w", w, dy.dtype, w.shape)
    _expect("dy", dy, dy.dtype, _output_size(dy.dtype, size, w.shape, (stride, padding, dilation), groups))
    return _empty(dy, size)


@torch.library.register_fake("autoconv::conv_transpose2d", lib=_library)
def _like_transposed(
    x: Tensor, w: Tensor, bias: Tensor | None, output_padding: Any, stride: Any, padding: Any, dilation: Any,
    groups: Any, *_: Any,
) -> Tensor:  # fmt: skip
    """A new tensor of the shape that `conv_transpose2d` gives."""
    _expect_four(x=x, w=w)
    channels = w.shape[1] * groups
    size = [
        (extent - 1) * stride[n] - 2 * padding[2 * n] + dilation[n] * (taps - 1) + output_padding[n] + 1
        for n, (extent, taps) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True))
    ]
    for name, extra, step in zip(("height", "width"), output_padding, stride, strict=True):
        if not 0 <= extra < step:
            raise ArrayError(f"output_padding of the {name}={extra}: expected less than the stride {step}")
    y = (x.shape[0], channels, *size)
    _expect("w", w, x.dtype, (x.shape[1], *w.shape[1:]))
    _expect("x", x, x.dtype, _output_size(x.dtype, y, w.shape, (stride, padding, dilation), groups))
    if bias is not None:
        _expect("bias", bias, x.dtype, (channels,))
    return _empty(x, y)


@torch.library.register_fake("autoconv::conv2d_wgrad", lib=_library)
def _like_filters(
    x: Tensor, dy: Tensor, filter_size: Any, stride: Any, padding: Any, dilation: Any, groups: Any, *_: Any
) -> Tensor:
    """A new tensor of the shape that `conv2d_wgrad` gives."""
    _expect_four(x=x, dy=dy)
    size = (dy.shape[1], x.shape[1] // groups, *_pair(filter_size))
    _expect("dy", dy, x.dtype, _output_size(x.dtype, x.shape, size, (stride, padding, dilation), groups))
    return _empty(x, size)


def _differentiable(name: str, gradients: Callable[[Any, Tensor], tuple[Any, ...]]) -> None:
    """Give an operator its gradients by the first two operands, and by a third that is a tensor."""
    operator = getattr(torch.ops.autoconv, name).default

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            first, second, _, *rest = args
            ctx.save_for_backward(first, second)
            ctx.rest = rest
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args)

        backward = staticmethod(gradients)

    _library.impl(name, Differentiable.apply, "Autograd")


def _forward_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, w), (of_x, of_w, of_bias, *_) = ctx.saved_tensors, ctx.needs_input_grad
    dx = conv2d_dgrad(dy, w, x.shape[2:], *ctx.rest) if of_x else None
    dw = conv2d_wgrad(x, dy, w.shape[2:], *ctx.rest) if of_w else None
    return dx, dw, dy.sum((0, 2, 3)) if of_bias else None, *[None] * len(ctx.rest)


def _dgrad_gradients(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    (dy, w), (of_dy, of_w, *_) = ctx.saved_tensors, ctx.needs_input_grad
    to_dy = conv2d(g, w, None, *ctx.rest) if of_dy else None
    to_w = conv2d_wgrad(g, dy, w.shape[2:], *ctx.rest) if of_w else None
    return to_dy, to_w, None, *[None] * len(ctx.rest)


def _transposed_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x, w), (of_x, of_w, of_bias, *_), (_, *geometry) = ctx.saved_tensors, ctx.needs_input_grad, ctx.rest
    dx = conv2d(dy, w, None, *geometry) if of_x else None
    dw = conv2d_wgrad(dy, x, w.shape[2:], *geometry) if of_w else None
    return dx, dw, dy.sum((0, 2, 3)) if of_bias else None, *[None] * len(ctx.rest)


def _wgrad_gradients(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    (x, dy), (of_x, of_dy, *_) = ctx.saved_tensors, ctx.needs_input_grad
    to_x = conv2d_dgrad(dy, g, x.shape[2:], *ctx.rest) if of_x else None
    to_dy = conv2d(x, g, None, *ctx.rest) if of_dy else None
    return to_x, to_dy, None, *[None] * len(ctx.rest)


_differentiable("conv2d", _forward_gradients)
_differentiable("conv2d_dgrad", _dgrad_gradients)
_differentiable("conv_transpose2d", _transposed_gradients)
_differentiable("conv2d_wgrad", _wgrad_gradients)
