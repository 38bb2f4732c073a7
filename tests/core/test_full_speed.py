"""Samples are taken while the machine is at its full speed, as long as there is patience."""

from __future__ import annotations

import pytest
from planning import LAYER
from scripted import Machine, timing

from autoconv.algorithm import Candidate
from autoconv.bench.race import interleaved
from autoconv.cpu.device import CPU
from autoconv.tuning.measurement import Measurement
from autoconv.tuning.timing import full_speed
from autoconv.tuning.timing.full_speed import SLOW, FullSpeed


class Scripted:
    """A machine with a speed for every look, the last for all that follow; looks and samples take a second each."""

    def __init__(self, *ratios: float, patience: float = 10.0) -> None:
        self.now, self.samples, self._ratios = 0.0, 0, iter(ratios)
        self._last = ratios[-1]
        self.full_speed = FullSpeed(self.look, patience, clock=lambda: self.now, sleep=self.sleep, busy=lambda: 0.0)

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
    assert [machine.full_speed.take(machine.sample) for _ in range(20)] == [*range(1, 21)]
    assert machine.full_speed.slow == 0


def test_a_slow_one_is_awaited() -> None:
    machine = Scripted(2.0, 2.0, 2.0, 2.0, 1.0)
    assert machine.full_speed.take(machine.sample) == 1.0
    assert machine.full_speed.slow == 0
    assert 0 < machine.full_speed.patience < 10.0


def test_a_sample_in_which_it_became_slow_is_taken_again() -> None:
    machine = Scripted(1.0, SLOW + 0.1, SLOW + 0.1, 1.0)
    assert machine.full_speed.take(machine.sample) == 2.0
    assert machine.full_speed.slow == 0


def test_patience_ends() -> None:
    machine = Scripted(2.0)
    for _ in range(3):
        machine.full_speed.take(machine.sample)
    assert machine.full_speed.slow == 3
    assert machine.full_speed.patience <= 0
    assert machine.now < 30.0


def test_every_contestant_is_sampled_through_it() -> None:
    machine = Scripted(1.0, 1.0, 1.0, 2.0, 2.0, 1.0)
    times = interleaved({"a": machine.sample, "b": machine.sample}, 2, machine.full_speed.take)
    assert sorted(times["a"] + times["b"]) == [1.0, 3.0, 4.0, 5.0]


def test_it_is_looked_at_now_and_then() -> None:
    machine = Scripted(1.0)
    assert machine.full_speed.wait() == 1.0
    assert machine.full_speed.wait() == 0.0
    machine.now += 1.0
    assert machine.full_speed.wait() == 1.0


def test_what_only_seemed_slow_while_threads_were_spinning() -> None:
    machine = Scripted(2.0, 1.0)
    assert machine.full_speed.take(machine.sample) == 1.0
    assert machine.full_speed.patience > 7.0


def test_waiting_does_not_count_in_a_race() -> None:
    machine, waited = Machine(), iter([0.0, 50.0])

    def ready() -> float:
        seconds = next(waited, 0.0)
        machine.now += seconds
        return seconds

    found = machine.race(machine.contestant("a", 1e-3), machine.contestant("b", 2e-3), budget=1.0, ready=ready)
    assert all(timing(result).samples >= 2 for result in found.values())
    assert machine.now > 50.0


def test_a_device_that_stays_slow_is_not_waited_for_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "pace", lambda self: 2.0)
    monkeypatch.setattr(full_speed, "_vain", {})
    device = CPU.current()
    measured = Measurement(LAYER, device, budget=0.2)
    assert FullSpeed.of(device).patience > 0
    measured.enter([Candidate("numpy.direct")])
    assert FullSpeed.of(device).patience == 0
