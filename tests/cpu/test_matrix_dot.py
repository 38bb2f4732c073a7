"""Dot products of pairs of bfloat16: right on every kind of layer, by plain arithmetic; and the code of AVX512-BF16."""

from __future__ import annotations

import ctypes
import os
import re

import numpy as np
import pytest
from assembly import assembly, functions_of
from guards import check_guarded
from layers import EPILOGUES, edge, operands
from vectors import INSTRUCTION_SETS, modelled, tile_device

from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import X86, Module, f32, i32, ptr
from autoconv.cpu.device import CPU
from autoconv.cpu.matrix.algorithm import blockings_of
from autoconv.cpu.matrix.dot import FEATURE, INSTRUCTION, PLAIN, MatrixDot, add_pairs, emit, product_of
from autoconv.layer import LAYOUTS, ConvLayer

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
DOT = MatrixDot()
WHOLE = ConvLayer(N=2, C=64, H=6, W=8, K=64, R=3, S=3, padding=1, dtype="bfloat16")
LAYERS = {
    "whole": WHOLE,
    "1x1, remainders": WHOLE.replace(C=67, K=37, H=7, W=7, R=1, S=1, padding=0),
    "a pixel": WHOLE.replace(N=1, C=3, K=1, H=1, W=1, R=1, S=1, padding=0),
    "stride 2": WHOLE.replace(stride=2, H=9, W=11),
    "groups": WHOLE.replace(groups=3, C=60, K=45),
    "many channels": WHOLE.replace(C=130, K=90),
    "the gradient": WHOLE.replace(C=35, K=50, H=5, W=13, direction="dgrad"),
}


def plain_device(instruction_set: str | None = None) -> CPU:
    """A processor whose tiles are loops, so that pairs are multiplied in plain arithmetic, whatever this one has."""
    device = tile_device(instruction_set)
    return CPU(2, device.instruction_set, matrix_unit="emulated", model=device.model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, instruction_set: str, layout: str) -> None:
    layer = LAYERS[name].replace(layout=layout)
    assert check_guarded(DOT, layer, plain_device(instruction_set), operands(layer))


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue: str) -> None:
    layer = edge("remainders", dtype="bfloat16", **EPILOGUES[epilogue])
    assert check_guarded(DOT, layer, plain_device(), operands(layer))


def emit_pairs(instruction_set: str) -> Module:
    """`pairs(sums, pixels, filters)` of a vector."""
    m = Module(instruction_set)
    k = m.function("pairs", ptr(f32), ptr(i32), ptr(i32))
    sums, pixels, filters = k.args
    lanes = m.lanes(f32)
    k.store(add_pairs(k, PLAIN, k.load(sums, lanes), k.load(pixels, lanes), k.load(filters, lanes)), sums)
    return m


def test_a_pair_is_added_in_two_steps_the_odd_one_first() -> None:
    """As the manual has it: 2**24 - 2**24 + 1 is 1, and would be 0 the other way round."""
    sums = np.full(16, 2.0**24, np.float32)
    pixels = np.full(16, 0xCB80_3F80, np.uint32)  # -2**24 above 1
    ones = np.full(16, 0x3F80_3F80, np.uint32)
    compiler.build(emit_pairs, "avx2").function("pairs", *[ctypes.c_void_p] * 3)(
        sums.ctypes.data, pixels.ctypes.data, ones.ctypes.data
    )
    assert (sums[:8] == 1).all()


@pytest.mark.skipif(not X86, reason="instructions of x86")
@pytest.mark.parametrize("processor", ["cooperlake", "sapphirerapids", "znver4"])
def test_the_code_for_avx512_bf16(processor: str) -> None:
    device = CPU(threads=2, instruction_set="avx512", matrix_unit="emulated", model=modelled("avx512", 2).text)
    params = DOT.all(WHOLE, device)[0].params
    module = emit("avx512", INSTRUCTION, WHOLE, blockings_of(WHOLE, device, params))
    text = assembly(module, processor)
    functions = functions_of(text)
    (block,) = (body for name, body in functions.items() if name.startswith("dot_2x2"))
    assert block.count("vdpbf16ps") == 16  # of a step: eight pixels by two vectors of filters
    assert "ymm" not in block
    assert "tile" not in text
    assert not re.search(r"vmov\w+\s+%zmm\d+, -?\d*\(%r[sb]p", block)  # all sums stay in registers


def test_who_offers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, vectors = plain_device(), {isa: CPU(2, isa, model=modelled(isa, 2).text) for isa in ("avx512", "avx2")}
    tiles = CPU(2, "avx512", matrix_unit="amx", model=modelled("avx512", 2).text)
    for has in (True, False):
        monkeypatch.setattr(compiler, "host_features", lambda has=has: {FEATURE: has})
        assert product_of(vectors["avx512"]) == (INSTRUCTION if has else None)
        assert (product_of(plain), product_of(vectors["avx2"]), product_of(tiles)) == (PLAIN, None, None)
    params = DOT.all(WHOLE, plain)[0].params
    assert DOT.all(WHOLE, tiles) == DOT.all(WHOLE, vectors["avx512"]) == []
    (reason,) = DOT.why_not(WHOLE, vectors["avx2"], params)
    assert reason.startswith("avx512bf16: expected a processor with it and AVX-512")
    assert DOT.why_not(WHOLE.replace(dtype="float32"), plain, params) == ["dtype: expected bfloat16, got float32"]
