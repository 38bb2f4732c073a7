"""The thread pool: Python threads parked inside compiled code, woken in about a microsecond.

An `Entry` calls a kernel's `run`. What a kernel says of the threads is in `codegen.launch`, what they run themselves in
`codegen.workers`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.launch import OPERANDS
from autoconv.cpu.codegen.workers import (
    ALLOWED,
    CLOSED,
    FLUSH,
    GIVEN,
    KEEP,
    LIST,
    MASK,
    PLACES,
    QUANTUM,
    RUNTIME,
    SETTINGS,
    SPIN,
    STATE,
    emit,
    emit_wake,
    futex_number,
    words_bytes,
)


@functools.cache
def _data_offset() -> int:
    """Where an array object keeps the address of its data: reading it there saves microseconds a launch."""
    samples = [np.empty(n, np.uint8) for n in (1, 100)]

    def holds(offset: int) -> bool:
        return all(ctypes.c_void_p.from_address(id(s) + offset).value == s.ctypes.data for s in samples)

    return next(offset for offset in range(16, samples[0].__sizeof__(), 8) if holds(offset))


@functools.cache
def program() -> compiler.Program:
    """What every kernel is launched by."""
    return compiler.build(emit, "generic", futex_number(), _data_offset(), QUANTUM)


@functools.cache
def _start() -> Callable[..., Any]:
    return program().function("start", *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * OPERANDS)


@functools.cache
def unavailable() -> str | None:
    """Why kernels cannot be compiled here, or None; warns once, since then only NumPy is left."""
    try:
        program()  # which every kernel needs
    except Exception as error:  # LLVM raises RuntimeError, a missing wheel ImportError, a missing library OSError
        reason = f"llvmlite cannot compile for this processor: {str(error).splitlines()[0] if str(error) else error!r}"
        warnings.warn(f"{reason}; autoconv falls back to NumPy", RuntimeWarning, stacklevel=2)
        return reason
    return None


def available() -> bool:
    """Whether kernels can be compiled here."""
    return unavailable() is None


class _Pool:
    """Shared words and the workers that watch them."""

    def __init__(self, threads: int) -> None:
        self._words = mmap.mmap(-1, words_bytes(threads))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._words))
        settings = (ctypes.c_int64 * 2).from_buffer(self._words, SETTINGS)
        crowded = threads > len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else False
        settings[0], settings[1] = threads, 1 if crowded else SPIN
        (ctypes.c_int64 * 1).from_buffer(self._words, STATE)[0] = CLOSED
        self.borrow(_runtime)
        work = program().function("work", ctypes.c_void_p, ctypes.c_int64)
        self._workers: list[threading.Thread] = []
        try:
            for n in range(1, threads):
                mine = self._words, work, self.address, n
                worker = threading.Thread(target=_watch, args=mine, name=f"autoconv-{n}", daemon=True)
                self._workers.append(worker)
                worker.start()
        except BaseException:  # an interrupt, too
            self.stop()
            raise
        if hasattr(os, "sched_getaffinity") and not crowded:
            self._list(os.sched_getaffinity(0))

    def _list(self, allowed: set[int]) -> None:
        """Let callers place the workers, where the processors' numbers fit into a set."""
        if max(allowed) >= 8 * MASK:
            return
        mask = sum(1 << n for n in allowed).to_bytes(MASK, sys.byteorder)
        self._words[ALLOWED : ALLOWED + MASK] = self._words[GIVEN : GIVEN + MASK] = mask  # as threads inherit it
        threads = (ctypes.c_int32 * len(self._workers)).from_buffer(self._words, LIST)
        threads[:] = [worker.native_id or 0 for worker in self._workers]
        places = (ctypes.c_int32 * 2).from_buffer(self._words, PLACES)
        places[1], places[0] = -1, len(self._workers)

    def borrow(self, runtime: tuple[int, int]) -> None:
        """Run on the threads of a runtime from the next region on."""
        run, number = ((ctypes.c_int64 * 1).from_buffer(self._words, RUNTIME + 8 * n) for n in range(2))
        if runtime[1]:  # a team that has just started still asks for its threads' numbers
            number[0] = runtime[1]
        run[0] = runtime[0]  # which is what counts

    def stop(self) -> None:
        """Have the workers leave, and wait until they have."""
        program().function("stop", ctypes.c_void_p)(self.address)
        for worker in self._workers:
            with suppress(RuntimeError):  # of one that has not begun, or does not know that it has
                worker.join()


