"""Where the cache's folder is, and what becomes of records where it cannot be used."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from races import DEVICE, LAYER, race

from autoconv.common import machine_code
from autoconv.errors import CacheWarning, RecordError
from autoconv.records.cache import TuningCache


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


def test_a_folder_with_a_variable_in_its_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_NAMED", "somebody")
    for name in ("$AUTOCONV_NAMED-cache", "${AUTOCONV_NAMED}"):
        monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / name))
        with pytest.raises(RecordError, match="expected the name of a folder, got one with a variable"):
            TuningCache()
    assert TuningCache(tmp_path / "$AUTOCONV_UNNAMED$").persistent
    assert [each.name for each in tmp_path.iterdir()] == ["$AUTOCONV_UNNAMED$"]


def test_the_folder_of_a_user_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", "~nobody-of-that-name/folder")
    with pytest.raises(RecordError, match="'~nobody-of-that-name/folder': expected a folder of a user that there is"):
        TuningCache()


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


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_folder_with_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(RecordError, match="expected the name of a folder"):
        TuningCache(name)
