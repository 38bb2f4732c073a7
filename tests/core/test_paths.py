"""How files are written, and where: whole or not at all, and where nobody else can write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from autoconv import paths

WHILE_COLLECTED = paths.cache_folder()


def test_tests_leave_the_users_own_records_alone_while_they_are_collected() -> None:
    assert WHILE_COLLECTED.name.startswith("autoconv-tests-")


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    paths.write_whole(path, "old")

    def fail() -> None:
        with paths.written_whole(path) as file:
            file.write(b"new")
            raise ValueError("half of it")

    with pytest.raises(ValueError, match="half of it"):
        fail()
    assert path.read_text() == "old"
    paths.write_whole(path, "new")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("list.yaml", "new")]


def test_what_a_killed_process_left_is_removed_a_day_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, left = tmp_path / "list[1].yaml", []
    with monkeypatch.context() as killed:  # before the file is in place, and without a last word
        killed.setattr(Path, "replace", lambda temporary, target: None)
        killed.setattr(Path, "unlink", lambda temporary: left.append(temporary))
        for _ in range(2):
            paths.write_whole(path, "half of it")
    others = [tmp_path / name for name in (".list[1].yaml.20240101", ".list.yaml.autoconv012345", "list[1].yaml.bak")]
    for other in others:
        other.touch()
    for old in (left[0], *others):
        os.utime(old, (0, 0))
    paths.write_whole(path, "all of it")
    assert sorted(tmp_path.iterdir()) == sorted([path, left[1], *others])


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_who_may_read_a_file_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.touch(0o600)
    paths.write_whole(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders belong to nobody here")
def test_temporary_files_lie_where_nobody_else_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    paths._new_folder.cache_clear()
    own = paths.temporary_folder()
    assert own == paths.temporary_folder() == tmp_path / f"autoconv-{os.getuid()}"
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    other = paths.temporary_folder()
    assert other == paths.temporary_folder() != own
    own.rmdir()
    own.symlink_to(tmp_path / "elsewhere")
    assert paths.temporary_folder() == other
    assert not (tmp_path / "elsewhere").exists()
    paths._new_folder.cache_clear()
