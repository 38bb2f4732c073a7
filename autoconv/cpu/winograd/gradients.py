"""Winograd's gradient of the filters on generated kernels, for the layers whose forward pass `winograd` takes.

F(m x m, r x r) transposed needs `(m + r - 1)**2` multiplications for what `m * m` pixels of dy add to `r * r` taps, as
the forward pass does for its outputs (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016); the
same decomposition serves strides, dilation and large filters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

from autoconv.algorithm import Params, bound_for
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.device import CPU
from autoconv.cpu.transform.geometry import unfit
from autoconv.cpu.winograd.estimate import wgrad_seconds
from autoconv.cpu.winograd.geometry import (
    WinogradTiling,
    cap,
    most_sizes,
    refusals_of,
    single_channels,
    sizes,
    winograd_axis,
)
from autoconv.cpu.winograd.gradients_geometry import WgradTiling
from autoconv.cpu.winograd.gradients_kernels import emit
from autoconv.layer import ConvLayer

CHUNKS = 16, 32, 64, 128, 256  # tiles of a chunk, about


def _forward(layer: ConvLayer) -> Correlation:
    return correlations(layer.replace(direction="fwd"))[0]


def _tiling(layer: ConvLayer, device: CPU, m: tuple[int, int], rows: int, slices: int) -> WgradTiling:
    """`slices` 0: as many as make enough tasks of blocks of filters and channels."""
    c = _forward(layer)
    forward = WinogradTiling(c, device.instruction_set, layer.accumulator.itemsize, m, rows, 0)
    one = WgradTiling(forward, 1, 1)
    enough = -(-2 * device.threads // (one.filter_blocks * one.channel_blocks))
    slices = min(slices or enough, forward.chunks)
    sections = min(-(-4 * device.threads // (slices * (forward.c_blocks + one.k_vectors))), forward.chunk)
    return WgradTiling(forward, slices, sections)


def _parse(params: Params) -> tuple[tuple[int, int], int, int]:
    down, across = map(int, str(params["m"]).split("x"))
    return (down, across), int(params["rows"]), int(params["slices"])


def tiling_of(layer: ConvLayer, device: CPU, params: Params) -> WgradTiling:
    """How a layer is cut."""
    return _tiling(layer, device, *_parse(params))


@functools.lru_cache(256)
def _ranked(layer: ConvLayer, device: CPU) -> tuple[tuple[tuple[int, int], int], ...]:
    """The most promising sizes of tiles, with the best sizes of chunks."""
    c = _forward(layer)
    found: dict[tuple[int, ...], tuple[float, tuple[int, int], int]] = {}
    for m in itertools.product(sizes(c.rows), sizes(c.columns)):
        one = _tiling(layer, device, m, 1, 1).forward
        for rows in {min(max(tiles // one.columns.tiles, 1), one.tile_rows) for tiles in CHUNKS}:
            cost = wgrad_seconds(_tiling(layer, device, m, rows, 0), device.machine)
            key = *sorted(m), rows >= one.tile_rows
            found[key] = min(found.get(key, (cost, m, rows)), (cost, m, rows))
    return tuple(choice[1:] for choice in sorted(found.values())[: most_sizes(layer)])


class WinogradWgrad(GeneratedAlgorithm):
    """Tiles of `m` pixels of dy; chunks of `rows` of tiles; `slices` of chunks with sums of their own."""

    name = "winograd.wgrad"
    directions = ("wgrad",)
    groupings = ("dense", "grouped")
    epilogue = False
    spreads_nonfinite = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        return super().unsupported(layer) or single_channels(layer) + unfit(layer.replace(direction="fwd"), 1)

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        found: list[Params] = []
        for m, rows in () if self.unsupported(layer) else _ranked(layer, device):
            slices = _tiling(layer, device, m, rows, 0).slices
            found.append({"m": f"{m[0]}x{m[1]}", "rows": rows, "slices": slices})
        return found

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        forward = tiling_of(layer, device, params).forward
        return refusals_of(forward.m, (forward,))

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return tiling_of(layer, device, params).workspace_bytes(device.threads)

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        return wgrad_seconds(tiling_of(layer, device, params), device.machine)

    def bound(self, layer: ConvLayer, params: Params) -> float:
        c, (down, across) = _forward(layer), _parse(params)[0]
        axes = winograd_axis(c.rows, down), winograd_axis(c.columns, across)
        return bound_for(layer, cap(axes))  # of the forward pass, whose errors are no smaller

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, tiling_of(layer, device, params))
