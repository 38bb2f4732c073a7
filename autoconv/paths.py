"""Where files lie: the data that comes with autoconv, and what it learns; and how a file is written."""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from platformdirs import user_cache_dir

from autoconv.errors import RecordError

ABANDONED = 24 * 3600  # seconds since a file was last written to


def shipped(folder: str) -> Path:
    """The folder of data files (`configs` or `cache`) that came with this installation.

    A wheel carries them inside the package; an editable install finds them at the root of the
    repository, recognised by its pyproject.toml, so that a stranger's `cache` beside an installed
    package is never taken for ours. The folder may be missing; the path then names where it belongs.
    """
    package = Path(__file__).parent
    root = package.parent
    if not (package / folder).is_dir() and (root / "pyproject.toml").is_file() and (root / folder).is_dir():
        return root / folder
    return package / folder


def cache_folder(named: Path | str | None = None) -> Path:
    """The folder of what is learned: the one named, `AUTOCONV_CACHE_DIR`, or the user's for caches.

    A user without a home has one among the temporary files.

    Raises
    ------
    RecordError
        When no folder could have that name, or it has the name of a variable of the environment in it, as `$HOME`.
    """
    named = named or os.environ.get("AUTOCONV_CACHE_DIR")
    try:
        impossible = named is not None and b"\0" in os.fsencode(named)
    except UnicodeEncodeError:  # a lone surrogate
        impossible = True
    if impossible:
        raise RecordError(f"{str(named)!r:.80}: expected the name of a folder, got characters that no name can have")
    try:
        found = _absolute(Path(named or user_cache_dir("autoconv")).expanduser())
    except RuntimeError as error:  # of a name that begins with ~
        if named:
            raise RecordError(f"{str(named)!r:.80}: expected a folder of a user that there is: {error}") from None
        return temporary_folder()
    if os.path.expandvars(found) != str(found):  # as diskcache does: records would lie in another folder than the rest
        raise RecordError(
            f"{str(found)!r:.80}: expected the name of a folder, got one with a variable of the environment"
        )
    return found


def temporary_folder() -> Path:
    """A folder among the temporary files into which this user alone can write, made where there is none.

    All processes of a user have the same, unless another user was there first.

    Raises
    ------
    OSError
        When there are no temporary files.
    """
    if not hasattr(os, "getuid"):
        return Path(tempfile.gettempdir()) / "autoconv"
    folder = Path(tempfile.gettempdir()) / f"autoconv-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if own else _new_folder()


@functools.cache
def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="autoconv-"))


def make_private(folder: Path) -> None:
    """Make a folder of this user alone where there is none; those above it are made as any others.

    Raises
    ------
    OSError
        When it cannot be made, as where a file has its name.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "expected a folder, got a file", str(folder)) from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as a whole or not at all, as `written_whole` does.

    Raises
    ------
    OSError
        When it cannot be written; it names the path given.
    """
    data = content.encode() if isinstance(content, str) else content
    with written_whole(path) as file:
        file.write(data)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to be written as a whole or not at all: what was there stays until all of it can take its place.

    A link stays one; nothing takes the place of a device or a pipe, which is written to. What a process left beside
    the file that was killed while it wrote is removed a day later.

    Raises
    ------
    OSError
        When it cannot be written; it names the path given.
    """
    target = path.resolve()
    unfinished = f".{target.name}.autoconv"  # and six digits
    temporary = target.with_name(unfinished + uuid.uuid4().hex[:6])
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
        else:
            with temporary.open("xb") as file:
                if path.exists():  # who may read it stays the same
                    temporary.chmod(stat.S_IMODE(path.stat().st_mode))
                yield file
            temporary.replace(target)
            _remove_abandoned(target.parent, re.compile(re.escape(unfinished) + "[0-9a-f]{6}"))
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary file
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


def _remove_abandoned(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the files of such names that nobody can be writing any more."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # another process was quicker, or it is another user's
                    if time.time() - entry.stat().st_mtime > ABANDONED:
                        (folder / entry.name).unlink()


@functools.cache
def _absolute(folder: Path) -> Path:
    """The folder as it was first meant: it stays where it is when the process goes elsewhere."""
    with suppress(OSError):  # the working directory is gone
        return folder.absolute()
    return folder
