"""How a kernel's work is spread over threads: what a kernel says of it.

The emitter writes one or more *tasks*, and a function `run` that launches them; a `pool.Entry` does the rest, in one
call from Python:

    task = m.function("task", *TASK, internal=True)
    context, index, thread = task.args
    x, w, y = operands(task, context, f32)[:3]      # pointers to a, b, out, bias, residual, workspace
    ...
    run = m.function("run", *RUN)
    context, = run.args
    launch(run, context, task, n_tasks)             # returns when all tasks are done
    launch(run, context, another, n)                # the next region

A task gets the context, its own number in 0 .. n_tasks - 1, and the number of the thread it runs on, in
0 .. threads - 1, for a part of the workspace of its own. Each thread has a share of neighbouring numbers, takes them in
order, and then what is left of the others'; so tasks must not depend on each other, and the answer must not depend on
who ran them.

No more threads take part in a region than it has tasks, or than the run was given.

Where every thread is to take part exactly once (`launch_team`), the function gets the context, its thread's number, and
the number of threads. Only waking them does that: who waits for every thread waits for the one whose processor another
process has.
"""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Function, Type, Value, i8, i64, ptr

# Context of a run, in 8-byte slots: the addresses of a, b, out, bias, residual, workspace, then these. Of the mode the
# low half is the run's, and the high half its caller's.
OPERANDS = 6
POOL, LAUNCH, LAUNCH_TEAM, MODE, PARTY, SLOTS = 6, 7, 8, 9, 10, 11

CONTEXT = ptr(i64)
RUN = (CONTEXT,)
TASK = (CONTEXT, i64, i64)  # context, task, thread
TEAM_TASK = (CONTEXT, i64, i64)  # context, thread, threads
LAUNCH_ARGS = (ptr(i8), ptr(i8), CONTEXT, i64)


def operands(k: Function, context: Value, *elements: Type) -> list[Value]:
    """Pointers to a, b, out, bias, residual and workspace (bytes), elements of the given type.

    One type stands for all arrays; with several, each array has its own.
    """
    types = [*(elements if len(elements) > 1 else elements * 5), i8][:OPERANDS]
    return [k.bits(k.load(context + n), ptr(t)) for n, t in enumerate(types)]


def launch(k: Function, context: Value, task: Function, n_tasks: int | Value) -> None:
    """In `run`: have the threads do tasks 0 .. n_tasks - 1, and wait for them."""
    _call_launch(k, context, LAUNCH, task, n_tasks)


def launch_team(k: Function, context: Value, function: Function) -> None:
    """In `run`: call the function once on every thread of the pool, and wait."""
    _call_launch(k, context, LAUNCH_TEAM, function, 0)


def _call_launch(k: Function, context: Value, slot: int, function: Function, n: int | Value) -> None:
    address = k.bits(k.load(context + slot), ptr(i8))
    pool = k.bits(k.load(context + POOL), ptr(i8))
    k.call_address(address, LAUNCH_ARGS, pool, k.address(function), context, n)
