"""Files of records: JSON, one record a line, as `export` writes them and folders of shipped records hold them."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from autoconv.common.text import reason
from autoconv.errors import RecordError
from autoconv.paths import write_whole
from autoconv.records.schema import SCHEMA, Record

KIND = "autoconv-records"
LARGEST_FILE = 1 << 28  # bytes: of 20,000 layers and more

_OTHERS = re.compile("[^A-Za-z0-9]+")


def file_name(device_key: str, suffix: str = ".json") -> str:
    """The name of the file, in a folder of records, that holds those of a device."""
    slug = _OTHERS.sub("-", device_key).strip("-")[:80]
    return f"{slug}-{hashlib.sha256(device_key.encode()).hexdigest()[:8]}{suffix}"


def text_of(record: Record) -> str:
    """A record as a line of JSON."""
    return json.dumps(record.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)


def parsed(text: str) -> object:
    """What a text says in JSON; RecordError where it says nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"expected JSON: {error}") from None


def check_regular(path: Path) -> None:
    """Refuse a pipe, say: to open it would wait for ever."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise RecordError(f"{path}: expected a regular file, got {stat.filemode(mode)}")


def read(path: Path) -> list[object]:
    """The records in a file, unchecked."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise RecordError(f"{path}: cannot be read: {reason(error)}") from None
    if len(content) > LARGEST_FILE:
        raise RecordError(f"{path}: expected at most {LARGEST_FILE >> 20} MiB, got a larger file")
    try:
        data = parsed(content.decode())
    except (RecordError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND or not isinstance(data.get("records"), list):
        raise RecordError(f"{path}: expected tuning records, as `autoconv export` writes them, got something else")
    if data.get("schema") != SCHEMA:
        raise RecordError(f"{path}: expected schema {SCHEMA}, as this version writes, got {data.get('schema')!r:.20}")
    records: list[object] = data["records"]
    return records


def write(path: Path, records: Sequence[Record]) -> None:
    """Write a file, as a whole or not at all."""
    lines = ",\n".join(map(text_of, records))
    write_whole(path, f'{{"schema":{SCHEMA},"kind":"{KIND}","records":[\n{lines}\n]}}\n')
