"""PyTorch's convolution (oneDNN's) as a candidate, and how it is called on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import ml_dtypes

from autoconv.algorithm import Array, Kernel, Params
from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.vendors.base import Vendor

if TYPE_CHECKING:
    from autoconv.device import Device
    from autoconv.layer import ConvLayer

FORMATS = ("nchw", "channels_last")


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Hold torch to so many threads, and give the user's own setting back."""
    import torch

    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_given() -> AbstractContextManager[Any]:
    """A context in which torch computes in the types that it is given, also within the caller's `torch.autocast`."""
    import torch

    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def tensor(array: Array) -> Any:
    """An array as a tensor that shares its memory; one that is read-only, which torch has not, is copied."""
    import torch

    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.isbuiltin != 1:  # a type of ml_dtypes, which torch has by the same name
        return torch.from_numpy(array.view(f"int{8 * array.itemsize}")).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def array(source: Any) -> Array:
    """A tensor on the CPU as an array that shares its memory, whatever its gradient.

    A view that PyTorch is yet to negate or to conjugate is copied, as no array can be one.
    """
    import torch

    found = source.detach().resolve_conj().resolve_neg()
    name = str(found.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):  # bfloat16, or one of 8 bits
        return found.view(torch.int16 if found.itemsize == 2 else torch.int8).numpy().view(getattr(ml_dtypes, name))
    return found.numpy()


def channels_first(array: Array, layout: str) -> Any:
    """Images or filters in a layout as a tensor of shape NCHW; that of NHWC arrays is channels_last."""
    found = tensor(array)
    return found.permute(CHANNELS_FIRST) if layout == "NHWC" else found


def uneven_padding(layer: ConvLayer) -> str | None:
    """Why torch cannot pad like a layer; None where it can."""
    if all(before == after for before, after in layer.padding):
        return None
    return f"padding: expected the same on both sides, as torch has no other, got {layer.padding}"


def torch_convolution(layer: ConvLayer, a: Any, b: Any, bias: Any, residual: Any) -> Any:
    """A layer by ATen, in whichever direction: tensors of shape NCHW and K C R S in, a new one out.

    What comes out has the memory format of `a` and `b`.
    """
    import torch

    geometry = list(layer.stride), [before for before, _ in layer.padding], list(layer.dilation)
    if layer.direction == "fwd":
        y = torch.conv2d(a, b, bias, *geometry, layer.groups)
        if residual is not None:
            y.add_(residual)
        return y.relu_() if layer.activation == "relu" else y
    data = layer.direction == "dgrad"
    first = layer.replace(layout="NCHW")
    # Of the operand whose gradient it is, only the shape is read.
    channels_last = a.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    shape = torch.empty(first.output_shape, dtype=a.dtype, device=a.device, memory_format=memory_format)
    dy, x, w = (a, shape, b) if data else (b, a, shape)
    rest = *geometry, False, [0, 0], layer.groups, [data, not data, False]
    return torch.ops.aten.convolution_backward(dy, x, w, None, *rest)[0 if data else 1]


class TorchKernel(Kernel):
    """ATen's convolution, on tensors of one memory format; others are converted in every run."""

    def __init__(self, layer: ConvLayer, device: Any, memory_format: str, packed_bytes: int) -> None:
        import torch

        self.layer, self.threads, self.packed_bytes = layer, device.threads, packed_bytes
        self.format = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format

    def pack(self, w: Array, packed: Array) -> None:
        """Filters in the order of channels_last, K R S C."""
        turned = w.transpose(CHANNELS_LAST)
        packed.view(w.dtype).reshape(turned.shape)[...] = turned

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        import torch

        layer, layout = self.layer, self.layer.layout
        if self.packed_bytes:
            K, channels, R, S = layer.w_shape
            second = channels_first(b.view(layer.numpy_dtype).reshape(K, R, S, channels), "NHWC")
        else:
            second = channels_first(b, layout)
        with torch_threads(self.threads), torch.inference_mode(), as_given():
            found = torch_convolution(
                layer,
                channels_first(a, layout).contiguous(memory_format=self.format),
                second.contiguous(memory_format=self.format),
                None if bias is None else tensor(bias),
                None if residual is None else channels_first(residual, layout),
            )
            channels_first(out, layout).copy_(found)


class Torch(Vendor):
    """PyTorch's convolution in either memory format; its own prepacked filters are not a public interface."""

    name = vendor = pool = "torch"
    dtypes = ("float32", "float64", "bfloat16")  # of float16 it keeps the sums in float16, too
    packages = ("torch",)
    call = 10e-6

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        return ({"format": name} for name in FORMATS)

    def refusals(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        if params["format"] not in FORMATS:
            reasons.append(f"format: expected {' or '.join(FORMATS)}, got {params['format']}")
        if (uneven := uneven_padding(layer)) is not None:
            reasons.append(uneven)
        if layer.dtype == "bfloat16" and layer.residual:
            reasons.append("residual: expected none in bfloat16, to which torch rounds before it adds the residual")
        return reasons

    def packs(self, layer: ConvLayer, params: Params) -> bool:
        return layer.direction != "wgrad" and layer.layout == "NCHW" and params["format"] == "channels_last"

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        return TorchKernel(layer, device, str(params["format"]), self.packed_bytes(layer, device, params))
