"""Convolution by products of tiles, on processors with a matrix unit."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.matrix.algorithm import Matrix, MatrixX3
from autoconv.cpu.matrix.dot import MatrixDot
from autoconv.cpu.matrix.gradients import MatrixWgrad, MatrixX3Wgrad
from autoconv.cpu.matrix.pointwise import MatrixPointwise, MatrixX3Pointwise
from autoconv.cpu.matrix.polyphase import MatrixPolyphase, MatrixX3Polyphase

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Matrix(),
    MatrixX3(),
    MatrixPointwise(),
    MatrixX3Pointwise(),
    MatrixPolyphase(),
    MatrixX3Polyphase(),
    MatrixWgrad(),
    MatrixX3Wgrad(),
    MatrixDot(),
)
