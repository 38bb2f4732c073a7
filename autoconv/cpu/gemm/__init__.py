"""Convolution as a matrix product of outer products, the image read in place or by packed panels of rows."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.gemm.algorithm import Gemm
from autoconv.cpu.gemm.polyphase import GemmPolyphase

ALGORITHMS: tuple[Algorithm[Any], ...] = (Gemm(), GemmPolyphase())
