"""The store: text only, whatever a stranger planted, shared by processes and threads."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from diskcache.core import DBNAME
from stores import plant, put, reopened, set_aside, store

from autoconv.errors import CacheWarning, RecordError
from autoconv.records import store as module
from autoconv.records.database import LARGEST, Closer
from autoconv.records.store import LONGEST, TextStore

__all__ = ["store"]  # a fixture


# --- what it is for -------------------------------------------------------------------------------------------


def test_text_is_kept_from_one_process_to_the_next(store: TextStore) -> None:
    put(store, "other", "täxt\n" * 1000)
    assert store.persistent
    assert store.get("missing") is None
    assert sorted(store) == ["key", "other"]
    again = reopened(store)
    assert again.get("key") == "value"
    assert again.get("other") == "täxt\n" * 1000


def test_what_is_plainly_there_is_read_without_setting_diskcache_up(
    store: TextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = reopened(store)
    monkeypatch.setattr(module, "Database", lambda *_, **__: pytest.fail("a whole database was opened to read a row"))
    assert again.get("key") == "value"


def test_nothing_is_opened_before_it_is_needed(tmp_path: Path) -> None:
    TextStore(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_change_that_raises_changes_nothing(store: TextStore) -> None:
    def change(text: str | None) -> str:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        store.update("key", change)
    assert store.get("key") == "value"
    put(store, "key", "next")
    assert store.get("key") == "next"


def test_long_texts_are_kept_inline_and_too_long_ones_refused(store: TextStore) -> None:
    put(store, "key", "ä" * LONGEST)
    assert reopened(store).get("key") == "ä" * LONGEST
    with pytest.raises(RecordError, match="expected at most"):
        put(store, "key", "x" * (LONGEST + 1))
    assert store.get("key") == "ä" * LONGEST
    assert store.persistent
    assert [p for p in store.directory.iterdir() if p.is_dir()] == []


# --- what a stranger planted ----------------------------------------------------------------------------------


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.victim),)


UPDATE = "UPDATE Cache SET mode = ?, filename = ?, value = ? WHERE key = 'key'"


def test_the_payload_would_work_on_diskcache_itself(tmp_path: Path) -> None:
    """Else the tests below would prove nothing."""
    import diskcache

    with diskcache.Cache(tmp_path / "cache") as cache:
        cache["key"] = Payload(tmp_path / "executed")
        assert cache["key"] is None
    assert (tmp_path / "executed").is_dir()


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 99, "4", None])
@pytest.mark.parametrize("where", ["inline", "file"])
def test_a_planted_row_runs_reads_and_removes_nothing(
    store: TextStore, tmp_path: Path, mode: object, where: str
) -> None:
    payload = pickle.dumps(Payload(tmp_path / "executed"))
    outside = tmp_path / "outside.txt"
    outside.write_bytes(payload)
    row = (mode, None, payload) if where == "inline" else (mode, "../outside.txt", None)
    plant(store, (UPDATE, row))
    again = TextStore(store.directory)
    with pytest.warns(CacheWarning, match="is ignored"):
        assert again.get("key") is None
    assert again.get("key") is None  # reported once: a second warning would be an error here
    put(again, "key", "new")
    assert again.get("key") == "new"
    assert not (tmp_path / "executed").exists()
    assert outside.read_bytes() == payload
    assert not set_aside(again)
    again.close()


def test_no_file_is_removed_by_a_stored_name(store: TextStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.touch()
    assert store.persistent
    database: Any = store._database
    database.disk.remove("../outside.txt")
    assert outside.exists()


@pytest.mark.parametrize("mode", [0, 2, 3, 4])
def test_text_that_claims_to_be_something_else_is_a_miss(store: TextStore, mode: int) -> None:
    plant(store, ("UPDATE Cache SET mode = ?", (mode,)))
    with pytest.warns(CacheWarning, match="is ignored"):
        assert store.get("key") is None


@pytest.mark.parametrize("value", [7, 1.5, b"value", "x" * (LARGEST + 1)])
def test_what_is_not_text_or_too_long_is_a_miss(store: TextStore, value: object) -> None:
    plant(store, ("UPDATE Cache SET value = ?", (value,)))
    with pytest.warns(CacheWarning, match="is ignored"):
        assert store.get("key") is None
    put(store, "key", "new")
    assert store.get("key") == "new"


def test_bytes_that_are_no_text_are_a_miss(store: TextStore) -> None:
    plant(store, ("UPDATE Cache SET value = CAST(x'FFFE' AS TEXT), filename = CAST(x'FF' AS TEXT)", ()))
    with pytest.warns(CacheWarning, match="is ignored"):
        assert store.get("key") is None
    put(store, "key", "new")
    assert store.get("key") == "new"


def test_planted_keys_are_not_unpickled(store: TextStore, tmp_path: Path) -> None:
    payload = pickle.dumps(Payload(tmp_path / "executed"))
    plant(store, ("INSERT INTO Cache (key, raw, mode, value) VALUES (?, 0, 1, 'x'), (5, 1, 1, 'x')", (payload,)))
    assert list(store) == ["key"]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("expiry", [0.0, 1e18, float("inf")])
def test_rows_that_expire_are_replaced_and_take_no_file_along(store: TextStore, tmp_path: Path, expiry: float) -> None:
    outside = tmp_path / "outside.txt"
    outside.touch()
    plant(store, ("UPDATE Cache SET expire_time = ?, filename = '../outside.txt'", (expiry,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert store.get("key") is None
        put(store, "key", "new")
    put(store, "other", "new")
    assert store.get("key") == "new"
    assert outside.exists()


SETTINGS: dict[str, object] = {
    "cull_limit": 10**6,
    "size_limit": 0,
    "eviction_policy": "least-recently-used",
    "statistics": 1,
    "tag_index": 1,
    "disk_min_file_size": 0,
    "disk_fetch": "broken",
    "disk__directory": "/",
    "disk_made_up": 1,
    "sqlite_journal_mode": "off",
    "sqlite_locking_mode": "exclusive",
    "sqlite_query_only": 1,
    "sqlite_writable_schema": 1,
    "sqlite_user_version": "7; DROP TABLE Cache",
    "sqlite_no such pragma(": "'",
    "_directory": "/nonexistent",
    "_disk": None,
    "_timeout": "text",
    "get": "text",
    "count": "text",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_planted_settings_have_no_say(store: TextStore, name: str) -> None:
    plant(store, ("INSERT OR REPLACE INTO Settings VALUES (?, ?)", (name, SETTINGS[name])))
    again = TextStore(store.directory)
    assert again.get("key") == "value"
    put(again, "key", "new")
    put(again, "other", "x" * 40_000)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((again.get("key"), again.get("other"))))
    thread.start()  # its connection reads the settings anew
    thread.join()
    assert seen == [("new", "x" * 40_000)]
    assert sorted(again) == ["key", "other"]
    assert not set_aside(again)
    assert [p for p in again.directory.iterdir() if p.is_dir()] == []
    again.close()


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER spoil BEFORE INSERT ON Cache BEGIN SELECT RAISE(ABORT, 'no'); END",
        "DROP TABLE Cache",
        "ALTER TABLE Cache RENAME COLUMN value TO worth",
        "ALTER TABLE Settings ADD COLUMN more",
    ],
)
def test_a_database_of_another_shape_is_set_aside(store: TextStore, statement: str) -> None:
    put(store, "other", "x")
    plant(store, (statement, ()))
    again = TextStore(store.directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        put(again, "key", "new")
    assert again.get("key") == "new"
    assert again.persistent
    assert {w.category for w in caught} <= {CacheWarning}
    assert len(set_aside(again)) == ("DROP" not in statement)  # a missing table is simply made again
    again.close()


# --- together -------------------------------------------------------------------------------------------------


def append(directory: Path, mark: str, times: int) -> None:
    store = TextStore(directory)
    for _ in range(times):
        store.update("log", lambda text: (text or "") + mark)
    if not store.persistent:
        raise SystemExit(1)


def test_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=append, args=(tmp_path, mark, 40)) for mark in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    log = TextStore(tmp_path).get("log")
    assert log is not None
    assert sorted(log) == ["a"] * 40 + ["b"] * 40


def test_threads_lose_nothing_of_each_other(store: TextStore) -> None:
    def work(mark: str) -> None:
        for _ in range(30):
            store.update("log", lambda text: (text or "") + mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.get("log") or "") == sorted("abcd" * 30)


def test_every_thread_has_a_connection_and_what_closes_it(store: TextStore) -> None:
    def connections() -> list[object]:
        store.update("log", lambda text: "")
        database = store._database
        assert database is not None
        return [database._con, database._local.closer.connection]

    seen = [connections()]
    thread = threading.Thread(target=lambda: seen.append(connections()))
    thread.start()
    thread.join()
    assert [mine is closers for mine, closers in seen] == [True, True]
    assert seen[0][0] is not seen[1][0]


@pytest.mark.parametrize("deleted", ["folder", "database", "replaced"])
def test_what_was_deleted_in_use_is_started_anew(tmp_path: Path, deleted: str) -> None:
    folder = tmp_path / "cache"
    store = TextStore(folder)
    store.update("a", lambda old: "1")
    (folder if deleted == "folder" else folder / DBNAME).rename(tmp_path / "away")
    if deleted == "replaced":
        TextStore(folder).update("b", lambda old: "2")
    with pytest.warns(CacheWarning, match="was deleted or replaced in use: a new one is started"):
        store.update("c", lambda old: "3")
    again = TextStore(folder)
    assert [again.get(key) for key in "abc"] == [None, "2" if deleted == "replaced" else None, "3"]
    assert store.persistent


def test_an_interrupt_within_a_transaction_locks_nobody_out(store: TextStore) -> None:
    store.update("a", lambda old: "1")
    database: Any = store._database

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name == "_transact" and database._con.in_transaction:
            sys.settrace(None)
            raise KeyboardInterrupt  # between two lines of diskcache
        return interrupt

    tracer = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.update("b", lambda old: "2")
    finally:
        sys.settrace(tracer)
    assert not database._con.in_transaction
    TextStore(store.directory).update("c", lambda old: "3")
    assert [store.get(key) for key in "abc"] == ["1", None, "3"]


@pytest.mark.parametrize("own", [True, False])
def test_a_connection_is_closed_by_the_process_that_opened_it(tmp_path: Path, own: bool) -> None:
    connection = sqlite3.connect(tmp_path / "file")
    closer = Closer()
    closer.connection, closer.pid = connection, os.getpid() if own else os.getppid()
    del closer
    with pytest.raises(sqlite3.ProgrammingError, match="closed") if own else closing(connection):
        connection.execute("SELECT 1")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_parent_and_forked_child_share_the_store(store: TextStore) -> None:
    script = f"""
