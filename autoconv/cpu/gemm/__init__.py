"""Convolution as a matrix product of outer products, the image read in place or by packed panels of rows."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.gemm.algorithm import Gemm

ALGORITHMS: tuple[Algorithm[Any], ...] = (Gemm(),)
