"""1x1 convolution as a matrix product of packed operands, for channels in planes.

Lanes are output channels and pixels are broadcast, as in `direct`; but a plane is cut into tiles of a few pixels,
and every tile's pixels are copied next to one another, channel after channel: one line of the cache then holds
several channels of a tile where in place it holds a part of one, and a task's tiles are read from the second-level
cache in order, by every block of filters. (The packing of Goto and van de Geijn, doi:10.1145/1356052.1356053, with
filters in the first-level cache.)

The gradient of the input of a layer with strides is such a product too, with zeros between its pixels: what a block of
filters makes of a strip is gathered first, and then spread over the rows of the image, each written in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module
from autoconv.cpu.common.algorithm import CALL, GeneratedAlgorithm
from autoconv.cpu.common.packing import packed_size
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm_packed.kernels import Cut, Shape, emit, product, thread_bytes, tile_pitch
from autoconv.layer import ConvLayer

TILES = {  # vectors of channels by pixels; one vector is enough where a broadcast is no instruction of its own
    "avx512": ((2, 14), (1, 28)),
    "avx2": ((2, 6),),
    "generic": ((2, 5),),
}
SUMS = 32 * 1024  # bytes of a task's sums, where they go over some channels at a time
MOST_TILES = 256  # in a task: what is noted of each lies on the stack
MOST_STRIDE = 8  # of a gradient: the zeros after a pixel are written out


def _tiles(layer: ConvLayer, device: CPU) -> list[dict[str, int]]:
    """The first tile, and what other has fewer lanes that hold nothing."""
    lanes = Module(device.instruction_set).lanes(DTYPES[layer.dtype])
    first, *others = ({"BK": vectors * lanes, "BQ": pixels} for vectors, pixels in TILES[device.instruction_set])
    K = product(layer).K
    return [first, *(tile for tile in others if _rounded(K, tile["BK"]) < _rounded(K, first["BK"]))]


def _rounded(K: int, BK: int) -> int:
    return math.ceil(K / BK) * BK


def _shape(layer: ConvLayer, device: CPU, params: Params) -> Shape:
    """Tiles of a strip fill half of the second-level cache, a block's filters half of the first."""
    problem = product(layer)
    BK, BQ = int(params["BK"]), int(params["BQ"])
    itemsize = layer.accumulator.itemsize
    parts = math.ceil(problem.C * BK * itemsize / (device.facts["l1_bytes"] // 2))
    unrolled = Module(device.instruction_set).terms
    BC = math.ceil(problem.C / (parts * unrolled)) * unrolled
    tiles = problem.N * Cut.of(problem, BQ).tiles
    most = SUMS // (BK * BQ * itemsize) if parts > 1 else MOST_TILES
    fit = max(1, min(most, device.facts["l2_bytes"] // 2 // (tile_pitch(problem, BQ) * itemsize)))
    strips = math.ceil(tiles / fit)
    blocks = math.ceil(problem.K / BK)
    chunks = 1
    while strips * chunks * problem.groups < 8 * device.threads and chunks * 2 <= blocks:
        chunks *= 2
    return Shape(BK, BQ, BC, math.ceil(tiles / strips), chunks, device.threads)


class Pointwise(GeneratedAlgorithm):
    """Register tiles of BK channels by BQ pixels, from packed filters and copied pixels."""

    name = "gemm.packed"
    exact = True
    modules = "direct_pack", "pieces", "pointwise_kernel"

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return _tiles(layer, device)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        if params not in (tiles := _tiles(layer, device)):
            allowed = ", ".join(f"BK={tile['BK']},BQ={tile['BQ']}" for tile in tiles)
            reasons.append(f"BK={params['BK']},BQ={params['BQ']}: allowed are {allowed}")
        if (layer.R, layer.S) != (1, 1):
            reasons.append(f"R={layer.R}, S={layer.S}: 1x1 filters are wanted; direct takes others")
        if layer.padding != ((0, 0), (0, 0)):
            reasons.append(f"padding {layer.padding}: pixels of the border would not be copied; direct takes it")
        if layer.layout == "NHWC":
            reasons.append("NHWC: channels are neighbours already; direct reads them in place")
        if layer.direction == "wgrad":
            reasons.append("wgrad: a sum over pixels")
        if layer.depthwise:
            reasons.append(f"groups={layer.groups}: one channel in a group; depthwise has lanes for it")
        if layer.direction == "dgrad" and max(layer.stride) > MOST_STRIDE:
            stride = f"{layer.stride[0]}x{layer.stride[1]}"
            reasons.append(f"dgrad of stride {stride}: zeros are written out for strides up to {MOST_STRIDE}")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        shape = _shape(layer, device, params)
        problem = product(layer)
        return device.threads * thread_bytes(problem, shape, layer.accumulator.itemsize)

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        problem = product(layer)
        return packed_size(problem, int(params["BK"])) * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """At peak, but for empty lanes, and what a tile's sums and a pixel's copies cost, which many channels share."""
        problem = product(layer)
        shares = (1.05 + 16 / problem.C) * _rounded(problem.K, int(params["BK"])) / problem.K + 8 / problem.K
        return max(shares * layer.flops / device.peak_flops(layer.dtype), layer.bytes / device.bandwidth()) + CALL

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, _shape(layer, device, params))
