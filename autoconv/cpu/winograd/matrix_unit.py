"""Winograd convolution whose products are computed by a matrix unit, on transforms split into bfloat16 parts.

Six products of parts err no more than products in float32 do, in tiles of any size. Three are as exact as large tiles
are, in small ones: what a product loses the inverse transform makes larger, the more so the larger the tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autoconv.accuracy import USUAL
from autoconv.algorithm import Params
from autoconv.cpu.codegen.ir import Module
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis
from autoconv.cpu.common.tiles.algorithm import X3_BOUND, TileAlgorithm, with_few_terms
from autoconv.cpu.device import CPU
from autoconv.cpu.transform import kernels
from autoconv.cpu.transform.matrix_unit import MatrixFilters, MatrixInput, MatrixTiling, MatrixWriter
from autoconv.cpu.winograd.algorithm import Cut, Winograd
from autoconv.cpu.winograd.geometry import WinogradAxis, WinogradTiling, winograd_axis
from autoconv.cpu.winograd.kernels import WinogradFilters, WinogradInput, WinogradWriter
from autoconv.layer import ConvLayer

MOST_OUTPUTS, MOST_POINTS = 4, 6  # of a tile by three products, within the cap of large tiles


@dataclass(frozen=True)
class WinogradMatrixTiling(MatrixTiling, WinogradTiling):
    """One correlation in tiles of m x m outputs, for the unit."""


class WinogradMatrixInput(MatrixInput[WinogradMatrixTiling], WinogradInput[WinogradMatrixTiling]):
    """Writes `BT x B` in parts."""


class WinogradMatrixFilters(MatrixFilters[WinogradMatrixTiling], WinogradFilters[WinogradMatrixTiling]):
    """Writes `G w GT` in parts."""


class WinogradMatrixWriter(MatrixWriter[WinogradMatrixTiling], WinogradWriter[WinogradMatrixTiling]):
    """Writes the functions of one correlation: products of the unit, and `AT M A`."""

    input_stage = WinogradMatrixInput
    filter_stage = WinogradMatrixFilters


def emit(instruction_set: str, layer: ConvLayer, tilings: tuple[WinogradMatrixTiling, ...]) -> Module:
    """`run` and `pack` for the correlations of a layer."""
    return kernels.emit(WinogradMatrixWriter, instruction_set, layer, tilings, tilings[0].matrix_unit)


class WinogradMatrix(TileAlgorithm, Winograd):
    """`winograd` with six products of a float32's parts for each of its own; parameters are the same.

    Sources: those of `winograd`, and of `matrix` for the parts and the tiles.
    """

    name = "winograd.matrix"
    emitter = staticmethod(emit)
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    products: ClassVar[dict[str, int]] = {"float32": 6}
    finer: ClassVar[Params] = {}  # a unit adds up in its own way

    def tiling(
        self, layer: ConvLayer, device: CPU, c: Correlation, m: tuple[int, int], cut: Cut
    ) -> WinogradMatrixTiling:
        where, unit = (device.instruction_set, layer.accumulator.itemsize, device.threads), device.matrix_unit or ""
        return WinogradMatrixTiling(c, *where, m, cut.rows, cut.coop, unit, self.products[layer.dtype])


class WinogradMatrixX3(WinogradMatrix):
    """The same with the three largest products, in tiles of up to four outputs.

    It serves float16 too, whose transforms are in float32 here.
    """

    name = "winograd.matrix.x3"
    dtypes = ("float32", "float16")
    rounds_more = True
    products: ClassVar[dict[str, int]] = {"float32": 3, "float16": 3}

    def sizes(self, axis: CorrelationAxis) -> Sequence[int]:
        return [m for m in super().sizes(axis) if _fits(winograd_axis(axis, m))]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        tilings = self.tilings(layer, device, params)
        if not all(_fits(axis) for tiling in tilings for axis in (tiling.rows, tiling.columns)):
            most = f"at most {MOST_OUTPUTS} outputs and {MOST_POINTS} points"
            reasons.append(f"m={params['m']}: expected {most} of a tile, as there are three products of parts")
        return reasons + with_few_terms(min(tiling.correlation.C * tiling.subfilters for tiling in tilings))

    def cap(self, axes: Iterable[WinogradAxis]) -> float:
        return max(X3_BOUND if axis.tile <= 4 else 3e-5 for axis in axes)

    def usual_error(self, layer: ConvLayer, params: Params, rms: bool = False) -> float:
        return USUAL * self.bound(layer, params)  # three products err more than transforms


def _fits(axis: WinogradAxis) -> bool:
    return axis.m <= MOST_OUTPUTS and axis.tile <= MOST_POINTS
