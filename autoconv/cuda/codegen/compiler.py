"""CUDA text to machine code: NVRTC by ctypes. What it has compiled is kept on disk, as `machine_code` does."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from autoconv.common import machine_code
from autoconv.errors import AutoconvError

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
WHEELS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")


class CompileError(AutoconvError, RuntimeError):
    """A kernel that NVRTC refuses, or NVRTC itself missing."""


class NVRTC:
    """The run-time compiler, without CuPy and without a driver.

    Raises
    ------
    CompileError
        When no libnvrtc can be loaded; the message says where it was looked for.
    """

    def __init__(self, path: str) -> None:
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins))  # NVRTC opens it by its bare name, which a wheel's folder does not serve
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        """Of the library: major, minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities, times ten, that this version compiles for."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(numbers)

    def compile(self, text: str, architecture: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
        """The cubin of a translation unit for, say, `sm_90a`, or its PTX for `compute_90`; and the compiler's log.

        Raises
        ------
        CompileError
            With the compiler's log.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        try:
            flags = [f"-arch={architecture}".encode(), b"-std=c++17", *(option.encode() for option in options)]
            status = self._library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            log = self._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()
            if status:
                raise CompileError(f"NVRTC {self.version[0]}.{self.version[1]} for {architecture}: {log.strip()}")
            kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
            return self._text(program, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}"), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, size_of: str, text_of: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_of, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(text_of, program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CompileError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")


def _places() -> Iterator[str]:
    """Where libnvrtc may be, the best guess first: where CuPy finds it, wheels, the system."""
    with contextlib.suppress(Exception):  # cuda-pathfinder comes with CuPy 14; it raises what it likes
        pathfinder = importlib.import_module("cuda.pathfinder")
        yield str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    found = importlib.util.find_spec("nvidia")
    for root in (found.submodule_search_locations or ()) if found else ():
        for folder in WHEELS:
            yield from (str(Path(root).parent / folder / name) for name in LIBRARIES)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if variable in os.environ:
            yield from (str(Path(os.environ[variable]) / "lib64" / name) for name in LIBRARIES)
    yield from LIBRARIES


@functools.cache
def nvrtc() -> NVRTC:
    """The run-time compiler of this machine.

    Raises
    ------
    CompileError
        When there is none.
    """
    for place in _places():
        with contextlib.suppress(OSError):
            return NVRTC(place)
    raise CompileError(
        "no NVRTC library (libnvrtc.so.13 or .12): it comes with cupy-cuda13x[ctk], with nvidia-cuda-nvrtc, "
        "or with a CUDA toolkit named by CUDA_PATH"
    )


def architecture(capability: int) -> str:
    """What to compile for on a compute capability, times ten; 9.0 and 10.x have instructions of their own."""
    return f"sm_{capability}a" if capability in (90, 100, 103) else f"sm_{capability}"


def target_for(capability: int, known: Sequence[int]) -> str:
    """What a compiler that knows these capabilities is told for one that may be newer than it.

    The machine code of a capability runs on later ones of the same major number; beyond, the driver translates PTX.
    """
    older = [one for one in known if one < capability]
    if capability in known or not older:
        return architecture(capability)
    return f"{'sm' if max(older) // 10 == capability // 10 else 'compute'}_{max(older)}"


def compiled(text: str, capability: int) -> bytes:
    """The cubin of a translation unit for a compute capability (times ten), from disk when it was made before.

    It is PTX where the compiler is older than the GPU.

    Raises
    ------
    CompileError
        When NVRTC is missing or refuses the text.
    """
    compiler = nvrtc()
    target = target_for(capability, compiler.architectures())
    key = hashlib.sha256(f"cubin\0{compiler.version}\0{target}\0{text}".encode()).digest()
    cubin = machine_code.load(key)
    if cubin is None:
        cubin, _ = compiler.compile(text, target)
        machine_code.save(key, cubin)
    return cubin
