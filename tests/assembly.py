"""What kernels are compiled to, as text, for processors that need not be this one."""

from __future__ import annotations

import re
from collections import defaultdict

import llvmlite.binding as llvm

from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import Module

__all__ = ["assembly", "functions_of", "streams"]


def assembly(module: Module, processor: str) -> str:
    """The assembly of a kernel for an x86 processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu=processor, opt=3)
    return str(target.emit_assembly(compiler._cleaned(str(module), target)))


def functions_of(text: str) -> dict[str, str]:
    """The functions of such a text, by name."""
    return dict(re.findall(r"^(\w+):\n(.*?)^\.?Lfunc_end", text, re.MULTILINE | re.DOTALL))


def streams(text: str) -> list[list[int]]:
    """What the innermost loops of a text load with whole vectors: the displacements from each address, in order."""
    found = []
    for label, body in re.findall(r"^(\.LBB\w+):(?:\s*#.*)?\n((?:\t.*\n)+)", text, re.MULTILINE):
        if not re.search(rf"\tj\w+\t{re.escape(label)}$", body, re.MULTILINE):
            continue
        places: dict[str, list[int]] = defaultdict(list)
        for line in body.splitlines():
            load = re.fullmatch(r"\tv\w+\t(-?\d*)(\([^)]*\)), (?:%[yz]mm\d+, )*%[yz]mm\d+", line)
            if load and "broadcast" not in line:
                places[load[2]].append(int(load[1] or 0))
        found += places.values()
    return found
