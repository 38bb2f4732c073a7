"""Records as files: what is exported and imported, and what is refused."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from races import DEVICE, LAYER, OTHER, race

from autoconv import registry
from autoconv.bench.gpu.cases import NOMINAL
from autoconv.cpu.device import CPU
from autoconv.errors import RecordError
from autoconv.paths import shipped, written_whole
from autoconv.records.cache import ImportReport, TuningCache
from autoconv.records.files import LARGEST_FILE, file_name
from autoconv.records.schema import MAX_RACES, Race, Record


def test_an_export_is_readable_sorted_and_repeatable(cache: TuningCache, tmp_path: Path) -> None:
    for layer, device in ((OTHER, "b"), (LAYER, "b"), (LAYER, "a")):
        cache.add(layer, device, race(a=1.0))
    assert cache.export(tmp_path / "all.json") == 3
    text = (tmp_path / "all.json").read_text()
    lines = text.splitlines()
    assert lines[0] == '{"schema":1,"kind":"autoconv-records","records":['
    assert lines[-1] == "]}"
    found = [(r["device"], r["layer"]) for r in (json.loads(line.rstrip(",")) for line in lines[1:-1])]
    assert found == [("a", LAYER), ("b", LAYER), ("b", OTHER)]
    assert cache.export(tmp_path / "again.json") == 3
    assert (tmp_path / "again.json").read_text() == text
    assert cache.export(tmp_path / "one.json", device="a") == 1
    assert cache.export(tmp_path / "none.json", device="missing") == 0
    assert json.loads((tmp_path / "none.json").read_text())["records"] == []


def test_an_export_that_fails_leaves_the_old_file(
    cache: TuningCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / "records.json"
    target.parent.mkdir()
    target.write_text("old")
    cache.add(LAYER, DEVICE, race(a=1.0))

    def fail(self: Path, other: Path) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no"):
        cache.export(target)
    assert [path.read_text() for path in target.parent.iterdir()] == ["old"]


def test_threads_that_write_one_file_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    path, both_write = tmp_path / "file", threading.Barrier(2, timeout=60)

    def write(letter: bytes) -> None:
        with written_whole(path) as file:
            file.write(letter)
            file.flush()
            both_write.wait()
            file.write(letter * 9)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, (b"a", b"b")))
    assert path.read_bytes() in (b"a" * 10, b"b" * 10)
    assert list(tmp_path.iterdir()) == [path]


def test_an_export_that_cannot_be_written_names_its_file(cache: TuningCache, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        cache.export(tmp_path / "nowhere" / "all.json")
    assert caught.value.filename == str(tmp_path / "nowhere" / "all.json")


@pytest.mark.skipif(os.name != "posix", reason="pipes and links are POSIX")
def test_an_export_takes_the_place_of_files_only(cache: TuningCache, tmp_path: Path) -> None:
    cache.add(LAYER, DEVICE, race(a=1.0))
    cache.export(tmp_path / "file.json")
    (tmp_path / "link.json").symlink_to("target.json")
    cache.export(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "target.json").read_text() == (tmp_path / "file.json").read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        text = reader.submit(pipe.read_text)
        cache.export(pipe)
        assert pipe.is_fifo()
        assert text.result() == (tmp_path / "file.json").read_text()


def test_an_import_takes_merges_and_knows(cache: TuningCache, tmp_path: Path) -> None:
    shared = race(1, a=1.0, b=2.0)
    cache.add(LAYER, DEVICE, shared)
    cache.add(OTHER, DEVICE, race(a=1.0))
    cache.export(tmp_path / "file.json")
    other = TuningCache(tmp_path / "other", system=None)
    own = race(2, a=2.0, c=1.0)
    other.add(LAYER, DEVICE, own)
    assert other.import_(tmp_path / "file.json") == ImportReport(taken=1, merged=1, known=0, refused=())
    assert other.load(LAYER, DEVICE) == Record(LAYER, DEVICE, (shared, own))
    assert other.load(OTHER, DEVICE) == cache.load(OTHER, DEVICE)
    assert other.import_(tmp_path / "file.json") == ImportReport(taken=0, merged=0, known=2, refused=())
    other.close()


def test_an_export_has_no_more_races_than_can_be_imported(tmp_path: Path) -> None:
    """Though races of the user's stand over as many that are shipped."""
    (tmp_path / "system").mkdir()
    for name, system, first in (("maker", None, 1), ("own", tmp_path / "system", 11)):
        cache = TuningCache(tmp_path / name, system)
        for number in range(MAX_RACES):
            cache.add(LAYER, DEVICE, race(first + number, **{"a": 1.0, f"{name}{number}": 2.0}))
        assert cache.export(tmp_path / "system") == 1
        assert len(cache.load(LAYER, DEVICE).races) == MAX_RACES * (1 + bool(system))  # type: ignore[union-attr]
        cache.close()
    with closing(TuningCache(tmp_path / "other", None)) as other:
        report = other.import_(tmp_path / "system" / file_name(DEVICE))
        assert report == ImportReport(taken=1, merged=0, known=0, refused=())
        assert min(r.when for r in other.load(LAYER, DEVICE).races)[8:10] == "11"  # type: ignore[union-attr]


