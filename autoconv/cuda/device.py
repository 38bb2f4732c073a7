"""An NVIDIA GPU as a device, through CuPy: its arrays, its streams, and how kernels are launched on it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoconv.algorithm import Algorithm, Array, Params
from autoconv.common.arrays import like
from autoconv.cuda import hardware
from autoconv.cuda.codegen import compiler
from autoconv.cuda.codegen.compiler import CompileError
from autoconv.cuda.codegen.occupancy import STATIC_SHARED
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.codegen.tensor_map import passing
from autoconv.cuda.common.algorithm import CudaAlgorithm
from autoconv.cuda.libraries.cublas_cufft import BLAS, Transform, cublas, cufft
from autoconv.cuda.timing import capture, operand_sets, replayer
from autoconv.device import Device, Operands, Stopwatch, with_its_sign
from autoconv.errors import ArrayError, PlanError
from autoconv.layer import DTYPES, ConvLayer

if TYPE_CHECKING:
    from types import ModuleType


ALIGNMENT = 16  # bytes of the widest load
DLPACK_HOST, DLPACK_CUDA = 1, 2
DEFAULT_STREAMS = (0, 1)  # which cannot be captured
ADDRESS_BITS = 64  # of a stream
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(frozen=True)
class CUDA(Device):
    """A GPU by its number among those CuPy sees."""

    index: int = 0
    kind = "cuda"
    alignment = ALIGNMENT

    @classmethod
    def current(cls) -> CUDA:
        """CuPy's current GPU.

        Raises
        ------
        PlanError
            When there is none; the message says what is missing.
        """
        missing = hardware.why_unavailable()
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
        missing = hardware.why_unavailable()
        if missing:
            raise PlanError(f"no CUDA device: {missing}")
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if not 0 <= index < count:
            raise PlanError(f"no CUDA device {index}: expected 0 to {count - 1}, which the driver sees")
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
        return hardware.facts(self.index)

    @property
    def versions(self) -> dict[str, str]:
        """CuPy, driver, runtime and compiler."""
        import cupy

        runtime = cupy.cuda.runtime
        return {
            "cupy": cupy.__version__,
            "driver": str(runtime.driverGetVersion()),
            "runtime": str(runtime.runtimeGetVersion()),
            "nvrtc": "{}.{}".format(*compiler.nvrtc().version),
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

    def adopt(self, array: object, name: str, *, written: bool = False) -> Array:
        """Anything on this GPU that speaks DLPack, as a CuPy array."""
        cupy = self.xp
        if isinstance(array, cupy.ndarray):
            raise ArrayError(f"{name}: expected an array on GPU {self.index}, got one on GPU {array.data.device_id}")
        if not hasattr(array, "__dlpack_device__"):
            raise ArrayError(
                f"{name}: expected an array of CuPy, or one that speaks DLPack, got {type(array).__name__}"
            )
        kind, index = array.__dlpack_device__()
        if (int(kind), index) != (DLPACK_CUDA, self.index):
            where = "in host memory" if int(kind) == DLPACK_HOST else f"on device {index} of DLPack kind {int(kind)}"
            got = f"{type(array).__name__} {where}"
            raise ArrayError(f"{name}: expected an array on GPU {self.index}, got {got}: cupy.asarray copies it")
        return cupy.from_dlpack(with_its_sign(array, name, written))

    def hand_back(self, array: object, own: Array) -> None:
        """By DLPack, which has the stream of who takes an array wait for CuPy's."""
        like(array, own)

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

    def memory(self) -> int:
        """What the GPU has."""
        return int(self.facts["memory_bytes"])

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

    def zeros(self, nbytes: int) -> Array:
        """Bytes of zeros, which are there already for whatever is launched from now on, on any stream, or captured.

        They are no part of CuPy's pool: the driver, which gets them back, waits for kernels that are still at work.
        """
        cuda = self.xp.cuda
        with self.selected(), cuda.using_allocator(None), cuda.Stream(non_blocking=True) as stream:
            array = self.xp.zeros(nbytes, "uint8")
            stream.synchronize()
        return array

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
        """The current stream and the calling thread; while that stream is captured, minus the number of the capture.

        The default streams of all threads have one address, 2; and on a stream that threads share, the kernels of one
        run may come between those of another.
        """
        stream = self.xp.cuda.get_current_stream()
        if stream.ptr in DEFAULT_STREAMS or not stream.is_capturing():
            return threading.get_ident() << ADDRESS_BITS | int(stream.ptr)
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

    def get_ready_for(self, layer: ConvLayer, candidates: Sequence[tuple[Algorithm[Any], Params]]) -> None:
        """Compile as many kernels at once as there are processors; each then lies in the folder of compiled ones."""
        ours = ((one, params) for one, params in candidates if isinstance(one, CudaAlgorithm))
        self.compile(unit for algorithm, params in ours for unit in algorithm.units(layer, params))

    def compile(self, units: Iterable[Unit]) -> None:
        """Compile kernels ahead, side by side; `load` then finds them, or says what is wrong with them."""
        texts = dict.fromkeys(unit.text for unit in units)
        capability = self.facts["compute_capability"]

        def compile_ahead(text: str) -> None:
            with contextlib.suppress(CompileError):  # building it says so
                compiler.compiled(text, capability)

        with ThreadPoolExecutor(min(len(texts), os.cpu_count() or 1) or 1) as pool:
            list(pool.map(compile_ahead, texts))

    def load(self, unit: Unit) -> Callable[..., None]:
        """A kernel, compiled where need be, as a function of its arrays (or None) on the current stream.

        Raises
        ------
        CompileError
            When NVRTC refuses the text, or the driver what NVRTC made of it.
        """
        grid, block, shared = unit.grid, (unit.threads, 1, 1), unit.dynamic
        with self.selected():
            function: Any = _function(self.index, unit.text, unit.function, self.facts["compute_capability"])
            if shared > STATIC_SHARED:
                self.xp.cuda.driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED, shared)
            if unit.persistent:
                held = self.xp.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, unit.threads, shared)
                grid = unit.resident(self.facts["multiprocessors"], held)

        def launch(*arguments: Array | None) -> None:  # of None, CuPy makes a null pointer
            function(grid, block, arguments, shared_mem=shared)

        if unit.maps:
            mapped = passing(unit.maps, self.address)
            return lambda *arguments: launch(*mapped(arguments))
        return launch

    def captured(self, launch: Callable[[], None]) -> Any:
        """What a function launches on the current stream, as a graph of CuPy's; it is called once beforehand.

        The graph holds the addresses of arrays, which have to stay. It may be launched on any stream.
        """
        with self.selected():
            self.synchronize()  # what the arrays hold must be there
            stream = self.xp.cuda.Stream(non_blocking=True)
            graph = capture(stream, launch)
            stream.synchronize()
        return graph

    def blas(self) -> BLAS:
        """What calls cuBLAS.

        Raises
        ------
        LibraryError
            When it cannot be loaded.
        """
        return cublas(self.facts["compute_capability"])

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
        sets = operand_sets(sum(x.nbytes for x in (operands.a, operands.b, operands.out)), self.facts["l2_bytes"])
        return Stopwatch(cold=replayer(self.xp, launch, operands, sets), hot=replayer(self.xp, launch, operands, 1))

    def peak_flops(self, dtype: str) -> float:
        """Operations per second by the clock and the width of the units; tensor cores for 16 bits."""
        facts = self.facts
        rate = hardware.multiply_adds(facts["compute_capability"], dtype)
        return 2.0 * rate * float(facts["multiprocessors"]) * float(facts["clock_hz"])

    def bandwidth(self) -> float:
        """Bytes per second of the memory, by its clock and width."""
        return float(self.facts["bandwidth"])

    def measured_peak(self, dtype: str) -> float:
        """Of cuBLAS on a product of 8192 cubed, or 2048 for float64; "tf32" is a type too."""
        return hardware.measured_peak(self.index, dtype)


def _capture(stream: int) -> int:
    """The number that the driver gave to the capture of a stream; CuPy does not tell it."""
    state, number = ctypes.c_int(), ctypes.c_uint64()
    status = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(state), ctypes.byref(number), None, None, None
    )
    if status:
        raise PlanError(f"cuStreamGetCaptureInfo: the driver does not tell which capture this is: CUDA error {status}")
    return number.value


@functools.lru_cache(maxsize=4096)
def _function(index: int, text: str, name: str, capability: int) -> Callable[..., None]:
    import cupy

    cubin = compiler.compiled(text, capability)
    with cupy.cuda.Device(index):
        module = cupy.cuda.function.Module()
        try:
            module.load(cubin)
        except cupy.cuda.driver.CUDADriverError as error:
            driver = hardware.dotted(cupy.cuda.runtime.driverGetVersion())
            nvrtc = "{}.{}".format(*compiler.nvrtc().version)
            raise CompileError(
                f"the driver (of CUDA {driver}) does not load {name} as NVRTC {nvrtc} compiled it: {error}"
            ) from None
        return module.get_function(name)  # type: ignore[no-any-return]
