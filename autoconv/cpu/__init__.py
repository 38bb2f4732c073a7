"""Convolution on a CPU: the table of contents of its algorithms."""

from autoconv.algorithm import Algorithm

ALGORITHMS: tuple[Algorithm, ...] = ()
