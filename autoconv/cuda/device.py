"""An NVIDIA GPU as a device, through CuPy: what it is, what runs on it, how launches on it are timed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autoconv.algorithm import Algorithm, Array, Params
from autoconv.cuda.codegen.compiler import CompileError, compiled, nvrtc
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.codegen.tensor_map import passing
from autoconv.cuda.libraries.cublas_cufft import BLAS, Transform, cublas, cufft
from autoconv.device import Device, Operands, Stopwatch
from autoconv.errors import ArrayError, PlanError
from autoconv.layer import DTYPES, ConvLayer

if TYPE_CHECKING:
    from types import ModuleType


ALIGNMENT = 16  # bytes of the widest load
DLPACK_HOST, DLPACK_CUDA = 1, 2
NO_DEVICE = 100  # cudaErrorNoDevice
DEFAULT_STREAMS = (0, 1)  # which cannot be captured
DECLARABLE = 48 << 10  # bytes of shared memory that a kernel gets without asking
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
REPLAYS = 4  # graph replays to a sample
MOST_SETS = 64  # operand sets to a graph; small layers cannot fill the L2 with a sensible number of them

# Multiply-adds a clock of one multiprocessor, by compute capability (times ten): float32 outside the
# tensor cores, float64, and 16-bit in them (CUDA C++ Programming Guide, "Arithmetic Instructions").
RATES: dict[int, tuple[int, int, int]] = {
    75: (64, 2, 512),
    80: (64, 32, 1024),
    86: (128, 2, 512),
    89: (128, 2, 512),
    90: (128, 64, 2048),
    100: (128, 64, 4096),
    120: (128, 2, 512),
}


def why_unavailable() -> str:
    """What is missing for this device, in one line; empty when nothing is."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not importable ({error}): pip install 'autoconv[cuda13]' or 'autoconv[cuda12]'"
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if error.status == NO_DEVICE:
            return "the driver sees no GPU"
        return f"CuPy {cupy.__version__} finds no usable driver ({error})"
    if not count:
        return "the driver sees no GPU"
    try:
        compiler = nvrtc().version
    except CompileError as error:
        return str(error)
    driver = runtime.driverGetVersion()
    if driver // 1000 < compiler[0]:  # within one major version, any driver loads any cubin
        return (
            f"the driver is of CUDA {_dotted(driver)}, older than the compiler, NVRTC {compiler[0]}.{compiler[1]}, "
            f"whose kernels it cannot load: update the driver, or install cupy-cuda{driver // 1000}x"
        )
    return ""


def _dotted(version: int) -> str:
    """A version as CUDA's interfaces give it: 13020 is 13.2."""
    return f"{version // 1000}.{version % 1000 // 10}"


