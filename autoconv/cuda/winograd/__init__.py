"""Winograd convolution on a GPU: in four kernels, and fused into one."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.winograd.fused import WinogradFused
from autoconv.cuda.winograd.winograd import Winograd

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Winograd(),
    WinogradFused(),
)
