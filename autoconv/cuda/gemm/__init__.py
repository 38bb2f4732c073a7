"""Convolution as a matrix product on a GPU: implicit, on tensor cores, and explicit by cuBLAS."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.gemm.explicit import Explicit
from autoconv.cuda.gemm.gemm import Gemm
from autoconv.cuda.gemm.staged import (
    HopperBF16x6Staged,
    HopperStaged,
    TensorBF16x6Staged,
    TensorStaged,
    TensorTF32x3Staged,
)
from autoconv.cuda.gemm.tensor import Tensor, TensorBF16x6, TensorTF32, TensorTF32x3

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Gemm(),
    Tensor(),
    TensorTF32(),
    TensorTF32x3(),
    TensorBF16x6(),
    TensorStaged(),
    TensorTF32x3Staged(),
    TensorBF16x6Staged(),
    HopperStaged(),
    HopperBF16x6Staged(),
    Explicit(),
)
