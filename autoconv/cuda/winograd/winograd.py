"""Winograd convolution: fewer multiplications by transforms of small tiles, in four kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from autoconv.accuracy import bound_for
from autoconv.algorithm import Kernel, Params
from autoconv.common.winograd_math import Matrix, transforms
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, ceil_div, no_tile, tile_of
from autoconv.cuda.common.gemm_tile import Fetch, GemmTile, single
from autoconv.cuda.common.model import Demand, beyond_cache, streaming
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 128
POINT_SLOTS = 8  # instructions of a transform to each point: moved once, twice part of a sum
MOST_POINTS = 8  # points of a tile in one dimension: 64 in two are as many as a thread can hold
ERROR_CAPS = {2: 4e-6, 4: 1e-5, 6: 3e-5}  # error for float32, by outputs of a tile
TILES = (  # of the product
    GemmTile(128, 128, 8, 8, 8, blocks=2),
    GemmTile(128, 64, 8, 8, 8, blocks=3),
    GemmTile(64, 64, 16, 4, 8, blocks=4),
)


def _function(name: str, matrix: Matrix) -> str:
    """A product with a constant matrix as straight-line code, without the terms that are zero."""
    lines = []
    for i, row in enumerate(matrix):
        terms = [f"{_factor(value)}x[{j}]" for j, value in enumerate(row) if value]
        lines.append(f"    y[{i}] = {' + '.join(terms) or 'Acc(0)'};\n")
    shape = f"const Acc (&x)[{len(matrix[0])}], Acc (&y)[{len(matrix)}]"
    return f"DEVICE void {name}({shape}) {{\n{''.join(lines)}}}\n"


def transforms_text(layer: ConvLayer, MH: int, MW: int) -> str:
    """The one-dimensional transforms of F(MH x MW, R x S), as `winograd.cuh` calls them.

    For wgrad those of F(R x S, MH x MW): the gradients of outputs are what a tile of inputs is correlated with.
    """
    extents = ((MH, layer.R), (MW, layer.S))
    down, across = (transforms(r, m) if layer.direction == "wgrad" else transforms(m, r) for m, r in extents)
    return "".join(
        _function(f"{name}_{axis}", getattr(t, matrix))
        for name, matrix in (("filter", "G"), ("input", "BT"), ("output", "AT"))
        for axis, t in (("h", down), ("w", across))
    )


def _factor(value: Fraction) -> str:
    return {1: "", -1: "-"}.get(value, f"Acc({float(value)!r}) * ")  # type: ignore[call-overload, no-any-return]


class Winograd(CudaAlgorithm):
    """F(m x m, R x S) with the transformed tiles in memory, for any groups, stride 1.

    Winograd, "Arithmetic Complexity of Computations" (1980), by way of Lavin & Gray, "Fast Algorithms for Convolutional
    Neural Networks" (2016), sections 4 and 5; filters of one row or column are transformed along one axis.
    """

    name = "winograd"
    files = ("winograd/winograd.cu",)
    directions = ("fwd", "dgrad")
    dilated = False
    spreads_nonfinite = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        for m in ERROR_CAPS:
            for tile in TILES:
                yield {"m": m, "BM": tile.BM, "BN": tile.BN}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons, missing = untransformable(layer, params), no_tile(TILES, params, "BM", "BN")
        if not missing and layer.dtype == "float64":
            missing = _tile(params).no_float64()
        reasons += missing
        if not reasons and max(_sizes(layer, params)) >= 2**31:
            reasons.append("elements of a matrix of the product: expected fewer than 2**31")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """Filters, input, product, output: the first one packs."""
        tile = _tile(params)
        MH, MW = outputs_of(layer, params)
        text = transforms_text(layer, MH, MW)
        blocks = transform_blocks(params)
        if layer.dtype == "float64":
            tile, blocks = tile.halved(), 2
        # a thread holds the points of a tile
        constants = (*tile.constants, ("MH", MH), ("MW", MW), ("THREADS", THREADS), ("BLOCKS", blocks))
        rows, depth, tiles = extents(layer, params)
        points = points_of(layer, params)

        def unit(name: str, jobs: int) -> Unit:
            grid = (ceil_div(jobs, THREADS), 1, 1)
            return Unit(name, *self.files, layer, grid, THREADS, blocks, 0, 0, constants, text)

        product = Unit(
            "winograd_product",
            *self.files,
            layer,
            (ceil_div(tiles, tile.BN), ceil_div(rows, tile.BM), points * layer.groups),
            tile.threads,
            tile.blocks,
            tile.shared(layer.accumulator.itemsize),
            0,
            constants,
            text,
        )
        return (
            unit("winograd_filter", layer.groups * rows * depth),
            unit("winograd_input", layer.groups * depth * tiles),
            product,
            unit("winograd_output", layer.groups * rows * tiles),
        )

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        _, inputs, products = _sizes(layer, params)
        points = points_of(layer, params) * layer.groups
        return (ceil_div(points * inputs, 64) * 64 + points * products) * layer.accumulator.itemsize

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        filters, _, _ = _sizes(layer, params)
        return points_of(layer, params) * layer.groups * filters * layer.accumulator.itemsize

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        _, into, product, out = self.units(layer, params)
        _, depth, tiles = extents(layer, params)
        tile, wide, last = _tile(params), layer.accumulator.itemsize, layer.layout == "NHWC"
        points = points_of(layer, params)
        filters, inputs, sums = (points * layer.groups * size * wide for size in _sizes(layer, params))
        kept = beyond_cache(device, inputs + sums) > 0  # in memory, between the kernels
        x, y = (math.prod(shape) * layer.itemsize for shape in (layer.input_shapes[0], layer.output_shape))
        lines = Fetch(4, 4, 4.0) if depth % 4 == 0 else single(wide, 4.0)
        images = lines if last else Fetch(4, 1, 4.0) if tiles % 4 == 0 else single(wide, 4.0)
        cached, moved = tile.BK * (tile.BM + tile.BN) * wide, kept * (inputs + sums) + filters
        return [
            replace(streaming(into, 2.0 * inputs, POINT_SLOTS * points), memory=x + kept * inputs),
            tile.demand(product, ceil_div(depth, tile.BK), (lines, images), wide, cached, moved),
            replace(streaming(out, sums + y, POINT_SLOTS * points), memory=y + kept * sums),
        ]

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, ERROR_CAPS[int(params["m"])])

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        filters, inputs, product, outputs = self.load(device, self.units(layer, params))
        return Chain(
            [
                (inputs, ("a", "workspace")),
                (product, ("b", "workspace")),
                (outputs, ("workspace", "out", "bias", "residual")),
            ],
            self.workspace_bytes(layer, device, params),
            filters,
            self.packed_bytes(layer, device, params),
        )


def transform_blocks(params: Params) -> int:
    """Of THREADS to a multiprocessor: as many as leave a thread the registers for a tile's points."""
    return 3 if params["m"] == 6 else 4


