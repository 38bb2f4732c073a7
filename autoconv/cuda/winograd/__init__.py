"""Winograd convolution on a GPU: in four kernels, fused into one, and with products on tensor cores."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.winograd.fused import WinogradFused
from autoconv.cuda.winograd.tensor import WinogradHopper, WinogradTF32x3
from autoconv.cuda.winograd.wgrad import WinogradHopperWgrad, WinogradTF32x3Wgrad
from autoconv.cuda.winograd.winograd import Winograd

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Winograd(),
    WinogradFused(),
    WinogradTF32x3(),
    WinogradHopper(),
    WinogradTF32x3Wgrad(),
    WinogradHopperWgrad(),
)
