"""`TuningCache`: what was measured, remembered: the user's database over the records that are shipped."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autoconv.errors import PlanError, RecordError
from autoconv.paths import cache_folder, make_private, shipped, temporary_folder
from autoconv.records.files import check_regular, file_name, parsed, read, text_of, write
from autoconv.records.schema import SCHEMA, Race, Record
from autoconv.records.store import TextStore
from autoconv.records.turns import take_turn

SYSTEM = shipped("cache")


@dataclass(frozen=True)
class ImportReport:
    """What became of the records of a file.

    Attributes
    ----------
    taken : int
        Records of layers that were new.
    merged : int
        Records that added races to known ones.
    known : int
        Records that added none.
    refused : tuple of str
        Why the others were refused, a line for each.
    """

    taken: int
    merged: int
    known: int
    refused: tuple[str, ...]


class TuningCache:
    """What was measured, remembered: a record for every layer on every device.

    Nothing on the disk makes a method fail: an invalid record is a miss, reported once by a
    `CacheWarning` and replaced by the next `add`; where the folder cannot be used, this process alone
    remembers. Threads, forked children and other processes may share a folder.

    Parameters
    ----------
    directory : path, optional
        Of the user's database: `AUTOCONV_CACHE_DIR`, else the platform's folder for caches, unless given.
    system : path or None
        Folder of read-only files of records; those that are shipped unless given. None: no such folder.

    Attributes
    ----------
    lost : bool
        Whether a race that was added ends with this process, as it could not be written.

    Raises
    ------
    RecordError
        When no folder could have such a name, or it has the name of a variable of the environment in it.

    Examples
    --------
    >>> import autoconv, tempfile
    >>> layer = autoconv.ConvLayer(N=1, C=2, H=5, W=5, K=3, R=3, S=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = TuningCache(folder, system=None)
    ...     made = autoconv.plan(layer, cache=cache, exact=True)
    ...     (record,) = cache.records()
    ...     cache.close()
    >>> record.layer == layer.key(), record.facts().keys() == set(map(autoconv.Candidate.parse, made.facts))
    (True, True)
    """

    def __init__(self, directory: Path | str | None = None, system: Path | str | None = SYSTEM) -> None:
        self.directory = cache_folder(directory)
        self.system = None if system is None else Path(system)
        self.store = TextStore(self.directory)  # of these records, and of what else is kept beside them
        self.lost = False
        self._shipped: dict[str, dict[str, object]] = {}  # by device and layer, as read
        self._loaded: dict[str, tuple[str | None, Record | None]] = {}  # by key, with the text it was read from

    @property
    def persistent(self) -> bool:
        """Whether what is added outlives this process."""
        return self.store.persistent

    def load(self, layer_key: str, device_key: str) -> Record | None:
        """What is known of a layer on a device; the user's races count as newer than the shipped ones.

        Parameters
        ----------
        layer_key : str
            `ConvLayer.key()`.
        device_key : str
            `Device.key`.

        Returns
        -------
        Record or None
            None where nothing is known.
        """
        key = _key(layer_key, device_key)
        text = self.store.get(key)
        if key not in self._loaded or self._loaded[key][0] != text:
            own = self._parsed(text, layer_key, device_key)
            system = self._system_record(layer_key, device_key)
            both = own.over(system) if own and system else own or system
            self._loaded[key] = text, both
        return self._loaded[key][1]

    def add(self, layer_key: str, device_key: str, race: Race, *, newest: bool = True) -> Record:
        """Remember one more race.

        Parameters
        ----------
        layer_key, device_key : str
            As for `load`.
        race : Race
            One with the id of a known race takes its place.
        newest : bool
            Whether one of a new id is the newest, or older than all that are known.

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
            return text_of(own.with_race(race, newest=newest) if own else new)

        self.store.update(_key(layer_key, device_key), with_race)
        self.lost |= newest and not self.persistent  # an older one has measured nothing now
        return self.load(layer_key, device_key) or new

    def records(self) -> Iterator[Record]:
        """Every record, the user's and the shipped, sorted by device and layer.

        Yields
        ------
        Record
        """
        for device_key, layer_key in sorted(self._pairs()):
            record = self.load(layer_key, device_key)
            if record is not None:
                yield record

    def is_own(self, record: Record) -> bool:
        """Whether the user's database has races of a record, beside copies of those that are shipped.

        Parameters
        ----------
        record : Record

        Returns
        -------
        bool
        """
        own = self._parsed(self.store.get(_key(record.layer, record.device)), record.layer, record.device)
        system = self._system_record(record.layer, record.device)
        shipped = {race.id for race in system.races} if system is not None else set()
        return own is not None and any(race.id not in shipped for race in own.races)

    def layers(self, device_key: str) -> list[str]:
        """The layers of which there are records of a device.

        Parameters
        ----------
        device_key : str
            `Device.key`.

        Returns
        -------
        list of str
            Their keys, sorted.
        """
        own = {layer_key for device, layer_key in self._own_pairs() if device == device_key}
        return sorted(own | self._shipped_for(device_key).keys())

    def _own_pairs(self) -> set[tuple[str, str]]:
        """Device and layer of every record in the user's database."""
        keys = (key.partition("|") for key in self.store)
        rests = (rest.partition("|") for schema, _, rest in keys if schema == str(SCHEMA))
        return {(device_key, layer_key) for layer_key, _, device_key in rests}

    def _pairs(self) -> set[tuple[str, str]]:
        """Device and layer of every record."""
        shipped = {(r["device"], r["layer"]) for path in self._system_files() for r in self._read_system(path)}
        return self._own_pairs() | shipped

    def export(self, path: Path | str, device: str | None = None) -> int:
        """Write the user's own records, or those of one device, as JSON, one record per line.

        Races that were shipped are in them, as the user's build upon those; records of nothing else are left out.

        Parameters
        ----------
        path : path
            Of the file, which is replaced as a whole or not at all; or of a folder, into which files of one device
            each go, named as those of a `system` folder.
        device : str, optional
            The key of the only device whose records are written.

        Returns
        -------
        int
            How many records were written.

        Raises
        ------
        OSError
            When a file cannot be written, or a folder is named, as by a slash at the end, that is not there.
        """
        if str(path).endswith(os.sep) and not Path(path).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path = Path(path)
        own = [record for record in self.records() if device in (None, record.device) and self.is_own(record)]
        records = [record.merge(record) for record in own]  # in the order they were run, as many as a file may have
        if path.is_dir():
            for key in dict.fromkeys(record.device for record in records):
                write(path / file_name(key), [record for record in records if record.device == key])
        else:
            write(path, records)
        return len(records)

    def import_(self, path: Path | str) -> ImportReport:
        """Merge a file that `export` wrote, here or elsewhere. It is not trusted: every record is checked.

        Parameters
        ----------
        path : path

        Returns
        -------
        ImportReport
            How many records were new, and which were refused and why.

        Raises
        ------
        RecordError
            When the file cannot be read, or is no file of records of this version.
        """
        counts = {"taken": 0, "merged": 0, "known": 0}
        refused = []
        for number, data in enumerate(read(Path(path)), 1):
            try:
                record = Record.from_json(data)
                _check_dates(record)
                counts[self._merge(record)] += 1
            except RecordError as error:
                refused.append(f"{path}: record {number}: {error}")
        return ImportReport(**counts, refused=tuple(refused))

    @contextmanager
    def timing_lock(self, device_key: str, timeout: float | None = None) -> Iterator[None]:
        """Be the only one on this machine, among those that share the folder, to time on a device.

        One thread may hold it several times over. Who waits for long is told for whom, in the log "autoconv". Where no
        lock can be made, one warning says so.

        Parameters
        ----------
        device_key : str
        timeout : float, optional
            Seconds to wait for another process; for ever unless given.

        Yields
        ------
        None
            While it is held.

        Raises
        ------
        PlanError
            When another process still holds it after `timeout` seconds.
        """
        from filelock import FileLock, Timeout  # slow to import, and needed only to time

        # A folder may be shared by machines of a kind, which do not disturb each other.
        name = file_name(f"{device_key}@{platform.node()}", ".lock")
        for own in (True, False):
            try:
                folder = self.directory if own else temporary_folder()
                make_private(folder)
                lock = FileLock(folder / name, is_singleton=True)
                take_turn(lock, f"timing on {device_key}", timeout)
                break
            except Timeout:
                raise PlanError(f"another process has been timing on {device_key} for over {timeout:g} s") from None
            except (OSError, NotImplementedError) as error:
                trouble = error
        else:
            self.store.report(f"{trouble}: two processes may time on {device_key} at once, and disturb each other")
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        """Close this thread's connection to the database; the next use opens another."""
        self.store.close()

    def _merge(self, record: Record) -> str:
        outcome = "known"

        def merged(text: str | None) -> str:
            nonlocal outcome
            own = self._parsed(text, record.layer, record.device)
            both = own.merge(record) if own else record
            outcome = "taken" if own is None else "known" if both == own else "merged"
            return text_of(both)

        self.store.update(_key(record.layer, record.device), merged)
        return outcome

    def _parsed(self, text: str | None, layer_key: str, device_key: str) -> Record | None:
        if text is None:
            return None
        try:
            return _checked(parsed(text), layer_key, device_key)
        except RecordError as error:
            self.store.report(f"{self.directory}: the record of {layer_key} is ignored: {error}")
            return None

    def _system_record(self, layer_key: str, device_key: str) -> Record | None:
        data = self._shipped_for(device_key).get(layer_key)
        if self.system is None or data is None:
            return None
        try:
            return _checked(data, layer_key, device_key)
        except RecordError as error:
            self.store.report(f"{self.system / file_name(device_key)}: the record of {layer_key} is ignored: {error}")
            return None

    def _shipped_for(self, device_key: str) -> dict[str, object]:
        """The shipped records of a device by their layers, read once and not checked."""
        if device_key not in self._shipped:
            records = [] if self.system is None else self._read_system(self.system / file_name(device_key))
            self._shipped[device_key] = {r["layer"]: r for r in records if r["device"] == device_key}
        return self._shipped[device_key]

    def _system_files(self) -> list[Path]:
        try:
            return sorted(self.system.glob("*.json")) if self.system else []
        except OSError as error:
            self.store.report(f"{error}: ignored")
            return []

    def _read_system(self, path: Path) -> list[dict[str, Any]]:
        """What looks like records in a file; their contents are checked when they are asked for."""
        try:
            check_regular(path)
            records = read(path)
        except FileNotFoundError:
            return []
        except (RecordError, OSError) as error:
            self.store.report(f"{error}: ignored")
            return []
        named = [r for r in records if isinstance(r, dict)]
        return [r for r in named if isinstance(r.get("layer"), str) and isinstance(r.get("device"), str)]


def _key(layer_key: str, device_key: str) -> str:
    return f"{SCHEMA}|{layer_key}|{device_key}"


def _checked(data: object, layer_key: str, device_key: str) -> Record:
    record = Record.from_json(data)
    if (record.layer, record.device) != (layer_key, device_key):
        raise RecordError(f"expected {layer_key} on {device_key}, got {record.layer} on {record.device}")
    return record


def _check_dates(record: Record) -> None:
    """Refuse races from the future: they would be the newest for good."""
    latest = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for race in record.races:
        if race.when > latest:
            raise RecordError(f"when={race.when}: expected a time that has been, got one that is yet to come")
