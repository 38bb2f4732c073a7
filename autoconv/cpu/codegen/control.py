"""Where a kernel goes: loops, branches, calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from autoconv.cpu.codegen.arithmetic import Arithmetic
from autoconv.cpu.codegen.values import Body, Number, Type, Value, i1, i8, i64, ptr


class Control(Arithmetic):
    """Control flow."""

    _open_if: tuple[str, str, int] | None = None

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

    def sweep(self, start: int | Value, stop: int | Value, together: int, body: Callable[[Value], None]) -> None:
        """`body(i)` for `i in range(start, stop)`: so many in one round of a loop, and the rest one by one."""
        whole = self.max(self.i64(stop) - start, 0) // together * together + start
        with self.loop(start, whole, together) as i:
            for n in range(together):
                body(i + n)
        if together > 1:
            with self.loop(whole, stop) as i:
                body(i)

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

    def call(self, function: Body, *args: Value | Number) -> None:
        """Call a function of this module, with values or constants."""
        self._call(f"@{function.name}", function.types, args)

    def call_address(self, address: Value, types: Sequence[Type], *args: Value | Number) -> None:
        """Call the function at an address, a pointer."""
        self._call(address.text, types, args)

    def _call(self, target: str, types: Sequence[Type], args: Sequence[Value | Number]) -> None:
        if len(types) != len(args):
            raise TypeError(f"{target} takes {len(types)} arguments, not {len(args)}")
        passed = ", ".join(f"{t} {self.const(t, a).text}" for t, a in zip(types, args, strict=True))
        self.lines.append(f"call void {target}({passed})")

    def address(self, function: Body) -> Value:
        """Where a function of this module starts, to be called by `call_address` or given to a pool."""
        return self.value(ptr(i8), f"@{function.name}")
