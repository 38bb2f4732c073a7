"""Convolution on a CPU: the table of contents of its algorithms."""

from autoconv.algorithm import Algorithm
from autoconv.cpu.floor.direct import Direct
from autoconv.cpu.floor.fft import FFT
from autoconv.cpu.floor.gemm import Gemm
from autoconv.cpu.floor.winograd import Winograd
from autoconv.cpu.vendor import Onnxruntime, Torch

ALGORITHMS: tuple[Algorithm, ...] = (Direct(), Gemm(), FFT(), Winograd(), Torch(), Onnxruntime())
