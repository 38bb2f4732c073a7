"""How fast all threads compute at the moment, and meet; and what leaves them, and caches, as a network does."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import numpy as np

from autoconv.algorithm import Array
from autoconv.cpu import allocator, pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, VECTOR_BYTES, Module
from autoconv.cpu.codegen.tiles import TILE_BYTES, TILE_FLOPS
from autoconv.cpu.machine import probes

BURSTS = 5  # of multiply-adds, or of products of tiles
MEETINGS = 25  # of all threads, of which the median counts
ROUNDS = 1000  # of products of tiles between two looks at the clock
BURST = 3e-4  # seconds of a burst of products of tiles
WAKING = 2e-3  # seconds of work in which a unit that has slept, of vectors or of tiles, comes to its full rate


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _awake(work: Callable[[], object]) -> None:
    """Have a unit work until it is at its full rate."""
    start = time.perf_counter()
    while time.perf_counter() - start < WAKING:
        work()


@functools.cache
def meter(instruction_set: str, threads: int) -> Callable[[], float]:
    """What measures the operations per second of all threads, once they are awake: in some milliseconds.

    Parameters
    ----------
    instruction_set : "avx512", "avx2", "neon" or "generic"
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

    burst = functools.partial(run, factors, numbers, sums)

    def rate() -> float:
        _awake(burst)
        return operations / statistics.median(timed(burst) for _ in range(BURSTS))

    return rate


def meeting(instruction_set: str, threads: int) -> float:
    """Seconds of a region in which all threads do nothing but begin and end: the median of some.

    It takes about twice as long while the system beneath a virtual machine has its processors on cores that share no
    cache, and then whatever one thread makes for another comes to it late, too.

    Parameters
    ----------
    instruction_set : "avx512", "avx2", "neon" or "generic"
    threads : int

    Returns
    -------
    float
    """
    region = functools.partial(pool.wake, instruction_set, threads)
    region()  # wakes the threads
    return statistics.median(timed(region) for _ in range(MEETINGS))


@functools.cache
def products(instruction_set: str, matrix_unit: str, dtype: str, threads: int) -> Callable[[int], None]:
    """What multiplies tiles on all threads, so many rounds of `probes.SUMS` products.

    Parameters
    ----------
    instruction_set, matrix_unit : str
    dtype : "bfloat16" or "int8"
    threads : int

    Returns
    -------
    callable
        Of normally distributed numbers: units multiply zeros faster.
    """
    run = pool.Entry(compiler.build(probes.emit_tiles, instruction_set, matrix_unit, dtype), probes.TILES, threads)
    memory = allocator.Allocator()
    out, tile = memory.take(TILE_BYTES * threads), memory.take(TILE_BYTES).view(np.uint16)
    numbers = np.random.default_rng(0).standard_normal(tile.size, np.float32)
    tile[:] = numbers.view(np.uint32) >> 16  # the upper half of a float32 is a bfloat16
    return lambda rounds: run(tile, np.array([threads, 0, rounds], np.int64), out)


@functools.cache
def read_by_all(instruction_set: str, threads: int) -> Callable[[Array], Array]:
    """What has every thread read its part of some memory, so that the caches of its core, too, have nothing else.

    Parameters
    ----------
    instruction_set : "avx512", "avx2", "neon" or "generic"
    threads : int

    Returns
    -------
    callable
        Of a contiguous array, where what does not fill a round of all threads is left out; one that comes too late has
        read nothing. Returned are the bits that each thread has seen, a vector each.
    """
    run = pool.Entry(compiler.build(probes.emit, instruction_set), probes.READ, threads)
    vector = VECTOR_BYTES[instruction_set]
    answers, step = allocator.Allocator().take(vector * threads), vector * probes.STREAMS * threads

    def read(array: Array) -> Array:
        run(array, np.array([threads, array.nbytes // step * step // threads // 4, 1], np.int64), answers)
        return answers.reshape(threads, vector)

    return read


def wake_unit(instruction_set: str, matrix_unit: str, threads: int) -> None:
    """Have all threads multiply tiles until a unit that slept is at its full rate; at first it gives a part of it."""
    _awake(functools.partial(products(instruction_set, matrix_unit, "bfloat16", threads), ROUNDS))


def unit_rate(instruction_set: str, matrix_unit: str, threads: int) -> float:
    """Operations per second of all threads on tiles of bfloat16: the median of some bursts of a unit that is awake.

    A burst takes so long that its first microseconds, in which a unit gives less, count for as little as in what the
    rate is held against, the machine's peak.
    """
    run = products(instruction_set, matrix_unit, "bfloat16", threads)
    wake_unit(instruction_set, matrix_unit, threads)
    rounds = max(1, round(ROUNDS * BURST / min(timed(lambda: run(ROUNDS)) for _ in range(BURSTS))))
    seconds = statistics.median(timed(lambda: run(rounds)) for _ in range(BURSTS))
    return float(TILE_FLOPS["bfloat16"] * probes.SUMS * rounds * threads) / seconds
