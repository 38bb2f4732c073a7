"""The machine model: probes that do what they are credited with, numbers that are checked, and what is on record."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vectors

from autoconv.cli.info import _machine_lines
from autoconv.cpu import device as cpu_device
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, VECTOR_BYTES, Module
from autoconv.cpu.codegen.words import CHANNELS, vector_products
from autoconv.cpu.device import CPU
from autoconv.cpu.machine import measure as measuring
from autoconv.cpu.machine import passes, probes, recorded
from autoconv.cpu.machine.curve import Curve, levels
from autoconv.cpu.machine.model import BUSY, CURVES, LINE, Machine
from autoconv.cpu.pool import Entry
from autoconv.errors import CacheWarning, PlanError, RecordError
from autoconv.paths import cache_folder
from autoconv.records.cache import TuningCache
from autoconv.records.store import TextStore
from autoconv.tuning.racing import HYBRID_CANDIDATES

KEY = "cpu-of-a-test"
SMALL = dataclasses.replace(measuring.ROUGH, largest=1 << 20, farthest=1 << 18, seconds=1e-5)
MACHINE = Machine(
    threads=2,
    when="2026-11-22T12:00:00+00:00",
    thorough=True,
    busy=0.0,
    peaks={"avx2": {"float32": 2e11, "float64": 1e11}},
    read_one=Curve(((1 << 14, 2e11), (1 << 20, 8e10), (1 << 26, 2e10))),
    read=Curve(((1 << 15, 4e11), (1 << 21, 1.6e11), (1 << 26, 4e10))),
    write=Curve(((1 << 15, 2e11), (1 << 26, 2e10))),
    stream=None,
    chase=None,
    jumps=None,
    transform=1e9,
    call=1e-6,
    barrier=5e-7,
    wake=1e-4,
    caches=(1 << 15, 1 << 19, 1 << 24),
)
CURVED = dataclasses.replace(
    MACHINE,
    stream=MACHINE.write,
    chase=Curve(((1 << 14, 6e8), (1 << 20, 7e7), (1 << 26, 7e6))),
    jumps=Curve(((1 << 15, 1e10), (1 << 21, 1.4e9), (1 << 27, 1.4e8))),
)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is a process that has not asked for its machine yet."""
    monkeypatch.setattr(recorded, "_in_force", {})


@pytest.mark.parametrize("instruction_set", vectors.INSTRUCTION_SETS)
@pytest.mark.parametrize(("dtype", "precision"), [("float32", 1e-2), ("float64", 1e-9)])
def test_the_peak_probe_does_the_multiply_adds_it_is_credited_with(
    instruction_set: str, dtype: str, precision: float
) -> None:
    lanes = Module(instruction_set).lanes(DTYPES[dtype])
    out = np.zeros((2, lanes), dtype)
    run = Entry(compiler.build(probes.emit_peak, instruction_set, dtype), probes.PEAK, 1)
    run(np.full(lanes, probes.FACTOR, dtype), np.array([1, 1, 1]), out)
    first = sum(probes.FACTOR * (n + 1) for n in range(probes.CHAINS))
    np.testing.assert_allclose(out[0], first * (1 + probes.FACTOR) ** probes.ROUNDS, rtol=precision)
    assert not out[1].any()


@pytest.mark.parametrize("instruction_set", vectors.INSTRUCTION_SETS)
def test_the_probe_of_words_does_the_products_it_is_credited_with(instruction_set: str) -> None:
    lanes = VECTOR_BYTES[instruction_set] // 4
    factor = np.arange(1, lanes + 1, dtype=np.int32) * 0x01030507
    out = np.zeros((2, lanes), np.int32)
    product = vector_products(instruction_set)[0]
    run = Entry(compiler.build(probes.emit_words, instruction_set, product), probes.WORDS, 1)
    run(factor, np.array([1, 1, 1]), out)
    narrow = np.int16 if CHANNELS[product] == 2 else np.int8
    pixels = np.int16 if CHANNELS[product] == 2 else np.uint8  # without a sign
    sums = factor + np.arange(probes.CHAINS, dtype=np.int32)[:, None]
    filters = factor.view(narrow).astype(np.int32).reshape(lanes, -1)
    for _ in range(probes.ROUNDS):
        numbers = sums.view(pixels).astype(np.int32).reshape(probes.CHAINS, lanes, -1)
        sums = sums + np.einsum("nlc,lc->nl", numbers, filters)
    np.testing.assert_array_equal(out[0], np.bitwise_xor.reduce(sums))
    assert not out[1].any()


