"""A database of diskcache's in which a row can only ever be inline text.

diskcache on its own unpickles values and keys, opens and deletes files by a stored name, and sets attributes
and PRAGMAs by stored settings: whoever can plant a row could run code.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import diskcache
from diskcache.core import ENOVAL, METADATA, MODE_RAW

LARGEST = 1 << 23  # bytes of one row

SETTINGS = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "size_limit": 2**62,
    "cull_limit": 0,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 2**10,
    "sqlite_journal_mode": "wal",
    "sqlite_mmap_size": 0,  # a mapped file that somebody truncates kills the process
    "sqlite_synchronous": 1,
    "disk_min_file_size": LARGEST,
    "disk_pickle_protocol": 4,
}


class TextDisk(diskcache.Disk):  # type: ignore[misc]
    """Inline text in, inline text out; no pickles, no bytes, no files."""

    def __init__(self, directory: str, **ignored: object) -> None:
        super().__init__(directory)

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise TypeError(f"key: expected text, got {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> str | None:
        return key if raw == 1 and type(key) is str else None

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, str]:
        if type(value) is not str or read:
            raise TypeError(f"value: expected text, got {type(value).__name__}")
        return len(value), MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> str:
        if mode != MODE_RAW or filename is not None or type(value) is not str or read:
            raise ValueError("the row is not inline text")
        return value

    def remove(self, file_path: object) -> None:
        """Nothing: a row names no file of ours."""


class Closer:
    """Closes a thread's connection when the thread, or the store, is gone: Python 3.13 complains if nobody does."""

    connection: sqlite3.Connection | None = None
    pid = 0

    def __del__(self) -> None:
        if self.connection is not None and self.pid == os.getpid():  # what a parent opened is the parent's to close
            with suppress(sqlite3.ProgrammingError):  # the store has died in another thread
                self.connection.close()


class Database(diskcache.Cache):  # type: ignore[misc]
    """A diskcache whose settings are ours, whatever the file says, and whose rows are bounded."""

    _txn_id: int | None  # the thread whose transaction is open

    @property
    def _con(self) -> sqlite3.Connection:
        try:
            closer: Closer = self._local.closer
        except AttributeError:  # made before the connection, since Python ends the older of unreachable objects first
            closer = self._local.closer = Closer()
        known = closer.connection
        try:
            with strange_is_broken():  # a new connection reads the settings
                connection: sqlite3.Connection = super()._con
        finally:  # one that cannot has to be closed, too
            closer.connection, closer.pid = getattr(self._local, "con", None), os.getpid()
        if connection is not known:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
        return connection

    def settle(self) -> None:
        """Roll back what an interrupt left open between two lines of diskcache: it would lock everybody out."""
        if self._txn_id == threading.get_ident():
            self._txn_id = None
        connection = getattr(self._local, "con", None)
        if connection is not None and connection.in_transaction:
            connection.rollback()

    def reset(self, key: str, value: object = ENOVAL, update: bool = True) -> Any:
        if key in SETTINGS:
            return super().reset(key, SETTINGS[key], update)
        return super().reset(key) if key in METADATA and value is ENOVAL else value


@contextmanager
def strange_is_broken() -> Iterator[None]:
    """Turn what a strange table makes diskcache trip over into the error of a broken database.

    sqlite3 does too: it cannot decode an error message of SQLite's that quotes a damaged schema.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise sqlite3.DatabaseError(str(error)) from error
