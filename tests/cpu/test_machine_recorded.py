"""The machine on record: what is measured when, and what is kept."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from machines import CURVED, MACHINE, SMALL
from vectors import modelled

from autoconv import registry
from autoconv.algorithm import Params
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm.algorithm import Gemm
from autoconv.cpu.machine import measure as measuring
from autoconv.cpu.machine import passes, recorded
from autoconv.cpu.machine.cached import cached_for_model
from autoconv.cpu.machine.model import BUSY, Machine
from autoconv.errors import CacheWarning
from autoconv.layer import ConvLayer
from autoconv.paths import cache_folder
from autoconv.records.cache import TuningCache
from autoconv.records.store import TextStore

KEY = "cpu-of-a-test"


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


def test_candidates_are_those_of_the_model_in_force() -> None:
    layer, device = ConvLayer(N=8, C=512, H=28, W=28, K=256, R=1, S=1), CPU(2, "generic")
    (family,) = [a for a in registry.algorithms(device) if a.name == "gemm.packed"]
    grids = []
    for caches in ((32 << 10, 1 << 20, 32 << 20), (16 << 10, 128 << 10, 1 << 20)):
        recorded.put_in_force(device.key, dataclasses.replace(modelled("generic", 2), caches=caches))
        grids.append(list(family.candidates(layer, device)))
    assert grids[0] != grids[1]


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
def test_memory_and_code_of_a_kernel_are_of_one_model() -> None:
    """Another thread's survey may put another model in force between the two."""
    device, layer = CPU(2, "generic"), ConvLayer(N=1, C=4, H=512, W=2048, K=32, R=3, S=3, padding=1)
    models = [dataclasses.replace(modelled("generic", 2), caches=(32 << 10, l2, 32 << 20)) for l2 in (1 << 20, 4 << 20)]

    class Surveyed(Gemm):
        def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
            recorded.put_in_force(device.key, models[1])
            return super().packed_bytes(layer, device, params)

    recorded.put_in_force(device.key, models[0])
    params = next(candidate.params for candidate in Gemm().all(layer, device) if candidate.params["NV"] == 1)
    before = Gemm().workspace_bytes(layer, device, params)
    assert Surveyed().build(layer, device, params).workspace_bytes == Gemm().workspace_bytes(layer, device, params)
    assert Gemm().workspace_bytes(layer, device, params) != before


def test_what_is_cached_for_a_model_is_computed_anew_for_another_alone() -> None:
    computed: list[int] = []
    cached = cached_for_model(2)(computed.append)
    first, second = (
        modelled("generic", 2),
        dataclasses.replace(modelled("generic", 2), caches=(1 << 12, 1 << 13, 1 << 14)),
    )
    for model, times in ((first, 1), (first, 1), (second, 2), (second, 2), (first, 3)):
        recorded.put_in_force(KEY, model)
        cached(7)
        assert computed == [7] * times


def test_what_was_measured_while_busy_is_measured_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _scripted(monkeypatch, busy=2 * BUSY)
    device = KEY, "avx2", 2
    for name in ("machine_in_force", "machine_in_force", "survey", "machine_in_force", "survey"):
        _as_a_new_process(name, *device)
    assert asked == [False, False, True, True]  # a thorough one stands in until there is a better one


