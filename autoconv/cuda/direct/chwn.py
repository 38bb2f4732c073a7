"""Direct convolution with images innermost (CHWN), as cuda-convnet has its arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.occupancy import STATIC_SHARED
from autoconv.cuda.codegen.source import Unit, wide
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div, roofline, scalar
from autoconv.cuda.gemm.gemm import Tile
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 256  # of the kernels that turn arrays
TURNED = 32  # rows and columns that turn together
ALIGNMENT = 256  # bytes, of each part of the workspace
TILES = (
    Tile(128, 128, 8, 8, 8, blocks=2),
    Tile(64, 64, 16, 4, 8, blocks=4),
    Tile(128, 32, 8, 8, 4, blocks=4),
    Tile(32, 32, 16, 4, 4, blocks=8),
)


class DirectCHWN(CudaAlgorithm):
    """Images become neighbours in the workspace, and outputs turn back on their way out; fwd and dgrad.

    The layout of Krizhevsky's cuda-convnet (2012). Each place of the output is a matrix product over the
    taps that meet the image there, so that padding, and in dgrad strides, cost nothing; it wants many
    images. Li, Yang, Feng, Chakradhar & Zhou, "Optimizing Memory Efficiency for Deep Convolutional Neural
    Networks on GPUs" (2016), say where it is ahead of other layouts.
    """

    name = "direct.chwn"
    files = ("direct/chwn.cu", "direct/chwn_product.cu")
    exact = True
    skips_padding = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        for tile in TILES:
            yield {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        tile, reasons = _tile(params), []
        if layer.direction == "wgrad":
            reasons.append("wgrad: this kernel has fwd and dgrad")
        if tile is None:
            return [*reasons, f"no such tile: {', '.join(f'{t.BM}x{t.BN}x{t.BK}' for t in TILES)} exist"]
        if layer.dtype == "float64" and tile.TM * tile.TN > 32:
            reasons.append(f"float64: {tile.TM}x{tile.TN} sums do not fit a thread's registers")
        if not reasons and max(_sizes(layer)) >= 2**30 and not wide(layer):
            reasons.append(f"filled up to {_images(layer)} images and whole words, an array has 2**30 elements")
        if _shared(layer, tile) > STATIC_SHARED:
            reasons.append(f"{layer.R}x{layer.S} taps, listed in shared memory, leave the tile too little")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """Filters, input, product and, where channels come first, output; the first one packs."""
        tile = _tile(params)
        assert tile is not None
        shared = _shared(layer, tile)
        if layer.dtype == "float64":
            tile = tile.halved()
        turning, product = self.files
        rows, height, width = _output(layer)

        def turn(name: str, shape: tuple[int, ...]) -> Unit:
            grid = (ceil_div(math.prod(shape[1:]), TURNED), ceil_div(_images(layer), TURNED), 1)
            turned = TURNED * (TURNED + 1) * layer.accumulator.itemsize
            return Unit(name, turning, layer, grid, THREADS, 4, turned)

        filters = (ceil_div(_sizes(layer)[0], THREADS), 1, 1)
        grid = (height * width * ceil_div(_images(layer), tile.BN), ceil_div(rows, tile.BM), layer.groups)
        return (
            Unit("chwn_filter", turning, layer, filters, THREADS, 4),
            turn("chwn_in", layer.input_shapes[0]),
            Unit("chwn_product", product, layer, grid, tile.threads, tile.blocks, shared, constants=tile.constants),
            *((turn("chwn_out", layer.output_shape),) if layer.layout == "NCHW" else ()),
        )

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return sum(_parts(layer))

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return _sizes(layer)[0] * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        tile = _tile(params)
        assert tile is not None
        rows, height, width = _output(layer)
        whole = ceil_div(rows, tile.BM) * tile.BM * ceil_div(_images(layer), tile.BN) * tile.BN * layer.groups
        blocks = whole // (tile.BM * tile.BN) * height * width
        together = int(device.facts["multiprocessors"]) * tile.blocks
        full = blocks / (ceil_div(blocks, together) * together)
        depth = math.prod(_meetings(layer)) * (layer.K if layer.direction == "dgrad" else layer.C) // layer.groups
        efficiency = 0.75 * min(1.0, 2 * tile.BM * tile.BN / (tile.BM + tile.BN) / 64) * full
        products = 2.0 * whole * depth / (efficiency * device.peak_flops(scalar(layer)))
        turned = 2 * self.workspace_bytes(layer, device, params) / device.bandwidth()
        launches = 2 if layer.layout == "NHWC" else 3
        return products + turned + roofline(layer, device, 1e3, launches=launches)

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        filters, turn, product, *back = self.load(device, self.units(layer, params))
        tail = ("bias", "residual")
        return Chain(
            [
                (turn, ("a", "workspace")),
                (product, ("b", "workspace", "out", *tail)),
                *((launch, ("workspace", "out", *tail)) for launch in back),
            ],
            self.workspace_bytes(layer, device, params),
            filters,
            self.packed_bytes(layer, device, params),
        )


def _tile(params: Params) -> Tile | None:
    wanted = params["BM"], params["BN"], params["BK"]
    return next((tile for tile in TILES if wanted == (tile.BM, tile.BN, tile.BK)), None)


def _shared(layer: ConvLayer, tile: Tile) -> int:
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
    return ceil_div(X * layer.itemsize, ALIGNMENT) * ALIGNMENT, ceil_div(sums, ALIGNMENT) * ALIGNMENT


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
