"""Winograd's gradient of the filters on generated kernels, for the layers whose forward pass `winograd` takes.

F(m x m, r x r) transposed needs `(m + r - 1)**2` multiplications for what `m * m` pixels of dy add to `r * r` taps, as
the forward pass does for its outputs (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016); the
same decomposition serves strides, dilation and large filters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autoconv.accuracy import bound_for
from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.grid import parts, steps
from autoconv.cpu.device import CPU
from autoconv.cpu.transform.geometry import unfit
from autoconv.cpu.winograd.algorithm import MOST_TILES, outputs
from autoconv.cpu.winograd.estimate import wgrad_seconds
from autoconv.cpu.winograd.geometry import (
    WinogradTiling,
    cap,
    refusals_of,
    single_channels,
    sizes,
    winograd_axis,
)
from autoconv.cpu.winograd.gradients_geometry import WgradTiling
from autoconv.cpu.winograd.gradients_kernels import emit
from autoconv.layer import ConvLayer


def _forward(layer: ConvLayer) -> Correlation:
    return correlations(layer.replace(direction="fwd"))[0]


def _tiling(layer: ConvLayer, device: CPU, m: tuple[int, int], rows: int, slices: int) -> WgradTiling:
    """`slices` 0: as many as make enough tasks of blocks of filters and channels."""
    c = _forward(layer)
    forward = WinogradTiling(c, device.instruction_set, layer.accumulator.itemsize, device.threads, m, rows, 0)
    one = WgradTiling(forward, 1, 1)
    enough = -(-2 * device.threads // (one.filter_blocks * one.channel_blocks))
    slices = min(slices or enough, forward.chunks)
    sections = min(-(-4 * device.threads // (slices * (forward.c_blocks + one.k_vectors))), forward.chunk)
    return WgradTiling(forward, slices, sections)


def tiling_of(layer: ConvLayer, device: CPU, params: Params) -> WgradTiling:
    """How a layer is cut."""
    return _tiling(layer, device, outputs(params), int(params["rows"]), int(params["slices"]))


class WinogradWgrad(GeneratedAlgorithm):
    """Tiles of `m` pixels of dy; chunks of `rows` of tiles; `slices` of chunks with sums of their own."""

    name = "winograd.wgrad"
    directions = ("wgrad",)
    groupings = ("dense", "grouped")
    spreads_nonfinite = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        return super().unsupported(layer) or single_channels(layer) + unfit(layer.replace(direction="fwd"), 1)

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterator[Params]:
        """Sizes of tiles by chunks by slices: as many of these as make tasks enough for the threads, or fewer."""
        c = _forward(layer)
        for m in itertools.product(sizes(c.rows), sizes(c.columns)):
            one = _tiling(layer, device, m, 1, 1).forward
            for rows in parts(one.tile_rows, MOST_TILES // one.columns.tiles):
                most = _tiling(layer, device, m, rows, 0).slices
                for slices in reversed(steps(most)):
                    yield {"m": f"{m[0]}x{m[1]}", "rows": rows, "slices": slices}

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        forward = tiling_of(layer, device, params).forward
        return refusals_of(forward.m, (forward,))

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return tiling_of(layer, device, params).workspace_bytes()

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        return wgrad_seconds(tiling_of(layer, device, params), device.machine)

    def bound(self, layer: ConvLayer, params: Params) -> float:
        c, (down, across) = _forward(layer), outputs(params)
        axes = winograd_axis(c.rows, down), winograd_axis(c.columns, across)
        return bound_for(layer, cap(axes))  # of the forward pass, whose errors are no smaller

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, tiling_of(layer, device, params))