def test_one_bad_record_does_not_spoil_the_others(cache: TuningCache, tmp_path: Path) -> None:
    good = Record(LAYER, DEVICE, (race(a=1.0),)).to_json()
    future = Record(OTHER, DEVICE, (Race("0" * 32, "2999-01-01T00:00:00+00:00", {}, False, None, {}),)).to_json()
    records: list[Any] = [good | {"layer": "fwd"}, None, good, future]
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"schema": 1, "kind": "autoconv-records", "records": records}))
    report = cache.import_(path)
    assert (report.taken, report.merged, report.known) == (1, 0, 0)
    assert [reason.split(": ")[1] for reason in report.refused] == ["record 1", "record 2", "record 4"]
    assert "yet to come" in report.refused[2]
    assert [record.to_json() for record in cache.records()] == [good]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected JSON"),
        (b"\xff\xfe", "decode"),
        (b"[" * 100_000, "expected JSON"),
        (b"[]", "expected tuning records, as `autoconv export` writes them"),
        (b'{"schema":1,"kind":"other","records":[]}', "expected tuning records, as `autoconv export` writes them"),
        (
            b'{"schema":1,"kind":"autoconv-records","records":{}}',
            "expected tuning records, as `autoconv export` writes them",
        ),
        (b'{"schema":2,"kind":"autoconv-records","records":[]}', "expected schema 1, as this version writes, got 2"),
    ],
)
def test_what_is_no_file_of_records_is_refused(cache: TuningCache, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=words) as caught:
        cache.import_(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "a" * 5000])
def test_an_impossible_file_name_is_refused(cache: TuningCache, name: str) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        cache.import_(name)


def test_missing_and_enormous_files_are_refused(cache: TuningCache, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"missing\.json: cannot be read: No such file"):
        cache.import_(tmp_path / "missing.json")
    with pytest.raises(RecordError, match="cannot be read"):
        cache.import_(tmp_path)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(RecordError, match="expected at most 256 MiB, got a larger file"):
        cache.import_(tmp_path / "large.json")


def test_devices_have_different_file_names_that_are_safe() -> None:
    keys = [DEVICE, DEVICE.replace(":", "-"), "a/../../b", "x" * 300, "y" * 300, "Ä"]
    names = [file_name(key) for key in keys]
    assert len(set(names)) == len(keys)
    assert all(name.replace("-", "").replace(".json", "").isalnum() and len(name) < 100 for name in names)


@pytest.mark.parametrize("path", sorted(shipped("cache").glob("*.json")), ids=lambda path: path.stem[:40])
def test_records_that_come_along_are_whole_and_know_todays_names(path: Path, tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    report = cache.import_(path)
    assert report.taken
    assert not report.refused
    names = {one.name for device in (CPU.current(), NOMINAL) for one in registry.algorithms(device)}
    for record in cache.records():
        assert {candidate.algorithm for candidate in record.facts()} <= names
