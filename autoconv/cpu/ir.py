"""A small readable layer over LLVM's assembly language, in which every kernel is written.

Python runs first: whatever is a Python `int` is a constant of the kernel, and a Python `for` unrolls.
`Value`s exist only when the kernel runs. A kernel that adds two arrays, with its tail masked:

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
  address. `internal=True` keeps its name out of the object, `inline=True` pastes it into its callers.
- Masks come from `k.mask(n, lanes)`: the first n lanes. Masked-off lanes touch no memory and read as 0.

- LLVM schedules within a basic block, and merges equal loads there. Steps of a sum that load the same data
  again (neighbouring taps) belong into a `loop`, not into unrolled code: else loads are held in registers,
  and the sums spilled. Unroll over what is really different: pixels, vectors, channels.

`compiler.build(emit, instruction_set, ...)` compiles what an `emit(instruction_set, ...) -> Module`
returns; `pool` says how a kernel's work is spread over threads.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from autoconv.cpu.values import (
    DTYPES,
    Number,
    Type,
    Value,
    Var,
    bf16,
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
    "DTYPES",
    "VECTOR_BYTES",
    "VECTOR_REGISTERS",
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


VECTOR_BYTES = {"avx512": 64, "avx2": 32, "generic": 16}
VECTOR_REGISTERS = {"avx512": 32, "avx2": 16, "generic": 16}


class Function:
    """One function being written; `k` in every kernel."""

    def __init__(self, module: Module, name: str, head: str, types: Sequence[Type], returns: Type | None) -> None:
        self.module, self.name, self.head, self.types, self.returns = module, name, head, types, returns
        self.args = tuple(Value(self, t, f"%a{n}") for n, t in enumerate(types))
        self.exported = not head.startswith("define internal")
        self.lines: list[str] = []
        self._allocas: list[str] = []
        self._count = 0
        self._ended = False
        self._open_if: tuple[str, str, int] | None = None

    # Plumbing: fresh names, instructions, constants.

    def fresh(self, prefix: str = "v") -> str:
        """A name not used before in this function."""
        self._count += 1
        return f"{prefix}{self._count}"

    def emit(self, type: Type, instruction: str) -> Value:  # noqa: A002
        """Append an instruction with a result."""
        name = "%" + self.fresh()
        self.lines.append(f"{name} = {instruction}")
        return Value(self, type, name)

    def alloca(self, type: Type, count: int = 1, align: int = 0) -> str:  # noqa: A002
        """Stack memory for the whole function; its name."""
        name = "%" + self.fresh("s")
        self._allocas.append(f"{name} = alloca {type}, i64 {count}" + (f", align {align}" if align else ""))
        return name

    def scratch(self, element: Type, count: int, align: int = 64) -> Value:
        """An array on the stack, uninitialised; keep it to a few KiB."""
        return Value(self, ptr(element), self.alloca(element, count, align))

    def const(self, type: Type, value: Value | Number) -> Value:  # noqa: A002
        """A constant of a type, or the value itself; every lane alike."""
        if isinstance(value, Value):
            return value
        if type.to is not None:
            text = "null"
        elif type.floating:
            text = _digits(type, value)
        elif type.bits == 1:
            text = "true" if value else "false"
        else:
            text = str(int(value))
        return Value(self, type, f"splat ({type.name} {text})" if type.lanes else text)

    def i64(self, value: int | Value) -> Value:
        """An i64."""
        return self.const(i64, value)

    def zero(self, element: Type, lanes: int = 1) -> Value:
        """Zero in every lane."""
        return self.const(vec(element, lanes), 0)

    def var(self, value: Value) -> Var:
        """A variable that starts as `value`."""
        return Var(self, value)

    def intrinsic(self, returns: Type | None, name: str, *args: Value) -> Value:
        """Call an LLVM intrinsic or a function of the process, declaring it."""
        types = ", ".join(str(a.type) for a in args)
        self.module.declare(f"declare {returns or 'void'} @{name}({types})")
        call = f"call {returns or 'void'} @{name}({', '.join(f'{a.type} {a.text}' for a in args)})"
        if returns is None:
            self.lines.append(call)
            return Value(self, i1, "undef")
        return self.emit(returns, call)

    # Arithmetic.

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """The sum a * b + c, rounded once where the instruction set can."""
        word = "fmuladd" if self.module.instruction_set == "generic" else "fma"
        return self.intrinsic(a.type, f"llvm.{word}.{a.type.suffix}", a, b, c)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """Lane by lane, `a` where the condition holds, else `b`."""
        return self.emit(a.type, f"select {condition.type} {condition.text}, {a.type} {a.text}, {b.type} {b.text}")

    def min(self, a: Value, b: Value | int) -> Value:
        """The smaller of two signed integers."""
        return self.intrinsic(a.type, f"llvm.smin.{a.type.suffix}", a, self.const(a.type, b))

    def max(self, a: Value, b: Value | int) -> Value:
        """The larger of two signed integers."""
        return self.intrinsic(a.type, f"llvm.smax.{a.type.suffix}", a, self.const(a.type, b))

    def relu(self, v: Value) -> Value:
        """The positive part; NaN stays NaN."""
        zero = self.const(v.type, 0)
        return self.select(v < zero, zero, v)

    def cast(self, v: Value, to: Type) -> Value:
        """Convert by value between integers (sign kept), or floats, or integer and float."""
        a, b = v.type, to
        if a == b:
            return v
        if a.floating != b.floating:
            op = "fptosi" if a.floating else "sitofp"
        elif a.floating:
            op = "fpext" if b.bits > a.bits else "fptrunc"
        else:
            op = ("zext" if a.bits == 1 else "sext") if b.bits > a.bits else "trunc"
        return self.emit(to, f"{op} {a} {v.text} to {to}")

    def bits(self, v: Value, to: Type) -> Value:
        """The same bits as another type; between pointers, another element type."""
        if v.type.to is not None and to.to is not None:
            return Value(self, to, v.text)
        op = "ptrtoint" if v.type.to is not None else "inttoptr" if to.to is not None else "bitcast"
        return self.emit(to, f"{op} {v.type} {v.text} to {to}")

    def zext(self, v: Value, to: Type) -> Value:
        """Widen an unsigned integer."""
        return self.emit(to, f"zext {v.type} {v.text} to {to}")

    def bytes_at(self, p: Value, offset: int | Value, element: Type) -> Value:
        """A pointer `offset` bytes further on, to elements of a type."""
        return self.bits(self.bits(p, ptr(i8)) + offset, ptr(element))

    def opaque(self, p: Value) -> Value:
        """The same pointer, of unknown origin: the many addresses counted from it are left as they are written.

        In a loop LLVM looks for the cheapest way to step them all together, which takes most of the time of
        compiling some kernels.
        """
        return self.intrinsic(p.type, "llvm.launder.invariant.group.p0", p)

    def settled(self, v: Value) -> Value:
        """The same floats, whose computation is not mixed with what follows.

        LLVM tries to merge every chain of shuffles with the next, in a time that grows much faster than the chain.
        """
        return self.intrinsic(v.type, f"llvm.arithmetic.fence.{v.type.suffix}", v)

    # Lanes.

    def splat(self, v: Value, lanes: int) -> Value:
        """A scalar in every lane."""
        if lanes == 1:
            return v
        one = self.emit(vec(v.type, lanes), f"insertelement {vec(v.type, lanes)} poison, {v.type} {v.text}, i64 0")
        return self.shuffle(one, one, [0] * lanes)

    def shuffle(self, a: Value, b: Value, indices: Sequence[int]) -> Value:
        """Lanes picked from `a` followed by `b`."""
        picks = ", ".join(f"i32 {i}" for i in indices)
        to = Type(a.type.name, a.type.bits, len(indices))
        return self.emit(to, f"shufflevector {a.type} {a.text}, {b.type} {b.text}, <{len(indices)} x i32> <{picks}>")

    def extract(self, v: Value, lane: int | Value) -> Value:
        """One lane."""
        return self.emit(v.type.scalar, f"extractelement {v.type} {v.text}, i64 {self.i64(lane).text}")

    def insert(self, v: Value, one: Value, lane: int | Value) -> Value:
        """The vector with one lane replaced."""
        return self.emit(v.type, f"insertelement {v.type} {v.text}, {one.type} {one.text}, i64 {self.i64(lane).text}")

    def iota(self, element: Type, lanes: int) -> Value:
        """0, 1, 2, ... of an integer type."""
        return Value(self, vec(element, lanes), f"<{', '.join(f'{element} {i}' for i in range(lanes))}>")

    def mask(self, n: int | Value, lanes: int, first: int = 0) -> Value | None:
        """Lanes first .. n - 1, for loads and stores; None (no mask) when a constant n covers them all."""
        if isinstance(n, Value):
            limit = self.cast(self.max(self.min(n, lanes), 0), i32)
            return self.iota(i32, lanes) < self.splat(limit, lanes) if lanes > 1 else limit > 0
        if n >= lanes and not first:
            return None
        lane = ", ".join(f"i1 {'true' if first <= i < n else 'false'}" for i in range(lanes))
        return Value(self, vec(i1, lanes), f"<{lane}>" if lanes > 1 else lane.removeprefix("i1 "))

    def sum(self, v: Value) -> Value:
        """The sum of all lanes, by halves."""
        while v.type.lanes > 1:
            half = v.type.lanes // 2
            v = self.shuffle(v, v, range(half)) + self.shuffle(v, v, range(half, 2 * half))
        return self.extract(v, 0) if v.type.lanes else v

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Rows of a square block, as many as lanes, to its columns.

        Interleaves pairs within 128-bit blocks, then deals whole blocks out: only shuffles that every x86
        has as one instruction. Which lane ended up where is followed here, not derived.
        """
        lanes = len(rows)
        where = [[(row, lane) for lane in range(lanes)] for row in range(lanes)]
        values = list(rows)

        def stage(distance: int, low: list[int], high: list[int]) -> None:
            for i in range(lanes):
                if not i & distance:
                    j = i | distance
                    a, b, both = values[i], values[j], where[i] + where[j]
                    values[i], values[j] = self.shuffle(a, b, low), self.shuffle(a, b, high)
                    where[i], where[j] = [both[t] for t in low], [both[t] for t in high]

        block = min(16 // rows[0].type.bytes, lanes)
        distance = 1
        while distance < block:  # unpack: pairs of `distance` lanes, within each block
            units = [(start, u) for start in range(0, lanes, block) for u in range(0, block // 2, distance)]
            low = [s + u + o + side for s, u in units for side in (0, lanes) for o in range(distance)]
            stage(distance, low, [t + block // 2 for t in low])
            distance *= 2
        while distance < lanes:  # even and odd blocks
            even = [s + o for s in range(0, 2 * lanes, 2 * block) for o in range(block)]
            stage(distance, even, [t + block for t in even])
            distance *= 2
        order = {tuple(lane for lane in lanes_of): n for n, lanes_of in enumerate(where)}
        return [values[order[tuple((row, column) for row in range(lanes))]] for column in range(lanes)]

    # Memory.

    def load(self, p: Value, lanes: int = 1, *, mask: Value | None = None, align: int = 0) -> Value:
        """`lanes` elements from `p`, of any alignment unless `align` (bytes) promises one."""
        element = p.type.to
        assert element is not None
        if mask is not None and lanes == 1:
            one = self.var(self.zero(widened(element) if element in (f16, bf16) else element))
            with self.if_(mask):
                one.set(self.load(p))
            return one.get()
        stored = vec(i16 if element in (f16, bf16) else element, lanes)
        align = align or element.bytes
        if mask is None:
            v = self.emit(stored, f"load {stored}, ptr {p.text}, align {align}")
        else:
            rest = Value(self, stored, "zeroinitializer")
            name = f"llvm.masked.load.{stored.suffix}.p0"
            v = self.intrinsic(stored, name, p, self.const(i32, align), mask, rest)
        if element == bf16:
            return self.bits(self.zext(v, vec(i32, lanes)) << 16, vec(f32, lanes))
        return self._from_half(v) if element == f16 else v

    def store(
        self, v: Value, p: Value, *, mask: Value | None = None, align: int = 0, nontemporal: bool = False
    ) -> None:
        """Store all lanes; past the caches when `nontemporal`, which wants whole aligned vectors.

        Other threads see non-temporal stores only after a `fence`.
        """
        element = p.type.to
        assert element is not None
        if mask is not None and not v.type.lanes:
            with self.if_(mask):
                self.store(v, p)
            return
        if mask is not None and mask.text.count("i1 true") == 1:
            # LLVM 22 makes of such a mask a scalar store, and that one too wide when the lanes were truncated.
            lane = mask.text.strip("<>").split(", ").index("i1 true")
            self.store(self.extract(v, lane), p + lane)
            return
        if element == bf16:
            v = self._to_bfloat(v)
        elif element == f16:
            v = self._to_half(v)
        align = align or (v.type.bytes * v.type.lanes if nontemporal else element.bytes)
        if mask is not None:
            self.intrinsic(None, f"llvm.masked.store.{v.type.suffix}.p0", v, p, self.const(i32, align), mask)
            return
        hint = ", !nontemporal !0" if nontemporal else ""
        self.lines.append(f"store {v.type} {v.text}, ptr {p.text}, align {align}{hint}")

    def broadcast(self, p: Value, lanes: int) -> Value:
        """The element at `p` in every lane."""
        return self.splat(self.load(p), lanes)

    def prefetch(self, p: Value, *, write: bool = False, locality: int = 3) -> None:
        """Fetch the cache line at `p`: locality 3 into level 1, 2 into level 2."""
        flags = [self.const(i32, n) for n in (int(write), locality, 1)]
        self.intrinsic(None, "llvm.prefetch.p0", p, *flags)

    def fence(self) -> None:
        """Make non-temporal stores visible to other threads; once, at the end of a task that did some."""
        if self.module.x86:
            self.intrinsic(None, "llvm.x86.sse.sfence")
        else:
            self.lines.append("fence release")

    def _from_half(self, v: Value) -> Value:
        lanes = v.type.lanes or 1
        if self.module.instruction_set != "generic":
            half = self.bits(v, vec(f16, lanes))
            return self.emit(vec(f32, lanes), f"fpext {half.type} {half.text} to {vec(f32, lanes)}")
        h = self.zext(v, vec(i32, lanes))
        magnitude = self.bits((h & 0x7FFF) << 13, vec(f32, lanes)) * 2.0**112  # the product normalises subnormals
        bits = self.bits(magnitude, h.type)
        bits = self.select(magnitude >= 65536.0, bits | 0x7F800000, bits)
        return self.bits(bits | ((h & 0x8000) << 16), vec(f32, lanes))

    def _to_half(self, v: Value) -> Value:
        lanes = v.type.lanes or 1
        if self.module.instruction_set != "generic":
            half = self.emit(vec(f16, lanes), f"fptrunc {v.type} {v.text} to {vec(f16, lanes)}")
            return self.bits(half, vec(i16, lanes))
        u = self.bits(v, vec(i32, lanes))
        magnitude = u & 0x7FFFFFFF
        normal = (magnitude + (((15 - 127) << 23) + 0xFFF) + ((magnitude >> 13) & 1)) >> 13
        tiny = self.bits(self.bits(magnitude, v.type) + 0.5, u.type) - (126 << 23)  # the sum rounds at half's last bit
        nan = self.select(magnitude > 0x7F800000, self.const(u.type, 0x7E00), self.const(u.type, 0x7C00))
        h = self.select(magnitude < (113 << 23), tiny, self.select(magnitude >= (143 << 23), nan, normal))
        return self.emit(vec(i16, lanes), f"trunc {u.type} {(h | ((u >> 16) & 0x8000)).text} to {vec(i16, lanes)}")

    def _to_bfloat(self, v: Value) -> Value:
        lanes = v.type.lanes or 1
        u = self.bits(v, vec(i32, lanes))
        rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        quiet = (u >> 16) | 0x40
        h = self.select(v.ne(v), quiet, rounded)
        return self.emit(vec(i16, lanes), f"trunc {u.type} {h.text} to {vec(i16, lanes)}")

    # Atomics, all sequentially consistent, on naturally aligned integers.

    def atomic_load(self, p: Value) -> Value:
        """The integer at `p`."""
        assert p.type.to is not None
        return self.emit(p.type.to, f"load atomic {p.type.to}, ptr {p.text} seq_cst, align {p.type.to.bytes}")

    def atomic_store(self, v: Value | int, p: Value) -> None:
        """Publish an integer."""
        assert p.type.to is not None
        value = self.const(p.type.to, v)
        self.lines.append(f"store atomic {value.type} {value.text}, ptr {p.text} seq_cst, align {value.type.bytes}")

    def atomic(self, op: str, p: Value, v: Value | int) -> Value:
        """Apply `add`, `sub`, `or`, `and` or `xchg`; what was there before."""
        assert p.type.to is not None
        value = self.const(p.type.to, v)
        return self.emit(value.type, f"atomicrmw {op} ptr {p.text}, {value.type} {value.text} seq_cst")

    def compare_exchange(self, p: Value, expected: Value | int, v: Value | int) -> Value:
        """Replace `expected` by `v`; whether that was there."""
        assert p.type.to is not None
        old, new = (self.const(p.type.to, n) for n in (expected, v))
        both = self.fresh()
        self.lines.append(
            f"%{both} = cmpxchg ptr {p.text}, {old.type} {old.text}, {new.type} {new.text} seq_cst seq_cst"
        )
        return self.emit(i1, f"extractvalue {{ {old.type}, i1 }} %{both}, 1")

    def pause(self) -> None:
        """Tell the processor that this loop spins."""
        if self.module.x86:
            self.intrinsic(None, "llvm.x86.sse2.pause")

    # Control flow.

    def _label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def _jump(self, name: str) -> None:
        self.lines.append(f"br label %{name}")

    @contextmanager
    def loop(self, start: int | Value, stop: int | Value, step: int | Value = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)`, run in the kernel; `step` is positive."""
        body, after = self.fresh("loop"), self.fresh("done")
        first, last = self.i64(start), self.i64(stop)
        if isinstance(start, int) and isinstance(stop, int):
            if start >= stop:
                raise ValueError(f"loop from {start} to {stop}: a constant loop runs at least once")
            self._jump(body + "pre")
        else:
            some = first < last
            self.lines.append(f"br i1 {some.text}, label %{body}pre, label %{after}")
        self._label(body + "pre")
        self._jump(body)
        self._label(body)
        head = len(self.lines)
        i = self.emit(i64, "phi")
        yield i
        latch, following = body + "latch", self.fresh()
        self._jump(latch)
        self._label(latch)
        self.lines.append(f"%{following} = add nsw i64 {i.text}, {self.i64(step).text}")
        again = self.emit(i1, f"icmp slt i64 %{following}, {last.text}")
        self.lines.append(f"br i1 {again.text}, label %{body}, label %{after}")
        self.lines[head] = f"{i.text} = phi i64 [ {first.text}, %{body}pre ], [ %{following}, %{latch} ]"
        self._label(after)

    @contextmanager
    def forever(self) -> Iterator[Callable[[Value], None]]:
        """Repeat until the function yielded is called with a condition that holds."""
        body, after = self.fresh("loop"), self.fresh("done")
        self._jump(body)
        self._label(body)

        def leave_if(condition: Value) -> None:
            on = self.fresh("on")
            self.lines.append(f"br i1 {condition.text}, label %{after}, label %{on}")
            self._label(on)

        yield leave_if
        self._jump(body)
        self._label(after)

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        """Run the block where the (scalar) condition holds."""
        then, other, join = self.fresh("then"), self.fresh("else"), self.fresh("join")
        self.lines.append(f"br i1 {condition.text}, label %{then}, label %{other}")
        self._label(then)
        yield
        self._jump(join)
        self._label(other)
        self._jump(join)
        self._label(join)
        self._open_if = (other, join, len(self.lines))

    @contextmanager
    def else_(self) -> Iterator[None]:
        """The other branch of the `if_` that has just ended."""
        if self._open_if is None or self._open_if[2] != len(self.lines):
            raise ValueError("else_ must follow its if_ at once")
        _, join, _ = self._open_if
        del self.lines[-2:]
        yield
        self._jump(join)
        self._label(join)

    def call(self, function: Function, *args: Value | Number) -> Value:
        """Call a function of this module, with values or constants."""
        return self._call(f"@{function.name}", function.returns, function.types, args)

    def call_address(self, address: Value, types: Sequence[Type], *args: Value | Number) -> None:
        """Call the void function at an address, a pointer."""
        self._call(address.text, None, types, args)

    def _call(self, target: str, returns: Type | None, types: Sequence[Type], args: Sequence[Value | Number]) -> Value:
        if len(types) != len(args):
            raise TypeError(f"{target} takes {len(types)} arguments, not {len(args)}")
        passed = ", ".join(f"{t} {self.const(t, a).text}" for t, a in zip(types, args, strict=True))
        if returns is None:
            self.lines.append(f"call void {target}({passed})")
            return Value(self, i1, "undef")
        return self.emit(returns, f"call {returns} {target}({passed})")

    def address(self, function: Function) -> Value:
        """Where a function of this module starts, to be called by `call_address` or given to a pool."""
        return Value(self, ptr(i8), f"@{function.name}")

    def ret(self, value: Value | int) -> None:
        """Give the result; the last thing in a function that has one."""
        assert self.returns is not None
        self.lines.append(f"ret {self.returns} {self.const(self.returns, value).text}")
        self._ended = True

    def __str__(self) -> str:
        end = [] if self._ended else ["ret void" if self.returns is None else "unreachable"]
        return "\n".join([self.head, "entry:", *self._allocas, *self.lines, *end, "}"])


class Module:
    """Functions compiled together for one instruction set."""

    def __init__(self, instruction_set: str, x86: bool | None = None) -> None:
        self.instruction_set = instruction_set
        self.x86 = platform.machine().lower() in ("x86_64", "amd64") if x86 is None else x86
        self.functions: list[Function] = []
        self._declarations: dict[str, None] = {}
        self._tables: list[str] = []

    def lanes(self, element: Type) -> int:
        """Lanes of one register for computing with elements of a type."""
        return VECTOR_BYTES[self.instruction_set] // widened(element).bytes

    @property
    def registers(self) -> int:
        """Number of vector registers."""
        return VECTOR_REGISTERS[self.instruction_set]

    def declare(self, line: str) -> None:
        """Declare what is defined elsewhere, once."""
        self._declarations[line] = None

    def table(self, k: Function, element: Type, values: Sequence[Number]) -> Value:
        """Constants in memory, as a pointer of the function that reads them."""
        name = f"@table{len(self._tables)}"
        numbers = ", ".join(f"{element} {_digits(element, value)}" for value in values)
        self._tables.append(f"{name} = internal constant [{len(values)} x {element}] [{numbers}], align 64")
        return Value(k, ptr(element), name)

    def function(
        self, name: str, *types: Type, returns: Type | None = None, internal: bool = False, inline: bool = False
    ) -> Function:
        """A new function; its arguments are its `args`."""
        arguments = ", ".join(f"{t} %a{n}" for n, t in enumerate(types))
        link = "internal " if internal or inline else ""
        head = f"define {link}{returns or 'void'} @{name}({arguments}) #{int(inline)} {{"
        k = Function(self, name, head, types, returns)
        self.functions.append(k)
        return k

    def __str__(self) -> str:
        bits = 8 * VECTOR_BYTES[self.instruction_set]
        common = f'nounwind "min-legal-vector-width"="{bits}" "prefer-vector-width"="{bits}"'
        attributes = [f"attributes #0 = {{ noinline {common} }}", f"attributes #1 = {{ alwaysinline {common} }}"]
        body = [str(f) for f in self.functions]
        return "\n".join([*self._tables, *body, *self._declarations, *attributes, "!0 = !{i32 1}", ""])


def _digits(element: Type, value: Number) -> str:
    """A floating-point number, rounded to its type, as LLVM's assembly wants it: in the bits of a double."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0] if element.bits == 32 else float(value)
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"
