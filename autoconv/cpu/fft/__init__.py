"""Fourier convolution in tiles, on generated kernels."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.fft.algorithm import TiledFFT

ALGORITHMS: tuple[Algorithm[Any], ...] = (TiledFFT(),)
