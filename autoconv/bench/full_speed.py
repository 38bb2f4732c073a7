"""Whether all threads compute at their full speed: those of a virtual machine do not always.

For seconds at a time two of its processors may share one core, or one may stand still, of which its own clocks tell
nothing. What computes most loses most then, so that a race is no longer between contestants alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module
from autoconv.cpu.device import CPU
from autoconv.cpu.machine import probes
from autoconv.tuning.race import wait_until_idle

SLOW = 1.2  # times as long as at the measured peak
BURSTS = 5  # of multiply-adds in a look, of a fraction of a millisecond each
PAUSE = 0.05  # seconds between looks
PATIENCE = 30.0  # seconds in one race for waiting, and for samples that are taken again

Sampler = Callable[[], float]


@dataclass
class FullSpeed:
    """Takes samples while the machine is at its full speed.

    Attributes
    ----------
    ratio : callable
        How many times as long as at the measured peak a burst of multiply-adds takes now, on all threads.
    patience : float
        Seconds that are left for waiting.
    slow : int
        Samples that were kept although the machine was slow, as no patience was left.
    clock, sleep : callable
    """

    ratio: Callable[[], float]
    patience: float
    slow: int = 0
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def of(cls, device: CPU) -> FullSpeed:
        """On a CPU's threads; where no kernel can be compiled, nothing is known of it, and nothing awaited."""
        return cls(_bursts(device) if pool.available() else lambda: 1.0, PATIENCE)

    def __call__(self, sampler: Sampler) -> float:
        """A sample before and after which the machine was at full speed, unless patience ends first.

        Parameters
        ----------
        sampler : callable
            Takes a sample, and gives its seconds.

        Returns
        -------
        float
            Seconds.
        """
        while True:
            start = self.clock()
            while self._slow() and self.clock() - start < self.patience:
                self.sleep(PAUSE)
            waited = self.clock() - start
            seconds = sampler()
            if not self._slow():
                self.patience -= waited
                return seconds
            self.patience -= self.clock() - start
            if self.patience <= 0:
                self.slow += 1
                return seconds

    def __str__(self) -> str:
        return f"{self.slow} samples were taken although the threads were not at their full speed"

    def _slow(self) -> bool:
        return self.ratio() > SLOW


def _bursts(device: CPU) -> Callable[[], float]:
    """The `ratio` of a device."""
    instruction_set = device.instruction_set
    lanes = Module(instruction_set).lanes(DTYPES["float32"])
    run = pool.Entry(compiler.build(probes.emit_peak, instruction_set, "float32"), probes.PEAK, device.threads)
    factors, numbers = np.full(lanes, probes.FACTOR, np.float32), np.array([device.threads, 1, 1], np.int64)
    sums = device.empty((lanes * device.threads,), np.float32)
    operations = 2 * lanes * device.threads * probes.ROUNDS * probes.CHAINS
    least = operations / device.machine.peaks[instruction_set]["float32"]

    def ratio() -> float:
        wait_until_idle()  # or threads of who has just been sampled still spin
        run(factors, numbers, sums)  # wakes the threads
        taken = []
        for _ in range(BURSTS):
            start = time.perf_counter()
            run(factors, numbers, sums)
            taken.append(time.perf_counter() - start)
        wait_until_idle()
        return statistics.median(taken) / least

    return ratio
