"""Memory for arrays on a CPU: aligned for the kernels, and used again rather than given back to the system."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.cpu import cgroup

ALIGNMENT = 64  # a cache line, and the widest vector
PAGE = 4096
LARGE_PAGE = 2 << 20
UNKNOWN = 1 << 40  # bytes of memory where the system does not say: a lot
SLAB = 4 * LARGE_PAGE  # bytes that small arrays share; pages that nobody has touched take no memory


class Allocator:
    """Memory that arrays gave back, for the next of the same size.

    Fresh memory costs a page fault for every page first touched, which takes longer than many a layer, and reading
    what lies in more pages than the processor remembers waits for every one of them to be looked up. A large page costs
    little more than a small one: what fills half of one is a whole number of them, and the rest shares them.
    What is kept is bounded to a sixteenth of the machine's memory.
    """

    def __init__(self) -> None:
        self._free: OrderedDict[int, list[Array]] = OrderedDict()  # by size, that of the last given back last
        self._rests: list[Array] = []  # of slabs, which nobody has had yet
        self._most = available // 16 if (available := physical_memory()) else 256 << 20

    @property
    def kept(self) -> int:
        """Bytes waiting to be used again."""
        return sum(size * len(self._free[size]) for size in list(self._free))

    def take(self, nbytes: int) -> Array:
        """A byte array on a cache line; its memory comes back when the last view of it is gone."""
        page = PAGE if nbytes < LARGE_PAGE // 2 else LARGE_PAGE
        size = -(-nbytes // page) * page
        try:
            raw = self._free[size].pop()
        except (KeyError, IndexError):
            raw = self._piece(size) if page == PAGE else _fresh(size, page)
        return np.asarray(_Lease(self, raw, nbytes))

    def _piece(self, size: int) -> Array:
        """Part of a slab of large pages: a line from the one before, so that not all begin in one set of a cache.

        Taking a rest off the list and putting back what is left of it are single operations: threads at the same time
        have slabs of their own.
        """
        try:
            rest = self._rests.pop()
        except IndexError:
            rest = _fresh(SLAB, LARGE_PAGE)
        if rest.size < size:
            rest = _fresh(SLAB, LARGE_PAGE)
        self._rests.append(rest[size + ALIGNMENT :])
        return rest[:size]

    def give(self, raw: Array) -> None:
        """Keep memory for later, in place of what was given back longest ago if need be.

        Called when an array dies, which may be at any moment, in any thread: so nothing here locks, and
        every step is a single operation on a list or a dict that makes no other object which Python's collector
        of cycles counts, as that may start it. So sizes are listed, not pairs, and none is ever removed. At the end
        of a process no name of a module stands for anything any more.
        """
        size = raw.size
        if size > self._most:
            return
        self._free.setdefault(size, []).append(raw)
        try:
            self._free.move_to_end(size)
            excess = self.kept - self._most  # a sum for every size would take longer than many a layer
            for old in list(self._free) if excess > 0 else ():
                while excess > 0 and self._free[old]:
                    excess -= self._free[old].pop().size
        except (KeyError, IndexError, RuntimeError):  # another thread was quicker, or a collection
            pass


class _Lease:
    """What owns the memory of one array, and gives it back in the end."""

    __slots__ = ("__array_interface__", "_memory", "_raw")

    def __init__(self, memory: Allocator, raw: Array, nbytes: int) -> None:
        self._raw, self._memory = raw, memory
        self.__array_interface__ = raw[:nbytes].__array_interface__

    def __del__(self) -> None:
        if (memory := getattr(self, "_memory", None)) is not None:  # there is none if an interrupt ended `__init__`
            memory.give(self._raw)


def _fresh(size: int, alignment: int) -> Array:
    """Bytes not used before. From 4 MiB on NumPy asks Linux for large pages; what is not touched takes no memory."""
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.__array_interface__["data"][0] % alignment
    return raw[start : start + size]


def physical_memory() -> int:
    """Bytes of memory that the machine has, or its part that this process may use; 0 where that is not known."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
    limit = cgroup.memory()[0]
    return there if limit is None else min(there, limit)


def available_memory() -> int:
    """Bytes of it that are free, or that the system could take back; a lot where it does not say."""
    left = cgroup.memory()[1]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = UNKNOWN
    return free if left is None else min(free, left)


take = Allocator().take  # what every array of this process shares


def done_aside(work: Callable[..., object], *arguments: Any) -> Callable[[], None]:
    """Begin work in another thread, or do it now where the system gives none; returned is what waits for its end."""
    thread = threading.Thread(target=work, args=arguments)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        work(*arguments)
        return lambda: None
    return thread.join


@functools.cache
def filled(nbytes: int) -> Callable[[], Array]:
    """What gives memory of a size that was written to: memory never touched comes slowly, and would not be read."""
    memory = np.empty(nbytes // 8, np.int64)
    wait = done_aside(memory.fill, 1)

    def there() -> Array:
        wait()
        return memory

    return there


def read(array: Array) -> None:
    """Read all of a contiguous array, as fast as it comes."""
    array.reshape(-1).view(np.uint8).max(initial=0)  # of an empty one, and of one without extents, too
