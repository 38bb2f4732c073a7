"""What the pool's workers and callers run: the text of its functions, and the words that they share.

One caller at a time uses the pool. A second one who finds it busy, from another thread or from within a
task, runs all its own tasks by itself, as thread 0: nobody waits, nothing can lock up.

After `fork` the child starts a pool of its own when it first needs one. At exit the threads are told to
leave; what is launched after that runs on the caller alone.

Linux likes to wake a sleeper on the processor of the one who wakes it, which is the one processor that is
sure to be busy: there the worker would wait for milliseconds while the caller does all the work. So workers
are kept off the processor that the caller was on when it last had to wake them, unless somebody else placed them.

Every thread computes in the float mode of the run that it takes part in, which is never the caller's: rounding to
nearest, no traps, and denormals as the run wants them. The caller's mode is put back before Python goes on.

A caller may bring the threads of an OpenMP runtime, which runs other things before and after: its threads, spinning
beside the workers, would keep processors from them. They do what the workers would, then, and those sleep on.

A worker whose processor another process wants, too, loses it when the system thinks fit: within a task, for whose end
all others then wait for milliseconds. So between two tasks it leaves the region and offers the processor by itself,
once in a fraction of the time that systems leave a thread alone. Where nobody wants it, it is back at once.

Sleeping and waking follow Drepper, "Futexes are tricky" (2011).
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable

from autoconv.cpu.codegen.ir import LINE, X86, Function, Module, Value, i1, i8, i32, i64, ptr
from autoconv.cpu.codegen.launch import (
    CONTEXT,
    LAUNCH,
    LAUNCH_ARGS,
    LAUNCH_TEAM,
    MODE,
    OPERANDS,
    PARTY,
    POOL,
    RUN,
    SLOTS,
    TASK,
    TEAM_TASK,
    launch_team,
)

# The pool's words, each on a cache line of its own; in bytes from its start.
STATE = 0  # i64: number of the region in the high half; in the low half, threads inside, its party, and CLOSED
NUMBER = 4  # the high half, which sleepers watch (x86-64 and AArch64 Linux are little-endian)
REGIONS = 64  # i64: regions so far whose tasks were dealt out
JOB = 128  # i64 each: function, context, number of tasks or TEAM, party, number of the region
SLEEPERS = 192  # i32: threads asleep, or about to be
BUSY = 256  # i32: whether a caller is using the pool
DONE = 320  # i64: threads of a team that have taken part
SETTINGS = 384  # i64 each: threads, turns of a spinning wait; i32: whether to leave
RUNTIME = SETTINGS + 24  # i64 each: OpenMP's functions that run a team, and tell a thread's number; 0 for none
PLACES = 448  # i32 each: workers listed, and the processor that they keep off
MASK = 128  # bytes of a set of processors, as the C library has it
# Sets: the processors of this process, those without the caller's, those that workers were given last, and a worker's.
ALLOWED, ELSEWHERE, GIVEN, FOUND = range(512, 512 + 4 * MASK, MASK)
LIST = FOUND + MASK  # i32 each: the workers' thread numbers; 0 for one that is not ours to place
SHARES = (
    LIST + 4 * 8 * MASK
)  # of each thread, on a line of its own; i64: a region's number, and how much was taken in it

# A region's party are the threads that may enter: numbers below it. With STATE it is read in one piece.
INSIDE = (1 << 16) - 1
PARTY_SHIFT, MOST_PARTY = 16, (1 << 15) - 1
CLOSED = 1 << 31
NUMBERS = (1 << 31) - 1  # of tasks, and of regions before they begin anew
EVERYONE = 0xFFFF_FFFF  # as a set of sleepers
# Float modes of a run, as x86's MXCSR has them: no traps, rounding to nearest; and both bits that count denormals as 0.
KEEP = 0x1F80
FLUSH = KEEP | 0x8040
QUANTUM = 1 << 21  # ticks of the processor's clock after which a worker offers its processor: about a millisecond
FOREVER = (1 << 63) - 1
RUN_TEAM = (ptr(i8), ptr(i8), i32, i32)  # function, its argument, threads, flags
SPIN = 2000  # turns of a wait for others who are at work, before the processor is offered between looks
# Ticks for which a worker without work stays awake, a third to half of a millisecond: longer than Python needs between
# two layers, or between two runs of a network. To wake a sleeper took a fifth of that where it was measured.
AWAKE = 1 << 20


def _wait(k: Function, spin: Value, done: Callable[[], Value]) -> None:
    """Spin for a while, then give the processor away between looks."""
    turns = k.var(spin)
    with k.forever() as leave_if:
        leave_if(done())
        turns.add(-1)
        with k.if_(turns.get() > 0):
            k.pause()
        with k.else_():
            _yield(k)


def _yield(k: Function) -> None:
    if os.name == "posix":
        k.intrinsic(i32, "sched_yield")


def _ticks(k: Function) -> Value:
    """The processor's clock; 0 where a program may not read it."""
    return k.intrinsic(i64, "llvm.readcyclecounter") if X86 else k.const(i64, 0)


