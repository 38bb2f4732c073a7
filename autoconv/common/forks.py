"""Forked processes: compiling ahead in some, while this one verifies what is compiled already; and their locks."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LONGEST = 60  # seconds after which such a process ends in any case: whoever waits for its kernels may be gone


@contextlib.contextmanager
def compiled_aside(builds: Sequence[Callable[[], object]], processes: int) -> Iterator[None]:
    """Build from the end of a list, while the caller builds from its start.

    What a forked process compiles is found by the caller in the folder of compiled kernels; where they meet, one kernel
    may be compiled twice. At the end of the context the processes are ended. Threads would not do, as llvmlite calls
    LLVM behind one lock; and a fork is safe only where no other thread holds a lock, as in the tuning worker.

    Parameters
    ----------
    builds : sequence of callable
        What compiles; what they raise is left for the caller to meet.
    processes : int
        How many compile at once, the caller among them.
    """
    helpers: list[int] = []
    try:
        for place in range(min(processes - 1, len(builds) - 1) if hasattr(os, "fork") else 0):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, here parked ones of ours
                try:
                    helper = os.fork()
                except OSError:  # there may be no more processes: the caller builds what is left
                    break
            if not helper:
                _build_and_exit(builds[::-1][place :: processes - 1])
            helpers.append(helper)
        yield
    finally:
        for helper in helpers:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored
                os.kill(helper, signal.SIGKILL)
                os.waitpid(helper, 0)


def _build_and_exit(builds: Sequence[Callable[[], object]]) -> None:
    try:
        signal.alarm(LONGEST)
        _close_all()
        for build in builds:
            with contextlib.suppress(Exception):
                build()
    finally:
        os._exit(0)


def _close_all() -> None:
    """Close what the caller has open, so that whoever reads what it writes sees that end."""
    folder = Path("/dev/fd")
    for entry in list(folder.iterdir()) if folder.is_dir() else ():
        if int(entry.name) > 2:
            with contextlib.suppress(OSError):  # that of the folder itself is closed
                os.close(int(entry.name))


_renewed: weakref.WeakKeyDictionary[object, dict[str, Callable[[], object]]] = weakref.WeakKeyDictionary()


def renew_in_children(owner: object, name: str, make: Callable[[], object] = threading.Lock) -> None:
    """Have every forked child find a lock free: a thread that the child lacks may hold it.

    Parameters
    ----------
    owner : object
        Whose lock it is: a module, or anything else.
    name : str
        The attribute's.
    make : callable
        What makes a new one.
    """
    _renewed.setdefault(owner, {})[name] = make


def _renew_locks() -> None:
    for owner, locks in list(_renewed.items()):
        for name, make in locks.items():
            setattr(owner, name, make())


def _renew_properties() -> None:
    """Give every `functools.cached_property` of ours a new lock, as a thread that the child lacks may hold it.

    Until Python 3.12 all objects of a class share one, which is held while a value is computed: a list of candidates
    takes a good part of a plan's time.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == __name__.partition(".")[0]:
            for kind in list(vars(module).values()):
                for value in list(vars(kind).values()) if isinstance(kind, type) else ():
                    if isinstance(value, functools.cached_property):
                        value.lock = threading.RLock()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
    if sys.version_info < (3, 12):
        os.register_at_fork(after_in_child=_renew_properties)
