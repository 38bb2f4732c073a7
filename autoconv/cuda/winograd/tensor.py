"""Winograd convolution with products on tensor cores: between the transforms, a convolution with filters of one tap."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from autoconv.accuracy import bound_for
from autoconv.algorithm import Array, Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.codegen.tensor_map import LINE
from autoconv.cuda.common.algorithm import CudaAlgorithm, aligned, ceil_div
from autoconv.cuda.common.model import Demand, beyond_cache, streaming
from autoconv.cuda.gemm.tensor import TensorTF32x3
from autoconv.cuda.hopper.split import HopperBF16x6
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

SIDE = 32  # channels of a block
WHOLE = {"SPLIT": 1}  # products to each point are many: their depth is not divided


@functools.lru_cache(16)  # every candidate of a grid asks for those of its layer
def _product(layer: ConvLayer, m: int, depth_unit: int) -> ConvLayer:
    """The products as a layer: a pixel to each tile, a group to each point of each group."""
    rows, depth, tiles = extents(layer, {"m": m})
    groups = points_of(layer, {"m": m}) * layer.groups
    channels = groups * ceil_div(depth, depth_unit) * depth_unit
    return ConvLayer(N=1, C=channels, H=1, W=tiles, K=groups * rows, R=1, S=1, groups=groups, layout="NHWC")


class WinogradTensor(CudaAlgorithm):
    """F(m x m, R x S) of float32 in three steps, the product of them another family's: in parts, on tensor cores.

    Winograd, "Arithmetic Complexity of Computations" (1980), by way of Lavin & Gray, "Fast Algorithms for Convolutional
    Neural Networks" (2016). The product is a convolution with filters of one tap, of so many groups as there are
    points, and as exact as a sum in float32; what errs are the transforms. `exact` leaves it out, and so does
    AUTOCONV_SPLIT_PRODUCTS=0.
    """

    files = ("winograd/tensor.cu",)
    directions = ("fwd", "dgrad")
    dtypes = ("float32",)
    groupings = ("dense", "grouped")  # a channel alone would be multiplied as so many of zeros
    dilated = False
    spreads_nonfinite = True
    depth_unit: ClassVar[int]  # channels of a group: those of the product are a multiple
    packing: ClassVar[str] = "filter_points"  # the kernel that transforms filters

    @property
    @abstractmethod
    def inner(self) -> CudaAlgorithm:
        """The family that multiplies."""

    def product(self, layer: ConvLayer, params: Params) -> ConvLayer:
        """What it is given."""
        return _product(layer, int(params["m"]), self.depth_unit)

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        for m in ERROR_CAPS:
            for tile in self.inner.candidates(self.product(layer, {"m": m}), device):
                if tile["SPLIT"] == 1:
                    yield {"m": m} | {name: value for name, value in tile.items() if name != "SPLIT"}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        return untransformable(layer, params) or self.inner.unfit(self.product(layer, params), _tile(params))

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        found = super().refusals(layer, device, params)
        return found or self.inner.refusals(self.product(layer, params), device, _tile(params))

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """Filters, input, output; and those of the product."""
        return *self.transforms(layer, params), *self.inner.units(self.product(layer, params), _tile(params))

    def transforms(self, layer: ConvLayer, params: Params) -> tuple[Unit, Unit, Unit]:
        """Of filters, the first one packs; of the input, and back."""
        MH, MW = outputs_of(layer, params)
        product, points = self.product(layer, params), points_of(layer, params)
        constants = (("MH", MH), ("MW", MW), ("DEPTH_UNIT", self.depth_unit))
        text, across = transforms_text(layer, MH, MW), THREADS // SIDE
        # two columns of points, where channels and tiles change places
        shared = 2 * (MH + layer.R - 1) * across * (SIDE + 8) * layer.itemsize if layer.layout == "NCHW" else 0

        def unit(name: str, blocks: int, shared: int = 0) -> Unit:
            held = transform_blocks(params)
            return Unit(name, *self.files, layer, (blocks, 1, 1), THREADS, held, shared, 0, constants, text)

        filters, tiles = math.prod(product.w_shape) // points, ceil_div(product.W, across)
        return (
            unit(self.packing, ceil_div(filters, THREADS)),
            unit("input_points", ceil_div(product.C // points, SIDE) * tiles, shared),
            unit("output_tiles", ceil_div(product.K // points, SIDE) * tiles, shared),
        )

    def parts(self, layer: ConvLayer, params: Params) -> tuple[int, int, int]:
        """Bytes of the transformed input, of its products and of the transformed filters."""
        product = self.product(layer, params)
        shapes = product.x_shape, product.y_shape, product.w_shape
        x, y, w = (aligned(math.prod(shape) * product.itemsize) for shape in shapes)
        return x, y, w

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        x, y, _ = self.parts(layer, params)
        return x + y  # products that are not divided need none

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        _, _, filters = self.parts(layer, params)
        return self.inner.packed_bytes(self.product(layer, params), device, _tile(params)) or filters

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        _, into, out = self.transforms(layer, params)
        inputs, sums, filters = self.parts(layer, params)
        product = self.product(layer, params)
        kept = beyond_cache(device, inputs + sums) > 0  # in memory, between the kernels
        x, y = (math.prod(shape) * layer.itemsize for shape in (layer.input_shapes[0], layer.output_shape))
        slots = POINT_SLOTS * points_of(layer, params)
        filters = self.inner.packed_bytes(product, device, _tile(params)) or filters
        (multiply,) = self.inner.demands(product, device, _tile(params))
        return [
            replace(streaming(into, x + inputs, slots), memory=x + kept * inputs),
            replace(multiply, memory=kept * (inputs + sums) + filters),
            replace(streaming(out, sums + y, slots), memory=y + kept * sums),
        ]

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, ERROR_CAPS[int(params["m"])])

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        return WinogradTensorKernel(self, layer, device, params)


class WinogradTensorKernel(Kernel):
    """The transforms, around the inner kernel on what they leave in the workspace."""

    def __init__(self, algorithm: WinogradTensor, layer: ConvLayer, device: CUDA, params: Params) -> None:
        self._filters, self._input, self._output = algorithm.load(device, algorithm.transforms(layer, params))
        self._inner = algorithm.inner.build(algorithm.product(layer, params), device, _tile(params))
        self._sums, _, _ = algorithm.parts(layer, params)  # where they begin in the workspace
        self.workspace_bytes = algorithm.workspace_bytes(layer, device, params)
        self.packed_bytes = algorithm.packed_bytes(layer, device, params)

    def pack(self, w: Array, packed: Array) -> None:
        self._filters(w, packed)

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        inputs, sums = workspace, workspace[self._sums :]
        self._input(a, inputs)
        self._inner.run(inputs, b, sums, None, None, workspace)
        self._output(sums, out, bias, residual)


class WinogradTF32x3(WinogradTensor):
    """Its products by `gemm.tensor.tf32x3`."""

    name = "winograd.tensor.tf32x3"
    inner = TensorTF32x3()
    depth_unit = 4


class WinogradHopper(WinogradTensor):
    """Its products by `gemm.hopper.bf16x6`, for which filters are transformed and taken apart at once."""

    name = "winograd.hopper.bf16x6"
    packing = "filter_parts"
    inner = HopperBF16x6()
    depth_unit = LINE // 4


def _tile(params: Params) -> Params:
    """What the inner family is told."""
    return {name: value for name, value in params.items() if name != "m"} | WHOLE
