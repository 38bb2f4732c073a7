"""A small readable layer over LLVM's assembly language, in which every kernel is written.

Python runs first: whatever is a Python `int` is a constant of the kernel, and a Python `for` unrolls.
`Value`s exist only when the kernel runs. A kernel that adds two arrays, with the remainder masked:

>>> m = Module("avx512")
>>> k = m.function("add", ptr(f32), ptr(f32), i64)
>>> x, y, n = k.args
>>> lanes = m.lanes(f32)
>>> with k.loop(0, n, lanes) as i:
...     mask = k.mask(n - i, lanes)
...     k.store(k.load(x + i, lanes, mask=mask) + k.load(y + i, lanes, mask=mask), y + i, mask=mask)
>>> "@llvm.masked.store" in str(m)
True

What there is to know:

- Types: `i1 i8 i32 i64 f32 f64 f16 bf16`, `vec(f32, 16)`, and `ptr(f32)`, whose arithmetic counts elements
  as in C: `x + 3`. `bytes_at(p, n, f32)` counts bytes. f16 and bf16 exist in memory only: `load` widens
  them to f32 and `store` rounds to nearest even.
- Operators: `+ - * // % & | ^ << >>` and comparisons `< <= > >= .eq .ne`, on values of one type; a Python
  number becomes a constant of the other side's type. `//`, `%` and `>>` are unsigned; comparisons signed.
- `k.loop(start, stop, step)` runs while `i < stop`; `k.if_(c)` may be followed at once by `k.else_()`.
- A variable that changes in a loop or a branch is a `Var`: `acc = k.var(zero)`, `acc.set(...)`,
  `acc.fma(a, b)` for acc += a * b, `acc.get()`. Variables live in registers (SROA removes the memory).
- `m.function` appends a function; what it returns can be called: `k.call(f, args)`; `k.address(f)` is its
  address. `internal=True` keeps its name out of the object.
- Masks come from `k.mask(n, lanes)`: the first n lanes. Masked-off lanes touch no memory and read as 0.
- `k.launder(p)` and `k.arithmetic_fence(v)` are the pointer and the value themselves, and tell the optimiser to leave
  what is computed from them as it is written.
- LLVM schedules within a basic block, and merges equal loads there. Steps of a sum that load the same data
  again (neighbouring taps) belong into a `loop`, not into unrolled code: else loads are held in registers,
  and the sums spilled. Unroll over what is really different: pixels, vectors, channels.

`compiler.build(emit, instruction_set, ...)` compiles what an `emit(instruction_set, ...) -> Module`
returns; `launch` says how a kernel's work is spread over threads. The language itself is written in `values`
(types, values, a function's text), `arithmetic`, `control`, `memory` and `tiles`; kernels import this page of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from autoconv.cpu.codegen.arithmetic import Var
from autoconv.cpu.codegen.memory import LINE
from autoconv.cpu.codegen.tiles import Tiles
from autoconv.cpu.codegen.values import (
    ARM,
    DTYPES,
    X86,
    Number,
    Type,
    Value,
    bf16,
    digits,
    f16,
    f32,
    f64,
    i1,
    i8,
    i16,
    i32,
    i64,
    ptr,
    vec,
    widened,
)

__all__ = [  # what a kernel imports
    "ARM",
    "DTYPES",
    "LINE",
    "VECTOR_BYTES",
    "VECTOR_REGISTERS",
    "X86",
    "Function",
    "Module",
    "Number",
    "Type",
    "Value",
    "Var",
    "bf16",
    "f16",
    "f32",
    "f64",
    "i1",
    "i8",
    "i16",
    "i32",
    "i64",
    "ptr",
    "vec",
    "widened",
]

VECTOR_BYTES = {"avx512": 64, "avx2": 32, "neon": 16, "generic": 16}
VECTOR_REGISTERS = {"avx512": 32, "avx2": 16, "neon": 32, "generic": 16}
LONG = 2500  # characters of a function that takes LLVM longer than to begin with another module
_NAMES, _HEAD = re.compile(r"@([\w.]+)"), re.compile(r"^define internal void")
TERMS = {"avx512": 1, "avx2": 4, "neon": 1, "generic": 2}  # that one round of a loop adds to a register tile's sums


class Function(Tiles):
    """One function being written; `k` in every kernel."""


class Module:
    """Functions compiled together for one instruction set, and for a matrix unit where they use `tiles`."""

    def __init__(self, instruction_set: str, matrix_unit: str | None = None) -> None:
        self.instruction_set = instruction_set
        self.matrix_unit = matrix_unit
        self.functions: list[Function] = []
        self._declarations: dict[str, None] = {}
        self._tables: dict[str, str] = {}  # names by content

    def lanes(self, element: Type) -> int:
        """Lanes of one register for computing with elements of a type."""
        return VECTOR_BYTES[self.instruction_set] // widened(element).bytes

    @property
    def registers(self) -> int:
        """Number of vector registers."""
        return VECTOR_REGISTERS[self.instruction_set]

    @property
    def terms(self) -> int:
        """Terms of a register tile's sums in one round of its loop.

        A round of few multiply-adds loses a tenth of the time to the loop itself; of more LLVM's scheduler would
        load too early and run out of registers.
        """
        return TERMS[self.instruction_set]

    def declare(self, line: str) -> None:
        """Declare what is defined elsewhere, once."""
        self._declarations[line] = None

    def table(self, k: Function, element: Type, values: Sequence[Number]) -> Value:
        """Constants in memory, as a pointer of the function that reads them; equal ones are there once."""
        numbers = ", ".join(f"{element} {digits(element, value)}" for value in values)
        content = f"internal constant [{len(values)} x {element}] [{numbers}], align {LINE}"
        return k.value(ptr(element), self._tables.setdefault(content, f"@table{len(self._tables)}"))

    def function(self, name: str, *types: Type, internal: bool = False) -> Function:
        """A new function; its arguments are its `args`."""
        arguments = ", ".join(f"{t} %a{n}" for n, t in enumerate(types))
        link = "internal " if internal else ""
        head = f"define {link}void @{name}({arguments}) #0 {{"
        k = Function(self, name, head, types)
        self.functions.append(k)
        return k

    def units(self) -> list[str]:
        """What is compiled by itself, as texts: kernels of one layer have much in common.

        A long function that calls no others is one, under a name that says what is in it, and every exported function
        is one, with what else it calls. LLVM makes the same of a function wherever that is, as it inlines none.
        """
        texts = {f.name: str(f) for f in self.functions}
        calls = {name: [n for n in _names(text) if n in texts and n != name] for name, text in texts.items()}
        apart = {f.name: f.name for f in self.functions if f.exported}  # with the names that they have everywhere
        for name, text in texts.items():
            if name not in apart and not calls[name] and len(text) >= LONG:
                content = self._text([_renamed(text, {name: "it"})])
                apart[name] = f"unit_{hashlib.sha256(content.encode()).hexdigest()[:32]}"
        units = dict[str, None]()  # equal ones once
        for name in apart:
            own = [name]
            for one in own:  # which grows
                own += [other for other in calls[one] if other not in apart and other not in own]
            parts = [_HEAD.sub("define void", texts[name]), *(texts[other] for other in own[1:])]
            called = {other for one in own for other in calls[one] if other in apart}
            others = (f for f in self.functions if f.name in called)
            parts += [f"declare void @{f.name}({', '.join(map(str, f.types))}) #0" for f in others]
            units[self._text(list(dict.fromkeys(_renamed(part, apart) for part in parts)))] = None
        return list(units)

    def __str__(self) -> str:
        return self._text([str(f) for f in self.functions])

    def _text(self, functions: Sequence[str]) -> str:
        """Some functions, with the constants and declarations that they name."""
        bits = 8 * VECTOR_BYTES[self.instruction_set]
        widths = f'"min-legal-vector-width"="{bits}" "prefer-vector-width"="{bits}"'
        attributes = f"attributes #0 = {{ noinline nounwind {widths} }}"
        named = _names("\n".join(functions))
        return "\n".join(
            [
                *(f"{name} = {content}" for content, name in self._tables.items() if name[1:] in named),
                *functions,
                *(line for line in self._declarations if named.keys() & _names(line).keys()),
                attributes,
                "!0 = !{i32 1}",
                "",
            ]
        )


def _names(text: str) -> dict[str, None]:
    """What a text names of functions and constants."""
    return dict.fromkeys(_NAMES.findall(text))


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return _NAMES.sub(lambda found: f"@{names.get(found[1], found[1])}", text)
