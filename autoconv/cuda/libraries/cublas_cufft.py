"""cuBLAS and cuFFT by ctypes: on raw addresses, on the current stream, also while that is captured in a graph.

CuPy has both, and loads them here; its own bindings allocate, and refuse to be captured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from autoconv.errors import AutoconvError

BLAS_NAMES = ("libcublas.so.13", "libcublas.so.12")
FFT_NAMES = ("libcufft.so.12", "libcufft.so.11")

# cudaDataType_t, and the cublasComputeType_t of its sums: float32 proper, never tf32.
TYPES = {"float32": 0, "float64": 1, "float16": 2, "complex64": 4, "complex128": 5, "bfloat16": 14}
COMPUTE_FLOAT32, COMPUTE_FLOAT64 = 68, 70
OPERATIONS = {"N": 0, "T": 1}
DEFAULT_ALGORITHM = -1
WIDE_REDUCTIONS = 16  # of cublasMath_t: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
# Bytes that the documentation of `cublasSetWorkspace` recommends: from Hopper on, and before it.
BLAS_WORKSPACE, SMALL_BLAS_WORKSPACE = 32 << 20, 4 << 20
HOPPER = 90  # compute capability, times ten
TRANSFORMS = {("float32", False): 0x2A, ("float32", True): 0x2C, ("float64", False): 0x6A, ("float64", True): 0x6C}
EXECUTE = {0x2A: "cufftExecR2C", 0x2C: "cufftExecC2R", 0x6A: "cufftExecD2Z", 0x6C: "cufftExecZ2D"}


class LibraryError(AutoconvError, RuntimeError):
    """A library of CUDA that is missing, or that refuses a call."""


class Matrices(NamedTuple):
    """Matrices in memory: steps, in elements, from row to row, column to column, matrix to matrix."""

    row: int
    column: int
    batch: int = 0

    @property
    def transposed(self) -> Matrices:
        """The same with rows for columns."""
        return Matrices(self.column, self.row, self.batch)


class StoredMatrix(NamedTuple):
    """The same as cuBLAS wants it, by columns: the operation on what is stored, and the leading dimension."""

    operation: str
    leading: int
    batch: int


class Product(NamedTuple):
    """C (m x n) = A B, `batch` times: what a call of cuBLAS says but for the addresses."""

    extents: tuple[int, int, int]  # m, n, and the depth
    batch: int
    dtypes: tuple[str, str]  # of A and B, and of C
    a: StoredMatrix
    b: StoredMatrix
    c: StoredMatrix


class BLAS(Protocol):
    """As much of cuBLAS as is used; it works in the caller's workspace, so that streams cannot meet in its own."""

    workspace_bytes: int

    def multiply(self, product: Product, a: int, b: int, c: int, workspace: int, add: bool) -> None:
        """The product of what lies at two addresses, put to the third or added to what is there."""


class Transform(Protocol):
    """A batch of two-dimensional real transforms of one length, forward or (unnormalised) back."""

    workspace_bytes: int

    def run(self, source: int, target: int, workspace: int) -> None:
        """Transform planes at an address to another; the way back may destroy its source."""


Multiply = Callable[[int, int, int, int, bool], None]


def product(
    blas: BLAS,
    dtypes: tuple[str, str],
    extents: tuple[int, int, int],
    batch: int,
    a: Matrices,
    b: Matrices,
    c: Matrices,
) -> Multiply:
    """A batched matrix product as a function of four addresses, the last the workspace's, and of whether it adds.

    Parameters
    ----------
    dtypes : of both operands, and of the result
    extents : int
        Rows of `a`, columns of `b`, and the depth in between.
    a, b, c : Matrices
        Each with neighbouring elements along rows or along columns.

    Raises
    ------
    ValueError
        When an operand has neighbours along neither.
    """
    m, n, k = extents
    by_rows = c.row != 1 and (c.column == 1 or n == 1)
    if by_rows:  # cuBLAS writes the transpose, by columns
        a, b, c = b.transposed, a.transposed, c.transposed
        m, n = n, m
    what = Product((m, n, k), batch, dtypes, _matrix(a, m, k), _matrix(b, k, n), _matrix(c, m, n))
    if what.c.operation != "N":
        raise ValueError(f"results {c} have no neighbours")

    def multiply(a_at: int, b_at: int, c_at: int, workspace: int, add: bool) -> None:
        if by_rows:
            a_at, b_at = b_at, a_at
        blas.multiply(what, a_at, b_at, c_at, workspace, add)

    return multiply


def _matrix(operand: Matrices, rows: int, columns: int) -> StoredMatrix:
    if operand.row == 1 or rows == 1:
        return StoredMatrix("N", max(operand.column if columns > 1 else 1, rows), operand.batch)
    if operand.column == 1 or columns == 1:
        return StoredMatrix("T", max(operand.row, columns), operand.batch)
    raise ValueError(f"{operand}: neither rows nor columns are neighbours")


def opened(names: tuple[str, ...], module: str) -> ctypes.CDLL:
    """A library that importing a module of CuPy brings, wherever that finds it.

    The modules do not know where wheels keep their libraries; cuda-pathfinder, which comes with CuPy, loads them first.
    """
    with contextlib.suppress(Exception):  # it raises what it likes; the module may find the library without it
        library = names[0].removeprefix("lib").partition(".")[0]
        importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib(library)
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise LibraryError(f"{names[0]} does not load: {error}") from error
    for name in names:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise LibraryError(f"none of {', '.join(names)} can be loaded")


