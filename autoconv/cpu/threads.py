"""How many threads compute, and why.

The processors of a computer are not all this process's. An affinity mask or a cpuset names some; a control group has a
quota of their time, and stops all threads of a process that has used it up until the next period begins: two threads
under a quota of one processor run for half of the time. And two hyper-threads share the units that multiply, so that a
second thread of a core adds nothing to kernels that keep them busy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from autoconv.cpu import cgroup
from autoconv.errors import PlanError

MOST_THREADS = 1024
PROCESSORS = Path("/sys/devices/system/cpu")


class Decision(NamedTuple):
    """How many threads, and why."""

    threads: int
    reason: str


def count_threads() -> Decision:
    """How many threads compute: `AUTOCONV_NUM_THREADS`, or one for each core of which this process has a whole.

    Returns
    -------
    Decision

    Raises
    ------
    PlanError
        When the variable is set to anything but a positive integer.
    """
    text = os.environ.get("AUTOCONV_NUM_THREADS")
    if text:
        if not (text.isdecimal() and len(text) <= 99) or not 1 <= int(text) <= MOST_THREADS:
            raise PlanError(f"AUTOCONV_NUM_THREADS={text!r:.80}: expected an integer from 1 to {MOST_THREADS}")
        return Decision(int(text), f"AUTOCONV_NUM_THREADS={text}")
    there, allowed, cores = os.cpu_count() or 1, _allowed(), count_cores()
    reason = f"one for each of {cores} cores" if cores > 1 else "one core"
    if cores < len(allowed):
        reason += f", whose {len(allowed)} hyper-threads share what multiplies"
    if len(allowed) < there:
        reason += f"; this process may use {len(allowed)} of {there} processors"
    quota = _quota()
    if quota is None or quota >= cores:
        return Decision(cores, reason)
    whole = max(1, int(quota))
    return Decision(whole, f"a quota of {quota:.4g} processors' time ({reason} without it)")


def count_cores() -> int:
    """The cores on which this process may run, however many hyper-threads each has."""
    return len({_core(processor) for processor in _allowed()})


def processors() -> float:
    """How many processors' time this process can get at once: that of those it may run on, or what a quota leaves."""
    quota, allowed = _quota(), len(_allowed())
    return allowed if quota is None else min(quota, allowed)


def _allowed() -> set[int]:
    """The processors on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _core(processor: int) -> str:
    """The hyper-threads of a processor's core; the processor alone where the system does not say."""
    text = cgroup.read(PROCESSORS / f"cpu{processor}" / "topology" / "thread_siblings_list")
    return text or str(processor)


def _quota() -> float | None:
    """The least quota of this process's control groups, in processors; None without one.

    A group's time is also its ancestors': `cpu.max` of version 2, `cpu.cfs_quota_us` of version 1 ("Control Group v2"
    and "CFS Bandwidth Control", in the documentation of the Linux kernel).
    """
    quotas = []
    for version, group in cgroup.folders("cpu"):
        if version == 2:
            quota, _, period = cgroup.read(group / "cpu.max").partition(" ")
        else:
            quota, period = (cgroup.read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # not "max" or -1, which are none
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)
