"""Text by key in a folder, shared by processes, whatever is found on the disk."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import diskcache
from diskcache.core import DBNAME, MODE_RAW

from autoconv.common.text import reason
from autoconv.errors import CacheWarning, RecordError
from autoconv.paths import make_private
from autoconv.records.database import LARGEST, SETTINGS, Database, TextDisk, strange_is_broken

LONGEST = LARGEST // 4 - 1024  # characters of one value
PATIENCE = 10  # seconds to wait for another process's transaction

# What SQLite keeps; the logs first, since a new database would take them for its own.
_FILES = (f"{DBNAME}-wal", f"{DBNAME}-shm", f"{DBNAME}-journal", DBNAME)

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


class TextStore:
    """Text by key, in a database in a folder; in memory where the folder cannot be used, but for what is there already.

    No method raises for what is on the disk: an unreadable row is a miss, a broken database is set
    aside and a new one started, and a folder that cannot be written costs persistence. Each is
    reported by one `CacheWarning`. Threads and forked children may share a store.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._memory: dict[str, str] | None = None  # takes over when the folder fails
        self._database: Database | None = None
        self._file: tuple[int, int] | None = None  # which one it is
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

        def in_database(database: Database) -> None:
            with database.transact():
                text = changed(self._read(database, key))
                with strange_is_broken():
                    database._sql("DELETE FROM Cache WHERE key = ?", (key,))  # whatever stands there
                    database.set(key, text)

        def in_memory(memory: dict[str, str]) -> None:
            with self._lock:
                memory[key] = changed(memory.get(key))

        self._do(in_database, in_memory)

    def __iter__(self) -> Iterator[str]:
        """Every key."""

        def in_database(database: Database) -> list[str]:
            with strange_is_broken():
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

    def _do(self, use: Callable[[Database], T], otherwise: Callable[[dict[str, str]], T]) -> T:
        for attempt in ("as it is", "repaired", "new"):
            database = self._open()
            if database is None:
                break
            try:
                database.settle()
                return use(database)
            except _TROUBLE as error:
                try:
                    if _unavailable(error) or attempt == "new":
                        raise
                    self._keep(self._repaired(doubted=attempt == "repaired"))
                except _TROUBLE as final:
                    self._degrade(final)
            except BaseException:
                database.settle()
                raise
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
            with strange_is_broken(), closing(sqlite3.connect(uri, timeout=0, uri=True)) as connection:
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

    def _read(self, database: Database, key: str) -> str | None:
        try:
            with strange_is_broken():
                value: str | None = database.get(key)
                return value
        except sqlite3.Error as error:
            if _unavailable(error) or _code(error) in _CORRUPT:
                raise
            self.report(f"{self.directory}: what is stored under {key!r} is ignored: {error!s:.200}")
            return None

    def _open(self) -> Database | None:
        if self._pid != os.getpid():
            _LEFT.append(self._database)
            self._database, self._lock, self._pid = None, threading.Lock(), os.getpid()
        if self._database is not None and self._file != self._identity():
            self.report(f"{self.directory / DBNAME} was deleted or replaced in use: a new one is started")
            _LEFT.append(self._database)
            self._database = None
        if self._database is None and self._memory is None:
            with self._lock:
                if self._database is None and self._memory is None:
                    try:
                        self._keep(self._connected())
                    except _TROUBLE as error:
                        self._degrade(error)
        return self._database if self._memory is None else None

    def _keep(self, database: Database) -> None:
        self._database, self._file = database, self._identity()

    def _identity(self) -> tuple[int, int] | None:
        """Which file has the database's name now."""
        try:
            found = (self.directory / DBNAME).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # nobody can tell
            return self._file
        return found.st_dev, found.st_ino

    def _connected(self) -> Database:
        try:
            return self._connect()
        except _TROUBLE as error:
            if _unavailable(error):
                raise
        return self._repaired()

    def _connect(self) -> Database:
        make_private(self.directory)
        self._regular(*_FILES)
        with strange_is_broken():
            return Database(str(self.directory), timeout=PATIENCE, disk=TextDisk, **SETTINGS)

    def _repaired(self, doubted: bool = False) -> Database:
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


# What SQLite must not close: in a forked child what the parent opened, and what was deleted, since it would delete the
# logs by their names, which may be those of a new database. Kept here, it never does.
_LEFT: list[Database | None] = []


def _sound(database: Database) -> bool:
    """Whether a broken database has been repaired since: it is whole, and takes a row."""
    with strange_is_broken():
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


def _code(error: BaseException) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _unavailable(error: BaseException | None) -> BaseException | None:
    """The error that says that the folder is at fault, if one does; a failed rollback hides the cause."""
    while error is not None:
        if isinstance(error, OSError | diskcache.Timeout) or _code(error) in _UNAVAILABLE:
            return error
        error = error.__context__
    return None
