"""Tiles: as loops the values of the manual, on every instruction set; as instructions what LLVM makes of them."""

from __future__ import annotations

import ctypes
import re

import ml_dtypes
import numpy as np
import pytest
from assembly import assembly
from vectors import INSTRUCTION_SETS

from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import X86, Module, f32, i8, i64, ptr

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


def emit(instruction_set: str, matrix_unit: str) -> Module:
    """`product(sums, a, b, pitch)`: sums, and operands whose rows lie some bytes apart."""
    m = Module(instruction_set, matrix_unit=matrix_unit)
    k = m.function("product", ptr(f32), ptr(i8), ptr(i8), i64)
    sums, a, b, pitch = k.args
    k.configure_tiles()
    k.tile_zero(1)
    k.tile_load(0, sums, 64)
    k.tile_load(6, a, pitch)
    k.tile_load(7, b, pitch)
    for tile in range(2):
        k.tile_multiply(tile, 6, 7)
        k.tile_store(tile, sums + 256 * tile, 64)
    k.release_tiles()
    return m


def product(instruction_set: str, sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums plus the product, and the product alone; `a` is 16 x 32, `b` 32 x 16."""
    apart = np.full((2, 16, 48), 0xFFFF, np.uint16)  # rows of 64 bytes among others
    apart[0, :, :32] = a.astype(ml_dtypes.bfloat16).view(np.uint16)
    pairs = b.reshape(16, 2, 16).transpose(0, 2, 1).reshape(16, 32)
    apart[1, :, :32] = pairs.astype(ml_dtypes.bfloat16).view(np.uint16)
    out = np.concatenate([sums, np.full((16, 16), np.nan)]).astype(np.float32)
    program = compiler.build(emit, instruction_set, "emulated")
    function = program.function("product", *[ctypes.c_void_p] * 3, ctypes.c_int64)
    function(out.ctypes.data, apart[0].ctypes.data, apart[1].ctypes.data, apart.strides[1])
    return out.reshape(2, 16, 16)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_product_adds_to_sums(instruction_set: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((16, 32), (32, 16)))
    sums = rng.standard_normal((16, 16), np.float32)
    got = product(instruction_set, sums, a, b)
    np.testing.assert_array_equal(got[0], sums + a @ b)
    np.testing.assert_array_equal(got[1], a @ b)


def test_sums_are_rounded_in_pairs_and_small_numbers_count_as_zero() -> None:
    a, b = np.zeros((16, 32), np.float32), np.zeros((32, 16), np.float32)
    a[0, :4], b[:4, 0] = (2.0**24, 1, 1, 1), 1  # even members: 2**24 + 1, rounded to 2**24; odd ones: 2
    a[1, 0], b[0, 1] = 2.0**-127, 2.0**100  # subnormal, as it is read
    a[2, 0], b[0, 2] = 2.0**-70, 2.0**-57  # as it comes out
    a[3, 0], b[0, 3] = 2.0**-70, 2.0**-56  # the smallest that counts
    sums = np.zeros((16, 16), np.float32)
    sums[1, 1] = 2.0**-127
    got = product("avx2", sums, a, b)
    assert got[1, 0, 0] == np.float32(2.0**24 + 2)
    assert got[0, 1, 1] == got[1, 1, 1] == got[1, 2, 2] == 0
    assert got[1, 3, 3] == np.float32(2.0**-126)


def test_values_that_are_not_finite_stay_so_and_spread_along_rows_and_columns_only() -> None:
    a, b = np.ones((16, 32), np.float32), np.ones((32, 16), np.float32)
    a[3, 7], b[5, 2] = np.inf, np.nan
    got = product("avx2", np.zeros((16, 16), np.float32), a, b)[1]
    assert np.isnan(got[:, 2]).all()
    assert np.isinf(np.delete(got[3], 2)).all()
    assert (np.delete(np.delete(got, 3, 0), 2, 1) == 32).all()


@pytest.mark.skipif(not X86, reason="instructions of x86")
def test_each_operation_is_one_instruction() -> None:
    text = assembly(emit("avx512", "amx"), "sapphirerapids")
    found = re.findall(r"ldtilecfg|tilezero|tileloadd|tdpbf16ps|tilestored|tilerelease", text)
    want = ["ldtilecfg", "tilezero", *["tileloadd"] * 3, *["tdpbf16ps", "tilestored"] * 2, "tilerelease"]
    assert found == want
    assert len(re.findall(r"tdpbf16ps\s+%tmm7, %tmm6, %tmm[01]\b", text)) == 2
    configuration = [int(byte) for byte in re.findall(r"i8 (\d+)", str(emit("avx512", "amx")).splitlines()[0])]
    assert configuration == [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8]


def test_tiles_that_hold_nothing_are_refused_when_the_kernel_is_written() -> None:
    k = Module("avx2", matrix_unit="emulated").function("f")
    k.tile_zero(0)
    with pytest.raises(ValueError, match=r"f: expected tiles that it has loaded or zeroed, got \[1, 2\]"):
        k.tile_multiply(0, 1, 2)
    with pytest.raises(ValueError, match="f: expected a module for a matrix unit"):
        Module("avx2").function("f").tile_zero(0)
