"""Convolution on a CPU: the table of contents of its algorithms."""

from autoconv.algorithm import Algorithm
from autoconv.cpu.floor.direct import Direct
from autoconv.cpu.floor.fft import FFT
from autoconv.cpu.floor.gemm import Gemm
from autoconv.cpu.floor.winograd import Winograd

ALGORITHMS: tuple[Algorithm, ...] = (Direct(), Gemm(), FFT(), Winograd())
