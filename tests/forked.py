"""What a forked child does of what a test asks of it."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

import pytest

SECONDS = 60  # after which a child that hangs is ended
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="nobody is forked here")


def exit_code(run: Callable[[], int]) -> int:
    """What a forked child gets from a call; 99 for an exception, and below 0 where it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: this process has threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        try:
            os._exit(run())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
