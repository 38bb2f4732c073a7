"""What a GPU is: what the driver knows of it, how fast it may be, and what is missing where there is none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from autoconv.cuda.codegen import compiler
from autoconv.cuda.codegen.compiler import CompileError

NO_DEVICE = 100  # cudaErrorNoDevice

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
        nvrtc = compiler.nvrtc().version
    except CompileError as error:
        return str(error)
    driver = runtime.driverGetVersion()
    if driver // 1000 < nvrtc[0]:  # within one major version, any driver loads any cubin
        return (
            f"the driver is of CUDA {dotted(driver)}, older than the compiler, NVRTC {nvrtc[0]}.{nvrtc[1]}, "
            f"whose kernels it cannot load: update the driver, or install cupy-cuda{driver // 1000}x"
        )
    return ""


def dotted(version: int) -> str:
    """A version as CUDA's interfaces give it: 13020 is 13.2."""
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def facts(index: int) -> dict[str, Any]:
    """Identity and sizes of a GPU: bytes, hertz, bytes per second; the compute capability times ten."""
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


def multiply_adds(capability: int, dtype: str) -> int:
    """To a clock of one multiprocessor, by its nominal width; on tensor cores for 16 bits."""
    single, double, half = RATES[max((known for known in RATES if known <= capability), default=75)]
    return {"float32": single, "float64": double}.get(dtype, half)


@functools.cache
def measured_peak(index: int, dtype: str) -> float:
    """Operations per second of cuBLAS on a product of 8192 cubed, or 2048 for float64; "tf32" is a type too."""
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
