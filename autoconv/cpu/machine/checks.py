"""A machine as JSON has it: every number of it checked, so that a damaged record is told from a machine."""

from __future__ import annotations

import itertools
from typing import Any

from autoconv.cpu.machine.curve import Curve
from autoconv.errors import RecordError

LEVELS = 3  # of caches, before memory
CURVES = ("read_one", "read", "write", "stream", "chase", "jumps", "handed")
KNOWN = ("read_one", "read")  # curves without which there is no machine
LATER = {"jumps", "handed"}  # what machines on record from before it was measured lack
NUMBERS = ("transform", "call", "barrier", "wake")
MOST = 1e18  # of anything measured


def checked(data: object, names: set[str]) -> dict[str, Any]:
    """The fields of a machine, with `Curve` and tuple in place of lists.

    Parameters
    ----------
    data : object
        As JSON has it.
    names : set of str
        The fields of a machine.

    Returns
    -------
    dict

    Raises
    ------
    RecordError
        For anything else; the message names the field, what it holds and what is expected.
    """
    if not isinstance(data, dict) or not names - LATER <= set(data) <= names:
        raise RecordError(f"machine={data!r:.80}: expected an object of {', '.join(sorted(names))}")
    found: dict[str, Any] = {**dict.fromkeys(LATER), **data}
    _check(type(found["threads"]) is int and found["threads"] >= 1, "threads", found, "a positive integer")
    _check(isinstance(found["when"], str), "when", found, "a text")
    _check(type(found["thorough"]) is bool, "thorough", found, "true or false")
    _check(_number(found["busy"], least=0.0), "busy", found, "a number from 0")
    _check(_peaks(found["peaks"]), "peaks", found, "positive numbers by unit and type, float32 among them")
    for name in CURVES:
        missing = found[name] is None and name not in KNOWN
        _check(missing or _points(found[name]), name, found, "pairs of ascending bytes and positive rates")
        found[name] = None if missing else Curve(tuple((size, float(rate)) for size, rate in found[name]))
    for name in NUMBERS:
        _check(found[name] is None or _number(found[name]), name, found, "a positive number, or null")
    sizes = found["caches"]
    right = isinstance(sizes, list) and len(sizes) == LEVELS and all(type(n) is int and n < MOST for n in sizes)
    _check(right and 0 < sizes[0] <= sizes[1] <= sizes[2], "caches", found, "three ascending sizes in bytes")
    return found | {"caches": tuple(sizes)}


def _check(right: bool, name: str, data: dict[str, Any], expected: str) -> None:
    if not right:
        raise RecordError(f"machine.{name}={data[name]!r:.80}: expected {expected}")


def _number(value: object, least: float = 1e-12) -> bool:
    return type(value) in (int, float) and least <= value < MOST  # type: ignore[operator]  # NaN is not


def _peaks(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(isinstance(types, dict) and all(map(_number, types.values())) for types in value.values())
        and any("float32" in types for types in value.values())
    )


def _points(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    if not all(isinstance(p, list) and len(p) == 2 and type(p[0]) is int and all(map(_number, p)) for p in value):
        return False
    return all(a[0] < b[0] for a, b in itertools.pairwise(value))
