"""Permission to use tiles: Linux wants to be asked once by every process, since they make its threads' state larger.

Source: the Linux kernel's documentation, "Using XSTATE features in user space applications" (x86/xstate).
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

from autoconv.errors import PlanError

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18


@functools.cache
def granted() -> bool:
    """Whether this process may use tiles: asked once, for all its threads and those of its forks.

    Linux refuses where the processor has none, where the kernel is older than them, and while a thread has a stack for
    signals that is too small for their state.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return False
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    asked = ctypes.c_long(ARCH_PRCTL), ctypes.c_long(ARCH_REQ_XCOMP_PERM), ctypes.c_long(XFEATURE_XTILEDATA)
    return bool(syscall(*asked) == 0)


def refused() -> list[str]:
    """Why this process may not use tiles; empty when it may."""
    if granted():
        return []
    return ["matrix_unit='amx': expected a process that may use tiles, and the system does not allow it"]


def require() -> None:
    """See to it that this process may use tiles.

    Raises
    ------
    PlanError
        When it may not: their first instruction would end it.
    """
    for reason in refused():
        raise PlanError(reason)
