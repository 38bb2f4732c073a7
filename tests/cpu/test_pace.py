"""How fast a processor is at the moment, on vectors and on tiles, and how soon its threads meet; and that a matrix unit
is awake when it is timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoconv.cpu import device as module
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.machine import pace

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")

PACE = CPU.pace  # which other tests do without


def test_products_of_any_unit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "ROUNDS", 2)
    isa = CPU.current().instruction_set
    assert 0 < pace.unit_rate(isa, "emulated", 2) < np.inf


def test_a_unit_is_woken_by_products_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WAKING", 3e-4)
    rounds: list[int] = []
    moments = iter(np.arange(0.0, 1.0, 1e-4).tolist())
    monkeypatch.setattr(pace, "products", lambda *of: rounds.append)
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(moments))
    pace.wake_unit("avx512", "amx", 2)
    assert rounds == [pace.ROUNDS] * 2  # a first look at the clock before, and one that ends it


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CPU:
    """This processor's vectors, with the peaks of a machine that has tiles."""
    monkeypatch.setattr(CPU, "pace", PACE)
    found = CPU.current(instruction_set=CPU.current().instruction_set)
    peaks = found.machine.peaks | {"amx": {"bfloat16": 1e12}}
    machine = replace(found.machine, peaks=peaks, call=6e-7, barrier=4e-7)
    monkeypatch.setattr(CPU, "machine", property(lambda self: machine))
    monkeypatch.setattr(pace, "meeting", lambda *of: 1e-6)
    monkeypatch.setattr(module, "_met", {})
    return found


def test_a_device_is_as_slow_as_what_is_slowest_on_it(device: CPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit may be shared with processors that are not this one's, while vectors are at their full speed."""
    monkeypatch.setattr(pace, "meter", lambda *of: lambda: device.peak_flops("float32") / 1.1)
    assert device.pace() == pytest.approx(1.1)
    monkeypatch.setattr(CPU, "_unit", lambda self: "amx")
    for rate, slowness in ((4e11, 2.5), (1e12, 1.1)):
        monkeypatch.setattr(pace, "unit_rate", lambda *of, rate=rate: rate)
        assert device.pace() == pytest.approx(slowness)


def test_all_threads_meet() -> None:
    assert 0 < pace.meeting(CPU.current().instruction_set, 2) < np.inf


@pytest.mark.parametrize(
    ("threads", "barrier", "slowness"), [(2, 4e-7, 2 / module.MEETINGS_VARY), (1, 4e-7, 1.1), (2, None, 1.1)]
)
def test_threads_far_from_one_another_make_a_device_slow(
    threads: int, barrier: float | None, slowness: float, device: CPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute as fast as ever, while what one has made comes late to the other."""
    monkeypatch.setattr(pace, "meter", lambda *of: lambda: device.peak_flops("float32") / 1.1)
    monkeypatch.setattr(pace, "meeting", lambda *of: 2e-6)
    machine = replace(device.machine, barrier=barrier)
    monkeypatch.setattr(CPU, "machine", property(lambda self: machine))
    assert replace(device, threads=threads).pace() == pytest.approx(slowness)


def test_near_is_as_near_as_threads_are_in_one_look_of_four(device: CPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have been measured while they were far from one another, or near for a moment."""
    monkeypatch.setattr(pace, "meter", lambda *of: lambda: device.peak_flops("float32"))

    def look(seconds: float) -> float:
        monkeypatch.setattr(pace, "meeting", lambda *of: seconds)
        return replace(device, threads=2).pace()

    far = pytest.approx(2 / module.MEETINGS_VARY)
    assert [look(seconds) for seconds in (1e-6, 5e-7, 5e-7, 1e-6)] == [1.0, 1.0, 1.0, far]
    looks = [look(1e-6) for _ in range(module.MEETINGS_KEPT)]
    assert (looks[0], looks[-1]) == (far, 1.0), "where they seldom are near, far is as usual"
    assert look(5e-7) == 1.0
    assert [look(5e-7 if n % 3 else 1e-6) for n in range(module.MEETINGS_KEPT)][-1] == far


def test_every_thread_reads_its_part() -> None:
    memory = np.zeros(3 << 16, np.uint8)
    memory[:: 1 << 16] = 1, 2, 4
    read = pace.read_by_all(CPU.current().instruction_set, 2)
    seen = ([np.bitwise_or.reduce(one) for one in read(memory)] for _ in range(10**6))  # a thread may come too late
    assert [1 | 2, 4] in seen


@pytest.mark.parametrize(
    ("unit", "allowed", "woken"), [("amx", True, 1), ("amx", False, 0), ("emulated", True, 0), (None, True, 0)]
)
def test_a_unit_in_hardware_is_awake_when_a_layer_is_timed(
    unit: str | None, allowed: bool, woken: int, device: CPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(pace, "wake_unit", lambda *of: calls.append(of))
    monkeypatch.setattr(module.permission, "granted", lambda: allowed)
    object.__setattr__(device, "matrix_unit", unit)
    device.settle()
    assert calls == [(device.instruction_set, unit, device.threads)] * woken
