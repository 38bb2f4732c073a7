"""dgrad of strided layers as one convolution of unit stride, computed by `matrix`."""

from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.matrix.algorithm import Matrix, MatrixX3


class MatrixPolyphase(Polyphase):
    """The polyphase components of dx by `matrix`."""

    name = "matrix.polyphase"
    dtypes = Matrix.dtypes
    exact = True
    keeps_denormals = False
    inner = Matrix()


class MatrixX3Polyphase(Polyphase):
    """The polyphase components of dx by `matrix.x3`."""

    name = "matrix.x3.polyphase"
    dtypes = MatrixX3.dtypes
    keeps_denormals = False
    inner = MatrixX3()
