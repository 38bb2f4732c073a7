"""Fourier convolution whose products are computed by a matrix unit, on spectra split into bfloat16 parts.

A product of complex numbers is three of real ones, of a, b and a + b by c + d, d - c and c (Gauss); here all three of
either side are kept, and what they add up to is computed where the products are transformed back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from autoconv.cpu.codegen.ir import Function, Module, Value
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.tiles.algorithm import X3_BOUND, TileAlgorithm
from autoconv.cpu.device import CPU
from autoconv.cpu.fft.algorithm import LARGEST_STACK, TiledFFT
from autoconv.cpu.fft.dft import Complex
from autoconv.cpu.fft.geometry import CircularAxis, FourierTiling
from autoconv.cpu.fft.kernels import FourierFilters, FourierInput, FourierWriter
from autoconv.cpu.transform import kernels
from autoconv.cpu.transform.matrix_unit import MatrixFilters, MatrixInput, MatrixTiling, MatrixWriter
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class FourierMatrixTiling(MatrixTiling, FourierTiling):
    """One correlation in tiles whose spectra are multiplied by the unit; all three products of a number are points."""

    @functools.cached_property
    def product_planes(self) -> int:
        return self.planes

    @functools.cached_property
    def pack_stack(self) -> int:
        """With the spectra of a pair of channels, which are written together."""
        return super().pack_stack + 2 * self.points * self.TK * self.itemsize


class FourierMatrixInput(MatrixInput[FourierMatrixTiling], FourierInput[FourierMatrixTiling]):
    """Writes the spectra of the input in parts."""


class FourierMatrixFilters(MatrixFilters[FourierMatrixTiling], FourierFilters[FourierMatrixTiling]):
    """Writes the spectra of the filters in parts."""

    stack = LARGEST_STACK

    def keep(self, k: Function, x: Complex, p: Value) -> None:
        c, d = x
        for n, plane in enumerate((d - c, c + d, c)):
            k.store(plane, p + n * self.apart)


class FourierMatrixWriter(MatrixWriter[FourierMatrixTiling], FourierWriter[FourierMatrixTiling]):
    """Writes the functions of one correlation: products of the unit, and the inverse transform."""

    input_stage = FourierMatrixInput
    filter_stage = FourierMatrixFilters

    def product_at(self, k: Function, p: Value) -> Complex:
        second, third, first = (k.load(p + n * self.tiling.m_stride, self.tiling.lanes) for n in range(3))
        return Complex(first - third, first + second)


def emit(instruction_set: str, layer: ConvLayer, tilings: tuple[FourierMatrixTiling, ...]) -> Module:
    """`run` and `pack` for the correlations of a layer."""
    return kernels.emit(FourierMatrixWriter, instruction_set, layer, tilings, tilings[0].matrix_unit)


class FourierMatrix(TileAlgorithm, TiledFFT):
    """`fft` with six products of a float32's parts for each of its own; parameters are the same.

    Sources: those of `fft`, and of `matrix` for the parts and the tiles.
    """

    name = "fft.matrix"
    emitter = staticmethod(emit)
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    products: ClassVar[dict[str, int]] = {"float32": 6}

    def tiling(
        self, layer: ConvLayer, device: CPU, c: Correlation, axes: tuple[CircularAxis, CircularAxis]
    ) -> FourierMatrixTiling:
        m, lengths = zip(*((axis.m, axis.length) for axis in axes), strict=True)
        where, unit = (device.instruction_set, layer.accumulator.itemsize, device.threads), device.matrix_unit or ""
        return FourierMatrixTiling(c, *where, m, 1, 0, lengths, False, unit, self.products[layer.dtype])


class FourierMatrixX3(FourierMatrix):
    """The same with the three largest products."""

    name = "fft.matrix.x3"
    dtypes = ("float32", "float16")
    rounds_more = True
    products: ClassVar[dict[str, int]] = {"float32": 3, "float16": 3}
    float32_bound = X3_BOUND
