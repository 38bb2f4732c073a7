"""What a kernel reads and writes: addresses, loads and stores of every type, what threads share."""

from __future__ import annotations

from autoconv.cpu.codegen.control import Control
from autoconv.cpu.codegen.values import X86, Type, Value, bf16, f16, f32, i1, i8, i16, i32, ptr, vec, widened

LINE = 64  # bytes of a cache's line


class Memory(Control):
    """Memory; of a scalar behind a mask it takes a branch."""

    def scratch(self, element: Type, count: int) -> Value:
        """An array on the stack, on a cache line and uninitialised; keep it to a few KiB."""
        return self.value(ptr(element), self.alloca(element, count, LINE))

    def bytes_at(self, p: Value, offset: int | Value, element: Type) -> Value:
        """A pointer `offset` bytes further on, to elements of a type."""
        return self.bits(self.bits(p, ptr(i8)) + offset, ptr(element))

    def launder(self, p: Value) -> Value:
        """The same pointer, whose origin the optimiser does not know: addresses counted from it stay as written.

        It is LLVM's `launder.invariant.group`, and no instruction. Without it, in a loop, LLVM relates all addresses to
        one another and looks for the cheapest way to step them together (loop strength reduction), which takes most of
        the time of compiling some kernels.
        """
        return self.intrinsic(p.type, "llvm.launder.invariant.group.p0", p)

    def load(
        self, p: Value, lanes: int = 1, *, mask: Value | None = None, align: int = 0, ordered: bool = False
    ) -> Value:
        """`lanes` elements from `p`, of any alignment unless `align` (bytes) promises one.

        Loads without a mask that are `ordered` are done one after the other, as written. LLVM may else turn around what
        a loop loads; and of a stream whose lines a loop asks for from the last to the first, some processors foresee
        nothing, so that it comes from memory at a third of the rate.
        """
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
            v = self.emit(stored, f"load{' volatile' * ordered} {stored}, ptr {p.text}, align {align}")
        else:
            rest = self.value(stored, "zeroinitializer")
            name = f"llvm.masked.load.{stored.suffix}.p0"
            v = self.intrinsic(stored, name, p, self.const(i32, align), mask, rest)
        if element == bf16:
            return self.bits(self.zext(v, vec(i32, lanes)) << 16, vec(f32, lanes))
        return self._from_half(v) if element == f16 else v

    def store(self, v: Value, p: Value, *, mask: Value | None = None, nontemporal: bool = False) -> None:
        """Store all lanes; past the caches when `nontemporal`, which wants whole aligned vectors.

        Other threads see non-temporal stores only after a `fence`.
        """
        element = p.type.to
        assert element is not None
        if mask is not None and not v.type.lanes:
            with self.if_(mask):
                self.store(v, p)
            return
        if element == bf16:
            v = self.to_bfloat(v)
        elif element == f16:
            v = self._to_half(v)
        align = v.type.bytes * v.type.lanes if nontemporal else element.bytes
        if mask is not None:
            if element.bytes < 4 and self.module.instruction_set == "avx512":
                # Where LLVM 22 finds that a mask has a single lane, it stores that alone, in the width it had before it
                # was truncated, and so beyond its place. Assembly without an instruction hides the truncation from it.
                v = self.emit(v.type, f'call {v.type} asm "", "=v,0"({v.type} {v.text})')
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
        if X86:
            self.intrinsic(None, "llvm.x86.sse.sfence")
        else:
            self.lines.append("fence release")

    def float_mode(self) -> Value:
        """The word by which this thread rounds, counts denormals and traps: x86's MXCSR; 0 elsewhere."""
        if not X86:
            return self.const(i32, 0)
        word = self.scratch(i32, 1)
        self.intrinsic(None, "llvm.x86.sse.stmxcsr", word)
        return self.load(word)

    def set_float_mode(self, mode: Value) -> None:
        """Have this thread compute by such a word from here on."""
        if X86:
            word = self.scratch(i32, 1)
            self.store(mode, word)
            self.intrinsic(None, "llvm.x86.sse.ldmxcsr", word)

    def _from_half(self, v: Value) -> Value:
        lanes = v.type.lanes or 1
        if self.module.instruction_set != "generic":
            half = self.bits(v, vec(f16, lanes))
            return self.emit(vec(f32, lanes), f"fpext {half.type} {half.text} to {vec(f32, lanes)}")
        h = self.zext(v, vec(i32, lanes))
        magnitude = h & 0x7FFF
        normal = (magnitude << 13) + ((127 - 15) << 23)
        # A subnormal is a number of units, and of normal size as a float: it stays what it is in every float mode.
        tiny = self.bits(self.cast(magnitude, vec(f32, lanes)) * 2.0**-24, h.type)
        bits = self.select(magnitude < 0x400, tiny, normal)
        bits = self.select(magnitude >= 0x7C00, bits | 0x7F800000, bits)
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

    def to_bfloat(self, v: Value) -> Value:
        """Floats rounded to bfloat16, as 16 bits; NaN stays NaN."""
        lanes = v.type.lanes or 1
        if self.module.matrix_unit == "amx":  # then there is an instruction for it
            narrow = self.emit(vec(bf16, lanes), f"fptrunc {v.type} {v.text} to {vec(bf16, lanes)}")
            return self.bits(narrow, vec(i16, lanes))
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
        if X86:
            self.intrinsic(None, "llvm.x86.sse2.pause")
