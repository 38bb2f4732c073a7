"""What was found of networks and their parts, and what is expected of layers, kept beside the records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from autoconv.device import Device
from autoconv.errors import AutoconvError
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits

T = TypeVar("T")

# What reading facts may raise that are not what today's code keeps: a file of any origin may hold them.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, AutoconvError)


class Kept:
    """Facts by the text of what they are of, which count where the code and the compiler measured are today's.

    Those of other code stay where they are: versions of autoconv, or of its compiler, may share a cache.

    Parameters
    ----------
    cache : TuningCache
        Beside whose records they are: what cannot be written there is remembered by the same process.
    device : Device
        On which they were measured.
    kind : str
        Of the facts.
    version : str
        Of the code.
    """

    def __init__(self, cache: TuningCache, device: Device, kind: str, version: str) -> None:
        self._store, self._device, self._kind = cache.store, device, kind
        software = " ".join(f"{name}={number}" for name, number in sorted(device.versions.items()))
        self._version = f"{version} {software}"

    def get(self, what: str) -> dict[str, Any]:
        """What is known; nothing where today's code was not measured, or where it cannot be read."""
        try:
            record = json.loads(self._store.get(self._key(what)) or "{}")
        except (RecursionError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def read(self, what: str, parse: Callable[[dict[str, Any]], T | None]) -> T | None:
        """What a function makes of what is known; None where nothing is, or where it cannot be what was kept.

        Parameters
        ----------
        what : str
        parse : callable
            Called with the facts as `keep` was given them. What it raises for others is no error.
        """
        try:
            return parse(self.get(what))
        except UNREADABLE:
            return None

    def keep(self, what: str, **facts: Any) -> None:
        """Keep facts, in plain JSON types, in the place of older ones."""
        record = json.dumps(facts)
        self._store.update(self._key(what), lambda old: record)

    def _key(self, what: str) -> str:
        digest = hashlib.sha256(f"{self._version}\n{what}".encode()).hexdigest()
        return f"{self._kind}|{digest}|{self._device.key}"


def told(options: Mapping[str, Any], *more: str) -> list[str]:
    """The limits among options for `plan`, and others of these names, as text of what facts are of."""
    names = (*more, *(field.name for field in fields(Limits)))
    return [f"{name}={options[name]}" for name in names if options.get(name) is not None]
