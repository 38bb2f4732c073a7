"""Tiled Fourier convolution on generated kernels: every length, every split of a layer, inside buffers and bound."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from autoconv.cpu import compiler
from autoconv.cpu.device import CPU, INSTRUCTION_SETS, host_instruction_set
from autoconv.cpu.fft_pieces import Transform, factors, get, put
from autoconv.cpu.ir import DTYPES, Module, ptr

pytestmark = pytest.mark.skipif(not compiler.available(), reason="llvmlite cannot target this processor")
HERE = INSTRUCTION_SETS[INSTRUCTION_SETS.index(host_instruction_set()) :]
DEVICE = CPU.current()
LENGTHS = [n for n in range(1, 101) if factors(n)]


def emit_transform(instruction_set: str, dtype: str, n: int, fold: bool, pairs: bool) -> Module:
    """`transform(x, X)` of n numbers of as many sequences as lanes, as `[number][part][lane]`."""
    m = Module(instruction_set)
    real = DTYPES[dtype]
    lanes = m.lanes(real)
    k = m.function("transform", ptr(real), ptr(real))
    x, y = k.args
    transform = Transform(k, real, lanes, n, fold=fold, pairs=pairs)
    transform.write(
        lambda i, j: get(k, x + (i + j) * (2 * lanes), lanes, lanes),
        lambda i, j, value: put(value, y + (i + j) * (2 * lanes), lanes),
    )
    return m


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", LENGTHS)
def test_transforms_of_every_length(n: int, dtype: str) -> None:
    instruction_set = HERE[n % len(HERE)]
    lanes = Module(instruction_set).lanes(DTYPES[dtype])
    x = np.random.default_rng(n).normal(size=(n, 2, lanes)).astype(dtype)
    want = np.fft.fft(x[:, 0].astype(complex) + 1j * x[:, 1], axis=0)
    for steps in ("", "a", "b"):
        if (n % 2 and steps) or factors(n, steps) is None:
            continue
        program = compiler.build(emit_transform, instruction_set, dtype, n, steps == "a", steps == "b")
        got = np.empty_like(x)
        program.function("transform", ctypes.c_void_p, ctypes.c_void_p)(x.ctypes.data, got.ctypes.data)
        error = np.abs(got[:, 0] + 1j * got[:, 1] - want).max() / np.abs(want).max()
        assert error < 8 * np.finfo(dtype).eps
