"""Convolution by products of tiles, on processors with a matrix unit."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.matrix.algorithm import Matrix, MatrixX3
from autoconv.cpu.matrix.dot import MatrixDot
from autoconv.cpu.matrix.gradients import MatrixWgrad, MatrixX3Wgrad
from autoconv.cpu.matrix.pointwise import MatrixPointwise, MatrixX3Pointwise

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Matrix(),
    MatrixX3(),
    MatrixPointwise(),
    MatrixX3Pointwise(),
    Polyphase(Matrix()),
    Polyphase(MatrixX3()),
    MatrixWgrad(),
    MatrixX3Wgrad(),
    MatrixDot(),
)
