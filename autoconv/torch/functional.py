"""`conv2d` and `conv_transpose2d` on tensors, with the arguments that PyTorch's own have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.functional import pad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from autoconv.common import arguments
from autoconv.errors import ArrayError, PlanError
from autoconv.torch import operators

Padding = int | tuple[int, int] | str


def conv2d(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: Padding = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    *,
    mode: str = "hybrid",
    exact: bool = False,
    vendors: bool = True,
) -> Tensor:
    """2-D convolution of tensors on the CPU, in place of `torch.nn.functional.conv2d`, with gradients of any order.

    A shape is planned when it is first seen, forward and for each gradient that is asked for. Tensors are read where
    they lie; under `torch.autocast` they are converted first, but for those of float64, as by PyTorch. Plans use no
    more threads than `torch.get_num_threads()`, and are deterministic where `torch.use_deterministic_algorithms` asks
    for that.

    Parameters
    ----------
    input : tensor of shape (N, C, H, W) or (C, H, W)
        In the memory format `channels_last`, it is computed as it lies, and gives its like. N may be 0.
    weight : tensor of shape (K, C/groups, R, S)
        The filters.
    bias : tensor of K values, optional
    stride : int or (height, width)
    padding : int, (height, width), "same" or "valid"
        "same" takes a stride of 1.
    dilation : int or (height, width)
    groups : int
    mode : str
        As for `autoconv.plan`; "hybrid" times the most promising candidates for 0.2 s, once for each shape.
    exact : bool
        Only algorithms that do no more to a sum than reorder it: no Winograd, no Fourier transforms.
    vendors : bool
        Whether PyTorch's own convolution is among the candidates, and what else is imported.

    Returns
    -------
    tensor of shape (N, K, P, Q) or (K, P, Q)

    Raises
    ------
    ArrayError
        For tensors that are not on the CPU, not dense, of other dimensions, of bytes, or of types that differ; for
        those with tangents, as there are no derivatives in forward mode; and for those by which `torch.func`
        differentiates, or which its `vmap` batches while it does, as gradients are those of `backward` and
        `torch.autograd.grad`.
    LayerError
        For what is no valid convolution.
    PlanError
        For an unknown mode, and as `autoconv.plan` does.

    Examples
    --------
    >>> import torch, autoconv.torch
    >>> x, w = torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3, requires_grad=True)
    >>> y = autoconv.torch.conv2d(x, w, padding="same", mode="heuristic")
    >>> y.sum().backward()
    >>> y.shape, w.grad.shape
    (torch.Size([1, 3, 5, 5]), torch.Size([3, 2, 3, 3]))
    """
    tensors, geometry = (input, weight, bias), (stride, padding, dilation, groups)
    if has_torch_function_variadic(*tensors):  # proxies that torch.fx traces by, and subclasses of tensors
        options = {"mode": mode, "exact": exact, "vendors": vendors}
        return handle_torch_function(conv2d, tensors, *tensors, *geometry, **options)
    return _called(_convolved, tensors, geometry, (mode, exact, vendors))


def conv_transpose2d(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    output_padding: int | tuple[int, int] = 0,
    groups: int = 1,
    dilation: int | tuple[int, int] = 1,
    *,
    mode: str = "hybrid",
    exact: bool = False,
    vendors: bool = True,
) -> Tensor:
    """Transposed 2-D convolution of tensors on the CPU, in place of `torch.nn.functional.conv_transpose2d`.

    Planned, read and differentiated as by `conv2d`.

    Parameters
    ----------
    input : tensor of shape (N, C, H, W) or (C, H, W)
    weight : tensor of shape (C, K/groups, R, S)
        The filters.
    bias : tensor of K values, optional
    stride : int or (height, width)
    padding : int or (height, width)
        Rows and columns cut from each side of the full result.
    output_padding : int or (height, width)
        Rows and columns added at the bottom and right, fewer than the stride or the dilation, each on its axis.
    groups : int
    dilation : int or (height, width)
    mode : str
        As for `conv2d`, like the next two.
    exact : bool
    vendors : bool

    Returns
    -------
    tensor of shape (N, K, P, Q) or (K, P, Q)

    Raises
    ------
    ArrayError, LayerError, PlanError
        As `conv2d` does.

    Examples
    --------
    >>> import torch, autoconv.torch
    >>> x, w = torch.ones(1, 2, 5, 5), torch.ones(2, 3, 4, 4)
    >>> autoconv.torch.conv_transpose2d(x, w, stride=2, padding=1, mode="heuristic").shape
    torch.Size([1, 3, 10, 10])
    """
    tensors, geometry = (input, weight, bias), (stride, padding, output_padding, groups, dilation)
    if has_torch_function_variadic(*tensors):
        options = {"mode": mode, "exact": exact, "vendors": vendors}
        return handle_torch_function(conv_transpose2d, tensors, *tensors, *geometry, **options)
    return _called(_transposed, tensors, geometry, (mode, exact, vendors))


Tensors = tuple[Tensor, Tensor, Tensor | None]
Options = tuple[str, bool, bool]


def _called(function: Callable[..., Tensor], tensors: Tensors, geometry: Any, options: Options) -> Tensor:
    """What a function of images, filters and bias gives, which are checked and may be of one image."""
    within = operators.within_derivative()
    for name, given in zip(("input", "weight", "bias"), tensors, strict=True):
        if given is None and name == "bias":
            continue
        if got := operators.not_taken(given):
            raise ArrayError(f"{name}: expected a dense tensor on the CPU, got {got}")
        if operators.has_tangent(given):
            raise ArrayError(f"{name}: expected a tensor without a tangent: there are no derivatives in forward mode")
        if operators.is_differentiated(given):
            raise ArrayError(
                f"{name}: expected one by which torch.func does not differentiate: backward and torch.autograd.grad do"
            )
        if within and operators.is_wrapped(given):
            raise ArrayError(f"{name}: expected one that vmap does not batch, within a derivative of torch.func")
    if within:  # by other tensors than these: to what is outside, this is a call like any other
        with temporarily_clear_interpreter_stack():
            return _called(function, tensors, geometry, options)
    check_options(*options)
    x, w, bias = tensors
    if x.dim() not in (3, 4) or w.dim() != 4:
        filters = "(K, C/groups, R, S)" if function is _convolved else "(C, K/groups, R, S)"
        raise ArrayError(
            f"expected input (N, C, H, W) or (C, H, W) and weight {filters}, got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if torch.is_autocast_enabled("cpu"):
        x, w, bias = (_autocast(x), _autocast(w), bias if bias is None else _autocast(bias))
    y = function(x if x.dim() == 4 else x[None], w, bias, *geometry, *options)
    return y if x.dim() == 4 else y[0]


def _convolved(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: Any, *options: Any
) -> Tensor:
    stride, dilation = _pair(stride, "stride", 1), _pair(dilation, "dilation", 1)
    groups = arguments.integer(groups, "groups", 1)
    sides = _sides(padding, stride, dilation, (w.shape[2], w.shape[3]))
    return operators.conv2d(x, w, bias, stride, sides, dilation, groups, *options)


def _transposed(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, output_padding: Any, groups: Any,
    dilation: Any, *options: Any,
) -> Tensor:  # fmt: skip
    stride, dilation = _pair(stride, "stride", 1), _pair(dilation, "dilation", 1)
    groups = arguments.integer(groups, "groups", 1)
    (top, left), (down, across) = _pair(padding, "padding", 0), _pair(output_padding, "output_padding", 0)
    (rows, columns), (height, width) = stride, dilation
    if down >= max(rows, height) or across >= max(columns, width):
        given = f"the stride {stride} or the dilation {dilation}"
        raise ArrayError(f"output_padding={down, across}: expected less than {given}")
    if down >= rows or across >= columns:  # zeros that follow the input give the same, with less than the stride
        x = pad(x, (0, across // columns, 0, down // rows))
    extra, sides = (down % rows, across % columns), (top, top, left, left)
    return operators.conv_transpose2d(x, w, bias, extra, stride, sides, dilation, groups, *options)


def check_options(mode: object, exact: object, vendors: object) -> None:
    """Refuse options of other types; which modes there are depends on the layer."""
    for name, value in (("exact", exact), ("vendors", vendors)):
        if not isinstance(value, bool):
            raise PlanError(f"{name}={value!r}: expected True or False")
    if not isinstance(mode, str):
        raise PlanError(f"mode={mode!r}: expected a str, as for autoconv.plan")


def _autocast(given: Tensor) -> Tensor:
    """A tensor in the type that `torch.autocast` asks for; of integers and of float64 it asks nothing."""
    if not given.is_floating_point() or given.dtype == torch.float64:
        return given
    return given.to(torch.get_autocast_dtype("cpu"))


def _sides(
    padding: Padding, stride: tuple[int, int], dilation: tuple[int, int], taps: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Padding of top, bottom, left and right."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        if stride != (1, 1):
            raise ArrayError(f"padding='same': expected a stride of 1, as PyTorch does, got {stride}")
        rows, columns = ((count - 1) * step for count, step in zip(taps, dilation, strict=True))
        return rows // 2, rows - rows // 2, columns // 2, columns - columns // 2
    if isinstance(padding, str):
        raise ArrayError(f"padding={padding!r}: expected integers, 'same' or 'valid'")
    height, width = _pair(padding, "padding", 0)
    return height, height, width, width


def _pair(value: object, name: str, least: int) -> tuple[int, int]:
    """Height and width; a list of one integer stands for both, as in PyTorch."""
    alone = isinstance(value, list | tuple) and len(value) == 1
    return arguments.pair(value[0] if alone else value, name, least)  # type: ignore[index]
