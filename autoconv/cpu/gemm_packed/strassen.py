from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm_packed.geometry import product, pixels_of
from autoconv.cpu.gemm_packed.strassen_geometry import *
from autoconv.cpu.gemm_packed.strassen_kernels import emit
from autoconv.layer import ConvLayer


class Strassen(GeneratedAlgorithm):
    name = "gemm.strassen"
    directions = ("fwd", "dgrad")
    layouts = ("NCHW",)
    groupings = ("dense", "grouped")
    spreads_nonfinite = True
    levels = 1

    def candidates(self, layer, device):
        return grid_of(layer, device, self.levels)

    def refusals(self, layer, device, params):
        return []

    def workspace_bytes(self, layer, device, params):
        return device.threads * thread_bytes(product(layer), blocking_of(layer, device, params), layer.accumulator.itemsize)

    def packed_bytes(self, layer, device, params):
        return packed_size(product(layer), blocking_of(layer, device, params)) * layer.accumulator.itemsize

    def estimate(self, layer, device, params):
        return 1.0

    def program(self, layer, device, params):
        return compiler.build(emit, device.instruction_set, layer, blocking_of(layer, device, params))
