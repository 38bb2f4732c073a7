"""The machine, measured: all of it, until measurements agree, and how busy it was meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from machines import CURVED, MACHINE, SMALL

from autoconv.cpu.device import CPU
from autoconv.cpu.machine import effort, passes
from autoconv.cpu.machine import measure as measuring
from autoconv.cpu.machine.checks import CURVES
from autoconv.cpu.machine.curve import Curve
from autoconv.cpu.machine.model import BUSY, Machine


@pytest.mark.parametrize("threads", [1, 2])
def test_a_measurement_is_whole_and_reads_back(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUGH", SMALL)
    isa = CPU.current().instruction_set
    found = measuring.measure(isa, threads, thorough=False)
    assert Machine.parse(found.text) == found
    assert [name for name, value in found.to_json().items() if value is None] == []
    assert found.flops(isa, "float32") > found.flops(isa, "float64") > 0
    assert found.flops(isa, "float16") == found.flops(isa, "float32")
    assert found.flops(isa, "int8") > 0
    for curve in (found.read_one, found.read, found.write, found.chase):
        assert curve is not None
        rates = [rate for _, rate in curve.points]
        assert rates == sorted(rates, reverse=True)
    assert not found.thorough


def test_a_first_look_tells_caches_apart_as_finely_as_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A working set twice as large may be twice as slow, and half of the cache seem to be all."""
    looked: list[int] = []
    monkeypatch.setattr(measuring._Session, "chase", lambda self, sizes: looked.extend(sizes) or CURVED.chase)
    measuring._Session(CPU.current().instruction_set, 1, SMALL).machine(thorough=False)
    assert looked[-1] == SMALL.farthest
    assert all(b < 1.6 * a for a, b in itertools.pairwise(looked))


