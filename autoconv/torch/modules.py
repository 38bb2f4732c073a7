"""`Conv2d` and `ConvTranspose2d`, modules like PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autoconv.errors import ConfigError
from autoconv.torch.functional import check_options, conv2d, conv_transpose2d
from autoconv.torch.operators import device_in_force
from autoconv.tuning.choice import check_mode


class _Planned:
    """How a module's convolution is planned."""

    mode: str = "hybrid"
    exact: bool = False
    vendors: bool = True

    @property
    def _options(self) -> dict[str, Any]:
        return {"mode": self.mode, "exact": self.exact, "vendors": self.vendors}


class Conv2d(_Planned, torch.nn.Conv2d):
    """`torch.nn.Conv2d`, computed by `autoconv.torch.conv2d`; parameters and their names are the same.

    Parameters
    ----------
    in_channels, out_channels : int
    kernel_size : int or (height, width)
    stride : int or (height, width)
    padding : int, (height, width), "same" or "valid"
    dilation : int or (height, width)
    groups : int
    bias : bool
    padding_mode : "zeros", "reflect", "replicate" or "circular"
    device : "cpu", optional
    dtype : torch.dtype, optional

    Attributes
    ----------
    mode : str
        As for `autoconv.torch.conv2d`, like the next two; of the class, until it is set on a module.
    exact : bool
    vendors : bool

    Examples
    --------
    >>> import torch, autoconv.torch
    >>> conv = autoconv.torch.Conv2d(2, 3, kernel_size=3, padding=1)
    >>> conv.mode = "heuristic"
    >>> conv(torch.ones(1, 2, 5, 5)).shape
    torch.Size([1, 3, 5, 5])
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        padding = self.padding
        if self.padding_mode != "zeros":
            input = pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)  # noqa: A001
            padding = 0
        geometry = self.stride, padding, self.dilation, self.groups
        return conv2d(input, weight, bias, *geometry, **self._options)


class ConvTranspose2d(_Planned, torch.nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, computed by `autoconv.torch.conv_transpose2d`; its parameters have the same names.

    Parameters
    ----------
    in_channels, out_channels : int
    kernel_size : int or (height, width)
    stride : int or (height, width)
    padding : int or (height, width)
    output_padding : int or (height, width)
    groups : int
    bias : bool
    dilation : int or (height, width)
    padding_mode : "zeros"
    device : "cpu", optional
    dtype : torch.dtype, optional

    Attributes
    ----------
    mode : str
        As for `autoconv.torch.conv2d`, like the next two; of the class, until it is set on a module.
    exact : bool
    vendors : bool

    Examples
    --------
    >>> import torch, autoconv.torch
    >>> conv = autoconv.torch.ConvTranspose2d(2, 3, kernel_size=2, stride=2)
    >>> conv.mode = "heuristic"
    >>> conv(torch.ones(1, 2, 5, 5)).shape
    torch.Size([1, 3, 10, 10])
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002
        """The result, of a size among those that the stride leaves open.

        Parameters
        ----------
        input : tensor of shape (N, C, H, W) or (C, H, W)
        output_size : list of int, optional
            Its height and width, perhaps after what stands before those in its shape.

        Returns
        -------
        tensor of shape (N, K, P, Q) or (K, P, Q)
        """
        steps = [*self.stride], [*self.padding], [*self.kernel_size], 2, [*self.dilation]
        extra = self._output_padding(input, output_size, *steps)
        geometry = self.stride, self.padding, tuple(extra), self.groups, self.dilation
        return conv_transpose2d(input, self.weight, self.bias, *geometry, **self._options)


OURS = {torch.nn.Conv2d: Conv2d, torch.nn.ConvTranspose2d: ConvTranspose2d}


def replace_convolutions(
    model: torch.nn.Module, *, mode: str = "hybrid", exact: bool = False, vendors: bool = True
) -> torch.nn.Module:
    """Have the convolutions of a model be ours, with the parameters that they have.

    Every `torch.nn.Conv2d` becomes an `autoconv.torch.Conv2d`, and every `ConvTranspose2d` likewise. Modules of
    classes derived from PyTorch's stay as they are.

    Parameters
    ----------
    model : torch.nn.Module
        It is changed; optimizers and hooks that know its modules and parameters go on knowing them.
    mode : str
        As for `autoconv.torch.conv2d`, like the next two.
    exact : bool
    vendors : bool

    Returns
    -------
    torch.nn.Module
        The model.

    Raises
    ------
    ConfigError
        For what is no `torch.nn.Module`.
    PlanError
        For a mode that is none and names no algorithm, or options of other types; the model stays as it is.

    Examples
    --------
    >>> import torch, autoconv.torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU())
    >>> type(autoconv.torch.replace_convolutions(model)[0])
    <class 'autoconv.torch.modules.Conv2d'>
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    check_options(mode, exact, vendors)
    check_mode(mode, device_in_force())
    for module in model.modules():
        if (ours := OURS.get(type(module))) is not None:
            module.__class__ = ours
            module.mode, module.exact, module.vendors = mode, exact, vendors
    return model