import os
from pathlib import Path
from autoconv.records.store import TextStore
store = TextStore(Path({str(store.directory)!r}))
store.update("log", lambda text: "start ")
parents = store._database
child = os.fork()
assert store.get("log").startswith("start ")
assert (store._database is parents) == (child > 0)  # SQLite forbids a child even to close it
for _ in range(30):
    store.update("log", lambda text: text + ("c" if child == 0 else "p"))
if child == 0:
    os._exit(0 if store.persistent else 1)
_, status = os.waitpid(child, 0)
log = store.get("log")
assert status == 0 and store.persistent
assert sorted(log.removeprefix("start ")) == ["c"] * 30 + ["p"] * 30, log
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this platform")
def test_a_process_killed_while_it_writes_leaves_a_whole_database(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from autoconv.records.store import TextStore
store = TextStore(Path({str(tmp_path)!r}))
store.update("log", lambda text: text or "")
print("ready", flush=True)
while True:
    store.update("log", lambda text: text + "x" * 1000)
    print("more", flush=True)
"""
    length = 0
    for i in range(4):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for expected in [b"ready", *[b"more"] * (1 + 5 * i)]:
                assert writer.stdout.readline().strip() == expected
            writer.kill()
        store = TextStore(tmp_path)
        log = store.get("log")
        assert log is not None
        assert set(log) <= {"x"}
        assert len(log) % 1000 == 0
        assert len(log) >= length + 1000 * (1 + 5 * i)
        length = len(log)
        put(store, "after", str(i))
        assert reopened(store).get("after") == str(i)
    assert not set_aside(store)
