"""As much of CuPy as autoconv uses, on NumPy arrays: GPUs, streams, graphs and modules whose kernels are emulated.

With it the real `CUDA` device runs without hardware: its launch code, its dispatch and its stopwatch.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simt.emulator import FENCE, EmulationError, emulated, sizes_of

from autoconv.cuda import device, hardware
from autoconv.cuda.codegen import compiler
from autoconv.cuda.codegen.occupancy import STATIC_SHARED
from autoconv.cuda.device import CUDA

NULL_STREAM = 0
REMEMBERED = (hardware.facts, device._function, CUDA.numbered)  # as they are: a test may put others in their places


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CUDADriverError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class ndarray(np.ndarray):  # noqa: N801  (CuPy's name)
    """A NumPy array that says on which GPU it lies."""

    gpu = 0

    def __array_finalize__(self, source: Any) -> None:
        self.gpu = getattr(source, "gpu", 0)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=self.gpu)

    @property
    def device(self) -> int:
        return self.gpu

    def get(self) -> Any:
        return self.view(np.ndarray)


ndarray.__module__ = "cupy"


class Stream:
    def __init__(self, fake: FakeCuPy, ptr: int) -> None:
        self.fake, self.ptr = fake, ptr
        self.recorded: list[Callable[[], None]] | None = None

    def __enter__(self) -> Stream:
        self.before, self.fake.current_stream = self.fake.current_stream, self
        return self

    def __exit__(self, *_: object) -> None:
        self.fake.current_stream = self.before

    def begin_capture(self) -> None:
        assert self.ptr not in (0, 1), "cannot capture on the default (legacy) stream"
        self.recorded = []
        self.fake.captures += 1
        self.fake.capturing.add(self.ptr)

    def is_capturing(self) -> bool:
        return self.recorded is not None

    def end_capture(self) -> Any:
        recorded, self.recorded = self.recorded, None
        assert recorded is not None
        self.fake.capturing.remove(self.ptr)

        def launch(stream: Stream | None = None) -> None:
            for run in recorded:
                run()

        return SimpleNamespace(launch=launch, upload=lambda stream: None, recorded=recorded)

    def synchronize(self) -> None:
        assert self.recorded is None, "cudaErrorStreamCaptureUnsupported"
        self.fake.runtime_call()

    def wait_event(self, event: Event) -> None:
        self.fake.waits.append((self.ptr, event.on.ptr))


class Event:
    """What is recorded is done at once, unless the fake's `pending` says otherwise."""

    def __init__(self, fake: FakeCuPy) -> None:
        self.fake, self.on = fake, None

    def synchronize(self) -> None:
        self.fake.runtime_call()
        self.fake.waited()

    def record(self, stream: Any = None) -> None:
        self.on = stream or self.fake.current_stream

    @property
    def done(self) -> bool:
        return not self.fake.pending


