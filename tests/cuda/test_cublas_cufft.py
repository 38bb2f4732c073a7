"""cuBLAS and cuFFT: what their calls are given, by stand-ins that take the same arguments."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simt.emulator import MISSING
from simt.libraries import NumpyBLAS, NumpyFFT

from autoconv.cuda.libraries import cublas_cufft as libraries
from autoconv.cuda.libraries.cublas_cufft import CuBLAS, CuFFT, LibraryError, Matrices, product

ROOM = 0x7700000100  # the workspace
LIBRARY = r"""
#include <complex>
#include <cstddef>
using Number = std::complex<float>;
static long calls[4];
static bool reset = false;
static int mode = 1;
extern "C" int cublasGetMathMode(void* handle, int* found) {
    return *found = mode, handle == (void*)0x7700000001 ? 0 : 1;
}
extern "C" int cublasSetMathMode(void* handle, int wanted) {
    return mode = wanted, handle == (void*)0x7700000001 ? 0 : 1;
}
extern "C" int mode_now() { return mode; }
extern "C" int cublasSetStream_v2(void* handle, void* stream) {
    reset = true;
    return handle == (void*)0x7700000001 && stream == (void*)0x7700000002 ? 0 : 1;
}
extern "C" int cublasSetWorkspace_v2(void* handle, void* room, size_t size) {
    reset = false;
    return handle == (void*)0x7700000001 && room == (void*)0x7700000100 && size == 4096 ? 0 : 7;
}
extern "C" int cublasGemmStridedBatchedEx(void*, int opa, int opb, int m, int n, int k, const void* alpha,
        const void* a, int atype, int lda, long long step_a, const void* b, int btype, int ldb, long long step_b,
        const void* beta,
        void* c, int ctype, int ldc, long long step_c, int batch, int compute, int algorithm) {
    if (ctype == 2 || ctype == 14) return mode == 17 ? 0 : 15;  // parts of sums in float32
    if (atype != 4 || btype != 4 || ctype != 4 || compute != 68 || algorithm != -1 || reset || mode != 1) return 15;
    for (int z = 0; z < batch; z++)
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) {
                Number sum = 0, &out = ((Number*)c)[z * step_c + i + (long long)j * ldc];
                for (int l = 0; l < k; l++)
                    sum += ((const Number*)a)[z * step_a + (opa ? l + (long long)i * lda : i + (long long)l * lda)] *
                           ((const Number*)b)[z * step_b + (opb ? j + (long long)l * ldb : l + (long long)j * ldb)];
                const Number scale = *(const Number*)beta;
                out = *(const Number*)alpha * sum + (scale == Number(0) ? Number(0) : scale * out);
            }
    return 0;
}
extern "C" int cufftCreate(int* plan) { return *plan = 5, 0; }
extern "C" int cufftDestroy(int plan) { return calls[3]++, plan != 5; }
extern "C" long destroyed() { return calls[3]; }
extern "C" int cufftSetAutoAllocation(int plan, int on) { return plan != 5 || on; }
extern "C" int cufftMakePlanMany(int plan, int rank, int* n, int* inembed, int, int, int* onembed, int, int, int type,
                                 int batch, size_t* size) {
    *size = (size_t)n[0] * n[1] * batch << 32;
    return plan != 5 || rank != 2 || inembed || onembed || (type != 0x2a && type != 0x2c) ? 4 : n[0] == 13 ? 8 : 0;
}
extern "C" int cufftSetStream(int, void* stream) { return stream != (void*)0x7700000002; }
extern "C" int cufftSetWorkArea(int, void* area) { return area != (void*)0x7700000003; }
extern "C" int cufftExecR2C(int plan, float* from, float* to) { return to[0] = from[0] + 1, plan != 5; }
extern "C" int cufftExecC2R(int plan, float* from, float* to) { return to[0] = from[0] + 2, plan != 5; }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """A library with the functions' names and signatures, and as much of CuPy as leads there."""
    if MISSING:
        pytest.skip("NOT CHECKED: the stand-in needs g++")
    (tmp_path / "library.cpp").write_text(LIBRARY)
    made = tmp_path / "library.so"
    subprocess.run(["g++", "-O1", "-w", "-shared", "-fPIC", tmp_path / "library.cpp", "-o", made], check=True)
    stream = SimpleNamespace(ptr=0x7700000002)
    cuda = SimpleNamespace(get_current_stream=lambda: stream)
    modules = {
        "cupy": SimpleNamespace(cuda=cuda),
        "cupy.cuda": cuda,
        "cupy.cuda.cufft": SimpleNamespace(),
        "cupy.cuda.device": SimpleNamespace(get_cublas_handle=lambda: 0x7700000001),
        "cupy_backends.cuda.libs.cublas": SimpleNamespace(),
    }
    for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs"):
        modules[name] = SimpleNamespace(__path__=[])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(libraries, "BLAS_NAMES", ("libnothing.so", str(made)))
    monkeypatch.setattr(libraries, "FFT_NAMES", (str(made),))
    return ctypes.CDLL(str(made))


def numbers(*shape: int) -> Any:
    generator = np.random.default_rng(0)
    return (generator.normal(size=shape) + 1j * generator.normal(size=shape)).astype("complex64")


