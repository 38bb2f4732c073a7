"""Compiling kernels in process with LLVM, and keeping the machine code in memory and on disk.

`build(emit, "avx512", 14, 2)` gives the `Program` of the module that `emit("avx512", 14, 2)` writes.
An emitter is a pure function of its arguments, all printable constants, and of the code that its family is made of;
so these two, with the processor and LLVM's version, name the machine code exactly, and a kernel
found on disk is loaded without being written again. What it shares with others is there once: a kernel's file names
those of its units (`Module.units`), which hold the code.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoconv.common import code_hash, machine_code
from autoconv.cpu.codegen.ir import X86, Module
from autoconv.errors import PlanError


class Program:
    """Machine code in memory, linked from objects; addresses stay valid as long as it lives."""

    def __init__(self, objects: Sequence[bytes], names: tuple[str, ...]) -> None:
        builder = _llvm().JITLibraryBuilder().add_current_process()
        for image in objects:
            builder.add_object_img(image)
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


def _cleaned(text: str, target: Any) -> Any:
    """As LLVM's module. Kernels are written as they should run: variables go to registers, the rest is cleaning."""
    llvm = _llvm()
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=0)
    builder = llvm.create_pass_builder(target, options)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_new_gvn_pass()
    passes.add_simplify_cfg_pass()
    passes.run(parsed, builder)
    return parsed


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


def _key(instruction_set: str, text: str) -> bytes:
    """Of what a text is compiled to."""
    return hashlib.sha256(f"{_toolchain()} {_features(instruction_set)} {text}".encode()).digest()


@functools.lru_cache(256)
def _compiled(instruction_set: str, text: str) -> bytes:
    """The object code of a unit, compiled now unless another kernel had it."""
    key = _key(instruction_set, text)
    image = machine_code.load(key)
    if image is None:
        target = _target(instruction_set)
        image = bytes(target.emit_object(_cleaned(text, target)))
        machine_code.save(key, image)
    return image


def _kept(key: bytes) -> Program | None:
    """The program on disk, if all of it is there: the names of its functions, and the keys of its units."""
    names, _, units = (machine_code.load(key) or b"").partition(b"\0")
    objects = [machine_code.load(units[n : n + len(key)]) for n in range(0, len(units), len(key))]
    images = [image for image in objects if image is not None]
    return Program(images, tuple(names.decode().split("\n"))) if names and len(images) == len(objects) else None


def build(emit: Callable[..., Module], instruction_set: str, *args: object) -> Program:
    """The program of `emit(instruction_set, *args)`: from memory, from disk, or compiled now.

    `args` are constants whose `repr` tells them apart: numbers, strings, tuples, layers.
    """
    text = f"{emit.__module__}.{emit.__qualname__}{(instruction_set, *args)} {_code_version(emit)}"
    key = _key(instruction_set, text)
    with _lock:
        program = _programs.get(key) or _kept(key)
        if program is None:
            module = emit(instruction_set, *args)
            units, names = module.units(), tuple(f.name for f in module.functions if f.exported)
            program = Program([_compiled(module.instruction_set, unit) for unit in units], names)
            keys = b"".join(_key(module.instruction_set, unit) for unit in units)
            machine_code.save(key, "\n".join(names).encode() + b"\0" + keys)
        _programs[key] = program
    return program
