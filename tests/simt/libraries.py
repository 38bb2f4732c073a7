"""NumPy in the place of cuBLAS and cuFFT: the same calls on the same addresses, all of them in host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from autoconv.cuda.libraries.cublas_cufft import Product, StoredMatrix
from autoconv.layer import DTYPES


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    """An array at an address; strides in elements."""
    kind = np.dtype(DTYPES.get(dtype, dtype))
    last = sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    raw = np.frombuffer((ctypes.c_char * ((last + 1) * kind.itemsize)).from_address(address), kind)
    return np.lib.stride_tricks.as_strided(raw, shape, [step * kind.itemsize for step in strides])


class NumpyBLAS:
    """`cublasGemmStridedBatchedEx`, which is by columns; narrow types are summed in float32.

    The workspace it claims is spoilt, as it may be.
    """

    workspace_bytes = 1 << 10

    def multiply(self, product: Product, a: int, b: int, c: int, workspace: int, add: bool) -> None:
        (m, n, k), (of, to) = product.extents, product.dtypes

        def matrices(address: int, matrix: StoredMatrix, rows: int, columns: int, dtype: str) -> Any:
            stored = (rows, columns) if matrix.operation == "N" else (columns, rows)
            assert matrix.leading >= stored[0], f"leading dimension {matrix.leading} of {stored[0]} rows"
            found = _view(address, (product.batch, *stored), (matrix.batch, 1, matrix.leading), dtype)
            return found if matrix.operation == "N" else found.swapaxes(1, 2)

        operands = matrices(a, product.a, m, k, of), matrices(b, product.b, k, n, of)
        out = matrices(c, product.c, m, n, to)
        sums = np.matmul(*(o.astype("float32") if o.dtype.itemsize == 2 else o for o in operands))
        out[...] = sums + out if add else sums
        _view(workspace, (self.workspace_bytes,), (1,), "uint8")[:] = 0xFF


class NumpyFFT:
    """A plan of cuFFT. The workspace it claims, and the source on the way back, are spoilt, as they may be."""

    def __init__(self, lengths: tuple[int, int], batch: int, dtype: str, back: bool) -> None:
        self._planes, self._spectra = (batch, *lengths), (batch, lengths[0], lengths[1] // 2 + 1)
        self._dtype, self._back = dtype, back
        self.workspace_bytes = 8 * batch * lengths[0]

    def run(self, source: int, target: int, workspace: int) -> None:
        number = "complex64" if self._dtype == "float32" else "complex128"
        shapes = ((self._planes, self._dtype), (self._spectra, number))
        (given, of), (wanted, to) = reversed(shapes) if self._back else shapes
        before = _view(source, given, _contiguous(given), of)
        after = _view(target, wanted, _contiguous(wanted), to)
        if self._back:
            after[...] = np.fft.irfft2(before, self._planes[1:], norm="forward")
            before[...] = np.nan
        else:
            after[...] = np.fft.rfft2(before)
        _view(workspace, (self.workspace_bytes,), (1,), "uint8")[:] = 0xFF


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
