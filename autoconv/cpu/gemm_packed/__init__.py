"""1x1 convolution as a matrix product of packed operands."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.gemm_packed.algorithm import Pointwise

ALGORITHMS: tuple[Algorithm[Any], ...] = (Pointwise(),)
