"""What a kernel computes: variables, arithmetic, lanes."""

from __future__ import annotations

from collections.abc import Sequence

from autoconv.cpu.codegen.values import Body, Number, Type, Value, i1, i32, vec


class Var:
    """A variable of the kernel, for what changes in loops and branches."""

    __slots__ = ("k", "slot", "type")

    def __init__(self, k: Arithmetic, value: Value) -> None:
        self.k, self.type = k, value.type
        self.slot = k.alloca(value.type)
        self.set(value)

    def get(self) -> Value:
        """Its value here."""
        return self.k.emit(self.type, f"load {self.type}, ptr {self.slot}")

    def set(self, value: Value | Number) -> None:
        """Assign."""
        self.k.lines.append(f"store {self.type} {self.k.const(self.type, value).text}, ptr {self.slot}")

    def fma(self, a: Value, b: Value) -> None:
        """Add a product, rounded once."""
        self.set(self.k.fma(a, b, self.get()))

    def add(self, value: Value | Number) -> None:
        """Add."""
        self.set(self.get() + value)


class Arithmetic(Body):
    """Computing, and moving lanes."""

    def var(self, value: Value) -> Var:
        """A variable that starts as `value`."""
        return Var(self, value)

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
            return self.value(to, v.text)
        op = "ptrtoint" if v.type.to is not None else "inttoptr" if to.to is not None else "bitcast"
        return self.emit(to, f"{op} {v.type} {v.text} to {to}")

    def zext(self, v: Value, to: Type) -> Value:
        """Widen an unsigned integer."""
        return self.emit(to, f"zext {v.type} {v.text} to {to}")

    def arithmetic_fence(self, v: Value) -> Value:
        """The same floats, whose computation the optimiser does not mix with what follows.

        It is LLVM's `arithmetic.fence`, and no instruction. Without it, LLVM tries to merge every chain of shuffles
        with the next, in a time that grows much faster than the chain.
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
        return self.value(vec(element, lanes), f"<{', '.join(f'{element} {i}' for i in range(lanes))}>")

    def mask(self, n: int | Value, lanes: int, first: int = 0) -> Value | None:
        """Lanes first .. n - 1, for loads and stores; None (no mask) when a constant n covers them all."""
        if isinstance(n, Value):
            limit = self.cast(self.max(self.min(n, lanes), 0), i32)
            return self.iota(i32, lanes) < self.splat(limit, lanes) if lanes > 1 else limit > 0
        return self.mask_of([first <= i < n for i in range(lanes)])

    def mask_of(self, chosen: Sequence[bool]) -> Value | None:
        """Some lanes, for loads and stores; None (no mask) for all of them."""
        if all(chosen):
            return None
        lane = ", ".join(f"i1 {'true' if one else 'false'}" for one in chosen)
        return self.value(vec(i1, len(chosen)), f"<{lane}>" if len(chosen) > 1 else lane.removeprefix("i1 "))

    def sum(self, v: Value) -> Value:
        """The sum of all lanes, by halves."""
        while v.type.lanes > 1:
            half = v.type.lanes // 2
            v = self.shuffle(v, v, range(half)) + self.shuffle(v, v, range(half, 2 * half))
        return self.extract(v, 0) if v.type.lanes else v

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Rows of a square block, as many as lanes, to its columns.

        Interleaves pairs within 128-bit blocks, then exchanges whole blocks: only shuffles that every x86
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
