"""Results that are added line by line to a file, as JSON: whatever ends the process, those before stay."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def read(path: Path) -> list[Any]:
    """The values of all whole lines; one that was cut short is none, and a file that is not there has none."""
    found: list[Any] = []
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


@contextmanager
def adding(path: Path) -> Iterator[Callable[[Any], None]]:
    """What adds a value to a file, at once and for good."""
    with path.open("a+b") as file:

        def add(value: Any) -> None:
            file.write(json.dumps(value).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # a line was cut short
                file.write(b"\n")
        yield add
