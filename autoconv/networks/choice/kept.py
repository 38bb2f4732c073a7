"""What was measured of networks and their parts, kept beside the records of layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from types import TracebackType
from typing import Any

from autoconv.device import Device
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits
from autoconv.records.store import TextStore


class Kept:
    """Facts by the text of what they are of, which count as long as the code and the compiler measured are today's.

    Parameters
    ----------
    cache : TuningCache
        Beside whose records they are.
    device : Device
        On which they were measured.
    kind : str
        Of the facts.
    version : str
        Of the code.
    """

    def __init__(self, cache: TuningCache, device: Device, kind: str, version: str) -> None:
        self._store, self._device, self._kind = TextStore(cache.directory), device, kind
        software = " ".join(f"{name}={number}" for name, number in sorted(device.versions.items()))
        self._version = f"{version} {software}"

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._store.close()

    def get(self, what: str) -> dict[str, Any]:
        """What is known; nothing where today's code was not measured, or where it cannot be read."""
        try:
            record: dict[str, Any] = json.loads(self._store.get(self._key(what)) or "{}")
            return record if record["version"] == self._version else {}
        except (LookupError, RecursionError, TypeError, ValueError):
            return {}

    def keep(self, what: str, **facts: Any) -> None:
        """Keep facts, in plain JSON types, in the place of older ones."""
        record = json.dumps({"version": self._version, **facts})
        self._store.update(self._key(what), lambda old: record)

    def _key(self, what: str) -> str:
        return f"{self._kind}|{hashlib.sha256(what.encode()).hexdigest()}|{self._device.key}"


def told(options: Mapping[str, Any], *more: str) -> list[str]:
    """The limits among options for `plan`, and others of these names, as text of what facts are of."""
    names = (*more, *(field.name for field in fields(Limits)))
    return [f"{name}={options[name]}" for name in names if options.get(name) is not None]
