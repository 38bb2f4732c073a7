"""A small kernel for tests of what compiles kernels, and how any is called."""

from __future__ import annotations

import ctypes
from typing import Any

from autoconv.cpu.codegen.compiler import Program
from autoconv.cpu.codegen.ir import DTYPES, Module, ptr


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