@pytest.mark.parametrize("instruction_set", vectors.INSTRUCTION_SETS)
class TestProbesOfMemory:
    """What each probe touches, element by element."""

    def run(self, instruction_set: str, probe: str, a: Any, out: Any, numbers: tuple[int, int, int]) -> None:
        Entry(compiler.build(probes.emit, instruction_set), probe, 1)(a, np.array(numbers), out)

    def test_reading_sees_every_element_of_the_range_and_none_beyond(self, instruction_set: str) -> None:
        lanes = VECTOR_BYTES[instruction_set] // 4
        number = 3 * probes.STREAMS * lanes
        for place in range(number + 1):
            a = np.zeros(number + lanes, np.int32)
            a[place] = 1 << place % 31
            out = np.zeros(lanes, np.int32)
            self.run(instruction_set, probes.READ, a, out, (1, number, 2))
            assert out.sum() == (a[place] if place < number else 0)

    @pytest.mark.parametrize("probe", [probes.WRITE, probes.STREAM])
    def test_writing_fills_the_range_and_nothing_beyond(self, instruction_set: str, probe: str) -> None:
        number = 2 * probes.STREAMS * VECTOR_BYTES[instruction_set] // 4
        out = CPU.current().empty((number + 16,), "float32")
        out[...] = 1.0
        self.run(instruction_set, probe, out, out, (1, number, 1))
        assert not out[:number].any()
        assert out[number:].all()

    def test_a_chain_is_followed_from_where_the_last_run_ended(self, instruction_set: str) -> None:
        out = np.zeros(1, np.int64)
        chain = np.array([3, 0, 1, 2], np.int64)
        for expected in (2, 0, 2):
            self.run(instruction_set, probes.CHASE, chain, out, (1, 1, 2))
            assert out[0] == expected

    def test_jumps_go_to_any_line_of_a_thread_s_range_and_to_none_beyond(self, instruction_set: str) -> None:
        number, rounds = 128 * probes.LINE, 1 << 12
        a = np.zeros(2 * number, np.int64)
        a[number:] = 1 << 62
        places = np.arange(number // probes.LINE)
        a[places * probes.LINE] = 1 << places % 61  # in every line its first number
        states = np.random.default_rng(0).integers(1 << 62, size=probes.JUMPS).astype(np.uint64)
        out = np.zeros(2 * probes.JUMPS, np.int64)
        out[: probes.JUMPS] = states
        drawn = set()
        for _ in range(rounds // probes.JUMPS):
            states = states * np.uint64(probes.FACTOR_64) + np.uint64(probes.TERM_64)
            drawn |= set(((states >> np.uint64(32)) % np.uint64(number) // np.uint64(probes.LINE)).tolist())
        self.run(instruction_set, probes.JUMP, a, out, (1, number, rounds))
        np.testing.assert_array_equal(out[: probes.JUMPS].view(np.uint64), states)  # where the next run goes on
        assert out[probes.JUMPS] == np.bitwise_or.reduce(a[:number])
        assert drawn == set(places)

    def test_a_transform_combines_every_point_with_every_other(self, instruction_set: str) -> None:
        lanes, n = VECTOR_BYTES[instruction_set] // 4, probes.STREAMS
        a = np.random.default_rng(0).standard_normal((3, n, lanes)).astype(np.float32)
        out = np.zeros((n, 3, lanes), np.float32)
        self.run(instruction_set, probes.TRANSFORM, a, out, (1, a.size, 1))
        matrix = np.eye(n)
        for distance in (1, 2, 4):
            weight = 0.25 * distance
            step = np.zeros((n, n))
            for low in (i for i in range(n) if not i & distance):
                high = low | distance
                step[low, [low, high]] = 1, weight
                step[high, [low, high]] = weight, -1
            matrix = step @ matrix
        assert matrix.all()
        np.testing.assert_allclose(out, np.einsum("pq,tql->ptl", matrix, a), rtol=1e-5, atol=1e-5)


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


FIRST = """if True:
    import collections
    import numpy as np
    import autoconv
    from autoconv.cpu.codegen import compiler
    emitters, compiled = collections.Counter(), compiler._compiled
    def count(module):
        emitters.update({"runs" if "run" in (names := [f.name for f in module.functions]) else names[-1]})
        return compiled(module)
    compiler._compiled = count
    autoconv.conv2d(np.ones((1, 16, 8, 8), np.float32), np.ones((8, 16, 3, 3), np.float32), padding=1)
    print(dict(emitters))
"""


def test_a_first_call_compiles_few_kernels(tmp_path: Path) -> None:
    """Most of its time goes by while they are compiled: of the pool, of the machine's first look, and of the layer."""
    environment = os.environ | {"AUTOCONV_CACHE_DIR": str(tmp_path), "AUTOCONV_KERNEL_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, check=True)
    emitters = ast.literal_eval(done.stdout)
    kernels = emitters.pop("runs")  # which pool.wake is one of, and the reference in float64
    assert emitters == {"stop": 1, "nothing": 1, "peak": 2, "words": 1}
    assert kernels <= 2 + HYBRID_CANDIDATES + 2  # some of a smaller error


def test_what_empties_the_caches_is_filled_aside_and_once() -> None:
    filled = cpu_device._sweeper(1 << 20)
    assert filled() is filled()
    assert cpu_device._sweeper(1 << 20)() is filled()
    assert filled().nbytes == 1 << 20
    assert filled().min() == filled().max() == 1  # pages that were never written to would all be one page


def test_jumps_are_as_slow_as_they_were_measured() -> None:
    nbytes = LINE * 1000
    waited = CURVED.jumping(nbytes, 1 << 25, 1 << 26)
    assert waited == pytest.approx(1000 / 1.4e8)
    assert waited > CURVED.reading(nbytes, 1 << 25)
    assert CURVED.jumping(nbytes, 1 << 13, 1 << 14) == CURVED.reading(nbytes, 1 << 13)  # in the first cache it is short
    assert CURVED.ahead == pytest.approx(10)  # two threads with so many lines of 7e6 a second each
    assert MACHINE.jumping(nbytes, 1 << 25, 1 << 26) == MACHINE.reading(nbytes, 1 << 25)  # where it was not measured
    assert MACHINE.ahead is None


def test_info_tells_how_many_loads_there_are_at_a_time() -> None:
    assert "a load from 64.00 MiB takes 0.143 us; of those that wait for no other, 10 at a time" in _machine_lines(
        CURVED
    )
    assert not any("at a time" in line for line in _machine_lines(MACHINE))


def test_a_first_look_tells_caches_apart_as_finely_as_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A working set twice as large may be twice as slow, and half of the cache seem to be all."""
    looked: list[int] = []
    monkeypatch.setattr(measuring._Session, "chase", lambda self, sizes: looked.extend(sizes) or CURVED.chase)
    measuring._Session(CPU.current().instruction_set, 1, SMALL).machine(thorough=False)
    assert looked[-1] == SMALL.farthest
    assert all(b < 1.6 * a for a, b in itertools.pairwise(looked))


def test_products_of_words_are_as_fast_as_multiply_adds_where_bytes_were_not_measured() -> None:
    assert MACHINE.word_products("avx2", 4, 8) == MACHINE.multiply_adds("avx2", "float32", 8)
    bytes_too = dataclasses.replace(MACHINE, peaks={"avx2": {"float32": 2e11, "int8": 6.4e11}})
    assert bytes_too.word_products("avx2", 4, 8) == 6.4e11 / (2 * 4 * 8 * 2)
    assert bytes_too.flops("avx2", "uint8") == bytes_too.flops("avx2", "int8") == 6.4e11
    assert MACHINE.flops("avx2", "uint8") == MACHINE.flops("avx2", "float32")


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
    found, _ = _with_slow_barriers(monkeypatch, lambda n: n <= 2 * measuring.REGIONS)
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


def test_levels_end_where_loads_and_reading_slow_down() -> None:
    sizes = [1 << n for n in range(13, 27)]

    def curve(*steps: tuple[int, float]) -> Curve:
        return Curve(tuple((n, next(rate for end, rate in steps if n <= end)) for n in sizes))

    latency = curve((1 << 15, 1 / 5), (1 << 20, 1 / 14), (1 << 21, 1 / 60), (1 << 30, 1 / 250))
    reading = curve((1 << 15, 200), (1 << 20, 100), (1 << 23, 77), (1 << 30, 20))
    assert levels(reading, latency) == (1 << 15, 1 << 20, 1 << 23)
    flat = curve((1 << 30, 1.0))
    assert levels(flat, flat) == (1 << 26, 1 << 26, 1 << 26)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", True),
        ("when", 5),
        ("thorough", 1),
        ("busy", -0.1),
        ("busy", float("nan")),
        ("peaks", {}),
        ("peaks", {"avx2": {"float64": 1e11}}),
        ("peaks", {"avx2": {"float32": 0}}),
        ("read", None),
        ("read", []),
        ("read", [[2, 1.0], [1, 1.0]]),
        ("read_one", [[1, "fast"]]),
        ("write", [[1, float("inf")]]),
        ("transform", 0),
        ("call", "1 us"),
        ("caches", [1, 2]),
        ("caches", [3, 2, 1]),
    ],
)
def test_a_number_that_is_none_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RecordError, match=rf"^machine\.{name}=.*: expected "):
        Machine.from_json(MACHINE.to_json() | {name: value})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({**MACHINE.to_json(), "extra": 1}), "[" * 100_000])
def test_a_text_that_is_no_machine_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match=r"^machine="):
        Machine.parse(text)


def test_what_others_noted_of_a_machine_may_have_gaps() -> None:
    gaps = dict.fromkeys(("write", "stream", "chase", "jumps", "transform", "call", "barrier", "wake"))
    found = Machine.from_json(MACHINE.to_json() | gaps)
    assert found.writing(1e6, 1 << 14, past=True) == found.reading(1e6, 1 << 14) == 1e6 / 4e11


def test_a_machine_on_record_may_lack_what_is_measured_since() -> None:
    old = {name: value for name, value in CURVED.to_json().items() if name != "jumps"}
    assert Machine.from_json(old) == dataclasses.replace(CURVED, jumps=None)
    with pytest.raises(RecordError, match=r"^machine="):
        Machine.from_json({name: value for name, value in old.items() if name != "chase"})


def _scripted(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[bool]:
    """Measurements that take no time; the list tells which were thorough."""
    asked: list[bool] = []
    peaks = {"avx2": MACHINE.peaks["avx2"] | {"int8": 3e11}}

    def measure(instruction_set: str, threads: int, matrix_unit: str | None, *, thorough: bool) -> Machine:
        asked.append(thorough)
        return dataclasses.replace(CURVED, **{"threads": threads, "thorough": thorough, "peaks": peaks} | changes)

    monkeypatch.setattr(measuring, "measure", measure)
    return asked


def _as_a_new_process(name: str, *args: Any) -> Machine:
    recorded._in_force.clear()
    return getattr(recorded, name)(*args)  # type: ignore[no-any-return]


def test_the_first_look_is_kept_until_a_survey_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _scripted(monkeypatch)
    device = KEY, "avx2", 2
    assert not _as_a_new_process("machine_in_force", *device).thorough
    assert not _as_a_new_process("machine_in_force", *device).thorough
    assert asked == [False]
    assert recorded.survey(*device).thorough
    assert recorded.machine_in_force(*device).thorough
    assert _as_a_new_process("machine_in_force", *device).thorough
    assert _as_a_new_process("survey", *device).thorough
    assert asked == [False, True]
    assert list(TuningCache(system=None).records()) == []


def test_what_was_measured_while_busy_is_measured_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _scripted(monkeypatch, busy=2 * BUSY)
    device = KEY, "avx2", 2
    for name in ("machine_in_force", "machine_in_force", "survey", "machine_in_force", "survey"):
        _as_a_new_process(name, *device)
    assert asked == [False, False, True, True]  # a thorough one stands in until there is a better one


def test_a_first_look_does_not_take_the_place_of_a_survey_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    _scripted(monkeypatch)
    recorded.survey(KEY, "avx2", 2)
    recorded._measured(KEY, "avx2", 2, None, thorough=False)
    assert _as_a_new_process("machine_in_force", KEY, "avx2", 2).thorough


def test_a_survey_measures_what_a_record_lacks_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = CPU.current().instruction_set
    device, old = (KEY, isa, 2, "emulated"), {"float32": 2e11, "float64": 1e11}
    asked = _scripted(monkeypatch, peaks={isa: old}, jumps=None)
    monkeypatch.setattr(measuring, "THOROUGH", SMALL)
    recorded._measured(*device, thorough=True)
    found = _as_a_new_process("survey", *device)
    assert found.peaks[isa] == old | {"int8": found.flops(isa, "int8")}
    assert found.peaks["emulated"].keys() == {"bfloat16", "int8"}
    assert found.jumps is not None
    assert dataclasses.replace(found, peaks={}) == dataclasses.replace(CURVED, peaks={}, jumps=found.jumps)
    monkeypatch.setattr(measuring, "completed", None)  # nothing is lacking now
    assert _as_a_new_process("survey", *device) == _as_a_new_process("machine_in_force", *device) == found
    assert asked == [True]


@pytest.mark.parametrize("text", ["nonsense", MACHINE.text.replace("200000000000.0", "-1")])
def test_a_damaged_record_is_reported_and_replaced(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _scripted(monkeypatch)
    store = TextStore(cache_folder())
    store.update(f"machine|{KEY}", lambda old: text)
    store.close()
    with pytest.warns(CacheWarning, match="the record of this machine is ignored: machine"):
        recorded.machine_in_force(KEY, "avx2", 2)
    _as_a_new_process("machine_in_force", KEY, "avx2", 2)
    assert asked == [False]


def test_a_record_of_other_threads_or_vectors_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _scripted(monkeypatch)
    recorded.survey(KEY, "avx2", 2)
    assert recorded.recorded(KEY, "avx2", 2) is not None
    assert recorded.recorded(KEY, "avx2", 3) is None
    assert recorded.recorded(KEY, "avx512", 2) is None


def test_a_processor_takes_the_model_of_another() -> None:
    device = CPU(2, "avx2", model=MACHINE.text)
    assert device.machine == MACHINE
    assert device.peak_flops("float32") == device.measured_peak("bfloat16") == 2e11
    assert device.bandwidth() == 4e10
    device.survey()  # nothing to measure: it is given
    assert CPU(**json.loads(json.dumps(dataclasses.asdict(device)))) == device  # as it goes to a worker
    with pytest.raises(PlanError, match="model: expected one measured with 3 threads, got one with 2"):
        CPU(3, "avx2", model=MACHINE.text)
    with pytest.raises(PlanError, match="model: expected one that knows generic, got avx2"):
        CPU(2, "generic", model=MACHINE.text)
    with pytest.raises(RecordError, match="machine="):
        CPU(2, "avx2", model="no model")
