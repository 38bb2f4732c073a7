"""Failures that say nothing of the candidate's kernel: how they are written, and how they are told from the others."""

from __future__ import annotations

_UNREACHED = "unreached"  # how they begin
_STARVED = f"{_UNREACHED}, no memory"
_KILLED = f"{_STARVED}: the worker died"
NO_CANDIDATE = "it is not a candidate of this layer"  # any more: it is on record of an algorithm as it was


def unreached(why: str) -> str:
    """That of a candidate whose turn never came."""
    return f"{_UNREACHED}: {why}"


def starved(why: str) -> str:
    """That of one that there was no memory for."""
    return f"{_STARVED}: {why}"


def killed() -> str:
    """That of one at which the system ended the worker, which it does for want of memory."""
    return f"{_KILLED} of signal 9 (SIGKILL)"


def is_unreached(failure: str | None) -> bool:
    """Whether it is any of these.

    >>> is_unreached(unreached("no time")), is_unreached(starved("4 GiB")), is_unreached("wrong result")
    (True, True, False)
    """
    return failure is not None and failure.startswith(_UNREACHED)


def is_starved(failure: str | None) -> bool:
    """Whether it is one for want of memory.

    >>> is_starved(unreached("no time")), is_starved(starved("4 GiB")), is_starved(killed())
    (False, True, True)
    """
    return failure is not None and failure.startswith(_STARVED)


def is_killed(failure: str | None) -> bool:
    """Whether it is one of a worker that was ended for that.

    >>> is_killed(starved("4 GiB")), is_killed(killed())
    (False, True)
    """
    return failure is not None and failure.startswith(_KILLED)
