"""Fourier convolution in tiles, on generated kernels."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.fft.algorithm import TiledFFT
from autoconv.cpu.fft.matrix_unit import FourierMatrix, FourierMatrixX3

ALGORITHMS: tuple[Algorithm[Any], ...] = (TiledFFT(), FourierMatrix(), FourierMatrixX3())
