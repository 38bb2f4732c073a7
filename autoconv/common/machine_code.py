"""Machine code kept on disk: in a folder only its owner can write, every file checked before use."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import uuid
import warnings
from pathlib import Path

from autoconv.paths import cache_folder

_SUM = hashlib.sha256().digest_size
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
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    except OSError as error:
        _warn(f"{folder()}: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):  # it is there no more, but after a failure
            os.unlink(new, dir_fd=descriptor)
        os.close(descriptor)
