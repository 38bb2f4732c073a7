"""A CUDA device without hardware: the kernels' own text, built by g++, on one fiber per CUDA thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from simt.libraries import NumpyBLAS, NumpyFFT

from autoconv.algorithm import Candidate
from autoconv.bench.gpu.cases import NOMINAL, NominalGPU
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.codegen.tensor_map import BYTES, TensorMap, Texture
from autoconv.cuda.libraries.cublas_cufft import BLAS, Transform
from autoconv.device import Operands, Stopwatch
from autoconv.errors import ArrayError
from autoconv.layer import ConvLayer

HERE = Path(__file__).parent
FENCE = 4096  # bytes on both sides of an array
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fPIC", "-w", "-g1")
HEADERS = ("simt.h", "async.h", "replay.h")
GRID = "grid.cpp"
MISSING = shutil.which("g++") is None
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')


class EmulationError(RuntimeError):
    """What the emulator or a sanitizer holds against a kernel."""


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"autoconv-simt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to another user"
    return folder


@functools.cache
def _sources() -> str:
    return "".join((HERE / name).read_text() for name in (*HEADERS, GRID))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join([*texts, _sources()]).encode()).hexdigest()[:32]


@functools.cache
def _precompiled(flags: tuple[str, ...]) -> Path:
    """A folder with the emulator's headers, and what is compiled of it: most of a kernel's build is saved."""
    target = _folder() / f"emulator-{_digest(*FLAGS, *flags)}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            for name in (*HEADERS, GRID):
                shutil.copy(HERE / name, made)
            header = made / HEADERS[-1]
            compiler = ["g++", *FLAGS, *flags]
            subprocess.run([*compiler, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
            subprocess.run([*compiler, f"-I{made}", "-c", made / GRID, "-o", made / f"{GRID}.o"], check=True)
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(target)
    return target


def build(text: str, flags: tuple[str, ...], program: bool = False) -> Path:
    """The text as a library with all its kernels, or as a program that replays a launch; built once per machine."""
    kernels = _KERNEL.findall(text)
    if program:
        replays = (
            f'if (!std::strcmp(arguments[2], "{name}")) return replay<{name}>(arguments[1]);' for name in kernels
        )
        export = f"int main(int, char** arguments) {{ {' '.join(replays)} return 2; }}"
    else:
        export = "\n".join(
            f'extern "C" const char* launch_{name}(const unsigned* grid, const unsigned* block, size_t shared, '
            "void** arguments, const int64_t* sizes, int count, unsigned schedule) { return "
            f"simt::launch<{name}>(grid, block, shared, arguments, sizes, count, schedule); }}"
            for name in kernels
        )
    source = f'#include "replay.h"\n{text}\n#line 1 "export"\n{export}\n'
    command = ["g++", *FLAGS, *flags, *(() if program else ("-shared",))]
    target = _folder() / f"{_digest(source, *command)}{'' if program else '.so'}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            file, made = Path(scratch) / "kernel.cpp", Path(scratch) / "made"
            file.write_text(source)
            emulator = _precompiled(flags)
            command += [f"-I{emulator}", file, emulator / f"{GRID}.o", "-o", made]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EmulationError(f"g++ refuses {', '.join(kernels)}:\n{done.stderr[:4000]}")
            made.replace(target)
    return target


def sizes_of(arrays: Sequence[Any]) -> Any:
    """Bytes of each, as the emulator wants them; -1 for None."""
    return (ctypes.c_int64 * len(arrays))(*(-1 if array is None else array.nbytes for array in arrays))


def emulated(text: str, function: str, flags: tuple[str, ...]) -> Any:
    """A kernel of the text in this process: `simt::launch`, whose answer is null, or what went wrong."""
    launch = getattr(ctypes.CDLL(str(build(text, flags))), f"launch_{function}")
    launch.restype = ctypes.c_char_p
    return launch


def _address(argument: Any) -> int | None:
    return None if argument is None else argument.__array_interface__["data"][0]


def _grid(unit: Unit) -> tuple[int, int, int]:
    return unit.resident(NOMINAL.facts["multiprocessors"], unit.blocks) if unit.persistent else unit.grid


def packed(tensor_map: TensorMap | Texture, address: int) -> bytes:
    """A tensor map as the emulator reads it: `simt::Map` of async.h, or `simt::Texture` of simt.h."""
    if isinstance(tensor_map, Texture):
        seen = struct.pack("=Q3I", address, tensor_map.itemsize, tensor_map.width, tensor_map.height)
        return seen.ljust(BYTES, b"\0")
    extents, strides = [*tensor_map.extents, 1][:4], [*tensor_map.strides, 0][:3]
    box = [*tensor_map.box, 1, 1][:4]
    flags = (tensor_map.itemsize, len(tensor_map.extents), tensor_map.im2col, tensor_map.dtype == "tf32")
    corners = [pair or (0, 0) for pair in (tensor_map.pixel_strides, tensor_map.lower, tensor_map.upper)]
    values = [*flags, *extents, *strides, *box, *corners[0], *corners[1], *corners[2]]
    return struct.pack("=Q4I4I3Q4I2I2i2i", address, *values).ljust(BYTES, b"\0")


def _passed(tensor_map: TensorMap | Texture, address: int) -> Any:
    """The same where a kernel may copy it from: on a multiple of 64 bytes."""
    raw = np.zeros(BYTES + 64, np.uint8)
    place = raw[-raw.ctypes.data % 64 :][:BYTES]
    place[:] = np.frombuffer(packed(tensor_map, address), np.uint8)
    return place


def launcher(unit: Unit, flags: tuple[str, ...], schedule: int, text: str | None = None) -> Callable[..., None]:
    """The unit as a function of its arrays, in this process."""
    run = emulated(unit.text if text is None else text, unit.function, flags)
    grid, block = (ctypes.c_uint * 3)(*_grid(unit)), (ctypes.c_uint * 3)(unit.threads, 1, 1)

    def launch(*arguments: Any) -> None:
        pointers = [ctypes.c_void_p(_address(argument)) for argument in arguments]
        values = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(pointer) for pointer in pointers))
        maps = [(i, _passed(m, _address(arguments[i]) or 0)) for i, m in enumerate(unit.maps) if m is not None]
        for i, place in maps:
            values[i] = place.ctypes.data
        shared = ctypes.c_size_t(unit.shared)
        error = run(grid, block, shared, values, sizes_of(arguments), len(pointers), ctypes.c_uint(schedule))
        if error:
            raise EmulationError(f"{unit.function}: {error.decode()}")

    return launch


def sanitized(unit: Unit, sanitizer: str, schedule: int, text: str | None = None) -> Callable[..., None]:
    """The unit as a function of its arrays, in a process under `address` or `thread` sanitizer."""
    flags = ("-O1", f"-fsanitize={sanitizer}")
    program = build(unit.text if text is None else text, flags, program=True)

    def launch(*arguments: Any) -> None:
        arrays = [None if a is None else a.tobytes() for a in arguments]
        sizes = [-1 if a is None else len(a) for a in arrays]
        header = struct.pack("8IQ", *_grid(unit), unit.threads, 1, 1, schedule, len(arrays), unit.shared)
        maps = [b"" if m is None else packed(m, 0) for m in (*unit.maps, *[None] * len(arrays))][: len(arrays)]
        head = header + struct.pack(f"{len(sizes)}q", *sizes) + b"".join(m.ljust(BYTES, b"\0") for m in maps)
        payload = [head, *(a for a in arrays if a is not None)]
        with tempfile.NamedTemporaryFile(dir=_folder()) as file:
            file.write(b"".join(payload))
            file.flush()
            options = {"ASAN_OPTIONS": "detect_stack_use_after_return=1:detect_leaks=0", "TSAN_OPTIONS": "exitcode=66"}
            done = subprocess.run(
                [program, file.name, unit.function],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | options,
            )
            if done.returncode:
                raise EmulationError(f"{unit.function} under {sanitizer} sanitizer: {done.stderr[:3000]}")
            file.seek(len(head))
            for given, sent in zip(arguments, arrays, strict=True):
                if sent is not None:  # arguments may share memory: what the kernel has not changed says nothing
                    before, after = (np.frombuffer(some, np.uint8) for some in (sent, file.read(len(sent))))
                    given.reshape(-1).view(np.uint8)[before != after] = after[before != after]

    return launch


@dataclass(frozen=True)
class Emulated(NominalGPU):
    """A GPU of some compute capability, on the CPU.

    `schedule` seeds the order of threads and the landing of copies; `flags` are g++'s; with a
    `sanitizer`, every launch is a process of its own.
    """

    capability: int = 80
    schedule: int = 2
    flags: tuple[str, ...] = ("-O1",)
    sanitizer: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", tuple(self.flags))  # a list, when it comes through JSON

    @property
    def facts(self) -> dict[str, Any]:
        return super().facts | {"name": f"emulated sm_{self.capability}"}

    @property
    def versions(self) -> dict[str, str]:
        return {"emulator": hashlib.sha256(_sources().encode()).hexdigest()[:16]}

    @property
    def xp(self) -> ModuleType:
        return np

    def owns(self, array: object) -> bool:
        return isinstance(array, np.ndarray)

    def adopt(self, array: object, name: str, *, written: bool = False) -> Any:
        raise ArrayError(f"{name}: expected an array of the emulated GPU, got {type(array).__name__}")

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def writable(self, array: Any) -> bool:
        return bool(array.flags.writeable)

    def memory_available(self) -> int:
        return self.memory()

    def measured_peak(self, dtype: str) -> float:
        return self.peak_flops(dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of NaN (all bits set), with fences of the same on both sides."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = np.full(nbytes + 2 * FENCE + 512, 0xFF, np.uint8)
        start = FENCE + -(raw.ctypes.data + FENCE) % 512  # as CuPy's memory pool aligns
        return raw[start : start + nbytes].view(dtype).reshape(shape)

    def zeros(self, nbytes: int) -> Any:
        array = self.empty((nbytes,), np.uint8)
        array[...] = 0
        return array

    def selected(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def elsewhere(self) -> bool:
        return False

    def launches_on(self) -> int:
        return 0

    def stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def lost(self) -> str:
        return ""

    def get_ready_for(self, layer: ConvLayer, candidates: Sequence[Candidate]) -> None:
        """What the emulator needs is built by g++, when it is loaded."""

    def blas(self) -> BLAS:
        return NumpyBLAS()

    def fourier(self, lengths: tuple[int, int], batch: int, dtype: str, back: bool) -> Transform:
        return NumpyFFT(lengths, batch, dtype, back)

    def load(self, unit: Unit) -> Callable[..., None]:
        if self.sanitizer:
            return sanitized(unit, self.sanitizer, self.schedule)
        return launcher(unit, self.flags, self.schedule)

    def stopwatch(self, launch: Callable[[Operands], None], operands: Operands) -> Stopwatch:
        """Two made-up times, hot half of cold: the emulator's own speed says nothing of a GPU's."""

        def take(seconds: float) -> Callable[[], float]:
            def sample() -> float:
                launch(operands)
                return seconds

            return sample

        return Stopwatch(cold=take(2e-5), hot=take(1e-5))


def fenced(array: Any) -> bool:
    """Whether nothing was written around an array that `Emulated.empty` gave."""
    raw = array
    while raw.base is not None:
        raw = raw.base
    start = _address(array) - raw.ctypes.data
    return bool((raw[:start] == 0xFF).all() and (raw[start + array.nbytes :] == 0xFF).all())
