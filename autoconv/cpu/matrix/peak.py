"""What a matrix unit does at most: products of tiles of numbers, on every thread at once."""

from __future__ import annotations

import functools
import time

import numpy as np

from autoconv.cpu import permission
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import LINE, Module, f32, i8
from autoconv.cpu.codegen.launch import RUN, TEAM_TASK, launch_team, operands
from autoconv.cpu.codegen.tiles import TILE_BYTES
from autoconv.cpu.pool import Entry

ROUNDS, PRODUCTS = 500, 4
RUNS = 20
OPERATIONS = 2 * 16 * 16 * 32  # of a product


def emit(instruction_set: str, matrix_unit: str) -> Module:
    """Every thread runs `ROUNDS` rounds of two tiles by two, loaded anew as a kernel does, and writes the sums."""
    m = Module(instruction_set, matrix_unit=matrix_unit)
    task = m.function("task", *TEAM_TASK, internal=True)
    context, thread, _ = task.args
    a, _, out, *_ = operands(task, context, i8, i8, f32, f32, f32)
    task.configure_tiles()
    for tile in range(PRODUCTS):
        task.tile_zero(tile)
    with task.loop(0, ROUNDS):
        for n in range(4):
            task.tile_load(PRODUCTS + n, a + n * TILE_BYTES, LINE)
        for tile in range(PRODUCTS):
            task.tile_multiply(tile, 4 + tile // 2, 6 + tile % 2)
    for tile in range(PRODUCTS):
        task.tile_store(tile, out + (thread * PRODUCTS + tile) * (TILE_BYTES // 4), LINE)
    task.release_tiles()
    run = m.function("run", *RUN)
    launch_team(run, run.args[0], task)
    return m


@functools.cache
def rate(instruction_set: str, matrix_unit: str, threads: int) -> float:
    """Operations on bfloat16 per second, of the best of some short runs on normally distributed numbers."""
    if matrix_unit == "amx":
        permission.require()
    run = Entry(compiler.build(emit, instruction_set, matrix_unit), "run", threads)
    numbers = np.random.default_rng(0).standard_normal(4 * TILE_BYTES // 2, np.float32).view(np.uint32) >> 16
    a = numbers.astype(np.uint16).view(np.uint8)
    out = np.empty((threads, PRODUCTS, 16, 16), np.float32)
    seconds = []
    for _ in range(RUNS + 1):  # the first wakes the pool
        start = time.perf_counter()
        run(a, None, out)
        seconds.append(time.perf_counter() - start)
    return OPERATIONS * ROUNDS * PRODUCTS * threads / min(seconds[1:])
