"""Machine code kept on disk: in a folder only its owner can write, every file checked before use.

The folder is bounded: what an upgrade leaves behind, nothing asks for again, and it goes when there is too much. A
file's time of writing tells when it was last of use. Whoever finds a file gone compiles anew, so nobody is asked first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from autoconv.paths import cache_folder, make_private

LARGEST = 1 << 30  # bytes of the folder
DAY = 86400  # seconds for which a file's time is not written anew, however often it is of use
_SUM = hashlib.sha256().digest_size
_OURS = re.compile(r"[0-9a-f]{64}|[0-9a-f]{32}\.new")  # kernels, and what a process that was killed left half-written
_USABLE = os.name == "posix"  # elsewhere there is no cheap way to see who could write


def folder() -> Path:
    """Where kernels are kept: where `AUTOCONV_KERNEL_DIR` says, or else beside the records."""
    named = os.environ.get("AUTOCONV_KERNEL_DIR")
    return cache_folder(named) if named else cache_folder() / "kernels"


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(f"{text}: compiled kernels are not kept on disk", RuntimeWarning, stacklevel=2)


def _private(entry: os.stat_result) -> bool:
    return entry.st_uid == os.getuid() and not entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _open() -> int | None:
    """A descriptor of the folder, so that what was checked is what is read and written; None with one warning."""
    path = folder()
    try:
        make_private(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        _warn(f"{path}: {error.strerror}")
        return None
    if _private(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    _warn(f"{path} belongs to, or can be written by, another user")
    return None


def load(key: bytes) -> bytes | None:
    """What was saved under the key (32 bytes); None when absent, damaged, or not this user's alone."""
    descriptor = _open() if _USABLE else None
    if descriptor is None:
        return None
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe is not waited for
        with os.fdopen(os.open(key.hex(), flags, dir_fd=descriptor), "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read() if _private(found) and stat.S_ISREG(found.st_mode) else b""
            if text and found.st_mtime < time.time() - DAY:
                with contextlib.suppress(OSError):  # it can be read in any case
                    os.utime(file.fileno())
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return text[_SUM:] if hashlib.sha256(key + text[_SUM:]).digest() == text[:_SUM] else None


def save(key: bytes, text: bytes) -> None:
    """Keep the text; a failure costs persistence only."""
    descriptor = _open() if _USABLE else None
    if descriptor is None:
        return
    new = f"{uuid.uuid4().hex}.new"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=descriptor), "wb") as file:
            file.write(hashlib.sha256(key + text).digest() + text)
        os.replace(new, key.hex(), src_dir_fd=descriptor, dst_dir_fd=descriptor)
        if key.hex().endswith("000"):  # one kernel in 4096: to look at all of them takes up to seconds
            _trim(descriptor)
    except OSError as error:
        _warn(f"{folder()}: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):  # it is there no more, but after a failure
            os.unlink(new, dir_fd=descriptor)
        os.close(descriptor)


def used() -> int:
    """Bytes of all that is kept; 0 where nothing can be."""
    try:
        return sum(found.st_size for _, found in _kept(folder()))
    except OSError:
        return 0


def _kept(where: int | Path) -> Iterator[tuple[str, os.stat_result]]:
    """The names of our files in the folder, and what the system notes of them; others are nobody's here."""
    with os.scandir(where) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    yield entry.name, entry.stat(follow_symlinks=False)


def _trim(descriptor: int) -> None:
    """Remove what has been of no use for longest, until the rest is within the limit."""
    total = 0
    for name, found in sorted(_kept(descriptor), key=lambda one: one[1].st_mtime, reverse=True):
        total += found.st_size
        if total > LARGEST:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
