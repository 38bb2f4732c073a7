"""Compiling kernels in process with LLVM, and keeping the machine code in memory and on disk.

`build(emit, "avx512", 14, 2)` gives the `Program` of the module that `emit("avx512", 14, 2)` writes.
An emitter is a pure function of its arguments, all printable constants, and of the code that its family is made of;
so these two, with the processor and LLVM's version, name the machine code exactly, and a kernel
found on disk is loaded without being written again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import os
import threading
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoconv.common import code_hash, machine_code
from autoconv.cpu.codegen.ir import X86, Module
from autoconv.errors import PlanError


class Program:
    """Machine code in memory; addresses stay valid as long as it lives."""

    def __init__(self, image: bytes, names: tuple[str, ...]) -> None:
        builder = _llvm().JITLibraryBuilder().add_object_img(image).add_current_process()
        for name in names:
            builder.export_symbol(name)
        self._code = builder.link(_jit(), uuid.uuid4().hex)
        self.names = names

    def address(self, name: str) -> int:
        """Where a function starts."""
        return int(self._code[name])

    def function(self, name: str, *types: Any) -> Callable[..., Any]:
        """The function, to be called from Python without the GIL; `types` are those of ctypes."""
        function: Callable[..., Any] = ctypes.CFUNCTYPE(None, *types)(self.address(name))
        function.program = self  # type: ignore[attr-defined]  # the code must outlive the function
        return function


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # for instructions written as such, which have no other name
    return llvm


@functools.cache
def _jit() -> Any:
    # The older linker maps code and constants apart, and aborts where a large array lies between them.
    return _llvm().create_lljit_compiler(_target("generic"), use_jit_link=os.name == "posix")


@functools.cache
def host_features() -> dict[str, bool]:
    """What LLVM says that this processor has."""
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())


@functools.cache
def host_name() -> str:
    """What LLVM calls this processor."""
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_name())


@functools.cache
def _features(instruction_set: str) -> tuple[str, str]:
    """LLVM's names of this processor and its features, less those above the instruction set.

    It may lack some of the set: then LLVM splits the vectors, and calls functions for what is no instruction. But it
    would end the process where instructions that kernels name are those of another architecture.

    Raises
    ------
    PlanError
    """
    if instruction_set in ("avx512", "avx2") and not X86:
        raise PlanError(f"instruction_set={instruction_set!r}: expected that of this processor, which is no x86")
    if instruction_set == "generic" and X86:
        return "x86-64", ""
    host = host_features()
    if instruction_set == "avx2":
        host = {name: on and not name.startswith(("avx512", "avx10", "amx")) for name, on in host.items()}
    return host_name(), ",".join(f"{'+' if host[name] else '-'}{name}" for name in sorted(host))


@functools.cache
def _target(instruction_set: str) -> Any:
    llvm = _llvm()
    cpu, features = _features(instruction_set)
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True, reloc="pic", codemodel="small")


def _cleaned(module: Module, target: Any) -> Any:
    """As LLVM's module. Kernels are written as they should run: variables go to registers, the rest is cleaning."""
    llvm = _llvm()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=0)
    builder = llvm.create_pass_builder(target, options)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_new_gvn_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(parsed, builder)
    return parsed


def _compiled(module: Module) -> bytes:
    """Object code."""
    target = _target(module.instruction_set)
    return bytes(target.emit_object(_cleaned(module, target)))


@functools.cache
def _toolchain() -> str:
    import llvmlite

    return f"llvmlite {llvmlite.__version__} LLVM {_llvm().llvm_version_info}"


_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # LLVM, whose own lock is held while this one is, goes on in the child
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_programs: weakref.WeakValueDictionary[bytes, Program] = weakref.WeakValueDictionary()


@functools.cache
def _code_version(emit: Callable[..., Module]) -> str:
    """A hash of the code that an emitter is made of: its family's, or its own file where it is of another package."""
    if emit.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return code_hash.version(emit.__module__)
    source = Path(inspect.getfile(emit)).read_bytes()
    return f"{code_hash.version(__name__)} {hashlib.sha256(source).hexdigest()}"


def build(emit: Callable[..., Module], instruction_set: str, *args: object) -> Program:
    """The program of `emit(instruction_set, *args)`: from memory, from disk, or compiled now.

    `args` are constants whose `repr` tells them apart: numbers, strings, tuples, layers.
    """
    text = (
        f"{_toolchain()} {_features(instruction_set)} {emit.__module__}.{emit.__qualname__}{(instruction_set, *args)}"
    )
    key = hashlib.sha256(f"{text} {_code_version(emit)}".encode()).digest()
    with _lock:
        program = _programs.get(key)
        if program is None:
            stored = machine_code.load(key)
            if stored is None:
                module = emit(instruction_set, *args)
                stored = "\n".join(f.name for f in module.functions if f.exported).encode() + b"\0" + _compiled(module)
                machine_code.save(key, stored)
            names, _, image = stored.partition(b"\0")
            program = _programs[key] = Program(image, tuple(names.decode().split("\n")))
    return program
