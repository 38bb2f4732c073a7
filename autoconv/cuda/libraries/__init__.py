"""Libraries of CUDA: cuBLAS and cuFFT, which our kernels call, and cuDNN, whose algorithms are candidates."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.libraries.algorithm import (
    Cudnn,
    CudnnAtomic,
    CudnnAtomicTF32,
    CudnnGraph,
    CudnnGraphAtomic,
    CudnnGraphAtomicTF32,
    CudnnGraphTF32,
    CudnnTF32,
)

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Cudnn(),
    CudnnAtomic(),
    CudnnTF32(),
    CudnnAtomicTF32(),
    CudnnGraph(),
    CudnnGraphAtomic(),
    CudnnGraphTF32(),
    CudnnGraphAtomicTF32(),
)