def test_one_thread_reads_and_follows_small_working_sets_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for 128 threads, whose least working set together is larger than the first cache of one of them."""
    isa = CPU.current().instruction_set
    session = measuring._Session(isa, 2, SMALL)
    monkeypatch.setattr(measuring, "SMALLEST", session.quantum)
    found = session.machine(thorough=False)
    assert found.chase is not None
    assert found.read_one.points[0][0] == found.chase.points[0][0] == session.quantum
    assert found.read.points[0][0] == 2 * session.quantum


@pytest.mark.parametrize(
    ("there", "largest"),
    [(0, 256 << 20), (8 << 30, 256 << 20), (1 << 30, 256 << 20), (512 << 20, 128 << 20), (1 << 20, 256 << 10)],
)
def test_the_largest_working_set_is_a_quarter_of_what_memory_there_is(
    there: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort.allocator, "physical_memory", lambda: there)  # 0 where the system does not say
    assert effort.THOROUGH.affordable() == largest


@pytest.mark.parametrize("threads", [1, 3])
def test_there_is_room_for_every_probe_however_little_memory_there_is(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort.allocator, "physical_memory", lambda: 1)
    session = measuring._Session(CPU.current().instruction_set, threads, SMALL)
    assert session.memory.nbytes - session.largest // 2 >= measuring.TRANSFORMED
    found = session.machine(thorough=False)
    assert Machine.parse(found.text) == found


def test_the_peak_of_a_matrix_unit_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUGH", SMALL)
    isa = CPU.current().instruction_set
    found = measuring.measure(isa, 1, "emulated", thorough=False)
    assert found.peaks.keys() == {isa, "emulated"}
    for dtype in ("bfloat16", "int8"):
        assert 0 < found.tiles("emulated", dtype) < found.flops(isa, "float32")
    monkeypatch.setattr(measuring.permission, "granted", lambda: False)
    without = measuring.measure(isa, 1, "amx", thorough=False)
    assert without.peaks.keys() == {isa}
    assert without.tiles("amx", "bfloat16") == without.flops(isa, "float32")


def test_without_kernels_numpy_stands_for_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUGH", SMALL)
    monkeypatch.setattr(measuring.pool, "available", lambda: False)
    found = measuring.measure("generic", 3, thorough=False)
    assert Machine.parse(found.text) == found
    assert (found.threads, found.transform, found.write) == (3, None, None)
    assert found.flops("generic", "float64") > 0
    assert found.writing(1e6, 1e5) == 2 * found.reading(1e6, 1e5) > 0


def test_without_kernels_too_the_machine_is_measured_until_measurements_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUGH", dataclasses.replace(SMALL, patience=60.0))
    monkeypatch.setattr(measuring, "ATTEMPTS", 3)
    monkeypatch.setattr(measuring.pool, "available", lambda: False)
    monkeypatch.setattr(measuring.time, "process_time", lambda: 0.0)  # others have it all
    made = []
    falling = measuring.falling
    monkeypatch.setattr(measuring, "falling", lambda points: made.append(points) or falling(points))
    found = measuring.measure("generic", 2, thorough=False)
    assert (found.busy, len(made)) == (1.0, 3)
    for n, (_, rate) in enumerate(found.read.points):
        assert rate >= max(points[n][1] for points in made)


def _measured(monkeypatch: pytest.MonkeyPatch, *found: Machine) -> tuple[Machine, int]:
    """What comes of these measurements, one after the other, and how many were made."""
    left = iter(found)
    monkeypatch.setattr(measuring, "THOROUGH", SMALL)
    monkeypatch.setattr(measuring, "ATTEMPTS", len(found))
    monkeypatch.setattr(measuring._Session, "machine", lambda self, *_: next(left))
    merged = measuring.measure(CPU.current().instruction_set, 1, thorough=True)
    return merged, len(found) - len(list(left))


def _with_a_share(share: float, busy: float = 0.0) -> Machine:
    """A measurement that got so much of the processor."""
    peaks = {"avx2": {dtype: share * rate for dtype, rate in MACHINE.peaks["avx2"].items()}}
    slower = {name: Curve(tuple((n, share * r) for n, r in getattr(CURVED, name).points)) for name in CURVES}
    return dataclasses.replace(CURVED, peaks=peaks, busy=busy, transform=share * 1e9, call=1e-6 / share, **slower)


def test_the_machine_is_measured_until_two_measurements_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, half = _with_a_share(1.0), _with_a_share(0.5)
    assert _measured(monkeypatch, whole, _with_a_share(0.97), whole)[1] == 2
    found, made = _measured(monkeypatch, half, whole, half, whole, whole)
    assert (found, made) == (dataclasses.replace(whole, caches=found.caches), 4)
    assert found.busy == 0.0


def test_a_busy_machine_is_measured_again_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = _with_a_share(1.0, busy=0.4)
    found, made = _measured(monkeypatch, crowded, crowded, crowded)  # they agree, but others were at work
    assert (found.busy, made) == (0.4, 3)
    found, made = _measured(monkeypatch, crowded, crowded, _with_a_share(1.0))
    assert (found.busy, made) == (0.0, 3)
    found, made = _measured(
        monkeypatch, _with_a_share(1.0), _with_a_share(0.8), _with_a_share(0.6)
    )  # no two of them agree
    assert (found.busy, made) == (pytest.approx(0.2), 3)
    assert found.peaks == MACHINE.peaks


def test_of_each_quantity_the_best_measurement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(_with_a_share(1.0), read=Curve(((1, 9.0), (2, 5.0), (4, 1.0))), barrier=1e-6, wake=3e-4)
    two = dataclasses.replace(_with_a_share(0.95), read=Curve(((1, 8.0), (2, 7.0), (4, 3.0))), barrier=2e-6, wake=1e-4)
    found, _ = _measured(monkeypatch, one, two)
    assert found.read.points == ((1, 9.0), (2, 7.0), (4, 3.0))
    assert (found.transform, found.call) == (1e9, 1e-6)
    assert (found.barrier, found.wake) == (1e-6, 1e-4)


def _with_slow_barriers(monkeypatch: pytest.MonkeyPatch, slow: Callable[[int], bool]) -> tuple[Machine, int]:
    """A machine whose regions take 2 ms while a function of their number says so, and how often it was measured."""
    made, regions = [], 0
    measured = measuring._Session.machine

    def counted(session: Any, *args: Any) -> Machine:
        made.append(session)
        return measured(session, *args)

    def region(*args: Any) -> None:
        nonlocal regions
        regions += 1
        if slow(regions):
            time.sleep(2e-3)  # as when another process has the core of a thread

    monkeypatch.setattr(measuring, "ROUGH", dataclasses.replace(SMALL, patience=60.0))
    monkeypatch.setattr(measuring, "ATTEMPTS", 3)
    monkeypatch.setattr(measuring._Session, "machine", counted)
    monkeypatch.setattr(measuring.pool, "wake", region)
    return measuring.measure(CPU.current().instruction_set, 2, thorough=False), len(made)


def test_a_barrier_that_was_slow_for_a_while_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = _with_slow_barriers(monkeypatch, lambda n: n <= 2 * measuring.MEETINGS)
    assert found.barrier is not None
    assert found.barrier < 1e-3


def test_a_barrier_that_stays_slow_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    found, passes = _with_slow_barriers(monkeypatch, lambda n: True)
    assert found.busy > BUSY
    assert passes == 3


def test_waits_of_which_no_two_agree_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [dataclasses.replace(_with_a_share(1.0), barrier=1e-6 * 3**n, wake=1e-4) for n in range(1, 4)]
    found, made = _measured(monkeypatch, *waits)
    assert (found.barrier, found.busy, made) == (3e-6, pytest.approx(1 - 4 / 10), 3)
    found, made = _measured(monkeypatch, *waits, dataclasses.replace(waits[0], barrier=4e-6))
    assert (found.barrier, found.busy, made) == (3e-6, 0.0, 4)
    sleepy = [dataclasses.replace(_with_a_share(1.0), wake=wake) for wake in (1e-4, 4e-3)]
    assert _measured(monkeypatch, *sleepy)[0].busy == pytest.approx(1 - 1e-4 / 4e-3)


def test_a_wait_is_sampled_until_it_agrees_with_an_earlier_pass() -> None:
    left, earlier = iter([5.0, 9.0, 1.5, 1.0]), [1.0]
    assert passes.steady(lambda: next(left), earlier) == 1.5
    assert (earlier, next(left)) == ([1.0, 1.5], 1.0)
    slow: list[float] = []
    assert passes.steady(lambda: 5.0, slow) == 5.0  # of the first there is nothing to compare with
    slow[0] = 1.0
    assert passes.steady(lambda: 5.0, slow) == 5.0  # after a few it is given up
    assert slow == [1.0, 5.0]


def test_the_share_that_others_used_is_what_this_process_lacked() -> None:
    session = measuring._Session(CPU.current().instruction_set, 1, SMALL)
    session.wall, session.used = 10.0, 7.0
    assert session.busy() == pytest.approx(0.3)
    session.used = 10.1
    assert session.busy() == 0.0
    session.used = 5.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "processors", lambda: 0.5)  # a quota, which is all that this process can get
        assert session.busy() == 0.0
    session.used = 10.1
    session.peaks = {"float32": 102e9, "float64": 101e9}  # one of them had half of the processor
    assert session.busy() == pytest.approx(1 - 102 / 202)
    session.peaks = {"float32": 190e9, "float64": 100e9}
    assert session.busy() == 0.0


def test_threads_that_do_not_reach_what_each_does_alone_had_no_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a host has put both processors of its virtual machine onto one core: their clocks say nothing of it."""
    monkeypatch.setattr(measuring, "count_cores", lambda: 2)
    session = measuring._Session(CPU.current().instruction_set, 2, SMALL)
    session.wall, session.used = 1.0, 2.0
    session.alone, session.peaks = 102e9, {"float32": 102e9, "float64": 51e9}
    assert session.busy() == pytest.approx(0.5)
    session.peaks = {"float32": 160e9, "float64": 80e9}  # clocks are lower when all compute
    assert session.busy() == 0.0
    monkeypatch.setattr(measuring, "count_cores", lambda: 1)
    session.peaks = {"float32": 102e9, "float64": 51e9}  # hyper-threads of one core, as the system says
    assert session.busy() == 0.0


@pytest.mark.parametrize("threads", [1, 2])
def test_the_pace_is_about_that_of_the_peak(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUGH", SMALL)
    assert 0.2 < min(CPU.current(threads).pace() for _ in range(5)) < 5.0


def test_of_a_machine_whose_model_is_given_no_pace_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUGH", SMALL)
    instruction_set = CPU.current().instruction_set
    other = measuring.measure(instruction_set, 2, thorough=False)
    peaks = {instruction_set: {dtype: 1e3 * peak for dtype, peak in other.peaks[instruction_set].items()}}
    assert CPU(2, instruction_set, model=dataclasses.replace(other, peaks=peaks).text).pace() == 1.0
