"""Fourier convolution on a GPU, around cuFFT."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.fft.fft import FFT

ALGORITHMS: tuple[Algorithm[Any], ...] = (FFT(),)
