"""cuDNN by ctypes: found at run time, loaded when first asked, never required; and its convolution calls.

These are the older interface, of numbered algorithms (cuDNN API Reference, "cudnn_cnn"). Newer engines are
offered through the graph interface alone, in `cudnn_graph`.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import importlib.util
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoconv.cuda.libraries.cublas_cufft import LibraryError
from autoconv.layer import ConvLayer

SONAME = "libcudnn.so.9"
WHEELS = ("nvidia/cudnn/lib", "torch/lib")
TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
FORMATS = {"NCHW": 0, "NHWC": 1}
CROSS_CORRELATION = 1
REASON = 300  # bytes of it, at most
MATHS = {"tf32": 0, "tensor": 1, "fma": 3}  # default (which allows TF32), tensor operations, multiply-adds alone
RELU, IDENTITY, PROPAGATE_NAN = 1, 5, 1
ALGORITHMS = {
    "fwd": (
        *("implicit_gemm", "implicit_precomp_gemm", "gemm", "direct"),
        *("fft", "fft_tiling", "winograd", "winograd_nonfused"),
    ),
    "dgrad": ("algo_0", "algo_1", "fft", "fft_tiling", "winograd", "winograd_nonfused"),
    "wgrad": ("algo_0", "algo_1", "fft", "algo_3", "winograd", "winograd_nonfused", "fft_tiling"),
}
CALLS = {"fwd": "Forward", "dgrad": "BackwardData", "wgrad": "BackwardFilter"}


def places() -> Iterator[str]:
    """Where the library may be: in this process, in wheels, on the system's path."""
    yield SONAME if loaded() else ""
    for package in ("nvidia", "torch"):
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(package)
            for root in (found.submodule_search_locations or ()) if found else ():
                yield from (str(Path(root).parent / folder / SONAME) for folder in WHEELS)
    yield SONAME


def loaded() -> bool:
    """Whether this process has a cuDNN already, its own or a framework's."""
    try:
        ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


@functools.cache
def installed() -> bool:
    """Whether there is one to be loaded; nothing is."""
    if loaded() or any(Path(place).is_file() for place in places()):
        return True
    return ctypes.util.find_library("cudnn") is not None


@functools.cache
def library() -> Any:
    """The library.

    Raises
    ------
    LibraryError
        When there is none.
    """
    for place in filter(None, places()):
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(place)
            found.cudnnGetErrorString.restype = ctypes.c_char_p
            found.cudnnGetVersion.restype = ctypes.c_size_t
            return found
    raise LibraryError(f"no {SONAME}: it comes with nvidia-cudnn-cu13 or nvidia-cudnn-cu12, with torch, or from NVIDIA")


def version() -> str:
    """Of the library, such as "91002"; "absent" where there is none."""
    try:
        return str(library().cudnnGetVersion())
    except LibraryError:
        return "absent"


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library.

    Raises
    ------
    LibraryError
        When it has none of that name, or gives another status than success; with what it says of that.
    """
    found = library()
    try:
        status = getattr(found, name)(*arguments)
    except AttributeError:
        raise LibraryError(f"cuDNN {version()} has no {name}") from None
    if status:
        message = ctypes.create_string_buffer(REASON)
        found.cudnnGetLastErrorString(message, ctypes.c_size_t(REASON))
        reason = " ".join(message.value.decode(errors="replace").split())
        raise LibraryError(": ".join(filter(None, (name, found.cudnnGetErrorString(status).decode(), reason))))


_handles = threading.local()


def handle(gpu: int) -> ctypes.c_void_p:
    """This thread's handle on the current GPU, whose number is given: one handle serves one thread at a time."""
    known: dict[str, ctypes.c_void_p] = _handles.__dict__
    name = f"gpu{gpu}"
    if name not in known:
        made = ctypes.c_void_p()
        call("cudnnCreate", ctypes.byref(made))
        known[name] = made
    return known[name]


def _descriptor(kind: str) -> tuple[ctypes.c_void_p, Any]:
    made = ctypes.c_void_p()
    call(f"cudnnCreate{kind}Descriptor", ctypes.byref(made))
    return made, getattr(library(), f"cudnnDestroy{kind}Descriptor")


