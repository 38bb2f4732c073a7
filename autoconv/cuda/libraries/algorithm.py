"""cuDNN as candidates, where it is installed: engines of its graph interface, and the older numbered algorithms."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from autoconv.accuracy import bound_for
from autoconv.algorithm import Algorithm, Array, Candidate, Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Launch, ceil_div
from autoconv.cuda.libraries import cudnn, cudnn_graph
from autoconv.cuda.libraries.cublas_cufft import LibraryError
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 256  # of the epilogue's kernel
CALL = 10e-6  # seconds of a call that computes next to nothing
ATOMIC = {"fwd": (), "dgrad": ("algo_0",), "wgrad": ("algo_0", "algo_3")}  # add in any order, says the API reference
ERROR_CAPS = {"winograd": 3e-5, "winograd_nonfused": 3e-5}  # error for float32
SUM_CAP = 2e-6  # of all others, as of a direct sum
TF32_CAP = 2.0**-10
RANKED = 10  # configurations tried, as many as by PyTorch's benchmark mode; beyond them, one of each other engine
UNRANKED = 4.0  # times a GEMM's time, that of engines which cuDNN makes no promise of
REFUSED = {
    "narrow_inputs": "it rounds its operands to a narrower type",
    "narrow_sums": "it adds in a narrower type than float32",
}
LIKELY = {"winograd": 0.6, "winograd_nonfused": 0.8, "implicit_precomp_gemm": 1.0, "algo_1": 1.0}  # of a GEMM's time


class CudnnFamily(Algorithm["CUDA"]):
    """What candidates of both interfaces have in common."""

    vendor = "cudnn"
    spreads_nonfinite = True

    @property
    def version(self) -> str:
        return cudnn.version()

    def installed(self) -> bool:
        return cudnn.installed()

    def loaded(self) -> bool:
        return cudnn.loaded()


class Cudnn(CudnnFamily):
    """The algorithms that give the same bits every time, without TF32."""

    name = "cudnn"
    maths: ClassVar[dict[str, tuple[str, ...]]] = {
        "float32": ("fma",),
        "float64": ("fma",),
        "float16": ("tensor", "fma"),
        "bfloat16": ("tensor", "fma"),
    }

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        for name in cudnn.ALGORITHMS[layer.direction]:
            if (name in ATOMIC[layer.direction]) != self.deterministic:
                yield from ({"ALGO": name, "MATH": arithmetic} for arithmetic in self.maths.get(layer.dtype, ()))

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        name, reasons = params["ALGO"], []
        for what, value, allowed in (
            ("MATH", params["MATH"], self.maths[layer.dtype]),
            ("ALGO", name, cudnn.ALGORITHMS[layer.direction]),
        ):
            if value not in allowed:
                reasons.append(f"{what}={value}: expected {' or '.join(allowed)} for {layer.direction}-{layer.dtype}")
        if any(before != after for before, after in layer.padding):
            reasons.append(f"padding={layer.padding}: expected the same on both sides")
        if layer.has_epilogue and not _native(layer, params) and layer.itemsize < 4:
            reasons.append(
                f"epilogue: expected ReLU, or ALGO=implicit_precomp_gemm; ours would round {layer.dtype} twice"
            )
        if not reasons:
            found = _workspace(device.index, layer, *_numbered(layer, params))
            reasons += [found] if isinstance(found, str) else []
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        found = _workspace(device.index, layer, *_numbered(layer, params))
        return found if isinstance(found, int) else 0

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        return _seconds(layer, device, params["MATH"] != "fma", LIKELY.get(str(params["ALGO"]), 2.0))

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, ERROR_CAPS.get(str(params["ALGO"]), SUM_CAP))

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        fused = _native(layer, params)
        epilogue = None
        if layer.has_epilogue and not fused:
            epilogue = device.load(epilogue_unit(layer))
        algorithm, arithmetic = _numbered(layer, params)
        return CudnnKernel(
            device, layer, algorithm, arithmetic, self.workspace_bytes(layer, device, params), epilogue, fused
        )


class CudnnAtomic(Cudnn):
    """Those that add in whichever order their blocks finish."""

    name = "cudnn.atomic"
    deterministic = False


class CudnnTF32(Cudnn):
    """float32 on tensor cores, which round operands to ten bits: only where the caller allows it."""

    name = "cudnn.tf32"
    tf32 = True
    dtypes = ("float32",)
    maths: ClassVar[dict[str, tuple[str, ...]]] = {"float32": ("tf32",)}

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, TF32_CAP)


class CudnnAtomicTF32(CudnnTF32):
    """Both."""

    name = "cudnn.atomic.tf32"
    deterministic = False


def epilogue_unit(layer: ConvLayer) -> Unit:
    """The kernel that ends, in place, what cuDNN begins."""
    blocks = ceil_div(math.prod(layer.output_shape), THREADS)
    return Unit("epilogue", "libraries/epilogue.cu", layer, (blocks, 1, 1), THREADS, 4)


class CudnnKernel(Kernel):
    """One call of cuDNN, and our epilogue where it has none."""

    def __init__(
        self,
        gpu: CUDA,
        layer: ConvLayer,
        algorithm: int,
        arithmetic: str,
        nbytes: int,
        epilogue: Launch | None,
        fused: bool,
    ) -> None:
        self._gpu, self._algorithm, self._epilogue, self._fused = gpu, algorithm, epilogue, fused
        self._convolution = _convolution(layer, arithmetic)
        self.workspace_bytes = nbytes
        self._no_bias = _no_bias(gpu, layer) if fused and not layer.bias else None

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        gpu = self._gpu
        address = gpu.address
        scratch = address(workspace), self.workspace_bytes
        given = (gpu.index, gpu.launches_on(), self._algorithm, address(a), address(b), address(out), scratch)
        if self._fused:
            added = address(self._no_bias if bias is None else bias)
            self._convolution.run_with_epilogue(*given, added, None if residual is None else address(residual))
        else:
            self._convolution.run(*given)
            if self._epilogue is not None:
                self._epilogue(out, bias, residual)


class CudnnGraph(CudnnFamily):
    """The engines of the graph interface that by its notes give the same bits every time, without TF32.

    A candidate is an engine's number and the choice of its knobs, so that any process can make it again, and
    METHOD where it is none of sums.
    """

    name = "cudnn.graph"
    asks_vendor = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        tried = _tried(self, device.index, layer)
        return [{}] if isinstance(tried, str) else [params for params, _ in tried]

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        if not params:
            tried = _tried(self, device.index, layer)
            return [tried if isinstance(tried, str) else "ENGINE: expected a number, got none"]
        found = _configured(device.index, layer, *_parsed(params))
        if isinstance(found, str):
            return [found]
        engine, _ = found
        reasons = [reason for note, reason in REFUSED.items() if note in engine.notes]
        if not self.takes(layer, engine):
            notes = ", ".join(sorted(engine.notes)) or "none"
            reasons.append(f"notes of the engine: expected those of {self.name}, got {notes}")
        if _params(engine) != params:
            reasons.append(f"expected its full name, {Candidate(self.name, tuple(_params(engine).items()))}")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        found = _configured(device.index, layer, *_parsed(params))
        return 0 if isinstance(found, str) else found[1]

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        tried = _tried(self, device.index, layer)
        known = () if isinstance(tried, str) else tried
        factor = next((factor for one, factor in known if one == params), UNRANKED)
        return _seconds(layer, device, self.tf32 or layer.itemsize < 4, factor)

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, ERROR_CAPS.get(str(params.get("METHOD")), SUM_CAP))

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        return GraphKernel(device, layer, _plan(device.index, layer, *_parsed(params)))

    def takes(self, layer: ConvLayer, engine: cudnn_graph.Engine) -> bool:
        """Whether the engine's notes make it one of this family."""
        tf32 = layer.dtype == "float32" and "tensor_core" in engine.notes
        return tf32 == self.tf32 and ("nondeterministic" not in engine.notes) == self.deterministic


