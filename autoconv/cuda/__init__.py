"""Convolution on NVIDIA GPUs: the table of contents of its algorithms."""

from autoconv.algorithm import Algorithm
from autoconv.cuda.depthwise import Depthwise
from autoconv.cuda.direct import Direct
from autoconv.cuda.direct_chwn import DirectCHWN
from autoconv.cuda.direct_tiled import DirectTiled
from autoconv.cuda.explicit import Explicit
from autoconv.cuda.fft import FFT
from autoconv.cuda.gemm import Gemm
from autoconv.cuda.hopper import Hopper, HopperTF32
from autoconv.cuda.tensor import Tensor, TensorTF32
from autoconv.cuda.vendor import (
    Cudnn,
    CudnnAtomic,
    CudnnAtomicTF32,
    CudnnGraph,
    CudnnGraphAtomic,
    CudnnGraphAtomicTF32,
    CudnnGraphTF32,
    CudnnTF32,
)
from autoconv.cuda.winograd import Winograd
from autoconv.cuda.winograd_fused import WinogradFused

ALGORITHMS: tuple[Algorithm, ...] = (
    Direct(),
    Gemm(),
    DirectTiled(),
    DirectCHWN(),
    Depthwise(),
    Winograd(),
    WinogradFused(),
    Tensor(),
    TensorTF32(),
    Hopper(),
    HopperTF32(),
    Explicit(),
    FFT(),
)
VENDORS: tuple[Algorithm, ...] = (
    Cudnn(),
    CudnnAtomic(),
    CudnnTF32(),
    CudnnAtomicTF32(),
    CudnnGraph(),
    CudnnGraphAtomic(),
    CudnnGraphTF32(),
    CudnnGraphAtomicTF32(),
)
