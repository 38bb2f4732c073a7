"""PyTorch (oneDNN) and ONNX Runtime (MLAS) as candidates, where they are installed.

Neither is imported before a plan builds one of its candidates, and neither is ever required. Both add with
multiply-adds in another order only: over the layers of the tests their errors stay below 2e-7 in float32. So
the cap is that of a direct sum, and a release that took to Winograd would be refused by verification, not
silently be less accurate. What they allocate inside is not known, and not part of `workspace_bytes`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from autoconv.algorithm import Algorithm, Array, Kernel, Params
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.device import Device

OPSET, IR_VERSION = 17, 9  # of the models given to ONNX Runtime: what every release since 1.15 reads
CALL = {"torch": 10e-6, "onnxruntime": 40e-6}  # seconds of a call that computes next to nothing


@functools.cache
def installed(package: str) -> bool:
    """Whether a package could be imported; nothing is."""
    return importlib.util.find_spec(package) is not None


@functools.cache
def release(package: str) -> str:
    """The version of a package that is not imported for it, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


class Vendor(Algorithm[Any]):
    """What the adapters share: reasons from what is installed, estimates from the machine's peak."""

    packages: ClassVar[tuple[str, ...]]

    @property
    def version(self) -> str:
        return release(self.name)

    def installed(self) -> bool:
        return all(map(installed, self.packages))

    def refusals(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        return [f"{package} is not installed" for package in self.packages if not installed(package)]

    def packed_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        return math.prod(layer.w_shape) * layer.itemsize if self.packs(layer, params) else 0

    @abstractmethod
    def packs(self, layer: ConvLayer, params: Params) -> bool:
        """Whether these parameters want the filters in another form."""

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        return CALL[self.name] + layer.flops / device.peak_flops(layer.dtype) + layer.bytes / device.bandwidth()


# PyTorch


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


def tensor(array: Array) -> Any:
    """An array as a tensor that shares its memory; one that is read-only, which torch has not, is copied."""
    import torch

    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.name == "bfloat16":  # a type of ml_dtypes, unknown to torch
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def channels_first(array: Array, layout: str) -> Any:
    """Images or filters in a layout as a tensor of shape NCHW; that of NHWC arrays is channels_last."""
    found = tensor(array)
    return found.permute(0, 3, 1, 2) if layout == "NHWC" else found


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
    shape = torch.empty(first.output_shape, dtype=a.dtype, memory_format=memory_format)
    dy, x, w = (a, shape, b) if data else (b, a, shape)
    tail = *geometry, False, [0, 0], layer.groups, [data, not data, False]
    return torch.ops.aten.convolution_backward(dy, x, w, None, *tail)[0 if data else 1]


class TorchKernel(Kernel):
    """ATen's convolution, on tensors of one memory format; others are converted in every run."""

    def __init__(self, layer: ConvLayer, device: Any, memory_format: str, packed_bytes: int) -> None:
        import torch

        self.layer, self.threads, self.packed_bytes = layer, device.threads, packed_bytes
        self.format = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format

    def pack(self, w: Array, packed: Array) -> None:
        """Filters in the order of channels_last, K R S C."""
        turned = w.transpose(0, 2, 3, 1)
        packed.view(w.dtype).reshape(turned.shape)[...] = turned

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        import torch

        layer, layout = self.layer, self.layer.layout
        if self.packed_bytes:
            K, channels, R, S = layer.w_shape
            second = channels_first(b.view(layer.numpy_dtype).reshape(K, R, S, channels), "NHWC")
        else:
            second = channels_first(b, layout)
        with torch_threads(self.threads), torch.inference_mode():
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
    packages = ("torch",)

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        return ({"format": name} for name in ("nchw", "channels_last"))

    def refusals(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        if params["format"] not in ("nchw", "channels_last"):
            reasons.append(f"format={params['format']}: allowed are nchw, channels_last")
        if any(before != after for before, after in layer.padding):
            reasons.append(f"torch pads both sides alike, this layer {layer.padding}")
        if layer.dtype == "float16":
            reasons.append("torch keeps sums of float16 in float16")
        if layer.dtype == "bfloat16" and layer.residual:
            reasons.append("torch rounds to bfloat16 before it adds the residual")
        return reasons

    def packs(self, layer: ConvLayer, params: Params) -> bool:
        return layer.direction != "wgrad" and layer.layout == "NCHW" and params["format"] == "channels_last"

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        return TorchKernel(layer, device, str(params["format"]), self.packed_bytes(layer, device, params))


# ONNX Runtime


def onnx_model(layers: Mapping[str, ConvLayer], constants: Mapping[str, Array]) -> bytes:
    """A model of convolutions side by side, each on its own input.

    Parameters
    ----------
    layers : mapping
        NCHW layers, forward, by name. Layer `NAME` has the inputs `NAME.x`, `NAME.w` and, where it has
        them, `NAME.bias` and `NAME.residual`; its output is `NAME.y`.
    constants : mapping
        Inputs that are part of the model, by their names; ONNX Runtime transforms such filters once.
    """
    from onnx import TensorProto, helper, numpy_helper

    nodes, inputs, outputs = [], [], []
    for name, layer in layers.items():
        shapes = {"x": layer.x_shape, "w": layer.w_shape}
        operands, rest = ["x", "w"], []
        if layer.bias and f"{name}.bias" in constants:
            shapes["bias"], operands = (layer.K,), ["x", "w", "bias"]
        elif layer.bias:  # one that is not constant would keep Conv itself from the fast kernels
            shapes["bias"], rest = (1, layer.K, 1, 1), [("Add", ["bias"])]
        if layer.residual:
            shapes["residual"] = layer.y_shape
            rest.append(("Add", ["residual"]))
        if layer.activation == "relu":
            rest.append(("Relu", []))
        values = [f"{name}.{stage}" for stage in ["y", "a", "b", "c"][len(rest) :: -1]]  # of every step, y the last
        (top, bottom), (left, right) = layer.padding
        geometry: dict[str, Any] = {
            "kernel_shape": (layer.R, layer.S),
            "strides": layer.stride,
            "pads": (top, left, bottom, right),
            "dilations": layer.dilation,
            "group": layer.groups,
        }
        nodes.append(helper.make_node("Conv", [f"{name}.{part}" for part in operands], values[:1], **geometry))
        for (operator, more), source, target in zip(rest, values, values[1:], strict=False):
            nodes.append(helper.make_node(operator, [source, *(f"{name}.{part}" for part in more)], [target]))
        for part, shape in shapes.items():
            if f"{name}.{part}" not in constants:
                inputs.append(helper.make_tensor_value_info(f"{name}.{part}", TensorProto.FLOAT, shape))
        outputs.append(helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, layer.y_shape))
    baked = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "convolutions", inputs, outputs, baked)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return bytes(model.SerializeToString())