@dataclass(frozen=True)
class CUDA(Device):
    """A GPU by its number among those CuPy sees."""

    index: int = 0
    kind = "cuda"

    @classmethod
    def current(cls) -> CUDA:
        """CuPy's current GPU.

        Raises
        ------
        PlanError
            When there is none; the message says what is missing.
        """
        missing = why_unavailable()
        if missing:
            raise PlanError(f"no CUDA device: {missing}")
        import cupy

        return cls(cupy.cuda.runtime.getDevice())

    @classmethod
    @functools.cache
    def numbered(cls, index: int) -> CUDA:
        """The GPU of that number.

        Raises
        ------
        PlanError
            When there is none; the message says what is missing, or how many there are.
        """
        missing = why_unavailable()
        if missing:
            raise PlanError(f"no CUDA device: {missing}")
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if not 0 <= index < count:
            raise PlanError(f"no CUDA device {index}: the driver sees {count}, numbered from 0")
        return cls(index)

    @property
    def key(self) -> str:
        """Model, compute capability and number of multiprocessors."""
        facts = self.facts
        name = str(facts["name"]).replace(" ", "_")
        return f"cuda-{name}-sm{facts['compute_capability']}-{facts['multiprocessors']}SMs"

    @property
    def name(self) -> str:
        """The model."""
        return str(self.facts["name"])

    @property
    def facts(self) -> dict[str, Any]:
        """Identity and sizes: bytes, hertz, bytes per second; the compute capability times ten."""
        return _facts(self.index)

    @property
    def versions(self) -> dict[str, str]:
        """CuPy, driver, runtime and compiler."""
        import cupy

        runtime = cupy.cuda.runtime
        return {
            "cupy": cupy.__version__,
            "driver": str(runtime.driverGetVersion()),
            "runtime": str(runtime.runtimeGetVersion()),
            "nvrtc": "{}.{}".format(*nvrtc().version),
        }

    @property
    def xp(self) -> ModuleType:
        """CuPy."""
        import cupy

        return cupy  # type: ignore[no-any-return]

    def address(self, array: Array) -> int:
        """Of an array's first element."""
        return int(array.data.ptr)

    def owns(self, array: object) -> bool:
        """Whether it is a CuPy array on this GPU."""
        return isinstance(array, self.xp.ndarray) and array.data.device_id == self.index

    def adopt(self, array: object, name: str) -> Array:
        """Anything on this GPU that speaks DLPack, as a CuPy array."""
        cupy = self.xp
        if isinstance(array, cupy.ndarray):
            raise ArrayError(f"{name} lies on GPU {array.data.device_id}, the plan is for GPU {self.index}")
        if not hasattr(array, "__dlpack_device__"):
            raise ArrayError(
                f"{name} is {type(array).__name__}: an array of CuPy, or one that speaks DLPack, is wanted"
            )
        kind, index = array.__dlpack_device__()
        if (int(kind), index) != (DLPACK_CUDA, self.index):
            where = "in host memory" if int(kind) == DLPACK_HOST else f"on device {index} of DLPack kind {int(kind)}"
            raise ArrayError(
                f"{name} ({type(array).__name__}) lies {where}: cupy.asarray brings it to GPU {self.index}"
            )
        return cupy.from_dlpack(array)

    def ready(self, array: Array) -> bool:
        """Contiguous, and on the boundary that the kernels' widest loads want."""
        return bool(array.flags.c_contiguous) and self.address(array) % ALIGNMENT == 0

    def writable(self, array: Array) -> bool:
        """CuPy's arrays all are."""
        return True

    def overlap(self, a: Array, b: Array) -> bool:
        """By the addresses: both are contiguous."""
        first, second = self.address(a), self.address(b)
        return bool(first < second + b.nbytes and second < first + a.nbytes)

    def memory_available(self) -> int:
        """What the driver has free, and what CuPy's pool keeps for later."""
        with self.selected():
            free, _ = self.xp.cuda.runtime.memGetInfo()
            return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array from CuPy's memory pool, which aligns to 512 bytes."""
        dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if self.elsewhere():
            with self.selected():
                return self.xp.empty(shape, dtype)
        return self.xp.empty(shape, dtype)

    def selected(self) -> AbstractContextManager[object]:
        """CuPy's own context."""
        return self.xp.cuda.Device(self.index)  # type: ignore[no-any-return]

    def elsewhere(self) -> bool:
        """Whether another GPU is CuPy's current one in this thread."""
        return bool(self.xp.cuda.runtime.getDevice() != self.index)

    def launches_on(self) -> int:
        """The address of CuPy's current stream."""
        return int(self.xp.cuda.get_current_stream().ptr)

    def stream(self) -> int:
        """As `launches_on`; while that stream is captured, minus the number of the capture."""
        stream = self.xp.cuda.get_current_stream()
        if stream.ptr in DEFAULT_STREAMS or not stream.is_capturing():
            return int(stream.ptr)
        return -_capture(stream.ptr)

    def synchronize(self) -> None:
        """Wait for the current stream, where a failed launch raises."""
        self.xp.cuda.get_current_stream().synchronize()

    def lost(self) -> str:
        """What the driver answers to everything after an illegal address or the like, which only a new process ends."""
        runtime = self.xp.cuda.runtime
        try:
            with self.selected():
                runtime.deviceSynchronize()
        except runtime.CUDARuntimeError as error:
            return str(error)
        return ""

    def prepare(self, layer: ConvLayer, candidates: Sequence[tuple[Algorithm[Any], Params]]) -> None:
        """As many kernels at once as there are processors; each is then found in the folder of compiled ones."""
        from autoconv.cuda.common.algorithm import CudaAlgorithm

        units: dict[str, None] = {}
        for algorithm, params in candidates:
            if isinstance(algorithm, CudaAlgorithm):
                units |= dict.fromkeys(unit.text for unit in algorithm.units(layer, params))
        capability = self.facts["compute_capability"]

        def compile_ahead(text: str) -> None:
            with contextlib.suppress(CompileError):  # building it says so
                compiled(text, capability)

        with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1) or 1) as pool:
            list(pool.map(compile_ahead, units))

    def load(self, unit: Unit) -> Callable[..., None]:
        """A kernel, compiled where need be, as a function of its arrays (or None) on the current stream.

        Raises
        ------
        CompileError
            When NVRTC refuses the text, or the driver what NVRTC made of it.
        """
        block, shared = (unit.threads, 1, 1), unit.dynamic
        grid = unit.resident(self.facts["multiprocessors"]) if unit.persistent else unit.grid
        with self.selected():
            function: Any = _function(self.index, unit.text, unit.function, self.facts["compute_capability"])
            if shared > DECLARABLE:
                self.xp.cuda.driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED, shared)

        def launch(*arguments: Array | None) -> None:  # of None, CuPy makes a null pointer
            function(grid, block, arguments, shared_mem=shared)

        if unit.maps:
            mapped = passing(unit.maps, self.address)
            return lambda *arguments: launch(*mapped(arguments))
        return launch

    def blas(self) -> BLAS:
        """What calls cuBLAS.

        Raises
        ------
        LibraryError
            When it cannot be loaded.
        """
        return cublas()

    def fourier(self, lengths: tuple[int, int], batch: int, dtype: str, back: bool) -> Transform:
        """A plan of cuFFT: real planes to half spectra, or `back`, without a factor.

        Raises
        ------
        LibraryError
            When cuFFT cannot be loaded, or refuses.
        """
        with self.selected():
            return cufft(self.index, lengths, batch, dtype, back)

    def stopwatch(self, launch: Callable[[Operands], None], operands: Operands) -> Stopwatch:
        """Events around replays of a graph; `cold` goes through operand sets larger than twice the L2."""
        nbytes = sum(array.nbytes for array in (operands.a, operands.b, operands.out))
        sets = min(2 * self.facts["l2_bytes"] // max(nbytes, 1) + 2, MOST_SETS)
        return Stopwatch(cold=self._replayer(launch, operands, sets), hot=self._replayer(launch, operands, 1))

    def _replayer(self, launch: Callable[[Operands], None], operands: Operands, sets: int) -> Callable[[], float]:
        cupy = self.xp
        copies = [operands]
        for _ in range(sets - 1):
            bias, residual = (None if x is None else x.copy() for x in (operands.bias, operands.residual))
            fresh = (operands.a.copy(), operands.b.copy(), cupy.empty_like(operands.out))
            copies.append(Operands(*fresh, bias, residual, operands.workspace))
        stream = cupy.cuda.Stream(non_blocking=True)
        launches = max(sets, 8)  # enough to make the replay's own cost small
        cupy.cuda.get_current_stream().synchronize()  # the copies must be there
        with stream:
            launch(operands)  # what is loaded or allocated once must not be captured
            stream.begin_capture()
            for i in range(launches):
                launch(copies[i % sets])
            graph = stream.end_capture()
            graph.upload(stream)
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()

        def sample() -> float:
            with stream:
                graph.launch(stream)
                start.record(stream)
                for _ in range(REPLAYS):
                    graph.launch(stream)
                stop.record(stream)
            stop.synchronize()
            return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3 / (REPLAYS * launches)

        return sample

    def peak_flops(self, dtype: str) -> float:
        """Operations per second by the clock and the width of the units; tensor cores for 16 bits."""
        facts = self.facts
        single, double, half = RATES[max((c for c in RATES if c <= facts["compute_capability"]), default=75)]
        width = {"float32": single, "float64": double}.get(dtype, half)
        return 2.0 * width * float(facts["multiprocessors"]) * float(facts["clock_hz"])

    def bandwidth(self) -> float:
        """Bytes per second of the memory, by its clock and width."""
        return float(self.facts["bandwidth"])

    def measured_peak(self, dtype: str) -> float:
        """Of cuBLAS on a product of 8192 cubed, or 2048 for float64; "tf32" is a type too."""
        return _measured_peak(self.index, dtype)


def _capture(stream: int) -> int:
    """The number that the driver gave to the capture of a stream; CuPy does not tell it."""
    state, number = ctypes.c_int(), ctypes.c_uint64()
    status = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(state), ctypes.byref(number), None, None, None
    )
    if status:
        raise PlanError(f"the driver does not tell which capture this is: CUDA error {status}")
    return number.value


