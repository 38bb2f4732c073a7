"""cuDNN as candidates, where it is installed: every numbered algorithm with every kind of arithmetic."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, cast

from autoconv.algorithm import Algorithm, Array, Kernel, Params, bound_for
from autoconv.cuda import cudnn
from autoconv.cuda.algorithm import Launch, ceil_div
from autoconv.cuda.libraries import LibraryError
from autoconv.cuda.source import Unit
from autoconv.device import Device
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 256  # of the tail's kernel
CALL = 10e-6  # seconds of a call that computes next to nothing
ATOMIC = {"fwd": (), "dgrad": ("algo_0",), "wgrad": ("algo_0", "algo_3")}  # add in any order, says the API reference
CAPS = {"winograd": 3e-5, "winograd_nonfused": 3e-5}  # error for float32; others as a direct sum
LIKELY = {"winograd": 0.6, "winograd_nonfused": 0.8, "implicit_precomp_gemm": 1.0, "algo_1": 1.0}  # of a GEMM's time


class Cudnn(Algorithm):
    """The algorithms that give the same bits every time, without TF32."""

    name = "cudnn"
    vendor = "cudnn"
    spreads_nonfinite = True
    maths: ClassVar[dict[str, tuple[str, ...]]] = {
        "float32": ("fma",),
        "float64": ("fma",),
        "float16": ("tensor", "fma"),
        "bfloat16": ("tensor", "fma"),
    }

    @property
    def version(self) -> str:
        return cudnn.version()

    def installed(self) -> bool:
        return cudnn.installed()

    def loaded(self) -> bool:
        return cudnn.loaded()

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        for name in cudnn.ALGORITHMS[layer.direction]:
            if (name in ATOMIC[layer.direction]) != self.deterministic:
                yield from ({"ALGO": name, "MATH": arithmetic} for arithmetic in self.maths.get(layer.dtype, ()))

    def why_not(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        name, reasons = params["ALGO"], []
        if params["MATH"] not in self.maths.get(layer.dtype, ()):
            reasons.append(
                f"MATH={params['MATH']}: {layer.dtype} has {', '.join(self.maths.get(layer.dtype, ())) or 'none'}"
            )
        if name not in cudnn.ALGORITHMS[layer.direction]:
            reasons.append(f"ALGO={name}: {layer.direction} has {', '.join(cudnn.ALGORITHMS[layer.direction])}")
        if any(before != after for before, after in layer.padding):
            reasons.append(f"cuDNN pads both sides alike, this layer {layer.padding}")
        if _tail(layer) and not _native(layer, params) and layer.itemsize < 4:
            reasons.append(
                f"a tail without ReLU is cuDNN's in implicit_precomp_gemm only; ours would round {layer.dtype} twice"
            )
        if not reasons:
            found = _workspace(device.index, layer, *_numbered(layer, params))  # type: ignore[attr-defined]
            reasons += [found] if isinstance(found, str) else []
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        found = _workspace(cast("CUDA", device).index, layer, *_numbered(layer, params))
        return found if isinstance(found, int) else 0

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        tensor = params["MATH"] != "fma"
        peak = device.peak_flops("float16" if tensor else layer.accumulator.name) / (
            2 if layer.itemsize == 4 and tensor else 1
        )
        compute = LIKELY.get(str(params["ALGO"]), 2.0) * layer.flops / (0.6 * peak)
        return CALL + max(compute, layer.bytes / device.bandwidth())

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, CAPS.get(str(params["ALGO"]), 2e-6))

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        gpu, fused = cast("CUDA", device), _native(layer, params)
        tail = None
        if _tail(layer) and not fused:
            blocks = ceil_div(math.prod(layer.output_shape), THREADS)
            tail = gpu.load(Unit("vendor_tail", ("vendor.cu",), layer, (blocks, 1, 1), THREADS, 4))
        algorithm, arithmetic = _numbered(layer, params)
        return CudnnKernel(gpu, layer, algorithm, arithmetic, self.workspace_bytes(layer, device, params), tail, fused)


class CudnnAtomic(Cudnn):
    """Those that add in whichever order their blocks finish."""

    name = "cudnn.atomic"
    deterministic = False


class CudnnTF32(Cudnn):
    """float32 on tensor cores, which round operands to ten bits: only where the caller allows it."""

    name = "cudnn.tf32"
    tf32 = True
    maths: ClassVar[dict[str, tuple[str, ...]]] = {"float32": ("tf32",)}

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, 2.0**-10)


class CudnnAtomicTF32(CudnnTF32):
    """Both."""

    name = "cudnn.atomic.tf32"
    deterministic = False


class CudnnKernel(Kernel):
    """One call of cuDNN, and our tail where it has none."""

    def __init__(
        self,
        gpu: CUDA,
        layer: ConvLayer,
        algorithm: int,
        arithmetic: str,
        nbytes: int,
        tail: Launch | None,
        fused: bool,
    ) -> None:
        self._gpu, self._algorithm, self._tail, self._fused = gpu, algorithm, tail, fused
        self._convolution = _convolution(layer, arithmetic)
        self.workspace_bytes = nbytes
        self._no_bias = None
        if fused and not layer.bias:
            self._no_bias = gpu.empty((layer.K,), layer.numpy_dtype)
            self._no_bias[...] = 0

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        gpu = self._gpu
        address = gpu.address
        scratch = address(workspace), self.workspace_bytes
        given = (gpu.index, gpu.launches_on(), self._algorithm, address(a), address(b), address(out), scratch)
        if self._fused:
            added = address(self._no_bias if bias is None else bias)
            self._convolution.run_with_tail(*given, added, None if residual is None else address(residual))
        else:
            self._convolution.run(*given)
            if self._tail is not None:
                self._tail(out, bias, residual)


def _tail(layer: ConvLayer) -> bool:
    return layer.bias or layer.residual or layer.activation is not None


def _native(layer: ConvLayer, params: Params) -> bool:
    """Whether cuDNN itself has the tail: without an activation only in one of its algorithms."""
    return _tail(layer) and (layer.activation == "relu" or params["ALGO"] == "implicit_precomp_gemm")


def _numbered(layer: ConvLayer, params: Params) -> tuple[int, str]:
    return cudnn.ALGORITHMS[layer.direction].index(str(params["ALGO"])), str(params["MATH"])


@functools.lru_cache(maxsize=1024)
def _convolution(layer: ConvLayer, arithmetic: str) -> cudnn.Convolution:
    return cudnn.Convolution(layer, arithmetic)


@functools.lru_cache(maxsize=16384)
def _workspace(gpu: int, layer: ConvLayer, algorithm: int, arithmetic: str) -> int | str:
    """Bytes of scratch, or why cuDNN does not take the layer."""
    try:
        return _convolution(layer, arithmetic).workspace(gpu, algorithm)
    except LibraryError as error:
        return str(error)
