"""Facts of the same hardware with fewer features count, and what they cover does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from faulty import FaultyCPU

from autoconv import Candidate, ConvLayer, TuningCache, forget_plans, plan
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.records.schema import Facts, Race
from autoconv.registry import algorithms
from autoconv.tuning.staleness import note

LAYER = ConvLayer(N=1, C=3, H=6, W=6, K=4, R=3, S=3)


def test_facts_without_the_matrix_unit_count_with_it(tmp_path: Path) -> None:
    device = FaultyCPU.having()
    whole = replace(device, matrix_unit="emulated")
    assert whole.lesser_keys == (device.key, *device.lesser_keys)
    cache = TuningCache(tmp_path, system=None)
    direct = NumpyDirect()
    found = {Candidate("numpy.direct"): Facts(direct.version, time=0.125, samples=9)}
    race = Race(
        "0" * 32, "2026-01-01T00:00:00+00:00", device.versions, False, None, found, note((direct,), frozenset())
    )
    cache.add(LAYER.key(), device.key, race)
    for mode in ("cached", "profile"):
        forget_plans()
        made = plan(LAYER, mode, device=whole, cache=cache, vendors=False)
        assert (str(made.candidate), made.timed, made.facts["numpy.direct"].time) == ("numpy.direct", 0, 0.125)
    own = cache.load(LAYER.key(), whole.key)
    assert own is not None
    assert own.races[-1].covers == race.covers  # noted anew, once the candidates were listed with the unit
    assert cache.load(LAYER.key(), device.key).races == (race,)  # type: ignore[union-attr]
    cache.close()


def test_what_a_record_without_the_unit_covers_is_not_believed(tmp_path: Path) -> None:
    """There its list was complete; with the unit there may be more candidates."""
    device = FaultyCPU.having("none")
    cache = TuningCache(tmp_path, system=None)
    found = {Candidate("numpy.direct"): Facts(NumpyDirect().version, time=0.125, samples=9)}
    covers = note(algorithms(device), frozenset())
    race = Race("0" * 32, "2026-01-01T00:00:00+00:00", device.versions, False, None, found, covers)
    cache.add(LAYER.key(), device.key, race)
    timed = [plan(LAYER, device=d, cache=cache).timed for d in (device, replace(device, matrix_unit="emulated"))]
    assert timed == [0, 2]  # the newcomer, and who is to be beaten
    cache.close()
