"""Extensions of the instruction set that the processor has and the system does not enable.

A vector's upper part is lost at a change of threads unless the system saves it; so where it does not, an instruction
that would write to it is an illegal one. LLVM looks at both, and with it the choice of the instruction set; here is
what they leave out.
"""

from __future__ import annotations

import ctypes

from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import X86, Function, Module, i32, ptr

# What the system has to save, as bits of XCR0, and where CPUID has the extension: a register (of eax, ebx, ecx, edx) of
# leaf 7, and a bit (Intel, "Software Developer's Manual", volume 1, sections 13.3 and 14.3; volume 2, CPUID).
EXTENSIONS = {"avx2": (0b110, 1, 5), "avx512": (0b1110_0110, 1, 16), "amx": (0b11 << 17, 3, 24)}
SAVES = 27  # bit of ecx of leaf 1: the system saves what XCR0 says, and XGETBV reads that


def emit(instruction_set: str) -> Module:
    """`cpuid(out, leaf)` and `xgetbv(out, 0)`, which store the registers that the instructions write."""
    m = Module(instruction_set)
    _emit_asm(m.function("cpuid", ptr(i32), i32), "cpuid", "={ax},={bx},={cx},={dx},{ax},{cx}", 4)
    _emit_asm(m.function("xgetbv", ptr(i32), i32), "xgetbv", "={ax},={dx},{ax},{cx}", 2)
    return m


def _emit_asm(k: Function, instruction: str, registers: str, results: int) -> None:
    """Give the second argument in eax and 0 in ecx, and store the results."""
    out, argument = k.args
    written, found = "{" + ", ".join(["i32"] * results) + "}", k.fresh()
    asm = f'asm sideeffect "{instruction}", "{registers},~{{dirflag}},~{{fpsr}},~{{flags}}"'
    k.lines.append(f"%{found} = call {written} {asm}(i32 {argument.text}, i32 0)")
    for n in range(results):
        k.store(k.emit(i32, f"extractvalue {written} %{found}, {n}"), out + n)


def _ask(instruction: str, argument: int, results: int) -> list[int]:
    out = (ctypes.c_uint32 * 4)()
    function = compiler.build(emit, "generic").function(instruction, ctypes.c_void_p, ctypes.c_int32)
    function(ctypes.addressof(out), argument)
    return list(out[:results])


def cpuid(leaf: int) -> list[int]:
    """eax, ebx, ecx and edx of a leaf of CPUID; zeros for one that the processor does not have."""
    return _ask("cpuid", leaf, 4) if leaf <= _ask("cpuid", 0, 4)[0] else [0] * 4


def saved() -> int:
    """The registers that the system saves, as XCR0 has them; 0 where it saves none of what is extended."""
    if not cpuid(1)[2] >> SAVES & 1:
        return 0
    low, high = _ask("xgetbv", 0, 2)
    return low | high << 32


def not_enabled() -> list[str]:
    """The extensions that this processor has and the system does not enable; none where it is not an x86.

    Returns
    -------
    list of str
        Of "avx2", "avx512" and "amx".
    """
    if not X86:
        return []
    leaf, kept = cpuid(7), saved()
    return [name for name, (bits, at, bit) in EXTENSIONS.items() if leaf[at] >> bit & 1 and kept & bits != bits]