def _watch(words: mmap.mmap, work: Callable[..., Any], address: int, number: int) -> None:
    """A worker's life: the words last as long as it does, whatever becomes of the pool."""
    work(address, number)
    del words


_pools: dict[int, _Pool] = {}
_lock = threading.Lock()
_runtime = 0, 0  # addresses: of what runs a team of OpenMP, and what tells a thread's number; of the pool's own, none


def borrow(runtime: ctypes.CDLL | None) -> None:
    """Run kernels on the threads of an OpenMP runtime from now on; with None, on the pool's own again.

    Parameters
    ----------
    runtime : ctypes.CDLL, optional
        A library that has GOMP_parallel and omp_get_thread_num, as those of GCC, LLVM and Intel do, or needs one.

    Raises
    ------
    AttributeError
        When it has neither.
    """
    global _runtime
    wanted = ("GOMP_parallel", "omp_get_thread_num")
    run, number = (ctypes.cast(runtime[name], ctypes.c_void_p).value or 0 if runtime else 0 for name in wanted)
    with _lock:
        _runtime = run, number
        for pool in _pools.values():
            pool.borrow(_runtime)


def _pool(threads: int) -> _Pool:
    """The pool of so many threads, started where there is none; of one where threads cannot be parked."""
    with _lock:
        if threads not in _pools:
            _pools[threads] = _started(threads if os.name == "posix" else 1)
        return _pools[threads]


def _started(threads: int) -> _Pool:
    """A pool of so many threads, or of as many as the system grants: whoever is there does all tasks."""
    while True:
        try:
            return _Pool(threads)
        except RuntimeError as error:
            warnings.warn(f"{threads} threads: {error}: kernels run on {threads // 2}", RuntimeWarning, stacklevel=4)
            threads //= 2


@atexit.register
def _stop() -> None:
    for pool in _pools.values():
        pool.stop()


def _forget() -> None:
    """In the child of a fork, where neither the workers are nor a runtime's threads."""
    global _lock, _runtime
    _pools.clear()
    _runtime = 0, 0
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Entry:
    """A `run`-like function of a program, to be called with arrays.

    It counts denormal operands and results as 0, unless `keep_denormals` was called. Of the pool's threads, `party`
    take part, all of them unless told otherwise.
    """

    def __init__(self, program: compiler.Program, name: str, threads: int, party: int | None = None) -> None:
        self._program, self._address, self._threads = program, program.address(name), threads
        self._start, self._mode, self._party = _start(), FLUSH, party or threads

    def keep_denormals(self) -> None:
        """Compute with denormals from now on, however long the processor takes."""
        self._mode = KEEP

    def __call__(
        self,
        a: Array,
        b: Array,
        out: Array,
        bias: Array | None = None,
        residual: Array | None = None,
        workspace: Array | None = None,
    ) -> None:
        """Run on the pool; arrays are passed as they are, None as a null address."""
        pool = _pools.get(self._threads) or _pool(self._threads)
        self._start(
            pool.address,
            self._address,
            self._mode,
            self._party,
            id(a),
            b if b is None else id(b),
            id(out),
            bias if bias is None else id(bias),
            residual if residual is None else id(residual),
            workspace if workspace is None else id(workspace),
        )


def wake(instruction_set: str, threads: int) -> None:
    """Wake the threads, as the layer before would have: those asleep take long to come."""
    _waker(instruction_set, threads)(_NOTHING, None, _NOTHING)


_NOTHING = np.zeros(1, np.float32)


@functools.cache
def _waker(instruction_set: str, threads: int) -> Entry:
    return Entry(compiler.build(emit_wake, instruction_set), "run", threads)
