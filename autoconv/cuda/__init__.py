"""Convolution on NVIDIA GPUs: the table of contents of its algorithms."""

from autoconv.algorithm import Algorithm
from autoconv.cuda.direct import Direct

ALGORITHMS: tuple[Algorithm, ...] = (Direct(),)
