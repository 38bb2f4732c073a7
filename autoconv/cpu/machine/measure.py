"""Measuring the machine: a first look in a fraction of a second, or all of it in a few."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from autoconv.algorithm import Array
from autoconv.cpu import allocator, permission, pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, VECTOR_BYTES, Module
from autoconv.cpu.codegen.tiles import TILE_FLOPS
from autoconv.cpu.codegen.words import CHANNELS, vector_products
from autoconv.cpu.machine import probes
from autoconv.cpu.machine.curve import Curve, falling, levels
from autoconv.cpu.machine.effort import FINEST, PEAKS_ONLY, ROUGH, SMALLEST, THOROUGH, Effort
from autoconv.cpu.machine.model import LINE, Machine
from autoconv.cpu.machine.pace import MEETINGS, products, timed
from autoconv.cpu.machine.passes import merged, settled, steady
from autoconv.cpu.threads import count_cores, processors

ATTEMPTS = 6  # measurements of a machine that never agree
UNEQUAL = 0.2  # the share that a peak has to fall short of the other type's by, to be no noise
CROWDED = 0.4  # ... and of as many times what one thread reaches alone: clocks are lower when all compute
TRANSFORMED = (
    16 << 10
)  # bytes of a thread's range while the transforms are measured: they shall stay in the first cache
MATRIX = 512  # rows of the product that stands for the peak where no kernel can be compiled
LOADS = 1 << 14  # of a sample that waits for nothing else: beside them a call takes next to nothing
FLOATS = ("float32", "float64")
RATE = 2e10  # bytes or so per second, from which the time of a first sample is guessed
ASLEEP = 0.02  # seconds after which threads have gone to sleep


def measure(instruction_set: str, threads: int, matrix_unit: str | None = None, *, thorough: bool) -> Machine:
    """This machine, as so many threads with such vectors find it.

    It is measured again until two measurements agree, a few times at most, and the best of each quantity counts: no
    passing disturbance does then. Where they never agree the model says how busy the machine was.

    Parameters
    ----------
    instruction_set : "avx512", "avx2", "neon" or "generic"
    threads : int
    matrix_unit : "amx", "emulated" or None
    thorough : bool
        In a few seconds, rather than a fraction of one.

    Returns
    -------
    Machine
    """
    effort = THOROUGH if thorough else ROUGH
    if not pool.available():
        return _agreed(functools.partial(_without_kernels, instruction_set, threads, effort, thorough), effort)
    session = _Session(instruction_set, threads, effort)
    return _agreed(lambda: session.machine(thorough, matrix_unit), effort)


def completed(machine: Machine, instruction_set: str, threads: int, matrix_unit: str | None = None) -> Machine:
    """A machine with what its record lacks, measured now as `measure` does: less could be when it was taken.

    Parameters
    ----------
    machine : Machine
    instruction_set, threads, matrix_unit
        As for `measure`.

    Returns
    -------
    Machine
        The same one where no kernel can be compiled; otherwise as busy as it was in the busier of both measurements.
    """
    if not pool.available():
        return machine
    effort = PEAKS_ONLY if machine.jumps is not None and machine.handed is not None else THOROUGH
    session = _Session(instruction_set, threads, effort)

    def sample() -> Machine:
        session.floats()  # which tell how busy the machine is
        found = dict(machine.peaks)
        if "int8" not in found[instruction_set]:
            found[instruction_set] = found[instruction_set] | {"int8": session.words()}
        if matrix_unit not in found:
            found |= session.units(matrix_unit)
        jumps, handed = machine.jumps or session.jumps(), machine.handed or session.handed()
        return dataclasses.replace(machine, peaks=found, jumps=jumps, handed=handed, busy=session.busy())

    best = _agreed(sample, effort)
    busy = max(machine.busy, best.busy)
    return dataclasses.replace(machine, peaks=best.peaks, jumps=best.jumps, handed=best.handed, busy=busy)


def _agreed(sample: Callable[[], Machine], effort: Effort) -> Machine:
    """What measurements say together that are repeated until two agree, or patience ends."""
    start = time.perf_counter()
    found = [sample() for _ in range(2)]
    while not settled(found) and len(found) < ATTEMPTS and time.perf_counter() - start < effort.patience:
        found.append(sample())
    return merged(found)


class _Session:
    """What measures: the probes, and the memory that they go over."""

    def __init__(self, instruction_set: str, threads: int, effort: Effort) -> None:
        self.instruction_set, self.threads, self.effort = instruction_set, threads, effort
        self.quantum = probes.STREAMS * VECTOR_BYTES[instruction_set]
        step = self.quantum * threads
        least = max(2 * TRANSFORMED, SMALLEST * threads)  # what a probe needs, however little memory there is
        self.largest = -(-max(effort.affordable(), least) // step) * step
        self.memory = allocator.Allocator().take(self.largest)  # which is not kept for others: it is large
        filled = allocator.done_aside(self.memory.fill, 0)  # memory never touched may come slowly
        self.program = compiler.build(probes.emit, instruction_set)
        self.multiplying = {dtype: compiler.build(probes.emit_peak, instruction_set, dtype) for dtype in FLOATS}
        filled()
        self.answers = allocator.take(self.quantum * threads)
        self.results = self.answers.view(np.float32)
        self.wall = self.used = self.alone = 0.0
        self.peaks: dict[str, float] = {}
        self.regions: list[float] = []  # seconds, as all passes found them
        self.wakes: list[float] = []

    def machine(self, thorough: bool, matrix_unit: str | None = None) -> Machine:
        """All of it, once."""
        read_one = self.curve(probes.READ, 1, self.sizes(self.effort.ratio, 1))
        chase = self.chase([size for size in self.sizes(FINEST, 1) if size <= self.effort.farthest])
        sizes, several = self.sizes(self.effort.ratio, self.threads), self.threads > 1
        self.floats()
        self.peaks["int8"] = self.words()
        call = self.seconds(self.runner(probes.NOTHING, 1, 1, 1), 100)
        return Machine(
            threads=self.threads,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            thorough=thorough,
            peaks={self.instruction_set: self.peaks} | self.units(matrix_unit),
            read_one=read_one,
            read=self.curve(probes.READ, self.threads, sizes) if several else read_one,
            write=self.curve(probes.WRITE, self.threads, sizes),
            stream=self.curve(probes.STREAM, self.threads, sizes[-3:]),
            transform=self.transform(),
            call=call,
            barrier=self.barrier(call) if several else call,
            wake=self.wake() if several else call,
            chase=chase,
            jumps=self.jumps(),
            handed=self.handed(),
            caches=levels(read_one, chase),
            busy=self.busy(),
        )

    def sizes(self, ratio: float, threads: int) -> list[int]:
        """Working sets of so many threads together."""
        count = int(math.log(self.largest / SMALLEST) / math.log(ratio) + 0.5)
        step = self.quantum * threads
        wanted = (SMALLEST * ratio**n for n in range(count + 1))
        return sorted({min(max(round(size / step), 1) * step, self.largest) for size in wanted})

    def runner(
        self, probe: str, threads: int, elements: int, rounds: int, dtype: str = "float32"
    ) -> Callable[[], None]:
        """What calls a probe once."""
        program = self.multiplying[dtype] if probe == probes.PEAK else self.program
        run = pool.Entry(program, probe, self.threads if threads > 1 else 1)
        numbers = np.array([threads, elements, rounds], np.int64)
        target = self.memory if probe in (probes.WRITE, probes.STREAM) else self.answers
        if probe == probes.TRANSFORM:
            target = self.memory[self.largest // 2 :]
        source = self.factors(dtype) if probe == probes.PEAK else self.memory
        return lambda: run(source, numbers, target)

    def factors(self, dtype: str) -> Array:
        """A vector of the factor by which the peak's sums shrink."""
        return np.full(Module(self.instruction_set).lanes(DTYPES[dtype]), probes.FACTOR, dtype)

    def seconds(self, call: Callable[[], None], samples: int | None = None) -> float:
        """The quickest of some calls, after one that is not counted."""
        call()
        return min(timed(call) for _ in range(samples or self.effort.samples))

    def curve(self, probe: str, threads: int, sizes: list[int]) -> Curve:
        """Bytes per second by working set."""
        points, rate = [], RATE
        for size in sizes:
            rounds = max(1, round(self.effort.seconds * rate / size))
            rate = size * rounds / self.seconds(self.runner(probe, threads, size // threads // 4, rounds))
            points.append((size, rate))
        return falling(points)

    def chase(self, sizes: list[int]) -> Curve:
        """Loads per second along a chain, in no order, through all cache lines of a working set."""
        rng, points, rate = np.random.default_rng(0), [], RATE / LINE
        for size in sizes:
            places = LINE // 8 * rng.permutation(size // LINE)
            places = np.append(places[places != 0], 0)  # from 0 through all of them and back
            chain = self.memory[:size].view(np.int64)
            chain[np.roll(places, 1)] = places
            self.answers[...] = 0
            loads = min(LOADS, max(LOADS // 8, round(self.effort.seconds * rate)))
            rate = loads / self.seconds(self.runner(probes.CHASE, 1, 1, loads))
            points.append((size, rate))
        return falling(points)

    def jumps(self) -> Curve:
        """Lines per second to which all threads jump, each in its part of a working set."""
        rng, points, rate = np.random.default_rng(0), [], RATE / LINE
        states = self.answers.view(np.int64)
        for size in self.parts():
            self.runner(probes.READ, self.threads, size // 4, 1)()  # into the cache that holds it
            states[...] = rng.integers(1 << 62, size=states.size)
            loads = max(LOADS, round(self.effort.seconds * rate))
            rate = loads / self.seconds(self.runner(probes.JUMP, self.threads, size // 8, loads))
            points.append((size * self.threads, self.threads * rate))
        return falling(points)

    def handed(self) -> Curve:
        """Bytes per second that all threads write, and then read what the next one has written."""
        points, rate = [], RATE / 4

        def seconds(size: int) -> float:
            """Of a round."""
            rounds = max(1, round(self.effort.seconds * rate / max(size, SMALLEST) / self.threads))
            return self.seconds(self.runner(probes.HAND, self.threads, size // 4, rounds)) / rounds

        regions = seconds(0)
        for size in self.parts():
            taken = seconds(size)
            rate = size * self.threads / max(taken - regions, taken / 8)
            points.append((size * self.threads, rate))
        return Curve(tuple(points))

    def parts(self) -> list[int]:
        """Bytes of one thread's part of working sets that all have a part of."""
        ratio, most = max(round(self.effort.ratio), 2), min(self.effort.farthest, self.largest // self.threads)
        sizes = [SMALLEST]
        while sizes[-1] * ratio <= most:
            sizes.append(sizes[-1] * ratio)
        return sizes

    def floats(self) -> None:
        """Measure the peaks of floats; what others use of the processor is counted from here on."""
        self.alone = max(self.alone, self.peak("float32", 1))
        self.wall = self.used = 0.0
        self.peaks = {dtype: self.peak(dtype, self.threads) for dtype in FLOATS}

    def peak(self, dtype: str, threads: int) -> float:
        """Operations per second of so many threads on vectors of floats."""
        lanes = Module(self.instruction_set).lanes(DTYPES[dtype])
        return self.operations(self.runner(probes.PEAK, threads, 1, 1, dtype), 2 * lanes * threads)

    def words(self) -> float:
        """Operations per second of all threads on words of bytes."""
        product = vector_products(self.instruction_set)[0]
        run = pool.Entry(compiler.build(probes.emit_words, self.instruction_set, product), probes.WORDS, self.threads)
        words = np.full(VECTOR_BYTES[self.instruction_set] // 4, 0x01010101, np.int32)
        numbers = np.array([self.threads, 1, 1], np.int64)
        return self.operations(
            lambda: run(words, numbers, self.answers), 2 * CHANNELS[product] * words.size * self.threads
        )

    def operations(self, call: Callable[[], None], of_a_chain: int) -> float:
        """Operations per second, by a probe of so many in every round of a chain, those of all its threads together.

        What others used of the processor meanwhile is noted.
        """
        for _ in range(self.effort.bursts // 10):  # the first wake the pool
            call()
        return float(of_a_chain) * probes.ROUNDS * probes.CHAINS / min(self.watched(call, self.effort.bursts))

    def watched(self, call: Callable[[], None], samples: int) -> list[float]:
        """Seconds of some calls that keep all threads at work; what others used of the processor meanwhile is noted."""
        wall, used = time.perf_counter(), time.process_time()
        seconds = [timed(call) for _ in range(samples)]
        self.wall += time.perf_counter() - wall
        self.used += time.process_time() - used
        return seconds

    def units(self, matrix_unit: str | None) -> dict[str, dict[str, float]]:
        """The peaks of a matrix unit that this process may use, on normally distributed numbers: zeros are faster."""
        if matrix_unit is None or (matrix_unit == "amx" and not permission.granted()):
            return {}
        return {matrix_unit: {dtype: self.tiles(matrix_unit, dtype) for dtype in TILE_FLOPS}}

    def tiles(self, matrix_unit: str, dtype: str) -> float:
        """Operations per second of all threads on tiles."""
        run, rounds = products(self.instruction_set, matrix_unit, dtype, self.threads), 1
        while True:
            best = self.seconds(functools.partial(run, rounds))
            if best > self.effort.seconds:
                return float(TILE_FLOPS[dtype] * probes.SUMS * rounds * self.threads) / best
            rounds *= 4

    def busy(self) -> float:
        """The share of the processor that this process did not get while all its threads computed.

        What a virtual machine is not given, its clocks do not tell. But both types' multiply-adds take as long, with
        twice the lanes for float32; and threads with a core each reach as many times what one reaches alone, but for
        their clocks. A peak that falls far short of either lacked at least that share.
        """
        wanted = self.wall * min(self.threads, processors())
        both = sorted((self.peaks.get("float32", 1.0), 2 * self.peaks.get("float64", 0.5)))
        unequal = 1 - both[0] / both[1]
        crowded = 1 - both[1] / (self.threads * self.alone) if self.alone and self.threads <= count_cores() else 0.0
        signs = (unequal if unequal > UNEQUAL else 0.0, crowded if crowded > CROWDED else 0.0)
        return max(0.0, 1 - self.used / wanted, *signs)

    def transform(self) -> float:
        """Vectors per second of one thread."""
        elements = TRANSFORMED // 4
        rounds = max(1, round(self.effort.seconds * 1e10 / TRANSFORMED))
        best = self.seconds(self.runner(probes.TRANSFORM, 1, elements, rounds))
        return rounds * TRANSFORMED / VECTOR_BYTES[self.instruction_set] / best

    def barrier(self, call: float) -> float:
        """Seconds by which a region of all threads takes longer than a call; a median, as it varies."""
        region = functools.partial(pool.wake, self.instruction_set, self.threads)
        region()
        least = steady(lambda: float(np.median(self.watched(region, MEETINGS))), self.regions)
        return max(least - call, 1e-8)

    def wake(self) -> float:
        """Seconds of a region whose threads are asleep."""

        def sample() -> float:
            time.sleep(ASLEEP)
            return timed(functools.partial(pool.wake, self.instruction_set, self.threads))

        return steady(sample, self.wakes)


def _without_kernels(instruction_set: str, threads: int, effort: Effort, thorough: bool) -> Machine:
    """What NumPy reaches, where no kernel can be compiled; the rest stays unmeasured.

    How busy the machine is, reading tells, which a single thread does.
    """
    matrices = {dtype: np.ones((MATRIX, MATRIX), dtype) for dtype in ("float32", "float64")}
    seconds = {dtype: min(timed(lambda a=a: a @ a) for _ in range(3)) for dtype, a in matrices.items()}  # type: ignore[misc]
    memory = np.ones(max(effort.affordable(), SMALLEST) // 8, np.int64)  # zeros may be one page, over and over
    sizes = [SMALLEST << n for n in range(0, 64, 2) if SMALLEST << n <= memory.nbytes]
    points, wall, used = [], time.perf_counter(), time.process_time()
    for size in sizes:
        part = memory[: size // 8]
        rounds = max(1, round(effort.seconds * 2e10 / size))
        best = min(timed(lambda part=part, n=rounds: [part.max() for _ in range(n)]) for _ in range(effort.samples))  # type: ignore[misc]
        points.append((size, size * rounds / best))
    wall, used = time.perf_counter() - wall, time.process_time() - used
    curve = falling(points)
    return Machine(
        threads=threads,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        thorough=thorough,
        busy=max(0.0, 1 - used / (wall * min(1.0, processors()))),
        peaks={instruction_set: {dtype: 2.0 * MATRIX**3 / best for dtype, best in seconds.items()}},
        read_one=curve,
        read=curve,
        write=None,
        stream=None,
        transform=None,
        call=None,
        barrier=None,
        wake=None,
        chase=None,
        jumps=None,
        handed=None,
        caches=levels(curve, curve),
    )
