"""A store with one text in it, and ways to change its database behind its back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autoconv.records.store import TextStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TextStore]:
    found = TextStore(tmp_path / "cache")
    found.update("key", lambda _: "value")
    yield found
    found.close()


def put(store: TextStore, key: str, text: str) -> None:
    store.update(key, lambda _: text)


def reopened(store: TextStore) -> TextStore:
    store.close()
    return TextStore(store.directory)


def plant(store: TextStore, *statements: tuple[str, tuple[Any, ...]]) -> None:
    """Change the database behind the store's back."""
    store.close()
    with closing(sqlite3.connect(store.directory / "cache.db")) as connection, connection:
        for statement, values in statements:
            connection.execute(statement, values)


def set_aside(store: TextStore) -> list[Path]:
    return list(store.directory.glob("cache.db.broken-*"))
