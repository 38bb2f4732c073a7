"""The machine model: what is computed from its numbers, and which numbers are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from machines import CURVED, MACHINE

from autoconv.cli.info import _machine_lines
from autoconv.cpu.codegen import ir
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.curve import Curve, levels
from autoconv.cpu.machine.model import LINE, Machine
from autoconv.errors import PlanError, RecordError


def test_a_line_is_as_long_as_in_kernels() -> None:
    assert ir.LINE == LINE


def test_jumps_are_as_slow_as_they_were_measured() -> None:
    nbytes = LINE * 1000
    waited = CURVED.jumping(nbytes, 1 << 25, 1 << 26)
    assert waited == pytest.approx(1000 / 1.4e8)
    assert waited > CURVED.reading(nbytes, 1 << 25)
    assert CURVED.jumping(nbytes, 1 << 13, 1 << 14) == CURVED.reading(nbytes, 1 << 13)  # in the first cache it is short
    assert CURVED.ahead == pytest.approx(10)  # two threads with so many lines of 7e6 a second each
    assert MACHINE.jumping(nbytes, 1 << 25, 1 << 26) == MACHINE.reading(nbytes, 1 << 25)  # where it was not measured
    assert MACHINE.ahead is None


def test_what_another_thread_has_written_takes_longer_to_get() -> None:
    part = 1 << 14
    alone = CURVED.writing(1e6, part) + CURVED.reading(1e6, part)
    assert CURVED.handing(1e6, 2 * part) == pytest.approx(1e6 / 1e10 - alone)
    assert CURVED.handing(1e6, 1 << 27) == 0  # memory is as slow for whoever wrote it
    assert MACHINE.handing(1e6, 2 * part) == 0  # where it was not measured


def test_info_tells_how_many_loads_there_are_at_a_time() -> None:
    assert "a load from 64.00 MiB takes 0.143 us; of those that wait for no other, 10 at a time" in _machine_lines(
        CURVED, 1 << 24
    )
    assert not any("at a time" in line for line in _machine_lines(MACHINE, 1 << 24))


def test_info_tells_what_it_costs_to_hand_on_what_was_written() -> None:
    told = "2 threads write 512.0 KiB and read them again at 62 GB/s, and at 18 where another has written them"
    assert told in _machine_lines(CURVED, 1 << 24)
    assert not any("another has written" in line for line in _machine_lines(MACHINE, 1 << 24))


def test_info_tells_the_peaks_of_bytes_and_of_tiles() -> None:
    peaks = {"avx512": {"float32": 3e11, "int8": 1.2e12}, "amx": {"bfloat16": 4e12, "int8": 8e12}}
    lines = _machine_lines(dataclasses.replace(MACHINE, peaks=peaks), 1 << 24)
    assert lines[0] == "peak of avx512: 1200 GOP/s in int8"
    assert lines[1] == "peak of amx: 4000 GFLOP/s in bfloat16, 8000 GOP/s in int8"
    without = dataclasses.replace(MACHINE, peaks={"avx2": {}})
    assert not any(line.startswith("peak") for line in _machine_lines(without, 1 << 24))


def test_info_tells_where_memory_may_have_been_a_cache() -> None:
    warning = "the largest working set was of 64.00 MiB, much of which the last cache, of 48.00 MiB, may hold: "
    assert any(line.startswith(warning) for line in _machine_lines(CURVED, 48 << 20))
    assert not any("may hold" in line for line in _machine_lines(CURVED, 32 << 20))


def test_products_of_words_are_as_fast_as_multiply_adds_where_bytes_were_not_measured() -> None:
    assert MACHINE.word_products("avx2", 4, 8) == MACHINE.multiply_adds("avx2", "float32", 8)
    bytes_too = dataclasses.replace(MACHINE, peaks={"avx2": {"float32": 2e11, "int8": 6.4e11}})
    assert bytes_too.word_products("avx2", 4, 8) == 6.4e11 / (2 * 4 * 8 * 2)
    assert bytes_too.flops("avx2", "uint8") == bytes_too.flops("avx2", "int8") == 6.4e11
    assert MACHINE.flops("avx2", "uint8") == MACHINE.flops("avx2", "float32")


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
        ("caches", [10**400] * 3),
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
    gaps = dict.fromkeys(("write", "stream", "chase", "jumps", "handed", "transform", "call", "barrier", "wake"))
    found = Machine.from_json(MACHINE.to_json() | gaps)
    assert found.writing(1e6, 1 << 14, past=True) == found.reading(1e6, 1 << 14) == 1e6 / 4e11


def test_a_machine_on_record_may_lack_what_is_measured_since() -> None:
    old = {name: value for name, value in CURVED.to_json().items() if name not in ("jumps", "handed")}
    assert Machine.from_json(old) == dataclasses.replace(CURVED, jumps=None, handed=None)
    with pytest.raises(RecordError, match=r"^machine="):
        Machine.from_json({name: value for name, value in old.items() if name != "chase"})


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
