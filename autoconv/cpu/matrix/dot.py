"""Dot products of pairs of bfloat16 on vectors, for processors with AVX512-BF16 and no tiles.

Panel and filters are those that tiles are loaded from: a word of a line, two channels of a pixel, meets a row of a tile
of filters, the same channels of 16 filters.

Source: Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2, VDPBF16PS.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import LINE, Function, Module, Value, bf16, f32, i32, i64, ptr, vec
from autoconv.cpu.codegen.tiles import TILE_BYTES, TILE_ROWS, UPPER, WORDS
from autoconv.cpu.common.tiles.products import FILTERS
from autoconv.cpu.device import CPU
from autoconv.cpu.matrix import kernels
from autoconv.cpu.matrix.algorithm import Matrix, blockings_of
from autoconv.cpu.matrix.geometry import MatrixBlocking, Panel
from autoconv.cpu.matrix.kernels import BLOCK, Fetch
from autoconv.layer import ConvLayer

FEATURE = "avx512bf16"
INSTRUCTION, PLAIN = "vdpbf16ps", "plain"  # how pairs are multiplied: the second in arithmetic that every processor has
TOGETHER = 8  # pixels by a block of filters whose sums are in registers


def add_pairs(k: Function, product: str, sums: Value, pixels: Value, filters: Value) -> Value:
    """`sums` and the two products of every word, each added and rounded by itself, the odd ones first."""
    if product == INSTRUCTION:
        pairs = vec(bf16, 2 * sums.type.lanes)
        return k.intrinsic(
            sums.type, "llvm.x86.avx512bf16.dpbf16ps.512", sums, k.bits(pixels, pairs), k.bits(filters, pairs)
        )
    for a, b in ((pixels & UPPER, filters & UPPER), (pixels << 16, filters << 16)):
        sums = k.fma(k.bits(a, sums.type), k.bits(b, sums.type), sums)
    return sums


def emit_block(product: str, m: Module, panel: Panel, products: int, tiles: tuple[int, int], fetch: Fetch) -> Function:
    """The same as `kernels.emit_block` writes, `TOGETHER` pixels at a time."""
    taps, filters, lanes = panel.taps, tiles[1], m.lanes(f32)
    k = m.function(f"dot_{tiles[0]}x{filters}_{len(m.functions)}", *BLOCK, internal=True)
    x, w, all_sums, blocks, add, *_ = k.args
    vectors = range(0, filters * TILE_ROWS, lanes)
    skips = m.table(k, i64, [tap * LINE for tap in taps]) if taps else None
    with k.loop(0, tiles[0] * TILE_ROWS, TOGETHER) as pixel:
        sums = k.bits(all_sums, ptr(f32)) + pixel * FILTERS
        totals = [[k.var(k.zero(f32, lanes)) for _ in vectors] for _ in range(TOGETHER)]
        with k.if_(add.ne(0)):
            for n, row in enumerate(totals):
                for first, total in zip(vectors, row, strict=True):
                    total.set(k.load(sums + (n * FILTERS + first), lanes))
        if skips is not None:
            step = filters * TILE_BYTES
            with k.loop(0, blocks) as block, k.loop(0, len(taps)) as tap, k.loop(0, WORDS) as word:
                line = x + (block * panel.block + pixel) * LINE + k.load(skips + tap) + word * 4
                pair = k.bits(w + (block * len(taps) + tap) * step + word * LINE, ptr(i32))
                places = [first // TILE_ROWS * (TILE_BYTES // 4) + first % TILE_ROWS for first in vectors]
                of_filters = [k.load(pair + place, lanes) for place in places]
                for n, row in enumerate(totals):
                    of_pixel = k.broadcast(k.bits(line + n * LINE, ptr(i32)), lanes)
                    for total, v in zip(row, of_filters, strict=True):
                        total.set(add_pairs(k, product, total.get(), of_pixel, v))
        for n, row in enumerate(totals):
            for first, total in zip(vectors, row, strict=True):
                k.store(total.get(), sums + (n * FILTERS + first))
    return k


def emit(instruction_set: str, product: str, layer: ConvLayer, blockings: tuple[MatrixBlocking, ...]) -> Module:
    """`run` and `pack` of a forward pass or a gradient of the input."""
    return kernels.emit(instruction_set, None, layer, blockings, functools.partial(emit_block, product))


def product_of(device: CPU) -> str | None:
    """How a device multiplies pairs, where it is worth it: with tiles it is not, and as loops it is a test."""
    if device.matrix_unit is not None:
        return PLAIN if device.matrix_unit == "emulated" else None
    able = device.instruction_set == "avx512" and compiler.host_features().get(FEATURE, False)
    return INSTRUCTION if able else None


class MatrixDot(Matrix):
    """Pixels by packed filters, pair by pair of channels, in registers; parameters are those of `matrix`.

    Sources: those of `matrix`; the instruction is VDPBF16PS of Intel's manual.
    """

    name = "matrix.dot"
    dtypes = ("bfloat16",)
    products: ClassVar[dict[str, int]] = {"bfloat16": 1}

    def missing(self, device: CPU) -> list[str]:
        if product_of(device) is None:
            return [f"{FEATURE}: expected a processor with it and AVX-512, and without a matrix unit, which is faster"]
        return []

    def rate(self, device: CPU) -> float:
        """Operations per second: as many words as a thread multiplies float32 numbers, two products for each."""
        return 2 * device.machine.flops(device.instruction_set, "float32")

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        product = product_of(device) or PLAIN
        return compiler.build(emit, device.instruction_set, product, layer, blockings_of(layer, device, params))