class CudnnGraphAtomic(CudnnGraph):
    """Those that may add in another order every time."""

    name = "cudnn.graph.atomic"
    deterministic = False


class CudnnGraphTF32(CudnnGraph):
    """Those of float32 on tensor cores: only where the caller allows it."""

    name = "cudnn.graph.tf32"
    tf32 = True

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, TF32_CAP)


class CudnnGraphAtomicTF32(CudnnGraphTF32):
    """Both."""

    name = "cudnn.graph.atomic.tf32"
    deterministic = False


class GraphKernel(Kernel):
    """One plan of the graph interface, which has the epilogue in it."""

    def __init__(self, gpu: CUDA, layer: ConvLayer, plan: cudnn_graph.ExecutionPlan) -> None:
        self._gpu, self._plan = gpu, plan
        self.workspace_bytes = plan.workspace_bytes
        self._no_bias = _no_bias(gpu, layer) if layer.has_epilogue and not layer.bias else None

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        gpu = self._gpu
        epilogue = (array for array in (residual, self._no_bias if bias is None else bias) if array is not None)
        self._plan.run(gpu.index, gpu.launches_on(), *map(gpu.address, (workspace, a, b, out, *epilogue)))


def _native(layer: ConvLayer, params: Params) -> bool:
    """Whether cuDNN itself has the epilogue: without an activation only in one of its algorithms."""
    return layer.has_epilogue and (layer.activation == "relu" or params["ALGO"] == "implicit_precomp_gemm")