def words_bytes(threads: int) -> int:
    """What the words of a pool of so many threads take."""
    return SHARES + LINE * threads


def futex_number() -> int | None:
    """The number of Linux's futex call, where it is known."""
    machine = platform.machine() if sys.platform == "linux" and sys.byteorder == "little" else ""
    return {"x86_64": 202, "aarch64": 98}.get(machine)


def emit(instruction_set: str, futex: int | None, data_offset: int, quantum: int) -> Module:
    """What workers and callers run; without futex, idle workers look every 50 microseconds."""
    m = Module(instruction_set)
    _emit_take_part(m)
    _emit_member(m)
    _emit_work(m, futex, quantum)
    _emit_launch(m, futex, team=False)
    _emit_launch(m, futex, team=True)
    _emit_start(m, data_offset)
    _emit_stop(m, futex)
    return m


def _doubling(k: Function, thread: Value) -> Value:
    """Which of the numbers 1, 2 to 3, 4 to 7, ... a thread's is among: workers are woken by these groups."""
    return 63 - k.intrinsic(i64, "llvm.ctlz.i64", thread, k.const(i1, 0))


def _sleep(k: Function, pool: Value, number: Value, thread: Value, futex: int | None) -> None:
    if futex is None:
        k.intrinsic(i32, "usleep", k.const(i32, 50))
        return
    k.atomic("add", k.bytes_at(pool, SLEEPERS, i32), 1)
    wait, none = k.const(i32, 128 + 9), k.const(ptr(i8), 0)  # FUTEX_WAIT_BITSET, private: if the number still holds
    group = k.cast(k.i64(1) << _doubling(k, thread), i32)
    k.intrinsic(i64, "syscall", k.i64(futex), k.bytes_at(pool, NUMBER, i8), wait, number, none, none, group)
    k.atomic("sub", k.bytes_at(pool, SLEEPERS, i32), 1)


def _wake(k: Function, pool: Value, groups: Value, futex: int | None) -> None:
    if futex is None:
        return
    with k.if_(k.atomic_load(k.bytes_at(pool, SLEEPERS, i32)) > 0):
        _keep_off(k, pool)
        wake, all_of_them, none = k.const(i32, 128 + 10), k.const(i32, 2**31 - 1), k.const(ptr(i8), 0)
        number = k.bytes_at(pool, NUMBER, i8)  # FUTEX_WAKE_BITSET, private
        k.intrinsic(i64, "syscall", k.i64(futex), number, wake, all_of_them, none, none, groups)


