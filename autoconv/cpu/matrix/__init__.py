"""Convolution by products of tiles, on processors with a matrix unit."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.matrix.algorithm import Matrix, MatrixX3

ALGORITHMS: tuple[Algorithm[Any], ...] = (Matrix(), MatrixX3())
