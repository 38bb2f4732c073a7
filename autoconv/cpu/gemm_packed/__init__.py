"""1x1 convolution as a matrix product of packed operands."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.gemm_packed.algorithm import GemmPacked

ALGORITHMS: tuple[Algorithm[Any], ...] = (GemmPacked(),)
