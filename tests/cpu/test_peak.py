"""The measured peak: a figure that the arithmetic of the kernel really earns."""

from __future__ import annotations

import numpy as np
import pytest

from autoconv.cpu import peak
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module
from autoconv.cpu.device import INSTRUCTION_SETS, host_instruction_set
from autoconv.cpu.pool import Entry

AVAILABLE = INSTRUCTION_SETS[INSTRUCTION_SETS.index(host_instruction_set()) :]


@pytest.mark.parametrize("instruction_set", AVAILABLE)
@pytest.mark.parametrize(("dtype", "precision"), [("float32", 1e-2), ("float64", 1e-9)])
def test_the_kernel_does_the_multiply_adds_it_is_credited_with(
    instruction_set: str, dtype: str, precision: float
) -> None:
    lanes = Module(instruction_set).lanes(DTYPES[dtype])
    out = np.zeros((2, lanes), dtype)
    run = Entry(compiler.build(peak.emit, instruction_set, dtype), "run", 1)
    run(np.full(lanes, peak.FACTOR, dtype), None, out)
    first = sum(peak.FACTOR * (n + 1) for n in range(peak.CHAINS))
    np.testing.assert_allclose(out[0], first * (1 + peak.FACTOR) ** peak.ROUNDS, rtol=precision)
    assert not out[1].any()
