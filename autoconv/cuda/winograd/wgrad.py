"""The gradient of filters by Winograd, with products on tensor cores: as in `tensor`, the other way round."""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from autoconv.accuracy import bound_for
from autoconv.algorithm import Array, Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import CudaAlgorithm, aligned, ceil_div
from autoconv.cuda.common.model import Demand, beyond_cache, streaming
from autoconv.cuda.gemm.tensor import TensorTF32x3
from autoconv.cuda.hopper.split import HopperBF16x6
from autoconv.cuda.winograd.tensor import SIDE
from autoconv.cuda.winograd.winograd import (
    ERROR_CAPS,
    POINT_SLOTS,
    THREADS,
    extents,
    outputs_of,
    points_of,
    transform_blocks,
    transforms_text,
    untransformable,
)
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

ERRORS = {4: ERROR_CAPS[2], 6: ERROR_CAPS[4], 8: ERROR_CAPS[6]}  # by points of a tile along an axis, at most
UNIT = 8  # channels and filters of a group of the product are a multiple: so much both families take


@functools.lru_cache(16)  # every candidate of a grid asks for those of its layer
def _product(layer: ConvLayer, m: int) -> ConvLayer:
    """The products as a layer: a pixel to each tile, a group to each point of each group."""
    rows, depth, tiles = extents(layer, {"m": m})
    groups = points_of(layer, {"m": m}) * layer.groups
    C, K = (groups * ceil_div(channels, UNIT) * UNIT for channels in (depth, rows))
    return ConvLayer(N=1, C=C, H=1, W=tiles, K=K, R=1, S=1, groups=groups, layout="NHWC", direction="wgrad")


class WinogradWgrad(CudaAlgorithm):
    """F(R x S, m x m) of float32: tiles of inputs, correlated with tiles of m x m gradients of outputs.

    Winograd, "Arithmetic Complexity of Computations" (1980), by way of Lavin & Gray, "Fast Algorithms for Convolutional
    Neural Networks" (2016), section 3, for whom the gradient is such a correlation. The product at each point is the
    gradient of filters of one tap, whose pixels are the tiles, and another family's. `exact` leaves it out, and so does
    AUTOCONV_SPLIT_PRODUCTS=0.
    """

    files = ("winograd/wgrad.cu",)
    directions = ("wgrad",)
    dtypes = ("float32",)
    groupings = ("dense", "grouped")  # a channel alone would be multiplied as so many of zeros
    dilated = False
    spreads_nonfinite = True

    @property
    @abstractmethod
    def inner(self) -> CudaAlgorithm:
        """The family that multiplies."""

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        for m in ERROR_CAPS:
            if not untransformable(layer, {"m": m}):
                for tile in self.inner.candidates(_product(layer, m), device):
                    yield {"m": m, **tile}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        return untransformable(layer, params) or self.inner.unfit(*_inner(layer, params))

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        found = super().refusals(layer, device, params)
        if found:  # also of an `m` that makes no tiles
            return found
        product, tile = _inner(layer, params)
        return self.inner.refusals(product, device, tile)

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """Inputs, gradients, filters; and those of the product."""
        return *self.transforms(layer, params), *self.inner.units(*_inner(layer, params))

    def transforms(self, layer: ConvLayer, params: Params) -> tuple[Unit, Unit, Unit]:
        """Of the input and of the gradient of the output, and back."""
        MH, MW = outputs_of(layer, params)
        (product, _), points = _inner(layer, params), points_of(layer, params)
        constants = (("MH", MH), ("MW", MW), ("DEPTH_UNIT", UNIT))
        text, across = transforms_text(layer, MH, MW), THREADS // SIDE
        # two columns of points, where channels and tiles change places
        shared = 2 * (MH + layer.R - 1) * across * (SIDE + 8) * layer.itemsize if layer.layout == "NCHW" else 0

        def unit(name: str, blocks: int, shared: int = 0) -> Unit:
            held = transform_blocks(params)
            return Unit(name, *self.files, layer, (blocks, 1, 1), THREADS, held, shared, 0, constants, text)

        tiles, filters = ceil_div(product.W, across), math.prod(product.w_shape) // points
        return (
            unit("input_points", ceil_div(product.C // points, SIDE) * tiles, shared),
            unit("gradient_points", ceil_div(product.K // points, SIDE) * tiles, shared),
            unit("filter_sums", ceil_div(filters, THREADS)),
        )

    def parts(self, layer: ConvLayer, params: Params) -> tuple[int, int, int]:
        """Bytes of the transformed input, of the transformed gradient and of their products."""
        product, _ = _inner(layer, params)
        shapes = product.x_shape, product.y_shape, product.w_shape
        x, y, w = (aligned(math.prod(shape) * product.itemsize) for shape in shapes)
        return x, y, w

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        product, tile = _inner(layer, params)
        return sum(self.parts(layer, params)) + self.inner.workspace_bytes(product, device, tile)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        into, gradient, out = self.transforms(layer, params)
        inputs, gradients, sums = self.parts(layer, params)
        product, tile = _inner(layer, params)
        kept = beyond_cache(device, inputs + gradients + sums) > 0  # in memory, between the kernels
        x, y, w = (math.prod(shape) * layer.itemsize for shape in (layer.x_shape, layer.y_shape, layer.w_shape))
        slots = POINT_SLOTS * points_of(layer, params)
        return [
            replace(streaming(into, x + inputs, slots), memory=x + kept * inputs),
            replace(streaming(gradient, y + gradients, slots), memory=y + kept * gradients),
            *(replace(one, memory=kept * one.memory) for one in self.inner.demands(product, device, tile)),
            replace(streaming(out, sums + w, slots), memory=w + kept * sums),
        ]

    def bound(self, layer: ConvLayer, params: Params) -> float:
        most = (
            max(outputs + taps for outputs, taps in zip(outputs_of(layer, params), (layer.R, layer.S), strict=True)) - 1
        )
        return bound_for(layer, next(cap for points, cap in ERRORS.items() if most <= points))

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        return WinogradWgradKernel(self, layer, device, params)


class WinogradWgradKernel(Kernel):
    """The transforms, around the inner kernel on what they leave in the workspace."""

    def __init__(self, algorithm: WinogradWgrad, layer: ConvLayer, device: CUDA, params: Params) -> None:
        self._input, self._gradient, self._sums = algorithm.load(device, algorithm.transforms(layer, params))
        product, tile = _inner(layer, params)
        self._inner = algorithm.inner.build(product, device, tile)
        self._starts = tuple(itertools.accumulate(algorithm.parts(layer, params)))
        self.workspace_bytes = algorithm.workspace_bytes(layer, device, params)

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        gradients, sums, rest = (workspace[start:] for start in self._starts)
        self._input(a, workspace)
        self._gradient(b, gradients)
        self._inner.run(workspace, gradients, sums, None, None, rest)
        self._sums(sums, out)


class WinogradTF32x3Wgrad(WinogradWgrad):
    """Its products by `gemm.tensor.tf32x3`."""

    name = "winograd.tensor.tf32x3.wgrad"
    inner = TensorTF32x3()


class WinogradHopperWgrad(WinogradWgrad):
    """Its products by `gemm.hopper.bf16x6`."""

    name = "winograd.hopper.bf16x6.wgrad"
    inner = HopperBF16x6()


def _inner(layer: ConvLayer, params: Params) -> tuple[ConvLayer, Params]:
    """What the inner family is asked to do."""
    return _product(layer, int(params["m"])), {name: value for name, value in params.items() if name != "m"}
