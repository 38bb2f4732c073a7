"""Samples are taken while the machine is at its full speed, as long as there is patience."""

from __future__ import annotations

import pytest

from autoconv.bench.full_speed import SLOW, FullSpeed
from autoconv.bench.race import interleaved
from autoconv.cpu import pool
from autoconv.cpu.device import CPU


class Scripted:
    """A machine with a speed for every look, the last for all that follow; looks and samples take a second each."""

    def __init__(self, *ratios: float, patience: float = 10.0) -> None:
        self.now, self.samples, self._ratios = 0.0, 0, iter(ratios)
        self._last = ratios[-1]
        self.full_speed = FullSpeed(self.look, patience, clock=lambda: self.now, sleep=self.sleep)

    def look(self) -> float:
        self.now += 1.0
        return next(self._ratios, self._last)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def sample(self) -> float:
        self.now, self.samples = self.now + 1.0, self.samples + 1
        return float(self.samples)


def test_a_quick_machine_is_sampled_once() -> None:
    machine = Scripted(1.0)
    assert [machine.full_speed(machine.sample) for _ in range(20)] == [*range(1, 21)]
    assert machine.full_speed.slow == 0


def test_a_slow_one_is_awaited() -> None:
    machine = Scripted(2.0, 2.0, 1.0)
    assert machine.full_speed(machine.sample) == 1.0
    assert machine.full_speed.slow == 0
    assert 0 < machine.full_speed.patience < 10.0


def test_a_sample_in_which_it_became_slow_is_taken_again() -> None:
    machine = Scripted(1.0, SLOW + 0.1, 1.0)
    assert machine.full_speed(machine.sample) == 2.0
    assert machine.full_speed.slow == 0


def test_patience_ends() -> None:
    machine = Scripted(2.0)
    for _ in range(3):
        machine.full_speed(machine.sample)
    assert machine.full_speed.slow == 3
    assert machine.full_speed.patience <= 0
    assert machine.now < 30.0


def test_every_contestant_is_sampled_through_it() -> None:
    machine = Scripted(1.0, 1.0, 1.0, 2.0, 1.0)
    times = interleaved({"a": machine.sample, "b": machine.sample}, 2, machine.full_speed)
    assert sorted(times["a"] + times["b"]) == [1.0, 3.0, 4.0, 5.0]


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
def test_a_look_at_this_machine() -> None:
    """A burst takes about as long as at the measured peak, of as many operations."""
    assert 0.2 < min(FullSpeed.of(CPU.current()).ratio() for _ in range(5)) < 20.0
