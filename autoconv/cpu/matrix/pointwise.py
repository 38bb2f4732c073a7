"""1x1 layers in NCHW by products of tiles whose rows are filters, so that neither pixels nor sums are transposed."""

from __future__ import annotations

from autoconv.cpu.matrix.algorithm import Matrix, MatrixX3
from autoconv.cpu.matrix.pointwise_kernels import PointwisePanel, emit
from autoconv.layer import ConvLayer

MOST_STRIDE = 4  # of the columns: each reads as many vectors for one


class MatrixPointwise(Matrix):
    """Tiles of packed filters by tiles of pixels, as they lie; parameters are those of `matrix`.

    Sources: those of `matrix`.
    """

    name = "matrix.pointwise"
    layouts = ("NCHW",)
    emitter = staticmethod(emit)
    panel = PointwisePanel
    transposes = False

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        if (layer.R, layer.S) != (1, 1) or layer.padding != ((0, 0), (0, 0)):
            got = f"{layer.R}x{layer.S} with {layer.padding}"
            reasons.append(f"R, S and padding: expected a filter of 1x1 without padding, got {got}")
        if layer.direction == "dgrad" and layer.stride != (1, 1):
            reasons.append(f"stride={layer.stride}: expected (1, 1) for dgrad")
        if layer.stride[1] > MOST_STRIDE:
            reasons.append(f"stride={layer.stride}: expected at most {MOST_STRIDE} columns")
        return reasons


class MatrixX3Pointwise(MatrixPointwise, MatrixX3):
    """The same with the three largest products of a float32's parts, for sums of many terms."""

    name = "matrix.x3.pointwise"
    dtypes = MatrixX3.dtypes
    exact = False
    products = MatrixX3.products
