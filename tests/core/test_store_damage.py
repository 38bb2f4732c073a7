"""The store when its files are damaged, locked, or cannot be written: a warning, and never an error."""

from __future__ import annotations

import gc
import os
import sqlite3
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from stores import plant, put, reopened, set_aside, store

from autoconv.errors import CacheWarning, RecordError
from autoconv.records.store import TextStore

__all__ = ["store"]  # a fixture


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_what_is_no_database_is_set_aside(store: TextStore, content: bytes) -> None:
    store.close()
    for path in store.directory.iterdir():
        path.unlink()
    (store.directory / "cache.db").write_bytes(content)
    again = TextStore(store.directory)
    with pytest.warns(CacheWarning, match="set aside"):
        put(again, "key", "new")
    assert again.get("key") == "new"
    assert again.persistent
    assert [path.read_bytes() for path in set_aside(again)] == [content]
    assert reopened(again).get("key") == "new"


def test_a_schema_that_is_no_text_is_set_aside(store: TextStore) -> None:
    store.close()
    path = store.directory / "cache.db"
    content = path.read_bytes().replace(b"AFTER INSERT ON Cache", b"AFTER INS\xffRT ON Cache")
    path.write_bytes(content)
    again = TextStore(store.directory)
    with pytest.warns(CacheWarning, match="set aside") as caught:
        assert again.get("key") is None  # sqlite3 raises UnicodeDecodeError
    assert len(caught) == 1
    put(again, "key", "new")
    assert again.persistent
    assert [path.read_bytes() for path in set_aside(again)] == [content]
    assert reopened(again).get("key") == "new"


