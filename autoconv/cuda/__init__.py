"""Convolution on NVIDIA GPUs: the table of contents of its algorithms."""

from autoconv.algorithm import Algorithm
from autoconv.cuda.depthwise import Depthwise
from autoconv.cuda.direct import Direct
from autoconv.cuda.explicit import Explicit
from autoconv.cuda.gemm import Gemm
from autoconv.cuda.hopper import Hopper, HopperTF32
from autoconv.cuda.tensor import Tensor, TensorTF32
from autoconv.cuda.winograd import Winograd

ALGORITHMS: tuple[Algorithm, ...] = (
    Direct(),
    Gemm(),
    Depthwise(),
    Winograd(),
    Tensor(),
    TensorTF32(),
    Hopper(),
    HopperTF32(),
    Explicit(),
)