@pytest.mark.parametrize("name", ["machine_in_force", "survey"])
def test_what_was_measured_while_busy_stays_until_the_machine_is_quiet(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, found = (KEY, "avx2", 2), []
    for call, busy in ((2e-6, 3 * BUSY), (3e-6, 2 * BUSY), (4e-6, 0.0), (5e-6, 0.0)):
        _scripted(monkeypatch, busy=busy, call=call)
        found.append(_as_a_new_process(name, *device).call)
    assert found == [2e-6, 2e-6, 4e-6, 4e-6]


def test_what_a_record_of_a_busy_machine_lacks_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = KEY, "avx2", 2
    _scripted(monkeypatch, busy=2 * BUSY, peaks={"avx2": MACHINE.peaks["avx2"]})
    _as_a_new_process("survey", *device)
    _scripted(monkeypatch, busy=2 * BUSY)
    assert "int8" in _as_a_new_process("survey", *device).peaks["avx2"]


def test_a_first_look_does_not_take_the_place_of_a_survey_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    _scripted(monkeypatch)
    recorded.survey(KEY, "avx2", 2)
    recorded._measured(KEY, "avx2", 2, None, thorough=False)
    assert _as_a_new_process("machine_in_force", KEY, "avx2", 2).thorough


def test_a_survey_measures_what_a_record_lacks_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = CPU.current().instruction_set
    device, old = (KEY, isa, 2, "emulated"), {"float32": 2e11, "float64": 1e11}
    asked = _scripted(monkeypatch, peaks={isa: old}, jumps=None, handed=None)
    monkeypatch.setattr(measuring, "THOROUGH", SMALL)
    monkeypatch.setattr(passes, "disturbance", lambda found: 0.0)
    recorded._measured(*device, thorough=True)
    found = _as_a_new_process("survey", *device)
    assert found.peaks[isa] == old | {"int8": found.flops(isa, "int8")}
    assert found.peaks["emulated"].keys() == {"bfloat16", "int8"}
    assert None not in (found.jumps, found.handed)
    added = {"peaks": {}, "jumps": found.jumps, "handed": found.handed}
    assert dataclasses.replace(found, peaks={}) == dataclasses.replace(CURVED, **added)
    monkeypatch.setattr(measuring, "completed", None)  # nothing is lacking now
    assert _as_a_new_process("survey", *device) == _as_a_new_process("machine_in_force", *device) == found
    assert asked == [True]


def test_what_a_record_lacks_is_measured_until_measurements_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = CPU.current().instruction_set
    old = dataclasses.replace(CURVED, peaks={isa: MACHINE.peaks["avx2"]})
    rates = itertools.chain([1e11, 2e11], itertools.repeat(3e11))
    monkeypatch.setattr(measuring, "PEAKS_ONLY", dataclasses.replace(SMALL, patience=60.0))
    monkeypatch.setattr(measuring._Session, "words", lambda session: next(rates))
    monkeypatch.setattr(measuring._Session, "busy", lambda session: 0.0)
    found = measuring.completed(old, isa, 2)
    assert (found.flops(isa, "int8"), found.busy) == (3e11, 0.0)
    assert dataclasses.replace(found, peaks=old.peaks) == old


def test_what_a_record_lacks_and_others_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = CPU.current().instruction_set
    asked = _scripted(monkeypatch, peaks={isa: MACHINE.peaks["avx2"]})
    monkeypatch.setattr(measuring, "PEAKS_ONLY", SMALL)
    monkeypatch.setattr(measuring._Session, "busy", lambda session: 2 * BUSY)
    recorded._measured(KEY, isa, 2, None, thorough=True)
    assert _as_a_new_process("survey", KEY, isa, 2).busy >= 2 * BUSY
    assert asked == [True]
    _as_a_new_process("survey", KEY, isa, 2)
    assert asked == [True, True]


@pytest.mark.parametrize("text", ["nonsense", MACHINE.text.replace("200000000000.0", "-1")])
def test_a_damaged_record_is_reported_and_replaced(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _scripted(monkeypatch)
    store = TextStore(cache_folder())
    store.update(recorded._name(KEY), lambda old: text)
    store.close()
    with pytest.warns(CacheWarning, match="the record of this machine is ignored: machine"):
        recorded.machine_in_force(KEY, "avx2", 2)
    _as_a_new_process("machine_in_force", KEY, "avx2", 2)
    assert asked == [False]


def test_what_other_code_has_measured_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _scripted(monkeypatch)
    with monkeypatch.context() as other:
        other.setattr(recorded.code_hash, "version", lambda module: "000000000000")
        recorded.survey(KEY, "avx2", 2)
    assert recorded.recorded(KEY, "avx2", 2) is None
    _as_a_new_process("survey", KEY, "avx2", 2)
    _as_a_new_process("survey", KEY, "avx2", 2)
    assert asked == [True, True]


def test_a_record_of_other_threads_or_vectors_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _scripted(monkeypatch)
    recorded.survey(KEY, "avx2", 2)
    assert recorded.recorded(KEY, "avx2", 2) is not None
    assert recorded.recorded(KEY, "avx2", 3) is None
    assert recorded.recorded(KEY, "avx512", 2) is None
