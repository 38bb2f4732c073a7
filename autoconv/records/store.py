"""Text by key in a folder, shared by processes: diskcache, with everything but inline text refused.

diskcache on its own unpickles values and keys, opens and deletes files by a stored name, and sets attributes
and PRAGMAs by stored settings: whoever can plant a row could run code. Here a row can only ever be text.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import diskcache
from diskcache.core import DBNAME, ENOVAL, METADATA, MODE_RAW

from autoconv.common.text import reason
from autoconv.errors import CacheWarning, RecordError
from autoconv.paths import make_private

LARGEST = 1 << 23  # bytes of one row
LONGEST = LARGEST // 4 - 1024  # characters of one value
PATIENCE = 10  # seconds to wait for another process's transaction

# What SQLite keeps; the logs first, since a new database would take them for its own.
_FILES = (f"{DBNAME}-wal", f"{DBNAME}-shm", f"{DBNAME}-journal", DBNAME)

_SETTINGS = {
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

# The folder is at fault, not what the database holds.
_UNAVAILABLE = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOLFS,
}
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_TROUBLE = (sqlite3.Error, diskcache.Timeout, OSError)

T = TypeVar("T")


class _TextDisk(diskcache.Disk):  # type: ignore[misc]
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


class _Closer:
    """Closes a thread's connection when the thread, or the store, is gone: Python 3.13 complains if nobody does."""

    connection: sqlite3.Connection | None = None
    pid = 0

    def __del__(self) -> None:
        if self.connection is not None and self.pid == os.getpid():  # what a parent opened is the parent's to close
            with suppress(sqlite3.ProgrammingError):  # the store has died in another thread
                self.connection.close()


class _Database(diskcache.Cache):  # type: ignore[misc]
    """A diskcache whose settings are ours, whatever the file says, and whose rows are bounded."""

    @property
    def _con(self) -> sqlite3.Connection:
        try:
            closer: _Closer = self._local.closer
        except AttributeError:  # made before the connection, since Python ends the older of unreachable objects first
            closer = self._local.closer = _Closer()
        known = closer.connection
        try:
            with _strange_is_broken():  # a new connection reads the settings
                connection: sqlite3.Connection = super()._con
        finally:  # one that cannot has to be closed, too
            closer.connection, closer.pid = getattr(self._local, "con", None), os.getpid()
        if connection is not known:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
        return connection

    def reset(self, key: str, value: object = ENOVAL, update: bool = True) -> Any:
        if key in _SETTINGS:
            return super().reset(key, _SETTINGS[key], update)
        return super().reset(key) if key in METADATA and value is ENOVAL else value


