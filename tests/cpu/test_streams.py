"""Where a loop reads a stream by several vectors, it asks for its lines from the first to the last."""

from __future__ import annotations

import pytest
from assembly import assembly, functions_of, streams

from autoconv.cpu import pool
from autoconv.cpu.codegen.ir import VECTOR_BYTES, Module
from autoconv.cpu.device import CPU
from autoconv.cpu.direct import kernels
from autoconv.cpu.direct.geometry import blockings
from autoconv.cpu.machine import probes
from autoconv.cpu.operators import rows
from autoconv.layer import ConvLayer

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
PROCESSORS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3"}


def products(instruction_set: str, vectors: int) -> Module:
    """A fully connected layer of one image, by tiles of so many vectors."""
    device = CPU(1, instruction_set)
    layer = ConvLayer(N=1, C=512, H=1, W=1, K=1024, R=1, S=1)
    params = {"TK": vectors * VECTOR_BYTES[instruction_set] // 4, "TP": 1, "TQ": 1, "BC": 512, "filters": "packed"}
    return kernels.emit(instruction_set, layer, blockings(layer, device, params))


@pytest.mark.parametrize("instruction_set", PROCESSORS)
@pytest.mark.parametrize("vectors", [3, 4, 8])
def test_filters_of_a_fully_connected_layer(instruction_set: str, vectors: int) -> None:
    functions = functions_of(assembly(products(instruction_set, vectors), PROCESSORS[instruction_set]))
    (found,) = (streams(text) for name, text in functions.items() if name.startswith("micro"))
    assert max(map(len, found)) == vectors
    assert found == [sorted(places) for places in found]


@pytest.mark.parametrize("instruction_set", PROCESSORS)
def test_memory_as_a_machine_is_measured(instruction_set: str) -> None:
    functions = functions_of(assembly(probes.emit(instruction_set), PROCESSORS[instruction_set]))
    (found,) = streams(functions["read_task"])
    assert len(found) == probes.STREAMS
    assert found == sorted(found)


@pytest.mark.parametrize("instruction_set", PROCESSORS)
def test_rows_that_are_reduced(instruction_set: str) -> None:
    module = rows.emit_reduction(instruction_set, "sum", 4, 1024)
    found = streams(functions_of(assembly(module, PROCESSORS[instruction_set]))["task"])
    assert max(map(len, found)) == rows.CHAINS
    assert found == [sorted(places) for places in found]
