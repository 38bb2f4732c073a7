"""The user's records over those that come along."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from races import DEVICE, LAYER, OTHER, race

from autoconv.errors import CacheWarning
from autoconv.paths import shipped
from autoconv.records.cache import SYSTEM, TuningCache
from autoconv.records.files import file_name
from autoconv.records.schema import Record


@pytest.fixture
def both(tmp_path: Path) -> TuningCache:
    """A cache whose system folder knows `a` and `b`."""
    maker = TuningCache(tmp_path / "maker", system=None)
    maker.add(LAYER, DEVICE, race(20, a=5.0, b=10.0))
    maker.add(OTHER, "gpu", race(a=1.0))
    (tmp_path / "system").mkdir()
    assert maker.export(tmp_path / "system") == 2
    maker.close()
    return TuningCache(tmp_path / "cache", tmp_path / "system")


def test_one_file_for_each_device(both: TuningCache) -> None:
    assert both.system is not None
    assert {path.name for path in both.system.iterdir()} == {file_name(DEVICE), file_name("gpu")}


def test_what_is_shipped_is_found_and_the_user_wins(both: TuningCache) -> None:
    found = both.load(LAYER, DEVICE)
    assert found is not None
    assert {str(c): f.time for c, f in found.facts().items()} == {"a": 5.0, "b": 10.0}
    after = both.add(LAYER, DEVICE, race(1, a=1.0, c=3.0))
    assert {str(c): f.time for c, f in after.facts().items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert both.load(LAYER, DEVICE) == after
    assert [(r.device, r.layer) for r in both.records()] == [(DEVICE, LAYER), ("gpu", OTHER)]
    both.close()


def test_what_is_shipped_is_not_written_to(both: TuningCache) -> None:
    assert both.system is not None
    before = {path: path.read_bytes() for path in both.system.iterdir()}
    both.add(LAYER, DEVICE, race(a=1.0))
    assert {path: path.read_bytes() for path in both.system.iterdir()} == before
    assert len(list(TuningCache(both.directory, None).records())) == 1
    both.close()


def test_only_the_file_of_the_device_is_read_and_once(both: TuningCache) -> None:
    assert both.system is not None
    (both.system / file_name("gpu")).write_text("broken")
    assert both.layers(DEVICE) == [LAYER]
    (both.system / file_name(DEVICE)).write_text("broken")
    assert both.load(LAYER, DEVICE) is not None
    both.add(OTHER, DEVICE, race(a=1.0))
    assert both.layers(DEVICE) == sorted((LAYER, OTHER))
    with pytest.warns(CacheWarning, match="expected JSON"):
        assert both.load(OTHER, "gpu") is None
    both.close()


def test_a_shipped_record_that_is_invalid_is_a_miss(both: TuningCache) -> None:
    assert both.system is not None
    path = both.system / file_name(DEVICE)
    path.write_text(path.read_text().replace('"time":5.0', '"time":-5.0'))
    with pytest.warns(CacheWarning, match="is ignored"):
        assert both.load(LAYER, DEVICE) is None
    both.close()


def test_a_note_on_what_is_shipped_makes_it_no_record_of_the_users(both: TuningCache, tmp_path: Path) -> None:
    shipped = both.load(LAYER, DEVICE)
    assert shipped is not None
    noted = both.add(LAYER, DEVICE, replace(shipped.races[0], covers="0123abcd"), newest=False)
    assert [r.covers for r in noted.races] == ["0123abcd"]
    assert not both.is_own(noted)
    assert both.export(tmp_path / "own.json") == 0
    assert both.is_own(both.add(LAYER, DEVICE, race(1, a=1.0, c=2.0)))
    assert both.export(tmp_path / "own.json") == 1
    both.close()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this platform")
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_no_file_in_the_shipped_folder_is_ignored(tmp_path: Path, kind: str) -> None:
    path = tmp_path / file_name(DEVICE)
    {"pipe": os.mkfifo, "folder": Path.mkdir, "loop": lambda path: path.symlink_to(path)}[kind](path)
    cache = TuningCache(tmp_path / "cache", system=tmp_path)
    with pytest.warns(CacheWarning, match="ignored"):
        assert cache.load(LAYER, DEVICE) is None
    assert list(cache.records()) == []
    cache.close()


def test_a_shipped_folder_that_cannot_be_entered_is_ignored(
    cache: TuningCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    assert cache.persistent
    cache.system = tmp_path / "system"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        patch.setattr(Path, "glob", refuse)
        with pytest.warns(CacheWarning, match=r"Permission denied: .*json': ignored"):
            assert cache.load(LAYER, DEVICE) is None
        with pytest.warns(CacheWarning, match=r"Permission denied: .*system': ignored"):
            assert list(cache.records()) == []


def test_what_ships_with_this_installation_is_valid() -> None:
    assert shipped("cache") == SYSTEM
    assert SYSTEM.is_dir()
    for path in SYSTEM.glob("*.json"):
        for data in json.loads(path.read_text())["records"]:
            assert path.name == file_name(Record.from_json(data).device)


def test_a_strangers_folder_beside_an_installed_package_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("autoconv.paths.__file__", str(tmp_path / "autoconv" / "paths.py"))
    assert shipped("cache") == tmp_path / "autoconv" / "cache"
    (tmp_path / "pyproject.toml").touch()
    assert shipped("cache") == tmp_path / "cache"
    (tmp_path / "autoconv" / "cache").mkdir(parents=True)
    assert shipped("cache") == tmp_path / "autoconv" / "cache"