class TextStore:
    """Text by key, in a database in a folder; in memory where the folder cannot be used, but for what is there already.

    No method raises for what is on the disk: an unreadable row is a miss, a broken database is set
    aside and a new one started, and a folder that cannot be written costs persistence. Each is
    reported by one `CacheWarning`. Threads and forked children may share a store.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._memory: dict[str, str] | None = None  # takes over when the folder fails
        self._database: _Database | None = None
        self._reported: set[str] = set()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def persistent(self) -> bool:
        """Whether what is stored outlives this process."""
        return self._open() is not None

    def get(self, key: str) -> str | None:
        """The text stored under a key, None where there is none that can be read."""
        if self._database is None and self._memory is None and (found := self._glance(key)) is not None:
            return found
        return self._do(lambda database: self._read(database, key), lambda memory: memory.get(key))

    def update(self, key: str, change: Callable[[str | None], str]) -> None:
        """Replace a text by `change(text)`, in one transaction. What `change` raises leaves it as it was.

        Raises
        ------
        RecordError
            When the text is longer than `LONGEST`, or it or the key has no UTF-8 (a lone surrogate).
        """

        def changed(old: str | None) -> str:
            text = change(old)
            if len(text) > LONGEST:
                raise RecordError(f"text under {key!r:.80}: expected at most {LONGEST} characters, got {len(text)}")
            try:
                (key + text).encode()
            except UnicodeEncodeError as error:  # else the database would be blamed
                raise RecordError(f"text under {key!r:.80}: expected Unicode text, got {error}") from None
            return text

        def in_database(database: _Database) -> None:
            with database.transact():
                text = changed(self._read(database, key))
                with _strange_is_broken():
                    database._sql("DELETE FROM Cache WHERE key = ?", (key,))  # whatever stands there
                    database.set(key, text)

        def in_memory(memory: dict[str, str]) -> None:
            with self._lock:
                memory[key] = changed(memory.get(key))

        self._do(in_database, in_memory)

    def __iter__(self) -> Iterator[str]:
        """Every key."""

        def in_database(database: _Database) -> list[str]:
            with _strange_is_broken():
                rows = database._sql("SELECT CAST(key AS BLOB) FROM Cache WHERE raw = 1 AND typeof(key) = 'text'")
                return [key for (data,) in rows if type(key := _decoded(data)) is str]

        return iter(self._do(in_database, list))

    def report(self, message: str) -> None:
        """Warn, the first time; in one line, whatever was found on the disk."""
        message = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in message[:1000])
        if message not in self._reported:
            self._reported.add(message)
            warnings.warn(message, CacheWarning, stacklevel=2)

    def close(self) -> None:
        """Close this thread's connection; the next use opens another."""
        if self._database is not None and self._pid == os.getpid():
            self._database.close()

    def _do(self, use: Callable[[_Database], T], otherwise: Callable[[dict[str, str]], T]) -> T:
        for attempt in ("as it is", "repaired", "new"):
            database = self._open()
            if database is None:
                break
            try:
                return use(database)
            except _TROUBLE as error:
                try:
                    if _unavailable(error) or attempt == "new":
                        raise
                    self._database = self._repaired(doubted=attempt == "repaired")
                except _TROUBLE as final:
                    self._degrade(final)
        assert self._memory is not None
        return otherwise(self._memory)

    def _glance(self, key: str) -> str | None:
        """The text, where the database plainly holds it: diskcache would first write all its settings, with care."""
        found = self._readable(key).get(key)
        return found if found is not None or os.access(self.directory, os.W_OK) else self._settled(key).get(key)

    def _regular(self, *names: str) -> None:
        """OSError where one of the files is there and is none: to open a pipe would wait for ever."""
        for name in names:
            with suppress(FileNotFoundError):
                mode = (self.directory / name).stat().st_mode
                if not stat.S_ISREG(mode):
                    raise OSError(f"{name}: expected a regular file, got {stat.filemode(mode)}")

    def _readable(self, key: str | None = None) -> dict[str, str]:
        """What can be read beside other processes: all that is text under a text, or what is under one key."""
        return self._plain_rows("mode=ro", _FILES, key)

    def _plain_rows(self, how: str, files: Iterable[str], key: str | None) -> dict[str, str]:
        """What is text under a text, all of it or under one key; nothing where that cannot be read just so."""
        query = "SELECT key, value FROM Cache WHERE raw = 1 AND mode = ? AND filename IS NULL AND expire_time IS NULL"
        wanted = (" AND key = ?", (MODE_RAW, key)) if key is not None else ("", (MODE_RAW,))
        try:
            self._regular(*files)
            uri = f"{(self.directory / DBNAME).absolute().as_uri()}?{how}"
            with _strange_is_broken(), closing(sqlite3.connect(uri, timeout=0, uri=True)) as connection:
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
                connection.text_factory = _decoded
                rows = connection.execute(query + wanted[0], wanted[1]).fetchall()
        except _TROUBLE:  # none there, or one that has to be looked after
            return {}
        return {name: text for name, text in rows if type(name) is type(text) is str}

    def _settled(self, key: str | None = None) -> dict[str, str]:
        """The same of a database in a folder that cannot be written, where nobody is in the middle of writing.

        SQLite would make files beside it even to read it, unless told that it never changes.
        """
        with suppress(OSError):
            if (self.directory / f"{DBNAME}-wal").stat().st_size:
                return {}
        return self._plain_rows("immutable=1", [DBNAME], key)

    def _read(self, database: _Database, key: str) -> str | None:
        try:
            with _strange_is_broken():
                value: str | None = database.get(key)
                return value
        except sqlite3.Error as error:
            if _unavailable(error) or _code(error) in _CORRUPT:
                raise
            self.report(f"{self.directory}: what is stored under {key!r} is ignored: {error!s:.200}")
            return None

    def _open(self) -> _Database | None:
        if self._pid != os.getpid():
            _PARENTS.append(self._database)
            self._database, self._lock, self._pid = None, threading.Lock(), os.getpid()
        if self._database is None and self._memory is None:
            with self._lock:
                if self._database is None and self._memory is None:
                    try:
                        self._database = self._connected()
                    except _TROUBLE as error:
                        self._degrade(error)
        return self._database if self._memory is None else None

    def _connected(self) -> _Database:
        try:
            return self._connect()
        except _TROUBLE as error:
            if _unavailable(error):
                raise
        return self._repaired()

    def _connect(self) -> _Database:
        make_private(self.directory)
        self._regular(*_FILES)
        with _strange_is_broken():
            return _Database(str(self.directory), timeout=PATIENCE, disk=_TextDisk, **_SETTINGS)

    def _repaired(self, doubted: bool = False) -> _Database:
        """The database, or a new one where it is broken; one process at a time looks after that.

        A doubted one has broken again after it was found whole: SQLite's check does not see everything.
        """
        from filelock import FileLock  # rarely needed, and slow to import

        with FileLock(self.directory / "repair.lock", timeout=PATIENCE):
            try:
                database = self._connect()
                if not doubted and _sound(database):
                    return database
            except _TROUBLE as error:
                if _unavailable(error):
                    raise
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
            for name in _FILES:
                with suppress(FileNotFoundError):
                    (self.directory / name).rename(self.directory / f"{name}.broken-{stamp}")
            self.report(f"{self.directory / DBNAME} is broken: it was set aside, and a new one started")
            return self._connect()

    def _degrade(self, error: Exception) -> None:
        self._memory = self._memory or self._readable() or self._settled()
        cause = _unavailable(error) or error
        self.report(f"{self.directory}: {reason(cause)[:200]}: tuning is remembered by this process only")