@functools.cache
def _facts(index: int) -> dict[str, Any]:
    import cupy

    found = cupy.cuda.runtime.getDeviceProperties(index)
    name = found["name"]
    # newer runtimes report no clocks with the properties, but still as attributes, in kilohertz
    attributes = cupy.cuda.Device(index).attributes
    memory_hz = 1e3 * attributes.get("MemoryClockRate", 0)
    return {
        "name": name.decode() if isinstance(name, bytes) else name,
        "compute_capability": 10 * found["major"] + found["minor"],
        "multiprocessors": found["multiProcessorCount"],
        "l2_bytes": found["l2CacheSize"],
        "memory_bytes": found["totalGlobalMem"],
        "shared_per_block": found["sharedMemPerBlockOptin"],
        "clock_hz": 1e3 * attributes.get("ClockRate", 0) or 1.5e9,
        "bandwidth": 2 * memory_hz * found["memoryBusWidth"] / 8 or 1e12,
    }


@functools.cache
def _measured_peak(index: int, dtype: str) -> float:
    import cupy

    extent = 2048 if dtype == "float64" else 8192
    # CuPy has no matrix product in bfloat16; the tensor cores are as fast for float16
    stored = {"bfloat16": "float16", "tf32": "float32"}.get(dtype, dtype)
    with cupy.cuda.Device(index), _tf32(dtype == "tf32"):
        # not zeros or ones, which draw less power
        a = cupy.sin(cupy.arange(extent**2, dtype="float32")).reshape(extent, extent).astype(stored)
        seconds = []
        for _ in range(6):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            cupy.matmul(a, a)
            stop.record()
            stop.synchronize()
            seconds.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return float(2.0 * extent**3 / min(seconds))


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """CuPy's own switch for products of float32."""
    if not allowed:
        yield
        return
    from cupy._core import _routines_linalg as linalg

    before = linalg.get_compute_type(np.float32)
    linalg.set_compute_type(np.float32, linalg.COMPUTE_TYPE_TF32)
    try:
        yield
    finally:
        linalg.set_compute_type(np.float32, before)


@functools.lru_cache(maxsize=4096)
def _function(index: int, text: str, name: str, capability: int) -> Callable[..., None]:
    import cupy

    cubin = compiled(text, capability)
    with cupy.cuda.Device(index):
        module = cupy.cuda.function.Module()
        try:
            module.load(cubin)
        except cupy.cuda.driver.CUDADriverError as error:
            driver, compiler = _dotted(cupy.cuda.runtime.driverGetVersion()), "{}.{}".format(*nvrtc().version)
            raise CompileError(
                f"the driver (of CUDA {driver}) does not load {name} as NVRTC {compiler} compiled it: {error}"
            ) from None
        return module.get_function(name)  # type: ignore[no-any-return]
