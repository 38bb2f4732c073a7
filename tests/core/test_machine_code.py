"""Machine code on disk: what was saved is loaded, and nothing that anyone else could have written."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from autoconv.common import machine_code
from autoconv.common.machine_code import folder, load, save

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX")
KEY, CODE = bytes(32), b"\x7fELF machine code"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("AUTOCONV_KERNEL_DIR")
    machine_code._warn.cache_clear()


def test_what_is_saved_is_loaded_from_a_private_folder(tmp_path: Path) -> None:
    assert load(KEY) is None
    save(KEY, CODE)
    assert load(KEY) == CODE
    save(KEY, CODE + b"!")
    assert load(KEY) == CODE + b"!"
    assert folder() == tmp_path / "kernels"
    assert folder().stat().st_mode & 0o777 == 0o700
    (file,) = folder().iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_folder_serves_where_it_is_copied_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(KEY, CODE)
    (tmp_path / "other").mkdir()
    folder().rename(tmp_path / "other" / "kernels")
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / "other"))
    assert load(KEY) == CODE


def test_the_folder_may_be_another_than_beside_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(tmp_path / "for kernels"))
    save(KEY, CODE)
    assert folder() == tmp_path / "for kernels"
    assert load(KEY) == CODE
    assert [path.name for path in tmp_path.iterdir()] == ["for kernels"]


def test_code_of_another_key_is_not_taken() -> None:
    save(KEY, CODE)
    other = bytes(31) + b"\1"
    (folder() / KEY.hex()).rename(folder() / other.hex())
    assert load(other) is None
    assert load(KEY) is None


@pytest.mark.parametrize("content", [b"", b"short", bytes(32), bytes(64)])
def test_a_damaged_file_is_a_miss(content: bytes) -> None:
    save(KEY, CODE)
    (folder() / KEY.hex()).write_bytes(content)
    assert load(KEY) is None


def test_a_file_that_others_can_write_is_not_used() -> None:
    save(KEY, CODE)
    (folder() / KEY.hex()).chmod(0o620)
    assert load(KEY) is None
    (folder() / KEY.hex()).chmod(0o600)
    assert load(KEY) == CODE


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_not_used(mode: int) -> None:
    save(KEY, CODE)
    folder().chmod(mode)
    with pytest.warns(RuntimeWarning, match="another user"):
        assert load(KEY) is None
    assert load(KEY) is None  # the warning comes once
    save(bytes(31) + b"\1", CODE)
    assert len(list(folder().iterdir())) == 1


def test_a_folder_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    save(KEY, CODE)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.warns(RuntimeWarning, match="another user"):
        assert load(KEY) is None


def test_links_are_not_followed(tmp_path: Path) -> None:
    save(KEY, CODE)
    (folder() / KEY.hex()).rename(tmp_path / "file")
    (folder() / KEY.hex()).symlink_to(tmp_path / "file")
    assert load(KEY) is None
    folder().rename(tmp_path / "elsewhere")
    folder().symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="not kept on disk"):
        save(bytes(31) + b"\1", CODE)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [KEY.hex()]


def test_a_folder_that_cannot_be_made_costs_only_persistence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="not kept on disk"):
        save(KEY, CODE)
    assert load(KEY) is None
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="file: expected a folder, got a file: compiled kernels"):
        assert load(KEY) is None


def test_what_could_not_be_kept_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        save(KEY, CODE)
    assert list(folder().iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_in_its_place_is_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(tmp_path))
    key = bytes(range(32))
    os.mkfifo(tmp_path / key.hex(), 0o600)
    assert machine_code.load(key) is None


def named(number: int, last: str = "001") -> bytes:
    return bytes.fromhex(f"{number:061x}{last}")


def kept() -> set[str]:
    return {path.name for path in folder().iterdir()}


def test_what_was_of_no_use_for_longest_goes_when_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        save(named(number), CODE)
        os.utime(folder() / named(number).hex(), times=(0, time.time() - (10 - number) * machine_code.DAY))
    assert load(named(0)) == CODE  # the oldest is of use again
    left = folder() / f"{0:032x}.new"  # half of a kernel, by a process that was killed
    strange = folder() / "notes.txt"  # nobody's here
    for path in (left, strange):
        path.write_bytes(bytes(100))
        os.utime(path, times=(0, 0))
    one = (folder() / named(0).hex()).stat().st_size
    assert machine_code.used() == 6 * one + 100
    monkeypatch.setattr(machine_code, "LARGEST", 4 * one)
    save(named(6), CODE)
    assert len(kept()) == 9  # not every kernel has the folder looked over
    save(named(7, "000"), CODE)
    assert kept() == {named(7, "000").hex(), *(named(number).hex() for number in (0, 5, 6)), strange.name}
    assert machine_code.used() == 4 * one
    strange.unlink()


def test_the_time_of_use_is_noted_once_a_day() -> None:
    save(KEY, CODE)
    file, hour = folder() / KEY.hex(), 3600
    for ago, noted in ((hour, False), (machine_code.DAY + hour, True)):
        os.utime(file, times=(0, before := time.time() // 1 - ago))
        assert load(KEY) == CODE
        assert (file.stat().st_mtime > before) is noted


def test_what_another_process_removes_meanwhile_is_nobodys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        save(named(number), CODE)
    unlink = os.unlink

    def removed_by_both(name: str, dir_fd: int) -> None:
        unlink(name, dir_fd=dir_fd)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", removed_by_both)
    monkeypatch.setattr(machine_code, "LARGEST", 0)
    save(KEY, CODE)
    assert kept() == set()


def test_nothing_is_used_where_there_is_no_folder() -> None:
    assert machine_code.used() == 0
