"""The tuning cache: what is added is there for this process and the next, and what is no record is a miss."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
from races import DEVICE, LAYER, OTHER, race

from autoconv.errors import CacheWarning, RecordError
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Record


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TuningCache]:
    found = TuningCache(tmp_path / "cache", system=None)
    yield found
    found.close()


def reopened(cache: TuningCache) -> TuningCache:
    cache.close()
    return TuningCache(cache.directory, cache.system)


def test_what_was_added_is_loaded_here_and_in_the_next_process(cache: TuningCache) -> None:
    assert cache.load(LAYER, DEVICE) is None
    first, second = race(a=1.0, b=2.0), race(a=2.0)
    assert cache.add(LAYER, DEVICE, first) == Record(LAYER, DEVICE, (first,))
    both = cache.add(LAYER, DEVICE, second)
    assert both == Record(LAYER, DEVICE, (first, second))
    for again in (cache, reopened(cache)):
        assert again.load(LAYER, DEVICE) == both
        assert again.load(OTHER, DEVICE) is None
        assert again.load(LAYER, "another device") is None
        assert list(again.records()) == [both]
    assert cache.persistent


@pytest.mark.parametrize(
    ("layer", "device", "name", "time"),
    [
        ("fwd", DEVICE, "a", 1.0),
        (LAYER, "", "a", 1.0),
        (LAYER, DEVICE, "not a name", 1.0),
        (LAYER, DEVICE, "a", float("nan")),
        (LAYER, DEVICE, "a", -1.0),
    ],
)
def test_what_could_not_be_read_back_is_not_added(
    cache: TuningCache, layer: str, device: str, name: str, time: float
) -> None:
    with pytest.raises(RecordError):
        cache.add(layer, device, race(**{name: time}))
    assert list(cache.records()) == []


GOOD = json.dumps(Record(LAYER, DEVICE, (race(a=1.0),)).to_json())


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD[: len(GOOD) // 2],
        "[" * 100_000,
        GOOD.replace('"time": 1.0', '"time": NaN'),
        GOOD.replace('"time": 1.0', '"time": ' + "9" * 5000),
        GOOD.replace('"time": 1.0', '"time": 1.0, "of the future": 1'),
        GOOD.replace(LAYER, OTHER),
        GOOD.replace(DEVICE, "another"),
    ],
    ids=["empty", "truncated", "deep", "NaN", "digits", "future", "layer", "device"],
)
def test_an_invalid_record_is_a_miss_reported_once_and_replaced(cache: TuningCache, text: str) -> None:
    cache.store.update(f"1|{LAYER}|{DEVICE}", lambda _: text)
    with pytest.warns(CacheWarning, match="is ignored"):
        assert cache.load(LAYER, DEVICE) is None
    assert cache.load(LAYER, DEVICE) is None
    assert list(cache.records()) == []
    added = race(a=2.0)
    cache.add(LAYER, DEVICE, added)
    assert reopened(cache).load(LAYER, DEVICE) == Record(LAYER, DEVICE, (added,))


def test_records_of_another_schema_are_left_alone(cache: TuningCache) -> None:
    cache.store.update(f"2|{LAYER}|{DEVICE}", lambda _: "of the future")
    assert cache.load(LAYER, DEVICE) is None
    assert list(cache.records()) == []


def add_races(directory: Path, letter: str, times: int) -> None:
    cache = TuningCache(directory, system=None)
    for i in range(times):
        cache.add(LAYER, DEVICE, race(**{f"{letter}{i}": 1.0}))


def test_two_processes_add_to_one_record(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=add_races, args=(tmp_path, letter, 4)) for letter in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    found = TuningCache(tmp_path, system=None).load(LAYER, DEVICE)
    assert found is not None
    assert {str(c) for r in found.races for c in r.facts} == {f"{letter}{i}" for letter in "ab" for i in range(4)}
