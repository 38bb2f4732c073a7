"""The gradient of the filters by products of tiles, whose depth is 32 neighbouring outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.codegen.tiles import TILE_FLOPS
from autoconv.cpu.common.estimate import operands_once, side_by_side
from autoconv.cpu.common.tiles.algorithm import TileAlgorithm, with_few_terms
from autoconv.cpu.common.tiles.products import DEPTH
from autoconv.cpu.device import CPU
from autoconv.cpu.matrix.algorithm import Matrix, MatrixX3
from autoconv.cpu.matrix.gradients_geometry import WgradCut, wgrad_cut
from autoconv.cpu.matrix.gradients_kernels import emit
from autoconv.layer import ConvLayer

STRIPS = (1024, 4096, 16384)  # outputs


class MatrixWgrad(TileAlgorithm):
    """The gradient of the filters by products of tiles: 16 filters by 16 channels, over 32 outputs.

    Parameters: `products` of parts of numbers, as of `matrix`; about how many outputs a `strip` has, which all threads
    pack together.

    Sources: those of `matrix`; the sum over outputs as a matrix product is that of Chellapilla, Puri and Simard (2006),
    https://inria.hal.science/inria-00112631.
    """

    name = "matrix.wgrad"
    directions = ("wgrad",)
    exact = True
    spreads_nonfinite = True  # zeros of dy between rows meet numbers of x
    products: ClassVar[dict[str, int]] = Matrix.products

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        products = self.products[layer.dtype]
        found: dict[WgradCut, Params] = {}
        for strip in STRIPS:
            cut = wgrad_cut(layer, products, strip, device.threads)
            found.setdefault(cut, {"products": products, "strip": strip})
        return found.values()

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        products, strip = params["products"], params["strip"]
        if products != (needed := self.products[layer.dtype]):
            reasons.append(f"products={products}: expected {needed} for {layer.dtype}")
        if int(strip) < DEPTH:
            reasons.append(f"strip={strip}: expected at least the {DEPTH} outputs of a product")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return _cut(layer, device, params).workspace_bytes

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """The products of whole tiles, the packing of both operands, and a region of threads for each."""
        machine, cut = device.machine, _cut(layer, device, params)
        filters, channels = cut.tiles
        images, rows, columns = cut.strips
        steps = cut.c.groups * filters * channels * len(cut.taps) * cut.steps
        rate = machine.tiles(device.matrix_unit or "", "bfloat16")
        multiplied = TILE_FLOPS["bfloat16"] * cut.b.products * steps / rate
        packed, vector = cut.places[2], VECTOR_BYTES[device.instruction_set]
        packing = packed / vector / machine.transforms(vector) / machine.threads
        moved = machine.writing(packed, packed / machine.threads) + machine.reading(packed, packed / machine.threads)
        strip = side_by_side(multiplied, moved) + packing + 2 * (machine.barrier or 0.0)
        return images * rows * columns * strip + operands_once(layer, machine) + (machine.call or 0.0)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        cut = _cut(layer, device, params)
        return compiler.build(emit, device.instruction_set, device.matrix_unit, layer, cut)


class MatrixX3Wgrad(MatrixWgrad):
    """The same with the three largest products of a float32's parts."""

    name = "matrix.x3.wgrad"
    dtypes = MatrixX3.dtypes
    exact = False
    rounds_more = True
    products: ClassVar[dict[str, int]] = MatrixX3.products
    float32_bound = MatrixX3.float32_bound

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        return super().refusals(layer, device, params) + with_few_terms(layer.N * layer.P * layer.Q)


def _cut(layer: ConvLayer, device: CPU, params: Params) -> WgradCut:
    return wgrad_cut(layer, int(params["products"]), int(params["strip"]), device.threads)