def unit_stride(layer: ConvLayer) -> list[str]:
    """The reason against another stride."""
    if layer.stride == (1, 1):
        return []
    return [f"stride: expected 1x1, where tiles of outputs share inputs, got {'x'.join(map(str, layer.stride))}"]


def untransformable(layer: ConvLayer, params: Params) -> list[str]:
    """What is against F(m x m, R x S) with the points of a tile in a thread's registers."""
    reasons = unit_stride(layer)
    if layer.R * layer.S == 1:
        reasons.append("filter: expected more than one tap, got 1x1, where nothing is saved")
    if params["m"] not in ERROR_CAPS or int(params["m"]) + max(layer.R, layer.S) - 1 > MOST_POINTS:
        expected = f"{' or '.join(map(str, ERROR_CAPS))}, and m + taps - 1 of at most {MOST_POINTS}"
        reasons.append(f"m={params['m']}: expected {expected}, got filters of {layer.R}x{layer.S}")
    return reasons


def _tile(params: Params) -> GemmTile:
    return tile_of(TILES, params, "BM", "BN")


def outputs_of(layer: ConvLayer, params: Params) -> tuple[int, int]:
    """Outputs of a tile (for wgrad, gradients of outputs), down and across; one where there is a single tap."""
    m = int(params["m"])
    return m if layer.R > 1 else 1, m if layer.S > 1 else 1


def points_of(layer: ConvLayer, params: Params) -> int:
    """Points of a tile."""
    MH, MW = outputs_of(layer, params)
    return (MH + layer.R - 1) * (MW + layer.S - 1)


def extents(layer: ConvLayer, params: Params) -> tuple[int, int, int]:
    """Channels out and in of a group, and tiles."""
    MH, MW = outputs_of(layer, params)
    C, K = layer.C // layer.groups, layer.K // layer.groups
    rows, depth, height, width = (C, K, layer.H, layer.W) if layer.direction == "dgrad" else (K, C, layer.P, layer.Q)
    return rows, depth, layer.N * ceil_div(height, MH) * ceil_div(width, MW)


def _sizes(layer: ConvLayer, params: Params) -> tuple[int, int, int]:
    """Elements of U, V and M to a point and group."""
    rows, depth, tiles = extents(layer, params)
    return rows * depth, depth * tiles, rows * tiles