def _no_bias(gpu: CUDA, layer: ConvLayer) -> Array:
    return gpu.zeros(layer.K * layer.itemsize).view(layer.numpy_dtype)


def _seconds(layer: ConvLayer, device: CUDA, tensor: bool, factor: float) -> float:
    """An estimate; the factor is of a GEMM's time."""
    peak = device.peak_flops("float16" if tensor else layer.accumulator.name)
    compute = factor * layer.flops / (0.6 * peak / (2 if layer.itemsize == 4 and tensor else 1))
    return CALL + max(compute, layer.bytes / device.bandwidth())


def _params(engine: cudnn_graph.Engine) -> dict[str, int | str]:
    knobs = ".".join(f"{kind}-{value}" for kind, value in engine.knobs)
    method = next((note for note in ERROR_CAPS if note in engine.notes), "")
    optional = {name: text for name, text in (("KNOBS", knobs), ("METHOD", method)) if text}
    return {"ENGINE": engine.number} | optional


def _parsed(params: Params) -> tuple[int, cudnn_graph.Knobs]:
    """The number of the engine and its knobs."""
    knobs = [knob.partition("-") for knob in str(params["KNOBS"]).split(".")] if "KNOBS" in params else []
    return int(params["ENGINE"]), tuple((int(kind), int(value)) for kind, _, value in knobs)


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


@functools.lru_cache(maxsize=1024)
def _offered(gpu: int, layer: ConvLayer) -> list[cudnn_graph.Engine] | str:
    """What the graph interface offers for a layer, or why it offers nothing."""
    try:
        return cudnn_graph.offered(gpu, layer)
    except LibraryError as error:
        return str(error)


@functools.lru_cache(maxsize=4096)
def _tried(family: CudnnGraph, gpu: int, layer: ConvLayer) -> list[tuple[Params, float]] | str:
    """A family's candidates, with how long each may take, as a factor; or why cuDNN offers none of any family."""
    offered = _offered(gpu, layer)
    if isinstance(offered, str):
        return offered
    mine = [engine for engine in offered if family.takes(layer, engine) and not engine.notes & REFUSED.keys()]
    kept: dict[cudnn_graph.Engine, float] = {}
    for rank, engine in enumerate(mine):
        if rank < RANKED or all(engine.number != other.number for other in kept):
            kept[engine] = (1 if engine.ranked else UNRANKED) + rank / RANKED
    return [(_params(engine), factor) for engine, factor in kept.items()]


@functools.lru_cache(maxsize=16384)
def _configured(
    gpu: int, layer: ConvLayer, number: int, knobs: cudnn_graph.Knobs
) -> tuple[cudnn_graph.Engine, int] | str:
    """An engine and the bytes of scratch it needs, or why cuDNN does not take it."""
    try:
        return cudnn_graph.configured(gpu, layer, number, knobs)
    except LibraryError as error:
        return str(error)


@functools.lru_cache(maxsize=256)
def _plan(gpu: int, layer: ConvLayer, number: int, knobs: cudnn_graph.Knobs) -> cudnn_graph.ExecutionPlan:
    return cudnn_graph.ExecutionPlan(gpu, layer, number, knobs)