def multiply(blas: Any, extents: tuple[int, int, int], orders: tuple[bool, ...], add: bool, room: int) -> None:
    """Three batches whose matrices lie by rows or by columns, against NumPy."""
    m, n, k = extents
    shapes = (3, m, k), (3, k, n), (3, m, n)
    a, b, c = (
        numbers(batch, rows, columns) if by_rows else numbers(batch, columns, rows).swapaxes(1, 2)
        for (batch, rows, columns), by_rows in zip(shapes, orders, strict=True)
    )
    wanted = a @ b + (c if add else 0)
    operands = [Matrices(*(step // 8 for step in (x.strides[1], x.strides[2], x.strides[0]))) for x in (a, b, c)]
    launch = product(blas, ("complex64", "complex64"), extents, 3, *operands)
    launch(*(x.__array_interface__["data"][0] for x in (a, b, c)), room, add)
    np.testing.assert_allclose(c, wanted, rtol=1e-5, atol=1e-5)


ORDERS = list(itertools.product((True, False), repeat=3))
EXTENTS = [(5, 7, 3), (1, 4, 6), (4, 1, 6), (6, 4, 1), (1, 1, 5)]


@pytest.mark.parametrize("extents", EXTENTS)
@pytest.mark.parametrize("orders", ORDERS)
def test_products_of_either_order(orders: tuple[bool, ...], extents: tuple[int, int, int]) -> None:
    room = np.empty(NumpyBLAS.workspace_bytes, "uint8")
    for add in (False, True):
        multiply(NumpyBLAS(), extents, orders, add, room.ctypes.data)


def test_what_cublas_is_given(library: ctypes.CDLL) -> None:
    for extents, orders, add in itertools.product(EXTENTS, ORDERS, (False, True)):
        multiply(CuBLAS(4096), extents, orders, add, ROOM)
    with pytest.raises(LibraryError, match="cublasSetWorkspace: status 7"):
        multiply(CuBLAS(4096), EXTENTS[0], ORDERS[0], False, ROOM + 256)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bits_are_reduced_in_float32(dtype: str, library: ctypes.CDLL) -> None:
    square = Matrices(4, 1)
    product(CuBLAS(4096), (dtype, dtype), (4, 4, 4), 1, square, square, square)(0, 0, 0, ROOM, False)
    assert library.mode_now() == 1  # as CuPy has it


def test_matrices_without_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="neither rows nor columns"):
        product(NumpyBLAS(), ("float32", "float32"), (4, 4, 4), 1, Matrices(8, 2), Matrices(4, 1), Matrices(4, 1))


def test_what_cufft_is_given(library: ctypes.CDLL) -> None:
    there, back = (CuFFT((4, 6), 10, "float32", way) for way in (False, True))
    assert there.workspace_bytes == 240 << 32
    values = (ctypes.c_float * 4)(0.5)
    for plan, step in ((there, 1), (back, 2)):
        plan.run(ctypes.addressof(values), ctypes.addressof(values) + 8, 0x7700000003)
        assert values[2] == 0.5 + step
    with pytest.raises(LibraryError, match="SetWorkArea: status 1"):
        there.run(ctypes.addressof(values), ctypes.addressof(values), 0)
    with pytest.raises(LibraryError, match="10 times 13x6: status 8"):
        CuFFT((13, 6), 10, "float32", False)
    del there, plan, back
    assert library.destroyed() == 3


def test_libraries_of_wheels_are_loaded_before_the_modules_that_need_them(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's modules are linked to them without a path, and find only what the process has loaded already."""
    loaded: list[str] = []
    needs = {"cupy_backends.cuda.libs.cublas": "cublas", "cupy.cuda.cufft": "cufft"}
    imported = importlib.import_module

    def bring(name: str) -> Any:
        if name == "cuda.pathfinder":
            return SimpleNamespace(load_nvidia_dynamic_lib=loaded.append)
        if needs.get(name, "") not in ["", *loaded]:
            raise ImportError(f"lib{needs[name]}.so: cannot open shared object file")
        return imported(name)

    monkeypatch.setattr(importlib, "import_module", bring)
    monkeypatch.setattr(libraries, "BLAS_NAMES", ("libcublas.so.13", *libraries.BLAS_NAMES))
    monkeypatch.setattr(libraries, "FFT_NAMES", ("libcufft.so.12", *libraries.FFT_NAMES))
    CuBLAS(4096)
    CuFFT((4, 6), 10, "float32", False)
    assert loaded == ["cublas", "cufft"]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda.cufft", None)
    with pytest.raises(LibraryError, match=r"libcufft\.so\.12 does not load"):
        CuFFT((4, 4), 1, "float32", False)


@pytest.mark.parametrize("lengths", [(6, 8), (5, 9), (1, 4)])
def test_the_stand_in_for_cufft_inverts_itself(lengths: tuple[int, int]) -> None:
    """Up to the factor that cuFFT leaves out."""
    planes = np.random.default_rng(0).normal(size=(3, *lengths)).astype("float32")
    spectra = np.empty((3, lengths[0], lengths[1] // 2 + 1), "complex64")
    scratch, again = np.empty(8 * 3 * lengths[0], "uint8"), np.empty_like(planes)
    at = [x.__array_interface__["data"][0] for x in (planes, spectra, again, scratch)]
    NumpyFFT(lengths, 3, "float32", back=False).run(at[0], at[1], at[3])
    np.testing.assert_allclose(spectra, np.fft.rfft2(planes), rtol=1e-5, atol=1e-5)
    NumpyFFT(lengths, 3, "float32", back=True).run(at[1], at[2], at[3])
    np.testing.assert_allclose(again, planes * np.prod(lengths), rtol=1e-5, atol=1e-5)
