"""AVX-512 machine code on processors that lack it: kernels run inside Bochs, an emulator of whole processors.

The emulated processor's memory is that of this process. Its page tables map each gigabyte in which the process has
memory to one of its own, and pages are lent to it when first touched; so it calls a kernel where LLVM put it, on
NumPy's arrays where they lie, and an access that this process may not make ends the process, as it would on a
processor that has the instructions. It has one thread.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bochscpu
import bochscpu.memory as guest
import pytest
from bochscpu.cpu import set_long_mode

from autoconv.algorithm import Array
from autoconv.cpu import device, pool
from autoconv.cpu.codegen import compiler, launch, workers
from autoconv.cpu.codegen.ir import Module

PROCESSOR = "tigerlake"  # what is emulated, as LLVM calls it: all of AVX-512 but half precision and bfloat16
LACKING = ("avx512fp16", "avx512bf16", "avxvnni")  # what this processor may have, and the emulated one does not
# Bochs rounds subnormal halves that lie between two others away from zero, until its version 3.0.
WRONG_THERE = "test_narrow_types_widen_and_round_like_numpy[float16-avx512]"

GIBIBYTE, PAGE = 1 << 30, 4096
ADDRESSES = 1 << 47  # those above are the kernel's
TABLES = 512 * GIBIBYTE  # where page tables begin: past every gigabyte that addresses are mapped to
TABLE, WHOLE_GIBIBYTE = 0b11, 0b1110_0011  # present and writable; seen and written to, and as large as that
HALT = 0xF4
ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")  # the rest go on the stack


class Processor:
    """One emulated processor, which calls functions of this process."""

    def __init__(self, stack_bytes: int = 4 << 20) -> None:
        self._gigabytes: list[int] = []  # of this process, in the order in which they lie in the emulated memory
        self._tables: dict[int, Any] = {}
        self._root = self._table()
        self._stack, self._halt = mmap.mmap(-1, stack_bytes), mmap.mmap(-1, PAGE)
        self._halt[0] = HALT
        self._return_to, self._stack_end = _address(self._halt), _address(self._stack) + stack_bytes
        self._session, self._hook = bochscpu.Session(), bochscpu.Hook()
        self._session.missing_page_handler = self._lend
        self._hook.hlt = self._return
        self._hook.exception = self._stop
        self._fault: tuple[Any, ...] | None = None
        self._returned = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the emulator, which holds on to its callbacks and so to this object."""
        del self._session, self._hook

    def call(self, function: int, *arguments: int) -> None:
        """Call the function at an address with integers and addresses; RuntimeError where the processor objects."""
        with self._lock:
            self._map()
            state = bochscpu.State()
            set_long_mode(state)
            state.cr3 = self._root
            state.cr4 = 1 << 5 | 1 << 9 | 1 << 10 | 1 << 18  # wide addresses, vectors, their exceptions, xcr0
            state.xcr0 = 0b1110_0111  # x87, XMM, YMM, masks, both parts of ZMM
            state.mxcsr, state.mxcsr_mask = 0x1F80, 0xFFFF  # no exceptions, round to nearest
            state.rflags = 2
            state.cs = _segment(8, 0x209B)
            state.ds = state.es = state.ss = state.fs = state.gs = _segment(16, 0xC93)
            words = [n % (1 << 64) for n in (self._return_to, *arguments[len(ARGUMENTS) :])]
            state.rsp = (self._stack_end - 8 * len(words)) // 16 * 16 - 8
            # What is below is nobody's: NaN, so that a kernel which reads what it has not written is seen.
            ctypes.memset(_address(self._stack), 0xFF, state.rsp - _address(self._stack))
            (ctypes.c_uint64 * len(words)).from_address(state.rsp)[:] = words
            state.rip = function
            for register, value in zip(ARGUMENTS, arguments, strict=False):
                setattr(state, register, value % (1 << 64))
            self._session.cpu.state = state
            self._fault, self._returned = None, False
            self._session.run([self._hook])
            if self._fault is not None:
                vector, code, at, address = self._fault
                raise RuntimeError(f"exception {vector}, code {code}, at {at - function:+#x}, address {address:#x}")
            if not self._returned:
                raise RuntimeError(f"stopped before it returned, at {self._session.cpu.rip - function:+#x}")

    def _table(self) -> int:
        """A page of a page table, empty; where it lies in the emulated memory."""
        page, at = guest.allocate_host_page(), TABLES + PAGE * len(self._tables)
        ctypes.memset(page, 0, PAGE)
        guest.page_insert(at, page)
        self._tables[at] = (ctypes.c_uint64 * (PAGE // 8)).from_address(page)
        return at

    def _map(self) -> None:
        """Map every gigabyte in which this process has memory."""
        root = self._tables[self._root]
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            for gigabyte in range(start // GIBIBYTE, -(-min(end, ADDRESSES) // GIBIBYTE)):
                if gigabyte not in self._gigabytes:
                    upper, lower = divmod(gigabyte, 512)
                    root[upper] = root[upper] or self._table() | TABLE
                    self._tables[root[upper] & -PAGE][lower] = len(self._gigabytes) * GIBIBYTE | WHOLE_GIBIBYTE
                    self._gigabytes.append(gigabyte)

    def _lend(self, at: int) -> None:
        place, offset = divmod(at & -PAGE, GIBIBYTE)
        guest.page_insert(at & -PAGE, self._gigabytes[place] * GIBIBYTE + offset)

    def _return(self, session: Any, _: int) -> None:
        self._returned = True
        session.stop()

    def _stop(self, session: Any, _: int, vector: Any, code: Any) -> None:
        self._fault = vector, code, session.cpu.rip, session.cpu.cr2
        session.stop()


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _segment(selector: int, attributes: int) -> Any:
    segment = bochscpu.Segment()
    segment.present, segment.selector, segment.attr = True, selector, attributes
    segment.base, segment.limit = 0, 0xFFFF_FFFF
    return segment


def install(patch: pytest.MonkeyPatch, processor: Processor) -> None:
    """From now on this processor has AVX-512: its kernels are compiled for the emulated one, and run there."""
    features, host_features, build, units = compiler._features, compiler.host_features, compiler.build, Module.units
    native, native_function = pool.Entry.__call__, compiler.Program.function
    # Both are kept: what the emulator has read as code must stay that code.
    emulated: set[compiler.Program] = set()
    launchers: set[compiler.Program] = set()  # the pool's, which tests may replace

    def features_there(instruction_set: str) -> tuple[str, str]:
        return (PROCESSOR, "") if instruction_set == "avx512" else features(instruction_set)

    def extensions_there() -> dict[str, bool]:
        return {name: on and name not in LACKING for name, on in host_features().items()}

    def build_for_there(emit: Callable[..., Module], instruction_set: str, *args: object) -> compiler.Program:
        program = build(emit, instruction_set, *args)
        if instruction_set == "avx512":
            emulated.add(program)
        return program

    def units_for_there(module: Module) -> list[str]:
        # Whole: in the one run of all tests with units, one answer was wrong, and it is not known why.
        return [str(module)] if module.instruction_set == "avx512" else units(module)

    words = mmap.mmap(-1, workers.words_bytes(1))  # a pool of one thread, which does every task itself
    (ctypes.c_int64 * 2).from_buffer(words, workers.SETTINGS)[:] = 1, 1

    def run(self: pool.Entry, a: Array, b: Array, out: Array, *others: Array | None) -> None:
        if self._program not in emulated:
            return native(self, a, b, out, *others)
        arrays = [0 if array is None else id(array) for array in (a, b, out, *others)]
        missing = [0] * (launch.OPERANDS - len(arrays))
        launchers.add(launcher := pool.program())
        start = launcher.address("start")
        return processor.call(start, _address(words), self._address, self._mode, 1, *arrays, *missing)

    def function(self: compiler.Program, name: str, *types: Any) -> Callable[..., Any]:
        if self not in emulated:
            return native_function(self, name, *types)
        return lambda *args: processor.call(self.address(name), *args)

    patch.setattr(device, "host_instruction_set", lambda: "avx512")
    patch.setattr(device, "host_level", lambda: "avx512")
    patch.setattr(compiler, "_features", features_there)
    patch.setattr(compiler, "host_features", extensions_there)
    patch.setattr(compiler, "build", build_for_there)
    patch.setattr(Module, "units", units_for_there)
    patch.setattr(compiler.Program, "function", function)
    patch.setattr(pool.Entry, "__call__", run)
