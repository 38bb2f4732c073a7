"""Many kernels in one call from Python: a kernel that runs others, whose operands stand in a table."""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Module, i8, i64, ptr
from autoconv.cpu.codegen.launch import OPERANDS, PARTY, RUN, SLOTS

FIRST = 2  # word of a row from which on it has the addresses of operands
ROW = FIRST + OPERANDS  # words: the address of a kernel's `run`, how many threads take part in it at most, its operands


def emit(instruction_set: str) -> Module:
    """`run` for a table a: the number of rows, then the rows, all int64. One kernel after the other, on all threads."""
    m = Module(instruction_set)
    run = m.function("run", *RUN)
    (context,) = run.args
    table = run.bits(run.load(context), ptr(i64))
    inner = run.scratch(i64, SLOTS)
    for slot in range(OPERANDS, SLOTS):
        run.store(run.load(context + slot), inner + slot)
    with run.loop(0, run.load(table)) as n:
        row = table + 1 + n * ROW
        for slot in range(OPERANDS):
            run.store(run.load(row + FIRST + slot), inner + slot)
        run.store(run.load(row + 1), inner + PARTY)
        run.call_address(run.bits(run.load(row), ptr(i8)), RUN, inner)
    return m
