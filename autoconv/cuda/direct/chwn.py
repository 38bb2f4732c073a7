"""Direct convolution with images innermost (CHWN), as cuda-convnet has its arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.occupancy import STATIC_SHARED
from autoconv.cuda.codegen.source import Unit, wide
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, aligned, ceil_div, no_tile, tile_of
from autoconv.cuda.common.gemm_tile import Fetch, GemmTile
from autoconv.cuda.common.model import Demand, beyond_cache, streaming
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 256  # of the kernels that transpose arrays
SQUARE = 32  # of a transpose
TILES = (
    GemmTile(128, 128, 8, 8, 8, blocks=2),
    GemmTile(64, 64, 16, 4, 8, blocks=4),
    GemmTile(128, 32, 8, 8, 4, blocks=4),
    GemmTile(32, 32, 16, 4, 4, blocks=8),
)


class DirectCHWN(CudaAlgorithm):
    """Images become neighbours in the workspace, and outputs are transposed back on their way out; fwd and dgrad.

    The layout of cuda-convnet: Krizhevsky, Sutskever & Hinton, "ImageNet Classification with Deep Convolutional Neural
    Networks" (2012). Each place of the output is a matrix product over the taps that meet the image there, so that
    padding, and in dgrad strides, cost nothing; it wants many images. Li, Yang, Feng, Chakradhar & Zhou, "Optimizing
    Memory Efficiency for Deep Convolutional Neural Networks on GPUs" (2016), say where it is ahead of other layouts.
    """

    name = "direct.chwn"
    files = ("direct/chwn.cu", "direct/chwn_product.cu")
    directions = ("fwd", "dgrad")
    exact = True
    skips_padding = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        for tile in TILES:
            yield {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = no_tile(TILES, params, "BM", "BN", "BK")
        if reasons:
            return reasons
        tile = _tile(params)
        if layer.dtype == "float64":
            reasons += tile.no_float64()
        if not reasons and max(_sizes(layer)) >= 2**30 and not wide(layer):
            reasons.append(f"elements, filled up to {_images(layer)} images and whole words: expected fewer than 2**30")
        if _shared(layer, tile) > STATIC_SHARED:
            reasons.append(f"filter: expected fewer taps to list beside the tile, got {layer.R}x{layer.S}")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """Filters, input, product and, where channels come first, output; the first one packs."""
        tile = _tile(params)
        shared = _shared(layer, tile)
        if layer.dtype == "float64":
            tile = tile.halved()
        transposing, product = self.files
        rows, height, width = _output(layer)

        def transpose(name: str, shape: tuple[int, ...]) -> Unit:
            grid = (ceil_div(math.prod(shape[1:]), SQUARE), ceil_div(_images(layer), SQUARE), 1)
            square = SQUARE * (SQUARE + 1) * layer.accumulator.itemsize
            return Unit(name, transposing, layer, grid, THREADS, 4, square)

        filters = (ceil_div(_sizes(layer)[0], THREADS), 1, 1)
        grid = (height * width * ceil_div(_images(layer), tile.BN), ceil_div(rows, tile.BM), layer.groups)
        return (
            Unit("chwn_filter", transposing, layer, filters, THREADS, 4),
            transpose("chwn_in", layer.input_shapes[0]),
            Unit("chwn_product", product, layer, grid, tile.threads, tile.blocks, shared, constants=tile.constants),
            *((transpose("chwn_out", layer.output_shape),) if layer.layout == "NCHW" else ()),
        )

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return sum(_parts(layer))

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return _sizes(layer)[0] * layer.accumulator.itemsize

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        tile, (_, into, product, *back) = _tile(params), self.units(layer, params)
        _, height, width = _output(layer)
        X, Y = _parts(layer)
        x, y = (math.prod(shape) * layer.itemsize for shape in (layer.input_shapes[0], layer.output_shape))
        kept = beyond_cache(device, X + Y) > 0  # in memory, between the kernels
        met = math.prod(_meetings(layer)) / (height * width)  # taps of an output, of the mean one
        slices = met * (layer.K if layer.direction == "dgrad" else layer.C) / layer.groups / tile.BK
        cached = tile.BK * (tile.BM * layer.accumulator.itemsize + tile.BN * layer.itemsize)
        moved = kept * (X + Y) + self.packed_bytes(layer, device, params) + (0 if back else y)
        lines = Fetch(4, 1, 12.0), Fetch(4, 1, 12.0)
        return [
            replace(streaming(into, x + X), memory=x + kept * X),
            tile.demand(product, max(slices, 1.0), lines, layer.accumulator.itemsize, cached, moved),
            *(replace(streaming(unit, y + Y), memory=y + kept * Y) for unit in back),
        ]

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        filters, transpose, product, *back = self.load(device, self.units(layer, params))
        epilogue = ("bias", "residual")
        return Chain(
            [
                (transpose, ("a", "workspace")),
                (product, ("b", "workspace", "out", *epilogue)),
                *((launch, ("workspace", "out", *epilogue)) for launch in back),
            ],
            self.workspace_bytes(layer, device, params),
            filters,
            self.packed_bytes(layer, device, params),
        )


def _tile(params: Params) -> GemmTile:
    return tile_of(TILES, params, "BM", "BN", "BK")


def _shared(layer: ConvLayer, tile: GemmTile) -> int:
    """Bytes of shared memory: slices, and the list of taps."""
    taps = 2 * layer.R * layer.S * (8 if wide(layer) else 4)
    return tile.shared(layer.accumulator.itemsize) + ceil_div(taps, 16) * 16


def _images(layer: ConvLayer) -> int:
    """Filled up to whole words."""
    return ceil_div(layer.N, 4) * 4


def _output(layer: ConvLayer) -> tuple[int, int, int]:
    """Channels of a group, rows and columns."""
    if layer.direction == "dgrad":
        return layer.C // layer.groups, layer.H, layer.W
    return layer.K // layer.groups, layer.P, layer.Q


def _sizes(layer: ConvLayer) -> tuple[int, int, int]:
    """Elements of packed filters, and of X and Y."""
    rows, images = _output(layer)[0], _images(layer)
    filters = math.prod(layer.w_shape) // rows * ceil_div(rows, 4) * 4
    X, Y = (math.prod(shape[1:]) * images for shape in (layer.input_shapes[0], layer.output_shape))
    return filters, X, Y


def _parts(layer: ConvLayer) -> tuple[int, int]:
    """Bytes of the workspace: X, and Y where channels come first."""
    _, X, Y = _sizes(layer)
    sums = Y * layer.accumulator.itemsize if layer.layout == "NCHW" else 0
    return aligned(X * layer.itemsize), aligned(sums)


def _meetings(layer: ConvLayer) -> tuple[int, int]:
    """Along each axis, pairs of an output and a tap that meet inside the image; for dgrad they are the same."""
    axes = zip(
        (layer.P, layer.Q), (layer.H, layer.W), (layer.R, layer.S), layer.stride, layer.padding, layer.dilation,
        strict=True,
    )  # fmt: skip
    down, across = (
        sum(0 <= o * stride - before + t * dilation < extent for o in range(outputs) for t in range(taps))
        for outputs, extent, taps, stride, (before, _), dilation in axes
    )
    return down, across