def onnx_session(layers: Mapping[str, ConvLayer], constants: Mapping[str, Array], threads: int) -> Any:
    """A session of ONNX Runtime for `onnx_model`, at its default settings but for the thread count."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(onnx_model(layers, constants), options, providers=["CPUExecutionProvider"])


def bound_arrays(session: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Any:
    """A binding under which the session reads and writes these arrays in place."""
    binding = session.io_binding()
    for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, array in arrays.items():
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.__array_interface__["data"][0])
    return binding


class OnnxruntimeKernel(Kernel):
    """A session of one convolution.

    ONNX Runtime transforms constant filters when a session is made of them. So to pack filters is to
    make a session; the packed buffer holds the filters themselves, and the session lives as long as
    the buffer. A buffer from elsewhere gets its session at the first run.
    """

    def __init__(self, layer: ConvLayer, device: Any, packed_bytes: int) -> None:
        self.layer, self.threads, self.packed_bytes = layer, device.threads, packed_bytes
        self._sessions: dict[int, tuple[weakref.ref[Array], Any]] = {}  # by the identity of the packed buffer
        self._session: Any = None if packed_bytes else onnx_session({"conv": layer}, {}, self.threads)

    def pack(self, w: Array, packed: Array) -> None:
        """Copy the filters, and make a session of them."""
        packed.view(w.dtype).reshape(w.shape)[...] = w
        self._bake(packed)

    def _bake(self, packed: Array) -> Any:
        layer, sessions, key = self.layer, self._sessions, id(packed)
        w = packed.view(layer.numpy_dtype).reshape(layer.w_shape)
        session = onnx_session({"conv": layer}, {"conv.w": w}, self.threads)
        sessions[key] = weakref.ref(packed, lambda _: sessions.pop(key, None)), session
        return session

    def _baked(self, packed: Array) -> Any:
        owner, session = self._sessions.get(id(packed), (None, None))
        return session if owner is not None and owner() is packed else self._bake(packed)

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        inputs = {"conv.x": a}
        if not self.packed_bytes:
            inputs["conv.w"] = b
        if bias is not None:
            inputs["conv.bias"] = bias.reshape(1, -1, 1, 1)
        if residual is not None:
            inputs["conv.residual"] = residual
        session = self._baked(b) if self.packed_bytes else self._session
        session.run_with_iobinding(bound_arrays(session, inputs, {"conv.y": out}))


class Onnxruntime(Vendor):
    """ONNX Runtime's forward convolution, its filters an input of the model or part of it."""

    name = vendor = pool = "onnxruntime"
    packages = ("onnxruntime", "onnx")

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        return ({"weights": kind} for kind in ("constant", "varying"))

    def refusals(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        if params["weights"] not in ("constant", "varying"):
            reasons.append(f"weights={params['weights']}: allowed are constant, varying")
        for name, only in (("direction", "fwd"), ("dtype", "float32"), ("layout", "NCHW")):
            if getattr(layer, name) != only:
                reasons.append(f"onnxruntime convolves {only} only, not {getattr(layer, name)}")
        return reasons

    def packs(self, layer: ConvLayer, params: Params) -> bool:
        return params["weights"] == "constant"

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        return OnnxruntimeKernel(layer, device, self.packed_bytes(layer, device, params))
