"""The tuning cache: two layers of records, and one process timing at a time."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from races import DEVICE, LAYER, OTHER, race

from autoconv.common import machine_code
from autoconv.errors import CacheWarning, PlanError, RecordError
from autoconv.paths import shipped
from autoconv.records.cache import SYSTEM, TuningCache
from autoconv.records.files import file_name
from autoconv.records.schema import Record


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TuningCache]:
    found = TuningCache(tmp_path / "cache", system=None)
    yield found
    found.close()


def reopened(cache: TuningCache) -> TuningCache:
    cache.close()
    return TuningCache(cache.directory, cache.system)


def overwrite(cache: TuningCache, text: str, layer: str = LAYER) -> None:
    cache._store.update(f"1|{layer}|{DEVICE}", lambda _: text)


# --- the user's records ---------------------------------------------------------------------------------------


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
    overwrite(cache, text)
    with pytest.warns(CacheWarning, match="is ignored"):
        assert cache.load(LAYER, DEVICE) is None
    assert cache.load(LAYER, DEVICE) is None
    assert list(cache.records()) == []
    added = race(a=2.0)
    cache.add(LAYER, DEVICE, added)
    assert reopened(cache).load(LAYER, DEVICE) == Record(LAYER, DEVICE, (added,))


def test_records_of_another_schema_are_left_alone(cache: TuningCache) -> None:
    cache._store.update(f"2|{LAYER}|{DEVICE}", lambda _: "of the future")
    assert cache.load(LAYER, DEVICE) is None
    assert list(cache.records()) == []


def test_a_folder_that_cannot_be_costs_persistence_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = TuningCache(tmp_path / "file" / "cache", system=None)
    with pytest.warns(CacheWarning, match="this process only"):
        cache.add(LAYER, DEVICE, race(a=1.0))
    cache.add(LAYER, DEVICE, race(b=1.0))
    found = cache.load(LAYER, DEVICE)
    assert found is not None
    assert len(found.races) == 2
    assert not cache.persistent
    with cache.timing_lock(DEVICE):
        pass


@pytest.mark.parametrize(
    ("below", "reason"), [("", "expected a folder, got a file"), ("cache", os.strerror(errno.ENOTDIR))]
)
def test_a_file_in_place_of_the_folder_is_called_one(tmp_path: Path, below: str, reason: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / below
    with pytest.warns(CacheWarning) as caught:
        assert not TuningCache(folder, system=None).persistent
    (warning,) = caught
    assert str(warning.message) == f"{folder}: {reason}: tuning is remembered by this process only"


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / "by variable"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert TuningCache().directory == tmp_path / "by variable"
    assert TuningCache(tmp_path / "given").directory == tmp_path / "given"
    assert TuningCache("~/given").directory == tmp_path / "home" / "given"
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", "")
    assert "autoconv" in str(TuningCache().directory)
    assert not (tmp_path / "home").exists()


def test_the_folder_stays_where_it_was_first_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOCONV_KERNEL_DIR")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for named in ("folder", "~/folder"):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("AUTOCONV_CACHE_DIR", named)
        where = tmp_path / named.replace("~", "home")
        assert (TuningCache().directory, machine_code.folder()) == (where, where / "kernels")
        monkeypatch.chdir("elsewhere")
        assert (TuningCache().directory, machine_code.folder()) == (where, where / "kernels")
        monkeypatch.chdir(tmp_path)


def test_a_user_without_a_home_has_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwd = pytest.importorskip("pwd")
    for name in ("HOME", "XDG_CACHE_HOME", "AUTOCONV_CACHE_DIR", "AUTOCONV_KERNEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert TuningCache().directory == tmp_path / f"autoconv-{os.getuid()}"
    assert machine_code.folder().parent == TuningCache().directory


@pytest.mark.skipif(os.name != "posix", reason="only there may a working directory be removed")
def test_without_a_working_directory_only_persistence_is_lost(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from autoconv.records.cache import TuningCache
        os.chdir(sys.argv[1])
        os.rmdir(sys.argv[1])
        print(TuningCache("relative", system=None).load("layer", "device"))
    """
    gone = tmp_path / "gone"
    gone.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(gone)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "None\n", done.stderr


# --- the shipped records --------------------------------------------------------------------------------------


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


def test_only_the_file_of_the_device_is_read(both: TuningCache) -> None:
    assert both.system is not None
    (both.system / file_name("gpu")).write_text("broken")
    assert both.load(LAYER, DEVICE) is not None
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


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_folder_with_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(RecordError, match="expected the name of a folder"):
        TuningCache(name)


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


# --- together -------------------------------------------------------------------------------------------------


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


HOLD = """
import sys
from autoconv.records.cache import TuningCache
with TuningCache(sys.argv[1], None).timing_lock(sys.argv[2]):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("usable", [True, False])
def test_two_processes_do_not_time_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: bool) -> None:
    """Not even where the lock has to go to the temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "file").touch()
    cache = TuningCache(tmp_path / "cache" if usable else tmp_path / "file" / "cache", system=None)
    command = [sys.executable, "-c", HOLD, str(cache.directory), DEVICE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(PlanError, match="another process has been timing"), cache.timing_lock(DEVICE, timeout=0.05):
            pass
        with cache.timing_lock("another device", timeout=0.05):
            pass
        holder.stdin.write("\n")
        holder.stdin.close()
        with cache.timing_lock(DEVICE):
            assert holder.wait() == 0


def test_without_a_temporary_folder_the_lock_is_in_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("autoconv.records.cache.temporary_folder", missing)
    with TuningCache(tmp_path, system=None).timing_lock(DEVICE, timeout=1):
        assert [path.suffix for path in tmp_path.iterdir() if path.suffix == ".lock"] == [".lock"]
    (tmp_path / "file").touch()
    unusable = TuningCache(tmp_path / "file" / "cache", system=None)
    with pytest.warns(UserWarning, match="two processes may time"), unusable.timing_lock(DEVICE, timeout=1):
        pass


def test_a_process_that_dies_lets_go_of_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), DEVICE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    with TuningCache(tmp_path, system=None).timing_lock(DEVICE, timeout=10):
        pass


def test_threads_take_turns_and_one_may_hold_the_lock_twice(cache: TuningCache) -> None:
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with cache.timing_lock(DEVICE), cache.timing_lock(DEVICE):
                inside += 1
                most = max(most, inside)
                time.sleep(1e-4)  # the others come in now, if they can
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_what_happens_under_the_lock_is_not_swallowed_and_frees_it(cache: TuningCache) -> None:
    with pytest.raises(KeyError), cache.timing_lock(DEVICE):
        raise KeyError
    with cache.timing_lock(DEVICE, timeout=1):
        pass
