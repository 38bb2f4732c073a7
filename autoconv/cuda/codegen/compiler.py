"""CUDA text to machine code: NVRTC by ctypes, and a private cache of cubins on disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from autoconv.errors import AutoconvError
from autoconv.paths import cache_folder

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
WHEELS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
DIGEST = hashlib.sha256().digest_size


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
        """The cubin of a translation unit for, say, `sm_90a`, and the compiler's log.

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
            return self._text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log
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


class CubinCache:
    """Cubins on disk: a folder of the user's own, each file behind a checksum.

    Machine code runs in the user's process, so a folder that another user owns or can write to is not
    used at all, and a file that does not match its checksum is compiled again. Nothing here is ever
    exported. A folder that cannot be used costs persistence, with one warning, and never the answer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._usable = True

    def get(self, key: str) -> bytes | None:
        """The cubin under a key, or None."""
        try:
            if not self._ready():
                return None
            data = (self._folder / f"{key}.cubin").read_bytes()
        except OSError:
            return None
        digest, cubin = data[:DIGEST], data[DIGEST:]
        return cubin if cubin and hashlib.sha256(key.encode() + cubin).digest() == digest else None

    def put(self, key: str, cubin: bytes) -> None:
        """Keep a cubin; a reader sees all of it or nothing."""
        try:
            if not self._ready():
                return
            handle, name = tempfile.mkstemp(dir=self._folder)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(key.encode() + cubin).digest() + cubin)
            Path(name).replace(self._folder / f"{key}.cubin")
        except OSError as error:
            self._give_up(str(error))

    def _ready(self) -> bool:
        if not self._usable:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = self._folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
            self._give_up("it is not a folder that only this user can write to")
        return self._usable

    def _give_up(self, reason: str) -> None:
        if self._usable:
            self._usable = False
            warnings.warn(
                f"compiled CUDA kernels are not kept in {self._folder}: {reason}", RuntimeWarning, stacklevel=4
            )


def cubin_folder() -> Path:
    """Where machine code for GPUs is kept: beside the records."""
    return cache_folder() / "cubins"


@functools.cache
def _cache(folder: Path) -> CubinCache:
    return CubinCache(folder)


def compiled(text: str, capability: int) -> bytes:
    """The cubin of a translation unit for a compute capability (times ten), from disk when it was made before.

    Raises
    ------
    CompileError
        When NVRTC is missing or refuses the text.
    """
    target, compiler = architecture(capability), nvrtc()
    material = f"{compiler.version}\0{target}\0{text}"
    key = hashlib.sha256(material.encode()).hexdigest()
    cache = _cache(cubin_folder())
    cubin = cache.get(key)
    if cubin is None:
        cubin, _ = compiler.compile(text, target)
        cache.put(key, cubin)
    return cubin