def _keep_off(k: Function, pool: Value) -> None:
    """Let the workers run on every processor but the caller's; nothing to do unless that changed.

    One that somebody else has placed, as a program may that keeps to fewer processors from now on, stays there.
    """
    places = k.bytes_at(pool, PLACES, i32)
    workers = k.zext(k.load(places), i64)
    with k.if_(workers > 0):
        here = k.intrinsic(i32, "sched_getcpu")
        with k.if_(here.ne(k.load(places + 1))):
            k.store(here, places + 1)
            word, bit = here >> 6, k.i64(1) << k.zext(here & 63, i64)
            allowed, elsewhere, given, found = (k.bytes_at(pool, n, i64) for n in (ALLOWED, ELSEWHERE, GIVEN, FOUND))
            elsewhere_8, given_8, found_8 = (k.bits(one, ptr(i8)) for one in (elsewhere, given, found))
            with k.loop(0, MASK // 8) as n:
                mine = k.select(k.cast(n, i32).eq(word), bit, k.i64(0))
                k.store(k.load(allowed + n) & (mine ^ -1), elsewhere + n)
            with k.loop(0, workers) as n:
                listed = k.bytes_at(pool, LIST, i32) + n
                thread = k.load(listed)
                with k.if_(thread.ne(0)):
                    k.intrinsic(i32, "sched_getaffinity", thread, k.i64(MASK), found_8)
                    with k.if_(k.intrinsic(i32, "memcmp", found_8, given_8, k.i64(MASK)).eq(0)):
                        k.intrinsic(i32, "sched_setaffinity", thread, k.i64(MASK), elsewhere_8)
                    with k.else_():
                        k.store(k.const(i32, 0), listed)
            with k.loop(0, MASK // 8) as n:
                k.store(k.load(elsewhere + n), given + n)


def _emit_take_part(m: Module) -> Function:
    """Do tasks until there are none left, or this thread's part of a team's work.

    Every thread of the party has a share of neighbouring tasks. It does its own, the same ones every time, so that what
    they read and wrote is still in its caches; and then what others have left of theirs. The last argument is when to
    leave in any case.
    """
    k = m.function("take_part", ptr(i8), i64, i64, internal=True)
    pool, thread, until = k.args
    job = k.bytes_at(pool, JOB, i64)
    function, context, n = k.bits(k.load(job), ptr(i8)), k.bits(k.load(job + 1), CONTEXT), k.load(job + 2)
    k.set_float_mode(k.cast(k.load(context + MODE), i32))
    with k.if_(n < 0):
        threads = k.load(k.bytes_at(pool, SETTINGS, i64))
        k.call_address(function, TEAM_TASK, context, thread, threads)
        k.atomic("add", k.bytes_at(pool, DONE, i64), 1)
    with k.else_():
        party, region = k.load(job + 3), k.load(job + 4)
        each, larger = n // party, n % party  # the first shares have a task more
        with k.loop(0, party) as further:
            whose = thread + further
            whose = k.select(whose < party, whose, whose - party)
            first = whose * each + k.min(whose, larger)
            share = each + k.select(whose < larger, k.i64(1), k.i64(0))
            place = k.bytes_at(pool + whose * LINE, SHARES, i64)
            with k.forever() as leave_if:
                leave_if(_ticks(k) > until)
                before = k.atomic_load(place)
                taken = k.select((before >> 32).eq(region), before & NUMBERS, k.i64(0))
                leave_if(taken >= share)
                with k.if_(k.compare_exchange(place, before, (region << 32) + taken + 1)):
                    k.call_address(function, TASK, context, first + taken, thread)
    return k


def _emit_member(m: Module) -> Function:
    """What a thread of an OpenMP team does: take part if it is invited, and leave its float mode as it was."""
    take_part = m.functions[0]
    k = m.function("member", ptr(i8), internal=True)
    (pool,) = k.args
    number = k.bits(k.load(k.bytes_at(pool, RUNTIME, i64) + 1), ptr(i8))
    thread = k.zext(k.emit(i32, f"call i32 {number.text}()"), i64)
    with k.if_(k.load(k.bytes_at(pool, JOB, i64) + 3) > thread):
        before = k.float_mode()
        k.call(take_part, pool, thread, FOREVER)
        k.set_float_mode(before)
    return k


def _emit_work(m: Module, futex: int | None, quantum: int) -> None:
    """A worker's life: wait for a region, enter it unless it is closed already, take part, leave it.

    After a quantum of ticks it leaves with tasks undone, offers its processor, and comes back.
    """
    take_part = m.functions[0]
    k = m.function("work", ptr(i8), i64)
    pool, thread = k.args
    state, number = k.bytes_at(pool, STATE, i64), k.bytes_at(pool, NUMBER, i32)
    settings = k.bytes_at(pool, SETTINGS, i64)
    before = k.float_mode()
    seen, until = k.var(k.const(i32, 0)), k.var(_ticks(k) + quantum)
    with k.forever() as leave_if:
        turns = k.var(k.load(settings + 1))
        asleep = _ticks(k) + k.select(turns.get() > 1, k.i64(AWAKE if X86 else 0), k.i64(0))
        with k.forever() as awake_if:
            awake_if(k.atomic_load(number).ne(seen.get()))
            turns.add(-1)
            with k.if_((turns.get() > 0) | (_ticks(k) < asleep)):
                k.pause()
            with k.else_():
                _sleep(k, pool, seen.get(), thread, futex)
        with k.forever() as done_if:
            now = k.atomic_load(state)
            seen.set(k.cast(now >> 32, i32))
            party = (now >> PARTY_SHIFT) & MOST_PARTY
            invited = k.select((now & CLOSED).eq(0), party, k.i64(0)) > thread
            entered = k.var(k.const(i64, 0))
            with k.if_(invited):
                entered.set(k.zext(k.compare_exchange(state, now, now + 1), i64))
            with k.if_(entered.get().ne(0)):
                once = k.load(k.bytes_at(pool, JOB, i64) + 2) < 0
                k.call(take_part, pool, thread, until.get())
                k.atomic("sub", state, 1)
                with k.if_(_ticks(k) > until.get()):
                    _yield(k)
                    until.set(_ticks(k) + quantum)
                    entered.set(k.zext(once, i64))  # of others there may be tasks left
            done_if(k.select(invited, entered.get(), k.i64(1)).ne(0))
        # Last: whoever stops the pool says so before changing the number, so whoever saw that change sees this.
        leave_if(k.atomic_load(k.bits(settings + 2, ptr(i32))).ne(0))
    k.set_float_mode(before)


def _emit_launch(m: Module, futex: int | None, team: bool) -> None:
    """Open a region, take part, close it, wait for those inside.

    A worker that wakes too late finds the region closed, so a short one does not wait for sleepers. A
    team needs everyone: its region is closed when all have taken part.
    """
    take_part, member = m.functions[:2]
    k = m.function("launch_team" if team else "launch", *LAUNCH_ARGS)
    pool, function, context, n = k.args
    state, job = k.bytes_at(pool, STATE, i64), k.bytes_at(pool, JOB, i64)
    settings = k.bytes_at(pool, SETTINGS, i64)
    threads = k.load(settings)
    party = threads if team else k.min(k.min(threads, n), k.load(context + PARTY))
    mine = k.var(k.const(i64, 0))
    with k.if_(party > 1):
        mine.set(k.zext(k.compare_exchange(k.bytes_at(pool, BUSY, i32), 0, 1), i64))
    with k.if_(mine.get().ne(0)):
        k.store(k.bits(function, i64), job)
        k.store(k.bits(context, i64), job + 1)
        k.store(k.i64(-1) if team else n, job + 2)
        k.store(party, job + 3)
        regions = k.bytes_at(pool, REGIONS, i64)
        region = (k.load(regions) + 1) & NUMBERS
        k.store(region, regions)
        k.store(region, job + 4)
        runtime = k.load(k.bytes_at(pool, RUNTIME, i64))
        with k.if_(runtime.ne(0)):
            mode = k.load(context + MODE)
            k.set_float_mode(k.cast(mode >> 32, i32))  # the caller's own, as threads that start now inherit it
            k.call_address(k.bits(runtime, ptr(i8)), RUN_TEAM, k.address(member), pool, k.cast(threads, i32), 0)
            k.set_float_mode(k.cast(mode, i32))
        with k.else_():
            number = (k.load(state) >> 32) + 1
            k.atomic("xchg", state, number << 32 | party << PARTY_SHIFT)
            _wake(k, pool, k.cast((k.i64(2) << _doubling(k, party - 1)) - 1, i32), futex)
            k.call(take_part, pool, 0, FOREVER)
            if team:
                done = k.bytes_at(pool, DONE, i64)
                _wait(k, k.load(settings + 1), lambda: k.atomic_load(done).eq(threads))
            k.atomic("or", state, CLOSED)
            _wait(k, k.load(settings + 1), lambda: (k.atomic_load(state) & INSIDE).eq(0))
        if team:
            k.atomic_store(0, k.bytes_at(pool, DONE, i64))
        k.atomic_store(0, k.bytes_at(pool, BUSY, i32))
    with k.else_():
        if team:
            k.call_address(function, TEAM_TASK, context, 0, 1)
        else:
            with k.loop(0, n) as index:
                k.call_address(function, TASK, context, index, 0)


def _emit_start(m: Module, data_offset: int) -> None:
    """What Python calls: take the addresses out of the array objects, and run in a float mode, with a party."""
    k = m.function("start", ptr(i8), ptr(i8), i64, i64, *(i64,) * OPERANDS)
    pool, run, mode, party, *arrays = k.args
    context = k.scratch(i64, SLOTS)
    for slot, array in enumerate(arrays):
        data = k.var(k.const(i64, 0))
        with k.if_(array.ne(0)):
            data.set(k.load(k.bits(array + data_offset, ptr(i64))))
        k.store(data.get(), context + slot)
    named = {f.name: f for f in m.functions}
    k.store(k.bits(pool, i64), context + POOL)
    k.store(k.bits(k.address(named["launch"]), i64), context + LAUNCH)
    k.store(k.bits(k.address(named["launch_team"]), i64), context + LAUNCH_TEAM)
    before = k.float_mode()
    k.store(k.zext(before, i64) << 32 | mode, context + MODE)
    k.store(party, context + PARTY)
    k.set_float_mode(k.cast(mode, i32))
    k.call_address(run, RUN, context)
    k.set_float_mode(before)


def _emit_stop(m: Module, futex: int | None) -> None:
    """Tell the workers to leave; callers are on their own from now on."""
    k = m.function("stop", ptr(i8))
    (pool,) = k.args
    settings = k.bytes_at(pool, SETTINGS, i64)
    k.atomic_store(1, settings)
    k.atomic_store(1, k.bits(settings + 2, ptr(i32)))
    k.atomic("add", k.bytes_at(pool, NUMBER, i32), 1)
    _wake(k, pool, k.const(i32, EVERYONE), futex)


def emit_wake(instruction_set: str) -> Module:
    """A region in which every thread does nothing."""
    m = Module(instruction_set)
    task = m.function("task", *TEAM_TASK, internal=True)
    run = m.function("run", *RUN)
    launch_team(run, run.args[0], task)
    return m