def _checked(what: str, status: int) -> None:
    if status:
        raise LibraryError(f"{what}: status {status}")


def _stream() -> ctypes.c_void_p:
    import cupy

    return ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)


class CuBLAS:
    """With CuPy's handle, of which each thread has its own.

    Parameters
    ----------
    workspace_bytes : int
        How much of it a product is to have.

    Raises
    ------
    LibraryError
        When there is no cuBLAS.
    """

    def __init__(self, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self._library = opened(BLAS_NAMES, "cupy_backends.cuda.libs.cublas")
        self._handle = importlib.import_module("cupy.cuda.device").get_cublas_handle
        numbers = (ctypes.c_float * 2)(1, 0), (ctypes.c_float * 2)(0, 0)  # read as real or as complex
        wide = (ctypes.c_double * 2)(1, 0), (ctypes.c_double * 2)(0, 0)
        self._scalars = {COMPUTE_FLOAT32: numbers, COMPUTE_FLOAT64: wide}

    def multiply(self, product: Product, a: int, b: int, c: int, workspace: int, add: bool) -> None:
        """`cublasGemmStridedBatchedEx`."""
        handle = ctypes.c_void_p(self._handle())
        of, to = product.dtypes
        compute = COMPUTE_FLOAT64 if of in ("float64", "complex128") else COMPUTE_FLOAT32
        one, zero = self._scalars[compute]
        _checked("cublasSetStream", self._library.cublasSetStream_v2(handle, _stream()))
        room = ctypes.c_void_p(workspace), ctypes.c_size_t(self.workspace_bytes)  # the line above has reset it
        _checked("cublasSetWorkspace", self._library.cublasSetWorkspace_v2(handle, *room))

        def stored(address: int, matrix: StoredMatrix, dtype: str) -> tuple[Any, ...]:
            return ctypes.c_void_p(address), TYPES[dtype], matrix.leading, ctypes.c_longlong(matrix.batch)

        with self._wide_reductions(handle) if to in ("float16", "bfloat16") else contextlib.nullcontext():
            status = self._library.cublasGemmStridedBatchedEx(
                handle,
                OPERATIONS[product.a.operation],
                OPERATIONS[product.b.operation],
                *product.extents,
                one,
                *stored(a, product.a, of),
                *stored(b, product.b, of),
                one if add else zero,
                *stored(c, product.c, to),
                product.batch,
                compute,
                DEFAULT_ALGORITHM,
            )
        _checked("cublasGemmStridedBatchedEx", status)

    @contextlib.contextmanager
    def _wide_reductions(self, handle: ctypes.c_void_p) -> Iterator[None]:
        """While parts of a sum may not be added in a result's type of 16 bits; handle and mode are CuPy's."""
        mode = ctypes.c_int()
        _checked("cublasGetMathMode", self._library.cublasGetMathMode(handle, ctypes.byref(mode)))
        _checked("cublasSetMathMode", self._library.cublasSetMathMode(handle, mode.value | WIDE_REDUCTIONS))
        try:
            yield
        finally:
            self._library.cublasSetMathMode(handle, mode)


class CuFFT:
    """A plan of cuFFT that works in the caller's workspace.

    Raises
    ------
    LibraryError
        When there is no cuFFT, or it refuses the lengths.
    """

    def __init__(self, lengths: tuple[int, int], batch: int, dtype: str, back: bool) -> None:
        self._library = opened(FFT_NAMES, "cupy.cuda.cufft")
        self._kind = TRANSFORMS[dtype, back]
        self._lock = threading.Lock()  # a plan has one stream and one workspace at a time
        plan, size = ctypes.c_int(), ctypes.c_size_t()
        _checked("cufftCreate", self._library.cufftCreate(ctypes.byref(plan)))
        weakref.finalize(self, self._library.cufftDestroy, plan).atexit = False
        _checked("cufftSetAutoAllocation", self._library.cufftSetAutoAllocation(plan, 0))
        status = self._library.cufftMakePlanMany(
            plan, 2, (ctypes.c_int * 2)(*lengths), None, 1, 0, None, 1, 0, self._kind, batch, ctypes.byref(size)
        )
        _checked(f"cufftMakePlanMany of {batch} times {lengths[0]}x{lengths[1]}", status)
        self._plan, self.workspace_bytes = plan, size.value

    def run(self, source: int, target: int, workspace: int) -> None:
        """`cufftExecR2C` or the like."""
        plan, library = self._plan, self._library
        with self._lock:
            _checked("cufftSetStream", library.cufftSetStream(plan, _stream()))
            _checked("cufftSetWorkArea", library.cufftSetWorkArea(plan, ctypes.c_void_p(workspace)))
            status = getattr(library, EXECUTE[self._kind])(plan, ctypes.c_void_p(source), ctypes.c_void_p(target))
        _checked(EXECUTE[self._kind], status)


@functools.cache
def cublas(capability: int) -> CuBLAS:
    """The one of this process for GPUs of a compute capability, times ten."""
    return CuBLAS(BLAS_WORKSPACE if capability >= HOPPER else SMALL_BLAS_WORKSPACE)


@functools.lru_cache(maxsize=256)
def cufft(device: int, lengths: tuple[int, int], batch: int, dtype: str, back: bool) -> CuFFT:
    """A plan on a GPU, which must be the current one; the same for the same question."""
    return CuFFT(lengths, batch, dtype, back)