# SQLite must not close, in a forked child, what the parent opened: kept here, it never is.
_PARENTS: list[_Database | None] = []


def _sound(database: _Database) -> bool:
    """Whether a broken database has been repaired since: it is whole, and takes a row."""
    with _strange_is_broken():
        ((verdict,),) = database._sql("PRAGMA quick_check(1)").fetchall()
        with suppress(_RollBackError), database.transact():
            database.set("sound", "")
            raise _RollBackError
    return bool(verdict == "ok")


def _decoded(data: bytes) -> str | bytes:
    """The text; the bytes themselves where they are none, so that one bad row does not hide the others."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class _RollBackError(Exception):
    """Ends a transaction that was only a trial."""


@contextmanager
def _strange_is_broken() -> Iterator[None]:
    """Turn what a strange table makes diskcache trip over into the error of a broken database.

    sqlite3 does too: it cannot decode an error message of SQLite's that quotes a damaged schema.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise sqlite3.DatabaseError(str(error)) from error


def _code(error: BaseException) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _unavailable(error: BaseException | None) -> BaseException | None:
    """The error that says that the folder is at fault, if one does; a failed rollback hides the cause."""
    while error is not None:
        if isinstance(error, OSError | diskcache.Timeout) or _code(error) in _UNAVAILABLE:
            return error
        error = error.__context__
    return None
