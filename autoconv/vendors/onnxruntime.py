"""ONNX Runtime's convolution (MLAS's) as a candidate, and the models and sessions that run it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autoconv.algorithm import Array, Kernel, Params
from autoconv.vendors.base import Vendor

if TYPE_CHECKING:
    from autoconv.device import Device
    from autoconv.layer import ConvLayer

OPSET, IR_VERSION = 17, 9  # of the models given to ONNX Runtime: what every release since 1.15 reads
WEIGHTS = ("constant", "varying")
# ONNX Runtime's names of settings.
SPINNING = "session.intra_op.allow_spinning"
FOLDER = "session.model_external_initializers_file_folder_path"


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
    return model_session(onnx_model(layers, constants), threads)


def model_session(model: bytes, threads: int, profile: str = "", spinning: bool = True, whole: bool = False) -> Any:
    """The same for any model; with a profile, which is written to a file whose name begins so.

    Its threads spin for a while after a run, which takes a core from whoever runs next, unless they are told not to. A
    model that is to be `whole` reads nothing from files, in which it could else name its constants.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    if not spinning:
        options.add_session_config_entry(SPINNING, "0")
    if whole:
        options.add_session_config_entry(FOLDER, os.devnull)  # which has no files
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


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
    directions = ("fwd",)
    dtypes = ("float32",)
    layouts = ("NCHW",)
    packages = ("onnxruntime", "onnx")
    call = 40e-6

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        return ({"weights": kind} for kind in WEIGHTS)

    def refusals(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        if params["weights"] not in WEIGHTS:
            reasons.append(f"weights: expected {' or '.join(WEIGHTS)}, got {params['weights']}")
        return reasons

    def packs(self, layer: ConvLayer, params: Params) -> bool:
        return params["weights"] == "constant"

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        return OnnxruntimeKernel(layer, device, self.packed_bytes(layer, device, params))
