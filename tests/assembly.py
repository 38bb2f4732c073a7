"""What kernels are compiled to, as text, for processors that need not be this one."""

from __future__ import annotations

import re

import llvmlite.binding as llvm

from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import Module

__all__ = ["assembly", "functions_of"]


def assembly(module: Module, processor: str) -> str:
    """The assembly of a kernel for an x86 processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu=processor, opt=3)
    return str(target.emit_assembly(compiler._cleaned(module, target)))


def functions_of(text: str) -> dict[str, str]:
    """The functions of such a text, by name."""
    return dict(re.findall(r"^(\w+):\n(.*?)^\.?Lfunc_end", text, re.MULTILINE | re.DOTALL))