class Convolution:
    """A layer as cuDNN's descriptors, for one kind of arithmetic; padding alike on both sides."""

    def __init__(self, layer: ConvLayer, math: str) -> None:
        self.layer = layer
        made = {name: _descriptor(kind) for name, kind in self._kinds(layer).items()}
        self.x, self.w, self.y, self.convolution, *epilogue = (found for found, _ in made.values())
        self.bias: Any = epilogue[0] if epilogue else None
        self.activation: Any = epilogue[1] if epilogue else None
        weakref.finalize(self, _destroy, list(made.values()))
        dtype = TYPES[layer.dtype]
        for descriptor, shape in ((self.x, (layer.C, layer.H, layer.W)), (self.y, (layer.K, layer.P, layer.Q))):
            self._tensor(descriptor, (layer.N, *shape))
        filters = layer.K, layer.C // layer.groups, layer.R, layer.S
        call("cudnnSetFilter4dDescriptor", self.w, dtype, FORMATS[layer.layout], *filters)
        (top, _), (left, _) = layer.padding
        geometry = (top, left, *layer.stride, *layer.dilation)
        accumulator = TYPES[layer.accumulator.name]
        call("cudnnSetConvolution2dDescriptor", self.convolution, *geometry, CROSS_CORRELATION, accumulator)
        call("cudnnSetConvolutionGroupCount", self.convolution, layer.groups)
        call("cudnnSetConvolutionMathType", self.convolution, MATHS[math])
        if self.activation is not None:
            self._tensor(self.bias, (1, layer.K, 1, 1))
            mode = RELU if layer.activation == "relu" else IDENTITY
            call("cudnnSetActivationDescriptor", self.activation, mode, PROPAGATE_NAN, ctypes.c_double(0))
        scalar = ctypes.c_double if layer.dtype == "float64" else ctypes.c_float
        self._one, self._zero = scalar(1), scalar(0)

    @staticmethod
    def _kinds(layer: ConvLayer) -> dict[str, str]:
        kinds = {"x": "Tensor", "w": "Filter", "y": "Tensor", "convolution": "Convolution"}
        epilogue = {"bias": "Tensor", "activation": "Activation"}
        return kinds | (epilogue if layer.has_epilogue else {})

    def _tensor(self, descriptor: Any, shape: tuple[int, ...]) -> None:
        """Of shape N, C, H, W, its strides those of the layout."""
        N, C, H, W = shape
        strides = (C * H * W, H * W, W, 1) if self.layer.layout == "NCHW" else (H * W * C, 1, W * C, C)
        call("cudnnSetTensor4dDescriptorEx", descriptor, TYPES[self.layer.dtype], N, C, H, W, *strides)

    @property
    def _operands(self) -> tuple[Any, Any, Any]:
        """Descriptors of both operands and the output, in the order of cuDNN's arguments."""
        return {
            "fwd": (self.x, self.w, self.y),
            "dgrad": (self.w, self.y, self.x),
            "wgrad": (self.x, self.y, self.w),
        }[self.layer.direction]

    def workspace(self, gpu: int, algorithm: int) -> int:
        """Bytes of scratch that an algorithm needs.

        Raises
        ------
        LibraryError
            When it does not take the layer.
        """
        size = ctypes.c_size_t()
        first, second, out = self._operands
        name = f"cudnnGetConvolution{CALLS[self.layer.direction]}WorkspaceSize"
        call(name, handle(gpu), first, second, self.convolution, out, algorithm, ctypes.byref(size))
        return size.value

    def run(self, gpu: int, stream: int, algorithm: int, a: int, b: int, out: int, scratch: tuple[int, int]) -> None:
        """Launch the convolution alone on a stream; arrays by their addresses, scratch with its size."""
        mine, pointer = handle(gpu), ctypes.c_void_p
        call("cudnnSetStream", mine, pointer(stream))
        if self.layer.direction == "dgrad":
            a, b = b, a
        first, second, third = self._operands
        name = f"cudnnConvolution{CALLS[self.layer.direction]}"
        given = (ctypes.byref(self._one), first, pointer(a), second, pointer(b), self.convolution, algorithm)
        workspace = pointer(scratch[0]), ctypes.c_size_t(scratch[1])
        call(name, mine, *given, *workspace, ctypes.byref(self._zero), third, pointer(out))

    def run_with_epilogue(
        self,
        gpu: int,
        stream: int,
        algorithm: int,
        a: int,
        b: int,
        out: int,
        scratch: tuple[int, int],
        bias: int,
        residual: int | None,
    ) -> None:
        """Launch the convolution and its epilogue as one call; `bias` is the address of K values."""
        mine, pointer = handle(gpu), ctypes.c_void_p
        call("cudnnSetStream", mine, pointer(stream))
        scale = self._zero if residual is None else self._one
        call(
            "cudnnConvolutionBiasActivationForward",
            *(mine, ctypes.byref(self._one), self.x, pointer(a), self.w, pointer(b), self.convolution, algorithm),
            *(pointer(scratch[0]), ctypes.c_size_t(scratch[1])),
            *(ctypes.byref(scale), self.y, pointer(out if residual is None else residual)),
            *(self.bias, pointer(bias), self.activation, self.y, pointer(out)),
        )


def _destroy(made: list[tuple[Any, Any]]) -> None:
    for descriptor, destroy in made:
        destroy(descriptor)