def test_a_connection_that_cannot_be_used_is_closed(store: TextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 complains if nobody does."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def kept(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    store.close()
    path = store.directory / "cache.db"
    path.write_bytes(path.read_bytes().replace(b"AFTER INSERT ON Cache", b"AFTER INS\xffRT ON Cache"))
    monkeypatch.setattr(sqlite3, "connect", kept)
    again = TextStore(store.directory)
    with pytest.warns(CacheWarning, match="set aside"):
        put(again, "key", "new")
    gc.collect()
    *broken, used = opened
    assert broken
    for connection in broken:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
    used.execute("SELECT 1")
    again.close()


def test_a_schema_that_breaks_meanwhile_costs_another_thread_nothing(store: TextStore) -> None:
    assert store.persistent
    path = store.directory / "cache.db"
    plant(store, ("PRAGMA wal_checkpoint(TRUNCATE)", ()))
    path.write_bytes(path.read_bytes().replace(b"AFTER INSERT ON Cache", b"AFTER INS\xffRT ON Cache"))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            put(store, "key", "new")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    with pytest.warns(CacheWarning, match="set aside"):  # noqa: PT031  (the thread warns)
        thread.start()
        thread.join()
    assert not failures
    assert store.get("key") == "new"
    assert store.persistent


def test_a_key_that_is_no_text_hides_no_other(store: TextStore) -> None:
    put(store, "other", "x")
    plant(store, ("UPDATE Cache SET key = CAST(x'6BFF79' AS TEXT) WHERE key = 'key'", ()))
    again = TextStore(store.directory)
    assert list(again) == ["other"]
    assert again.get("other") == "x"
    assert again.persistent
    again.close()


@pytest.mark.parametrize("text", ["\ud800", "x\udcff"])
def test_what_has_no_utf8_is_refused_and_the_database_not_blamed(store: TextStore, text: str) -> None:
    with pytest.raises(RecordError, match="expected Unicode text"):
        put(store, "key", text)
    with pytest.warns(CacheWarning, match="is ignored"):
        assert store.get(text) is None
    with pytest.raises(RecordError, match="expected Unicode text"):
        put(store, text, "value")
    assert store.get("key") == "value"
    assert store.persistent
    assert not set_aside(store)


def test_what_breaks_again_after_it_was_found_whole_is_set_aside(store: TextStore) -> None:
    """SQLite's check, and a row on trial, see nothing wrong with this."""
    plant(store, ("CREATE TRIGGER spoil BEFORE DELETE ON Cache BEGIN SELECT RAISE(ABORT, 'no'); END", ()))
    again = TextStore(store.directory)
    with pytest.warns(CacheWarning, match="set aside") as caught:
        put(again, "key", "new")
    assert len(caught) == 1
    assert again.get("key") == "new"
    assert again.persistent
    assert len(set_aside(again)) == 1
    assert reopened(again).get("key") == "new"


@pytest.mark.parametrize("damage", ["schema", "used", "header", "page", "swap", "cut"])
def test_no_damage_to_the_file_makes_a_method_fail(tmp_path: Path, damage: str) -> None:
    keys = [f"key{i}" for i in range(12)]
    source = TextStore(tmp_path / "source")
    for key in keys:
        put(source, key, key * 300)
    source.close()
    whole = (tmp_path / "source" / "cache.db").read_bytes()
    size = int.from_bytes(whole[16:18], "big")
    for seed in range(20):
        random = Random(f"{damage} {seed}")
        (tmp_path / f"{seed}").mkdir()
        (tmp_path / f"{seed}" / "cache.db").write_bytes(_damaged(whole, size, damage, random))
        store = TextStore(tmp_path / f"{seed}")
        uses: list[Callable[[], object]] = [
            lambda store=store: [store.get(key) for key in keys],  # type: ignore[misc]
            lambda store=store: list(store),  # type: ignore[misc]
            lambda store=store: put(store, "key0", "new"),  # type: ignore[misc]
        ]
        random.shuffle(uses)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for use in uses:
                use()
            put(store, "last", "text")
            assert store.get("last") == "text"
        assert {warning.category for warning in caught} <= {CacheWarning}
        assert all(len(text) < 1100 and text.isprintable() for text in (str(w.message) for w in caught))
        assert len(caught) >= len(set_aside(store))
        store.close()


def _damaged(whole: bytes, size: int, damage: str, random: Random) -> bytes:
    data = bytearray(whole)
    pages = range(0, len(data), size)
    if damage == "cut":
        return whole[: random.randrange(len(whole))]
    if damage in ("page", "swap"):
        one, other = random.choice(pages), random.choice(pages)
        data[one : one + size] = random.randbytes(size) if damage == "page" else whole[other : other + size]
        if damage == "swap":
            data[other : other + size] = whole[one : one + size]
        return bytes(data)
    places = range({"schema": size, "header": 100, "used": len(data)}[damage])
    used = [i for i in places if data[i]]
    for _ in range(random.choice([1, 2, 5])):
        data[random.choice(used)] = random.randrange(256)
    return bytes(data)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this platform")
@pytest.mark.parametrize("name", ["cache.db", "cache.db-wal", "cache.db-shm", "cache.db-journal"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(store: TextStore, name: str) -> None:
    store.close()
    (store.directory / name).unlink(missing_ok=True)
    os.mkfifo(store.directory / name)
    again = TextStore(store.directory)
    with pytest.warns(CacheWarning, match=rf"{name}: expected a regular file, got p.*this process only"):
        put(again, "new", "text")
    assert again.get("new") == "text"
    assert again.get("key") == (None if name == "cache.db" else "value")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_database_is_set_aside(store: TextStore, share: float) -> None:
    for i in range(200):
        put(store, f"key{i}", "x" * 2000)
    store.close()
    path = store.directory / "cache.db"
    os.truncate(path, int(path.stat().st_size * share))
    again = TextStore(store.directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for i in range(200):
            assert again.get(f"key{i}") in (None, "x" * 2000)
    assert again.persistent
    assert len(set_aside(again)) == 1
    for i in range(200):
        put(again, f"key{i}", "new")
    assert all(reopened(again).get(f"key{i}") == "new" for i in range(0, 200, 20))


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    (tmp_path / "cache.db").touch()
    store = TextStore(tmp_path)
    put(store, "key", "value")
    assert reopened(store).get("key") == "value"


def test_a_folder_that_cannot_be_costs_persistence_and_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = TextStore(tmp_path / "file" / "cache")
    with pytest.warns(CacheWarning, match="this process only"):
        assert store.get("key") is None
    put(store, "key", "value")  # without another warning, which would be an error here
    store.update("key", lambda text: f"{text}, changed")
    assert store.get("key") == "value, changed"
    assert list(store) == ["key"]
    assert not store.persistent


def test_a_folder_that_cannot_be_written_is_still_read(store: TextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def refuse(path: str, *arguments: Any, **options: Any) -> sqlite3.Connection:
        """As SQLite in such a folder: what may change cannot be read, since that takes files beside it."""
        return connect(path if "immutable" in path else "/nowhere/cache.db", *arguments, **options)

    put(store, "other", "more")
    plant(store, ("INSERT INTO Cache (key, raw, mode, value) VALUES (?, 1, 1, ?)", ("strange", b"\xff")))
    monkeypatch.setattr(sqlite3, "connect", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    again = TextStore(store.directory)
    assert (again.get("key"), again.get("other")) == ("value", "more")
    with pytest.warns(CacheWarning, match="unable to open database file: tuning is remembered by this process only"):
        assert again.get("strange") is None
    assert sorted(again) == ["key", "other"]
    put(again, "key", "new")
    assert (again.get("key"), again.get("other")) == ("new", "more")


def test_a_disk_that_fills_up_costs_persistence_and_not_the_database(
    store: TextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(error: sqlite3.OperationalError) -> sqlite3.OperationalError:
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        return error

    def refuse(*arguments: object) -> None:
        database._sql("ROLLBACK")  # as SQLite does by itself, so that diskcache's own rollback fails
        raise full(sqlite3.OperationalError("database or disk is full"))

    assert store.persistent
    database: Any = store._database
    monkeypatch.setattr(database, "_row_insert", refuse)
    with pytest.warns(CacheWarning, match="disk is full"):
        put(store, "other", "value")
    assert store.get("other") == "value"
    assert store.get("key") == "value"  # though it stands in the log only
    assert not store.persistent
    assert not set_aside(store)
    assert reopened(store).get("key") == "value"


def test_a_database_that_stays_locked_costs_persistence(store: TextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoconv.records.store.PATIENCE", 0.05)
    again = reopened(store)
    assert again.persistent
    with closing(sqlite3.connect(store.directory / "cache.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.warns(CacheWarning, match="this process only"):
            put(again, "other", "value")
    assert again.get("other") == "value"
