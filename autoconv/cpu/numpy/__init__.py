"""The floor: every family in plain NumPy and SciPy, for any machine and any layer."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.numpy.direct import Direct
from autoconv.cpu.numpy.fft import FFT
from autoconv.cpu.numpy.gemm import Gemm
from autoconv.cpu.numpy.winograd import Winograd

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Direct(),
    Gemm(),
    FFT(),
    Winograd(),
)
