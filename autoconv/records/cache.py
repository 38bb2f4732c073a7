"""`TuningCache`: what was measured, remembered: the user's database over the records that are shipped."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autoconv.errors import PlanError, RecordError
from autoconv.paths import cache_folder, shipped, temporary_folder
from autoconv.records.schema import SCHEMA, Race, Record
from autoconv.records.store import TextStore

KIND = "autoconv-records"
LARGEST_FILE = 1 << 26  # bytes of a file of records
SYSTEM = shipped("cache")

_OTHERS = re.compile("[^A-Za-z0-9]+")


@dataclass(frozen=True)
class ImportReport:
    """What became of a file's records: `taken` are new, `merged` added races to known ones, `known` added none.

    `refused` gives the reasons, one line for each record that was.
    """

    taken: int
    merged: int
    known: int
    refused: tuple[str, ...]


class TuningCache:
    """The records of layers on devices.

    Nothing on the disk makes a method fail: an invalid record is a miss, reported once by a
    `CacheWarning` and replaced by the next `add`; where the folder cannot be used, this process alone
    remembers. Threads, forked children and other processes may share a folder.

    Parameters
    ----------
    directory : path, optional
        Of the user's database: `AUTOCONV_CACHE_DIR`, else the platform's folder for caches, unless given.
    system : path or None
        Folder of read-only files of records; those that are shipped unless given. None: no such folder.

    Raises
    ------
    RecordError
        When no folder could have that name.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     cache = TuningCache(folder, system=None)
    ...     print(cache.persistent, len(list(cache.records())))
    ...     cache.close()
    True 0
    """

    def __init__(self, directory: Path | str | None = None, system: Path | str | None = SYSTEM) -> None:
        self.directory = cache_folder(directory)
        self.system = None if system is None else Path(system)
        self._store = TextStore(self.directory)
        self._shipped: dict[str, dict[str, object]] = {}  # by device and layer, as read
        self._loaded: dict[str, tuple[str | None, Record | None]] = {}  # by key, with the text it was read from

    @property
    def persistent(self) -> bool:
        """Whether what is added outlives this process."""
        return self._store.persistent

    def load(self, layer_key: str, device_key: str) -> Record | None:
        """What is known of a layer on a device; the user's races count as newer than the shipped ones.

        Parameters
        ----------
        layer_key, device_key : str
            `ConvLayer.key()` and `Device.key`.

        Returns
        -------
        Record or None
            None where nothing valid is known.
        """
        key = _key(layer_key, device_key)
        text = self._store.get(key)
        if key not in self._loaded or self._loaded[key][0] != text:
            own = self._parsed(text, layer_key, device_key)
            system = self._system_record(layer_key, device_key)
            both = own.over(system) if own and system else own or system
            self._loaded[key] = text, both
        return self._loaded[key][1]

    def add(self, layer_key: str, device_key: str, race: Race) -> Record:
        """Remember one more race.

        Parameters
        ----------
        layer_key, device_key : str
            `ConvLayer.key()` and `Device.key`.
        race : Race

        Returns
        -------
        Record
            All that is known thereafter.

        Raises
        ------
        RecordError
            When the race, the layer or the device is not one that could be read back.
        """
        new = Record(layer_key, device_key, (race,))
        Record.from_json(new.to_json())

        def with_race(text: str | None) -> str:
            own = self._parsed(text, layer_key, device_key)
            return _text(own.with_race(race) if own else new)

        self._store.update(_key(layer_key, device_key), with_race)
        return self.load(layer_key, device_key) or new

    def records(self) -> Iterator[Record]:
        """Every record, sorted by device and layer.

        Yields
        ------
        Record
        """
        pairs = set()
        for key in self._store:
            schema, _, rest = key.partition("|")
            layer_key, _, device_key = rest.partition("|")
            if schema == str(SCHEMA):
                pairs.add((device_key, layer_key))
        for path in self._system_files():
            pairs |= {(r["device"], r["layer"]) for r in self._read_system(path)}
        for device_key, layer_key in sorted(pairs):
            record = self.load(layer_key, device_key)
            if record is not None:
                yield record

    def export(self, path: Path | str, device: str | None = None) -> int:
        """Write the records, or those of one device, as JSON, one record per line.

        A file is replaced as a whole or not at all.

        Parameters
        ----------
        path : path or str
            A file; or a folder, into which go files of one device each, named as in a `system` folder.
        device : str, optional
            The key of a device.

        Returns
        -------
        int
            How many records were written.

        Raises
        ------
        OSError
            When a file cannot be written.
        """
        path = Path(path)
        records = [record for record in self.records() if device in (None, record.device)]
        if path.is_dir():
            for key in dict.fromkeys(record.device for record in records):
                _write(path / file_name(key), [record for record in records if record.device == key])
        else:
            _write(path, records)
        return len(records)

    def import_(self, path: Path | str) -> ImportReport:
        """Merge a file that `export` wrote, here or elsewhere. It is not trusted: every record is checked.

        Parameters
        ----------
        path : path or str

        Returns
        -------
        ImportReport
            How many records were taken, merged or known, and why others were refused.

        Raises
        ------
        RecordError
            When the file cannot be read, or is no file of records of this version.
        """
        counts = {"taken": 0, "merged": 0, "known": 0}
        refused = []
        for number, data in enumerate(_read(Path(path)), 1):
            try:
                record = Record.from_json(data)
                _check_dates(record)
            except RecordError as error:
                refused.append(f"{path}: record {number}: {error}")
                continue
            counts[self._merge(record)] += 1
        return ImportReport(**counts, refused=tuple(refused))

    @contextmanager
    def timing_lock(self, device_key: str, timeout: float | None = None) -> Iterator[None]:
        """Be the only one on this machine, among those that share the folder, to time on a device.

        One thread may hold it several times over.

        Parameters
        ----------
        device_key : str
            `Device.key`.
        timeout : float, optional
            Seconds to wait; for ever unless given.

        Yields
        ------
        None

        Raises
        ------
        PlanError
            When another process still holds it after `timeout` seconds.
        """
        from filelock import FileLock, Timeout  # slow to import, and needed only to time

        # A folder may be shared by machines of a kind, which do not disturb each other.
        name = file_name(f"{device_key}@{platform.node()}", ".lock")
        for folder in (self.directory, temporary_folder()):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = FileLock(folder / name, is_singleton=True)
                lock.acquire(timeout=-1 if timeout is None else timeout)
                break
            except Timeout:
                raise PlanError(f"another process has been timing on {device_key} for over {timeout:g} s") from None
            except (OSError, NotImplementedError) as error:
                trouble = error
        else:
            self._store.report(f"{trouble}: two processes may time on {device_key} at once, and disturb each other")
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        """Close this thread's connection to the database; the next use opens another."""
        self._store.close()

    def _merge(self, record: Record) -> str:
        outcome = "known"

        def merged(text: str | None) -> str:
            nonlocal outcome
            own = self._parsed(text, record.layer, record.device)
            both = own.merge(record) if own else record
            outcome = "taken" if own is None else "known" if both == own else "merged"
            return _text(both)

        self._store.update(_key(record.layer, record.device), merged)
        return outcome

    def _parsed(self, text: str | None, layer_key: str, device_key: str) -> Record | None:
        if text is None:
            return None
        try:
            return _checked(_json(text), layer_key, device_key)
        except RecordError as error:
            self._store.report(f"{self.directory}: the record of {layer_key} is ignored: {error}")
            return None

    def _system_record(self, layer_key: str, device_key: str) -> Record | None:
        if self.system is None:
            return None
        path = self.system / file_name(device_key)
        if device_key not in self._shipped:
            self._shipped[device_key] = {r["layer"]: r for r in self._read_system(path) if r["device"] == device_key}
        data = self._shipped[device_key].get(layer_key)
        try:
            return _checked(data, layer_key, device_key) if data is not None else None
        except RecordError as error:
            self._store.report(f"{path}: the record of {layer_key} is ignored: {error}")
            return None

    def _system_files(self) -> list[Path]:
        try:
            return sorted(self.system.glob("*.json")) if self.system else []
        except OSError as error:
            self._store.report(f"{error}: ignored")
            return []

    def _read_system(self, path: Path) -> list[dict[str, Any]]:
        """What looks like records in a file; their contents are checked when they are asked for."""
        try:
            _check_regular(path)
            records = _read(path)
        except FileNotFoundError:
            return []
        except (RecordError, OSError) as error:
            self._store.report(f"{error}: ignored")
            return []
        named = [r for r in records if isinstance(r, dict)]
        return [r for r in named if isinstance(r.get("layer"), str) and isinstance(r.get("device"), str)]


