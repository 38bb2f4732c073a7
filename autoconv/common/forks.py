"""Locks in the child of a fork, where the threads that may have held them are not."""

from __future__ import annotations

import functools
import os
import sys
import threading


def _renew_properties() -> None:
    """Give every `functools.cached_property` of ours a new lock.

    Until Python 3.12 all objects of a class share one, which is held while a value is computed: a list of candidates
    takes a good part of a plan's time.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == __name__.partition(".")[0]:
            for kind in list(vars(module).values()):
                for value in list(vars(kind).values()) if isinstance(kind, type) else ():
                    if isinstance(value, functools.cached_property):
                        value.lock = threading.RLock()  # type: ignore[attr-defined]


def watch() -> None:
    """Do so in every child from now on, where it is needed."""
    if hasattr(os, "register_at_fork") and sys.version_info < (3, 12):
        os.register_at_fork(after_in_child=_renew_properties)
