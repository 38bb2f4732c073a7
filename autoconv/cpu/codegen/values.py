"""Types and values of the kernels that `ir` writes, and the text of a function, to which values add instructions."""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from autoconv.cpu.codegen.ir import Function, Module


@dataclass(frozen=True)
class Type:
    """A scalar (`lanes` 0), a vector, or a pointer (`to` is what it points at)."""

    name: str
    bits: int
    lanes: int = 0
    to: Type | None = None

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.name}>" if self.lanes else self.name

    @property
    def scalar(self) -> Type:
        """The type of one lane."""
        return Type(self.name, self.bits) if self.lanes else self

    @property
    def floating(self) -> bool:
        """Whether float or double."""
        return self.name in ("float", "double")

    @property
    def bytes(self) -> int:
        """Size of one lane in memory."""
        return max(self.bits // 8, 1)

    @property
    def suffix(self) -> str:
        """As in an intrinsic's name: v16f32."""
        letter = "f" if self.floating or self.name == "half" else "i"
        return (f"v{self.lanes}" if self.lanes else "") + f"{letter}{self.bits}"


i1, i8, i16, i32, i64 = (Type(f"i{bits}", bits) for bits in (1, 8, 16, 32, 64))
f32, f64, f16, bf16 = Type("float", 32), Type("double", 64), Type("half", 16), Type("bfloat", 16)
DTYPES = {"float32": f32, "float64": f64, "float16": f16, "bfloat16": bf16}
X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")


def vec(element: Type, lanes: int) -> Type:
    """A vector; of one lane it is the scalar, so that one text serves both."""
    return Type(element.name, element.bits, lanes) if lanes > 1 else element


def ptr(to: Type) -> Type:
    """A pointer to elements of a type."""
    return Type("ptr", 64, 0, to)


def widened(element: Type) -> Type:
    """The type in which a stored element is computed with."""
    return f64 if element == f64 else f32


Number = int | float


class Value:
    """Something the kernel computes: `text` is its name or constant in LLVM's assembly."""

    __slots__ = ("k", "text", "type")

    def __init__(self, k: Function, type: Type, text: str) -> None:  # noqa: A002
        self.k, self.type, self.text = k, type, text

    def _binary(self, integer: str, floating: str, other: Value | Number, swap: bool = False) -> Value:
        a, b = self, self.k.const(self.type, other)
        if swap:
            a, b = b, a
        op = floating if self.type.floating else integer
        return self.k.emit(self.type, f"{op} {self.type} {a.text}, {b.text}")

    def _compare(self, word: str, other: Value | Number) -> Value:
        b = self.k.const(self.type, other)
        floating = "fcmp une" if word == "ne" else f"fcmp o{word[-2:]}"
        op = floating if self.type.floating else f"icmp {word}"
        return self.k.emit(vec(i1, self.type.lanes), f"{op} {self.type} {self.text}, {b.text}")

    def __add__(self, other: Value | Number) -> Value:
        if isinstance(other, int) and other == 0 and not self.type.floating:
            return self
        if self.type.to is not None:
            step = self.k.const(i64, other)
            return self.k.emit(self.type, f"getelementptr {self.type.to}, ptr {self.text}, i64 {step.text}")
        return self._binary("add", "fadd", other)

    __radd__ = __add__

    def __sub__(self, other: Value | Number) -> Value:
        if isinstance(other, int) and (other == 0 or self.type.to is not None):
            return self + -other
        return self._binary("sub", "fsub", other)

    def __rsub__(self, other: Number) -> Value:
        return self._binary("sub", "fsub", other, swap=True)

    def __mul__(self, other: Value | Number) -> Value:
        return self if isinstance(other, int) and other == 1 else self._binary("mul", "fmul", other)

    __rmul__ = __mul__

    def __neg__(self) -> Value:
        if self.type.floating:
            return self.k.emit(self.type, f"fneg {self.type} {self.text}")
        return 0 - self

    def __floordiv__(self, other: Value | int) -> Value:
        return self if isinstance(other, int) and other == 1 else self._binary("udiv", "", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("urem", "", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and", "", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or", "", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", "", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("shl", "", other)

    def __rshift__(self, other: Value | int) -> Value:
        return self._binary("lshr", "", other)

    def __lt__(self, other: Value | Number) -> Value:
        return self._compare("slt", other)

    def __le__(self, other: Value | Number) -> Value:
        return self._compare("sle", other)

    def __gt__(self, other: Value | Number) -> Value:
        return self._compare("sgt", other)

    def __ge__(self, other: Value | Number) -> Value:
        return self._compare("sge", other)

    def eq(self, other: Value | Number) -> Value:
        """`==` of the kernel."""
        return self._compare("eq", other)

    def ne(self, other: Value | Number) -> Value:
        """`!=` of the kernel; true where one side is NaN."""
        return self._compare("ne", other)

    def __bool__(self) -> bool:
        raise TypeError("a Value has no truth when the kernel is written: use k.if_ or k.select")


class Body:
    """The text of one function: its names, instructions and constants."""

    def __init__(self, module: Module, name: str, head: str, types: Sequence[Type]) -> None:
        self.module, self.name, self.head, self.types = module, name, head, types
        self.args = tuple(self.value(t, f"%a{n}") for n, t in enumerate(types))
        self.exported = not head.startswith("define internal")
        self.lines: list[str] = []
        self._allocas: list[str] = []
        self._count = 0

    def fresh(self, prefix: str = "v") -> str:
        """A name not used before in this function."""
        self._count += 1
        return f"{prefix}{self._count}"

    def value(self, type: Type, text: str) -> Value:  # noqa: A002
        """What a text stands for: a constant, or what the function computes and has named."""
        return Value(cast("Function", self), type, text)

    def emit(self, type: Type, instruction: str) -> Value:  # noqa: A002
        """Append an instruction with a result."""
        name = "%" + self.fresh()
        self.lines.append(f"{name} = {instruction}")
        return self.value(type, name)

    def alloca(self, type: Type, count: int = 1, align: int = 0) -> str:  # noqa: A002
        """Stack memory for the whole function; its name."""
        name = "%" + self.fresh("s")
        self._allocas.append(f"{name} = alloca {type}, i64 {count}" + (f", align {align}" if align else ""))
        return name

    def const(self, type: Type, value: Value | Number) -> Value:  # noqa: A002
        """A constant of a type, or the value itself; every lane alike."""
        if isinstance(value, Value):
            return value
        if type.to is not None:
            text = "null"
        elif type.floating:
            text = digits(type, value)
        elif type.bits == 1:
            text = "true" if value else "false"
        else:
            text = str(int(value))
        return self.value(type, f"splat ({type.name} {text})" if type.lanes else text)

    def i64(self, value: int | Value) -> Value:
        """An i64."""
        return self.const(i64, value)

    def zero(self, element: Type, lanes: int = 1) -> Value:
        """Zero in every lane."""
        return self.const(vec(element, lanes), 0)

    def intrinsic(self, returns: Type | None, name: str, *args: Value) -> Value:
        """Call an LLVM intrinsic or a function of the process, declaring it."""
        types = ", ".join(str(a.type) for a in args)
        self.module.declare(f"declare {returns or 'void'} @{name}({types})")
        call = f"call {returns or 'void'} @{name}({', '.join(f'{a.type} {a.text}' for a in args)})"
        if returns is None:
            self.lines.append(call)
            return self.value(i1, "undef")
        return self.emit(returns, call)

    def __str__(self) -> str:
        return "\n".join([self.head, "entry:", *self._allocas, *self.lines, "ret void", "}"])


def digits(element: Type, value: Number) -> str:
    """A number as LLVM's assembly wants it; of a floating-point type, rounded to it, in the bits of a double."""
    if not element.floating:
        return str(int(value))
    rounded = struct.unpack("<f", struct.pack("<f", value))[0] if element.bits == 32 else float(value)
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"
