"""The NumPy reference family: each algorithm in plain NumPy and SciPy, for any machine and any layer."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.cpu.numpy.fft import NumpyFFT
from autoconv.cpu.numpy.gemm import NumpyGemm
from autoconv.cpu.numpy.integer import NumpyInteger
from autoconv.cpu.numpy.winograd import NumpyWinograd

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    NumpyDirect(),
    NumpyGemm(),
    NumpyFFT(),
    NumpyWinograd(),
    NumpyInteger(),
)
