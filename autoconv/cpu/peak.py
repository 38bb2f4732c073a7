"""What the machine can do at most: fused multiply-adds on registers, on every thread at once."""

from __future__ import annotations

import functools
import time

import numpy as np

from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module
from autoconv.cpu.codegen.launch import RUN, TEAM_TASK, launch_team, operands
from autoconv.cpu.pool import Entry

ROUNDS = 50_000
CHAINS = 12  # independent sums: more than a multiply-add's latency times the units that do them
RUNS = 100
FACTOR = -1e-5  # sums shrink by it every round, and neither vanish nor overflow


def emit(instruction_set: str, dtype: str) -> Module:
    """Every thread runs `ROUNDS` rounds of `CHAINS` fused multiply-adds, and writes what came of it."""
    m = Module(instruction_set)
    element = DTYPES[dtype]
    lanes = m.lanes(element)
    task = m.function("task", *TEAM_TASK, internal=True)
    context, thread, _ = task.args
    a, _, out, *_ = operands(task, context, element)
    factor = task.load(a, lanes)
    sums = [task.var(factor * (n + 1)) for n in range(CHAINS)]
    with task.loop(0, ROUNDS):
        for chain in sums:
            chain.fma(chain.get(), factor)
    total = sums[0].get()
    for chain in sums[1:]:
        total = total + chain.get()
    task.store(total, out + thread * lanes)
    run = m.function("run", *RUN)
    launch_team(run, run.args[0], task)
    return m


@functools.cache
def flops(instruction_set: str, dtype: str, threads: int) -> float:
    """Operations per second of the best of many short runs; "float32" or "float64"."""
    element = DTYPES[dtype]
    lanes = Module(instruction_set).lanes(element)
    run = Entry(compiler.build(emit, instruction_set, dtype), "run", threads)
    a = np.full(lanes, FACTOR, dtype)
    out = np.empty((threads, lanes), dtype)
    seconds = []
    for _ in range(RUNS + 1):  # the first wakes the pool
        start = time.perf_counter()
        run(a, None, out)
        seconds.append(time.perf_counter() - start)
    return 2.0 * ROUNDS * CHAINS * lanes * threads / min(seconds[1:])
