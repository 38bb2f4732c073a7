"""Implicit GEMM by the asynchronous units of one compute capability, 9.0: in 16 bits, in tf32, and float32 in parts."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.hopper.hopper import Hopper, HopperTF32
from autoconv.cuda.hopper.pointwise import HopperBF16x6Pointwise, HopperPointwise
from autoconv.cuda.hopper.split import HopperBF16x6

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Hopper(),
    HopperTF32(),
    HopperPointwise(),
    HopperBF16x6(),
    HopperBF16x6Pointwise(),
)
