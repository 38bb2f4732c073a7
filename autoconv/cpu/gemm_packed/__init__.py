"""1x1 convolution as a matrix product of packed operands, by eight products of halves or by Strassen's seven."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.gemm_packed.algorithm import GemmPacked
from autoconv.cpu.gemm_packed.strassen import GemmStrassen

ALGORITHMS: tuple[Algorithm[Any], ...] = (GemmPacked(), GemmStrassen())
