"""Quantised convolution: sums of integers in float64, which holds every int32 exactly, image by image."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from autoconv.algorithm import Array, Kernel, Params
from autoconv.common.epilogue.quantization import finished, meanings
from autoconv.common.types import INTEGERS
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.direct import NumpyDirect, NumpyDirectKernel
from autoconv.layer import ConvLayer


class NumpyIntegerKernel(Kernel):
    """The direct sums of one image at a time, less the zero point; then what the integers stand for."""

    def __init__(self, layer: ConvLayer, device: CPU) -> None:
        self.layer = layer
        self._one = layer.replace(N=1, dtype="float64", activation=None)
        self._direct = NumpyDirectKernel(self._one, device)

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        layer = self.layer
        zero = meanings(layer, bias)[2]
        filters, sums = b.astype(np.float64), np.empty(self._one.y_shape)
        for n in range(layer.N):
            self._direct.run(a[n : n + 1] - np.float64(zero), filters, sums, None, None, workspace)
            out[n : n + 1] = finished(layer, np.rint(sums), bias, 1 if layer.layout == "NCHW" else 3)


class NumpyInteger(NumpyDirect):
    """Rank-C updates, tap by tap, on shifted views of the input, of integers."""

    name = "numpy.int8"
    directions = ("fwd",)
    dtypes = tuple(INTEGERS)
    stands_in_for = "int8"
    kernel: ClassVar[Any] = NumpyIntegerKernel

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        copies = 8.0 * (layer.bytes + 3 * layer.N * layer.K * layer.P * layer.Q)
        return (
            super().estimate(layer.replace(dtype="float64", activation=None), device, params)
            + copies / device.bandwidth()
        )