class FakeCuPy:
    """The module: what it lacks is NumPy's.

    `fault` is what every call of the runtime answers from some moment on, as after an illegal address.
    """

    __version__ = "14.2.0"
    ndarray = ndarray

    def __init__(self, gpus: int | None = 2, capability: int = 90, memory: int = 1 << 34, driver: int = 13020) -> None:
        self.gpus, self.current, self.memory, self.driver, self.capability = gpus, 0, memory, driver, capability
        self.fault = ""
        self.launches: list[str] = []
        self.current_stream = Stream(self, NULL_STREAM)
        self.streams = 100
        self.captures = 0
        self.pooled = True  # whether memory comes from the pool
        self.held = 32  # blocks of any kernel by a multiprocessor
        self.capturing: set[int] = set()  # streams
        self.pending = False  # whether what was launched still runs
        self.waits: list[tuple[int, int]] = []  # a stream, and the one whose event it waits for
        fake = self

        class Device:
            def __init__(self, index: int) -> None:
                self.id = int(index)
                self.attributes = {"ClockRate": 1980000, "MemoryClockRate": 3201000}

            def __int__(self) -> int:
                return self.id

            def __enter__(self) -> Device:
                self.before, fake.current = fake.current, self.id
                return self

            def __exit__(self, *_: object) -> None:
                fake.current = self.before

        Device.__module__ = "cupy.cuda.device"
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=self._count,
            getDevice=lambda: self.current,
            getDeviceProperties=self._properties,
            driverGetVersion=lambda: self.driver,
            runtimeGetVersion=lambda: 13000,
            deviceSynchronize=self._synchronize,
            memGetInfo=lambda: (self.memory, self.memory),
        )
        self.attributes_set: list[tuple[int, int, int]] = []
        self.cuda: Any = SimpleNamespace(
            runtime=runtime,
            driver=SimpleNamespace(
                CUDADriverError=CUDADriverError,
                occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: self.held,
                funcSetAttribute=lambda *given: self.attributes_set.append(given),
            ),
            Device=Device,
            using_allocator=self._using_allocator,
            Stream=self._stream,
            Event=lambda disable_timing=False: Event(self),
            get_elapsed_time=lambda start, stop: 0.25,  # milliseconds
            get_current_stream=lambda: self.current_stream,
            function=SimpleNamespace(Module=lambda: Module(self)),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def waited(self) -> None:
        """Called where the host waits for an event."""

    def runtime_call(self) -> None:
        if self.fault:
            raise CUDARuntimeError(700, self.fault)

    def _synchronize(self) -> None:
        self.runtime_call()
        if self.capturing:
            raise CUDARuntimeError(
                900, "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"
            )

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> ndarray:
        """An array of NaN (all bits set) on the current GPU."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes > self.memory:
            raise OutOfMemoryError(f"Out of memory allocating {nbytes} bytes")
        raw = np.full(nbytes + 2 * FENCE, 0xFF, np.uint8)
        start = -raw.ctypes.data % 512
        array = raw[start : start + nbytes].view(dtype).reshape(shape).view(ndarray)
        array.gpu = self.current
        return array

    def zeros(self, shape: Any, dtype: Any = np.float64) -> ndarray:
        assert not self.current_stream.is_capturing(), "a graph would put zeros there each time"
        fresh = self.empty(shape, dtype)
        fresh[...] = 0
        return fresh

    def empty_like(self, array: ndarray) -> ndarray:
        return self.empty(array.shape, array.dtype)

    def asarray(self, array: Any, dtype: Any = None) -> ndarray:
        given = np.asarray(array, dtype)
        fresh = self.empty(given.shape, given.dtype)
        fresh[...] = given
        return fresh

    @contextlib.contextmanager
    def _using_allocator(self, allocator: None) -> Iterator[None]:
        self.pooled = False
        yield
        self.pooled = True

    def _stream(self, non_blocking: bool = False) -> Stream:
        self.streams += 1
        return Stream(self, self.streams)

    def _count(self) -> int:
        if self.gpus is None:
            raise CUDARuntimeError(35, "cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        if not self.gpus:
            raise CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.gpus

    def _properties(self, index: int) -> dict[str, Any]:
        return {
            "name": b"Fake GPU",
            "major": self.capability // 10,
            "minor": self.capability % 10,
            "multiProcessorCount": 4,
            "l2CacheSize": 1 << 12,
            "totalGlobalMem": self.memory,
            "sharedMemPerBlockOptin": 227 << 10,
            "memoryBusWidth": 6144,
        }


class Module:
    """A module whose cubin is the kernel's text."""

    def __init__(self, fake: FakeCuPy) -> None:
        self.fake = fake

    def load(self, cubin: bytes) -> None:
        assert type(cubin) is bytes
        if self.fake.driver < 13000:
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        self.text, self.gpu = cubin.decode(), self.fake.current

    def get_function(self, name: str) -> Function:
        return Function(self, name)


class Function:
    """A kernel as CuPy calls it: grid, block, arguments of arrays on one GPU or None, dynamic shared memory."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name, self.ptr = module, name, id(self)
        self.run = emulated(module.text, name, ("-O1",))

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, shared_mem: int = 0) -> None:
        fake = self.module.fake
        assert fake.current == self.module.gpu, "CUDA_ERROR_INVALID_HANDLE: a kernel of another GPU"
        assert all(a is None or (type(a) is ndarray and a.gpu == fake.current) for a in args)
        fake.runtime_call()

        def run() -> None:
            fake.launches.append(self.name)
            pointers = [ctypes.c_void_p(None if a is None else a.ctypes.data) for a in args]
            values = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(pointer) for pointer in pointers))
            shape = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block)
            shared = ctypes.c_size_t(shared_mem or STATIC_SHARED)
            error = self.run(*shape, shared, values, sizes_of(args), len(pointers), ctypes.c_uint(1))
            if error:
                raise EmulationError(f"{self.name}: {error.decode()}")

        recorded = fake.current_stream.recorded
        if recorded is None:
            run()
        else:
            recorded.append(run)


def install(fake: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    """Make this the CuPy of the process, and the emulator what compiles and runs its kernels."""
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(compiler, "compiled", lambda text, capability: text.encode())
    monkeypatch.setattr(compiler, "nvrtc", lambda: SimpleNamespace(version=(13, 0)))
    monkeypatch.setattr(device, "_capture", lambda stream: fake.captures)
    forget()
    return fake


def forget() -> None:
    """Forget the devices of an earlier CuPy."""
    for remembered in REMEMBERED:
        remembered.cache_clear()
