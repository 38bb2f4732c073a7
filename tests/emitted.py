"""A small kernel for tests of what compiles kernels, and how any is called."""

from __future__ import annotations

import ctypes
from typing import Any

from autoconv.cpu.codegen.compiler import Program
from autoconv.cpu.codegen.ir import DTYPES, Module, f64, i64, ptr


def call(program: Program, name: str, *args: Any) -> None:
    types = [ctypes.c_int64 if isinstance(a, int) else ctypes.c_void_p for a in args]
    program.function(name, *types)(*[a if isinstance(a, int) else a.ctypes.data for a in args])


def emit_tables(instruction_set: str, name: str) -> Module:
    """Constants in memory, of a type that is named, which `read` copies."""
    m = Module(instruction_set)
    element = DTYPES[name]
    k = m.function("read", ptr(element))
    for n, values in enumerate(([0.1, 2.0, -3.5], [1e30])):
        table = m.table(k, element, values)
        with k.loop(0, len(values)) as i:
            k.store(k.load(table + i), k.args[0] + i + 3 * n)
    return m


def emit_long(instruction_set: str, number: int) -> Module:
    """`fill` and `fill_again`, which write 0 to 99 by way of long functions alike, and `number` at 100."""
    m = Module(instruction_set)
    long = [m.function(f"long{n}", ptr(f64), internal=True) for n in range(2)]
    for k in long:
        table = m.table(k, f64, range(100))
        for n in range(100):
            k.store(k.load(table + n), k.args[0] + n)
    last = m.function("last", ptr(f64), i64, internal=True)
    last.store(last.const(f64, number), last.args[0] + last.args[1])
    for name in ("fill", "fill_again"):
        k = m.function(name, ptr(f64))
        for function in long:
            k.call(function, *k.args)
        k.call(last, *k.args, 100)
    again = m.function("fill_twice", ptr(f64))
    for k in m.functions[-3:-1]:
        again.call(k, *again.args)
    return m
