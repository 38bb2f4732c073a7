"""Waiting for a lock that another process may hold for minutes, and saying so."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

SILENT = 5.0  # seconds of waiting that nobody would wonder about
NOTES = logging.getLogger("autoconv")


def take_turn(lock: BaseFileLock, what: str, timeout: float | None) -> None:
    """Acquire a lock; after a few seconds a line in the log, which Python shows unless told otherwise, names it.

    Parameters
    ----------
    lock : FileLock
    what : str
        What its holder is doing.
    timeout : float or None
        Seconds to wait; None: for ever.

    Raises
    ------
    filelock.Timeout
        When it is still held then.
    """
    from filelock import Timeout  # slow to import

    patience = math.inf if timeout is None else timeout
    try:
        lock.acquire(timeout=min(patience, SILENT))
    except Timeout:
        if patience <= SILENT:
            raise
        NOTES.warning("waiting for another process, or thread, that is %s: it holds %s", what, lock.lock_file)
        lock.acquire(timeout=-1 if timeout is None else timeout - SILENT)
