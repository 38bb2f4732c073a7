"""Filters of one tap in NCHW, by Hopper's own means: no array has to be copied in another order."""

from __future__ import annotations

from autoconv.algorithm import Params
from autoconv.cuda.codegen.tensor_map import LINE, STRIDE_UNIT, TensorMap
from autoconv.cuda.common.algorithm import ceil_div
from autoconv.cuda.hopper.hopper import Hopper, HopperTile, Pass, pass_axes
from autoconv.cuda.hopper.split import HopperBF16x6
from autoconv.layer import ConvLayer


class HopperPointwise(Hopper):
    """`gemm.hopper` on NCHW: y = w x for each image, whose pixels are neighbours in memory.

    The copy engine brings runs of pixels of one image, a line to each channel, which the tensor cores read across.
    """

    name = "gemm.hopper.pointwise"
    layouts = ("NCHW",)
    directions = ("fwd", "dgrad")
    groupings = ("dense",)
    pointwise = True

    def passes(self, layer: ConvLayer) -> list[Pass]:
        run = LINE // layer.itemsize
        rows, columns = (pass_axes(layer, i)[0] for i in (0, 1))
        return [(rows._replace(pixels=1), columns._replace(pixels=ceil_div(layer.H * layer.W, run) * run))]

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons, unit = [], STRIDE_UNIT // layer.itemsize
        for name, given, expected in (
            ("filter", (layer.R, layer.S), (1, 1)),
            ("stride", layer.stride, (1, 1)),
            ("padding", tuple(map(sum, layer.padding)), (0, 0)),
        ):
            if given != expected:
                reasons.append(f"{name}: expected {'x'.join(map(str, expected))}, got {'x'.join(map(str, given))}")
        if layer.H * layer.W % unit:
            reasons.append(f"pixels of an image: expected a multiple of {unit}, got {layer.H * layer.W}")
        return reasons or super().unfit(layer, params)

    def maps(self, layer: ConvLayer, one: Pass, tile: HopperTile) -> tuple[TensorMap, TensorMap]:
        _, filters = super().maps(layer, one, tile)
        channels, pixels = layer.C if layer.direction == "fwd" else layer.K, layer.H * layer.W
        line, box = pixels * layer.itemsize, LINE // layer.itemsize
        return TensorMap(layer.dtype, (pixels, channels, layer.N), (line, channels * line), (box, box, 1)), filters


class HopperBF16x6Pointwise(HopperPointwise, HopperBF16x6):
    """`gemm.hopper.bf16x6` likewise; lanes take from the lines what they multiply, number by number.

    Parts and products: as in `gemm.hopper.bf16x6`, which names their sources.
    """

    name = "gemm.hopper.bf16x6.pointwise"