def file_name(device_key: str, suffix: str = ".json") -> str:
    """The name of the file, in a folder of records, that holds those of a device."""
    slug = _OTHERS.sub("-", device_key).strip("-")[:80]
    return f"{slug}-{hashlib.sha256(device_key.encode()).hexdigest()[:8]}{suffix}"


def _key(layer_key: str, device_key: str) -> str:
    return f"{SCHEMA}|{layer_key}|{device_key}"


def _text(record: Record) -> str:
    return json.dumps(record.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from None


def _checked(data: object, layer_key: str, device_key: str) -> Record:
    record = Record.from_json(data)
    if (record.layer, record.device) != (layer_key, device_key):
        raise RecordError(f"it is about {record.layer} on {record.device}")
    return record


def _check_dates(record: Record) -> None:
    """Refuse races from the future: they would be the newest for good."""
    latest = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for race in record.races:
        if race.when > latest:
            raise RecordError(f"a race was run at {race.when}, which is yet to come")


def _check_regular(path: Path) -> None:
    """Refuse a pipe, say: to open it would wait for ever."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise RecordError(f"{path}: expected a regular file, got {stat.filemode(mode)}")


def _read(path: Path) -> list[object]:
    """The records in a file, unchecked."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise RecordError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > LARGEST_FILE:
        raise RecordError(f"{path}: larger than {LARGEST_FILE >> 20} MiB")
    try:
        data = _json(content.decode())
    except (RecordError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND or not isinstance(data.get("records"), list):
        raise RecordError(f"{path}: not a file of tuning records, as `autoconv export` writes them")
    if data.get("schema") != SCHEMA:
        raise RecordError(f"{path}: of schema {data.get('schema')!r:.20}; this version reads {SCHEMA}")
    records: list[object] = data["records"]
    return records


def _write(path: Path, records: list[Record]) -> None:
    lines = ",\n".join(map(_text, records))
    text = f'{{"schema":{SCHEMA},"kind":"{KIND}","records":[\n{lines}\n]}}\n'
    if path.exists() and not path.is_file():  # a device or a pipe, which nothing may take the place of
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()  # a link stays one
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary file
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()
