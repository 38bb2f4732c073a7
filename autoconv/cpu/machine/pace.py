"""How fast all threads compute at the moment."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import numpy as np

from autoconv.cpu import allocator, pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module
from autoconv.cpu.machine import probes

BURSTS = 5  # of multiply-adds, of a fraction of a millisecond each


@functools.cache
def meter(instruction_set: str, threads: int) -> Callable[[], float]:
    """What measures the operations per second of all threads, in a millisecond or so.

    Parameters
    ----------
    instruction_set : "avx512", "avx2" or "generic"
    threads : int

    Returns
    -------
    callable
        Of multiply-adds on vectors of float32: the median of some bursts.
    """
    lanes = Module(instruction_set).lanes(DTYPES["float32"])
    run = pool.Entry(compiler.build(probes.emit_peak, instruction_set, "float32"), probes.PEAK, threads)
    factors, numbers = np.full(lanes, probes.FACTOR, np.float32), np.array([threads, 1, 1], np.int64)
    sums = allocator.Allocator().take(4 * lanes * threads).view(np.float32)
    operations = 2.0 * lanes * threads * probes.ROUNDS * probes.CHAINS

    def burst() -> float:
        start = time.perf_counter()
        run(factors, numbers, sums)
        return time.perf_counter() - start

    def rate() -> float:
        burst()  # wakes the threads
        return operations / statistics.median(burst() for _ in range(BURSTS))

    return rate
