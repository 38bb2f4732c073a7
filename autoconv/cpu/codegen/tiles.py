"""Tiles: eight registers of 16 rows by 64 bytes, and the product of two that is added to a third.

They are written in two ways. With the matrix unit "amx" each operation is an instruction of Intel's Advanced Matrix
Extensions, with constant numbers of tiles: LLVM allocates none, and keeps the order. With "emulated" it is a loop over
arrays of 1 KiB on the stack, which gives the same values on every processor; so an emitter is tested anywhere.

Tiles keep nothing from one function to the next: each loads or zeroes what it multiplies. A thread may use them between
`configure_tiles` and `release_tiles`, which a task calls at its start and at its end.

Source: Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2, TDPBF16PS and TDPBUSD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from autoconv.cpu.codegen.memory import Memory
from autoconv.cpu.codegen.values import Type, Value, f32, i8, i32, ptr, vec

if TYPE_CHECKING:
    from autoconv.cpu.codegen.ir import Function, Module

TILES = 8
TILE_ROWS = 16
TILE_ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
WORDS = TILE_ROW_BYTES // 4  # of a row: sums, or pairs of narrow numbers
TILE_FLOPS = {"bfloat16": 4 * TILE_ROWS * WORDS**2, "int8": 8 * TILE_ROWS * WORDS**2}  # of a product of tiles
EXPONENT, UPPER, SIGN = 0x7F800000, -(1 << 16), -(1 << 31)


class Tiles(Memory):
    """Tiles of whole rows, multiplied as bfloat16 or as bytes."""

    def __init__(self, module: Module, name: str, head: str, types: Sequence[Type]) -> None:
        super().__init__(module, name, head, types)
        self._defined: set[int] = set()  # tiles that the text so far has loaded or zeroed
        self._arrays: dict[int, Value] = {}

    def configure_tiles(self) -> None:
        """Have this thread's tiles be eight of 16 rows by 64 bytes."""
        if self._emulated():
            return
        # palette 1; 14 reserved bytes; the bytes of a row of each tile, in 16 bits; the rows of each tile
        widths = [TILE_ROW_BYTES, 0] * TILES + [0, 0] * TILES
        configuration = [1, *[0] * 15, *widths, *[TILE_ROWS] * TILES, *[0] * TILES]
        self.intrinsic(None, "llvm.x86.ldtilecfg", self.module.table(cast("Function", self), i8, configuration))

    def release_tiles(self) -> None:
        """This thread uses no tiles any more: who switches threads need not save them."""
        if not self._emulated():
            self.intrinsic(None, "llvm.x86.tilerelease")

    def tile_zero(self, tile: int) -> None:
        """Zero in every byte."""
        self._defined.add(tile)
        if not self._emulated():
            self.intrinsic(None, "llvm.x86.tilezero", self.const(i8, tile))
            return
        array, lanes = self._array(tile), self.module.lanes(f32)
        with self.loop(0, TILE_BYTES // 4, lanes) as word:
            self.store(self.zero(i32, lanes), array + word)

    def tile_load(self, tile: int, p: Value, pitch: int | Value) -> None:
        """Rows of 64 bytes, `pitch` bytes apart."""
        self._defined.add(tile)
        if self._emulated():
            self._copy_rows(p, pitch, self._array(tile), TILE_ROW_BYTES)
        else:
            self.intrinsic(None, "llvm.x86.tileloadd64", self.const(i8, tile), p, self.i64(pitch))

    def tile_store(self, tile: int, p: Value, pitch: int | Value) -> None:
        """Rows of 64 bytes, `pitch` bytes apart."""
        self._check(tile)
        if self._emulated():
            self._copy_rows(self._array(tile), TILE_ROW_BYTES, p, pitch)
        else:
            self.intrinsic(None, "llvm.x86.tilestored64", self.const(i8, tile), p, self.i64(pitch))

    def tile_multiply(self, sums: int, a: int, b: int) -> None:
        """Add the product of bfloat16 tiles to float32 sums.

        Row m of `a` holds the pairs `a[m, 2k], a[m, 2k+1]`, row k of `b` the pairs `b[2k, n], b[2k+1, n]`, k and n from
        0 to 15, and row m of `sums` grows by `sum over k of a[m, 2k] b[2k, n] + a[m, 2k+1] b[2k+1, n]`. Numbers below
        2**-126 count as 0, those that are read and those that come out. Each sum is rounded to nearest, in whatever
        mode the thread is.
        """
        self._check(sums, a, b)
        if self._emulated():
            self.call(_multiplier(self.module), *(self._array(tile) for tile in (sums, a, b)))
        else:
            self.intrinsic(None, "llvm.x86.tdpbf16ps", *(self.const(i8, tile) for tile in (sums, a, b)))

    def tile_multiply_bytes(self, sums: int, a: int, b: int) -> None:
        """Add the product of tiles of bytes to int32 sums: `a` without a sign, `b` with one.

        Rows hold groups of four bytes where those of `tile_multiply` hold pairs. Sums are exact, modulo 2**32.
        """
        self._check(sums, a, b)
        if self._emulated():
            self.call(_byte_multiplier(self.module), *(self._array(tile) for tile in (sums, a, b)))
        else:
            self.intrinsic(None, "llvm.x86.tdpbusd", *(self.const(i8, tile) for tile in (sums, a, b)))

    def _emulated(self) -> bool:
        unit = self.module.matrix_unit
        if unit is None:
            raise ValueError(f"{self.name}: expected a module for a matrix unit, as it uses tiles")
        return unit == "emulated"

    def _check(self, *tiles: int) -> None:
        if missing := sorted(set(tiles) - self._defined):
            raise ValueError(f"{self.name}: expected tiles that it has loaded or zeroed, got {missing}")

    def _array(self, tile: int) -> Value:
        if tile not in self._arrays:
            self._arrays[tile] = self.scratch(i32, TILE_BYTES // 4)
        return self._arrays[tile]

    def _copy_rows(self, source: Value, pitch: int | Value, target: Value, target_pitch: int | Value) -> None:
        lanes = self.module.lanes(f32)
        with self.loop(0, TILE_ROWS) as row:
            there, here = (self.bytes_at(p, row * n, i32) for p, n in ((source, pitch), (target, target_pitch)))
            for word in range(0, WORDS, lanes):
                self.store(self.load(there + word, lanes), here + word)


def _multiplier(m: Module) -> Function:
    """`multiply(sums, a, b)` of arrays, the same function for the whole module.

    As the manual has it: the even and the odd members of pairs are summed apart, by multiply-adds, and then added.
    """
    name = "tile_multiply"
    if (known := next((f for f in m.functions if f.name == name), None)) is not None:
        return known
    k = m.function(name, *[ptr(i32)] * 3, internal=True)
    sums, a, b = k.args
    lanes = m.lanes(f32)
    starts = range(0, WORDS, lanes)
    with k.loop(0, TILE_ROWS) as row:
        even, odd = ([k.var(k.zero(f32, lanes)) for _ in starts] for _ in range(2))
        with k.loop(0, WORDS) as pair:
            left = k.splat(k.load(a + row * WORDS + pair), lanes)
            for start, low, high in zip(starts, even, odd, strict=True):
                right = k.load(b + pair * WORDS + start, lanes)
                low.fma(_normal(k, left << 16), _normal(k, right << 16))
                high.fma(_normal(k, left & UPPER), _normal(k, right & UPPER))
        for start, low, high in zip(starts, even, odd, strict=True):
            here = sums + row * WORDS + start
            total = _normal(k, k.load(here, lanes)) + (low.get() + high.get())
            k.store(k.bits(_normal(k, k.bits(total, vec(i32, lanes))), vec(i32, lanes)), here)
    return k


def _byte_multiplier(m: Module) -> Function:
    """`multiply(sums, a, b)` of arrays of bytes, the same function for the whole module."""
    name = "tile_multiply_bytes"
    if (known := next((f for f in m.functions if f.name == name), None)) is not None:
        return known
    k = m.function(name, *[ptr(i32)] * 3, internal=True)
    sums, a, b = k.args
    lanes = m.lanes(f32)
    with k.loop(0, TILE_ROWS) as row, k.loop(0, WORDS, lanes) as start:
        total = k.var(k.load(sums + row * WORDS + start, lanes))
        with k.loop(0, WORDS) as group:
            left, right = k.splat(k.load(a + row * WORDS + group), lanes), k.load(b + group * WORDS + start, lanes)
            for n in range(0, 32, 8):
                total.add(((left >> n) & 0xFF) * ((((right >> n) & 0xFF) ^ 0x80) - 0x80))
        k.store(total.get(), sums + row * WORDS + start)
    return k


def _normal(k: Function, bits: Value) -> Value:
    """Floats of these bits, or zero of their sign where they are subnormal."""
    small = (bits & EXPONENT).eq(0)
    return k.bits(k.select(small, bits & SIGN, bits), vec(f32, bits.type.lanes))
