"""The thread pool: every task once, under many callers, after fork and at exit."""

import ctypes
import ctypes.util
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from forked import exit_code, forks

from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import X86, Module, f64
from autoconv.cpu.codegen.launch import RUN, TASK, TEAM_TASK, launch, launch_team, operands
from autoconv.cpu.codegen.workers import SLEEPERS, futex_number
from autoconv.cpu.pool import Entry
from autoconv.cpu.threads import count_threads

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


@pytest.fixture(autouse=True)
def own_workers(monkeypatch):
    """Kernels run on the pool's workers, even after a test that shares PyTorch's threads, as it does for good."""
    monkeypatch.setattr(pool, "_runtime", pool._runtime)
    pool.borrow(None)
    yield
    monkeypatch.undo()
    for one in pool._pools.values():
        one.borrow(pool._runtime)


def emit(instruction_set, n_tasks):
    """`run`: out[i] += a[i], twice, the second phase from the end; `team`: out[thread] += 1, threads."""
    m = Module(instruction_set)
    k = m.function("task", *TASK, internal=True)
    ctx, index, _ = k.args
    a, _, out = operands(k, ctx, f64)[:3]
    k.store(k.load(out + index) + k.load(a + index), out + index)
    back = m.function("back", *TASK, internal=True)
    ctx, index, _ = back.args
    out = operands(back, ctx, f64)[2]
    place = out + (2 * n_tasks - 1 - index)
    back.store(back.load(place) + back.load(out + (n_tasks - 1 - index)), place)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, n_tasks)
    launch(run, run.args[0], back, n_tasks)

    k = m.function("who", *TASK, internal=True)
    ctx, index, thread = k.args
    out = operands(k, ctx, f64)[2]
    k.store(k.cast(thread, f64), out + index)
    with k.loop(0, 100):  # long enough for the others to come
        k.pause()
    run = m.function("party", *RUN)
    launch(run, run.args[0], k, n_tasks)

    k = m.function("once", *TEAM_TASK, internal=True)
    ctx, thread, threads = k.args
    mine = operands(k, ctx, f64)[2] + thread * 2
    k.store(k.load(mine) + 1.0, mine)
    k.store(k.load(mine + 1) + k.cast(threads, f64), mine + 1)
    run = m.function("team", *RUN)
    launch_team(run, run.args[0], k)
    return m


def check(n_tasks, threads, times):
    entry = Entry(compiler.build(emit, "generic", n_tasks), "run", threads)
    a, out = np.arange(1.0, n_tasks + 1), np.zeros(2 * n_tasks)
    for _ in range(times):
        entry(a, None, out)
    np.testing.assert_array_equal(out[:n_tasks], times * a)
    np.testing.assert_array_equal(out[n_tasks:], times * (times + 1) / 2 * a)


def fall_asleep(threads):
    """Wait until the workers of a pool sleep: all have said so, and the system does not run them either."""
    words, workers = pool._pools[threads]._words, pool._pools[threads]._workers
    while int.from_bytes(words[SLEEPERS : SLEEPERS + 4], sys.byteorder) < threads - 1 or not all(map(sleeps, workers)):
        time.sleep(0.001)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("n_tasks", [1, 2, 7, 300])
def test_every_task_runs_once(threads, n_tasks):
    check(n_tasks, threads, 200)
    if futex_number() is not None:
        fall_asleep(threads)
    check(n_tasks, threads, 1)


@pytest.mark.parametrize("threads", [8, 64])  # on however few processors
def test_many_threads(threads):
    for n_tasks in (1, 3, threads, 500):
        check(n_tasks, threads, 20)
    if futex_number() is not None:
        fall_asleep(threads)
    check(500, threads, 1)


@pytest.mark.parametrize(("party", "n_tasks"), [(1, 300), (2, 300), (3, 300), (8, 300), (8, 2), (99, 5)])
def test_only_a_party_takes_part_and_no_more_threads_than_there_are_tasks(party, n_tasks):
    entry = Entry(compiler.build(emit, "generic", n_tasks), "party", 8, party)
    seen = set()
    for _ in range(50):
        out = np.full(n_tasks, -1.0)
        entry(out, None, out)
        seen |= set(out.astype(int).tolist())
    assert seen <= set(range(min(party, n_tasks, 8)))


@pytest.mark.skipif(count_threads().threads < 2, reason="threads take turns on one processor")
def test_each_thread_does_its_own_half():
    """The same tasks in every run, but for what it takes from a thread that another process keeps from its own."""
    n_tasks = 301
    entry = Entry(compiler.build(emit, "generic", n_tasks), "party", 2)
    own = np.arange(n_tasks) > n_tasks // 2
    shares = []
    while not shares or (max(shares) < 0.9 and len(shares) < 2000):
        out = np.full(n_tasks, -1.0)
        entry(out, None, out)
        shares.append(np.mean(out == own))
    assert max(shares) >= 0.9


@pytest.mark.skipif(futex_number() is None, reason="nobody sleeps here")
@pytest.mark.parametrize(("party", "woken"), [(1, 0), (2, 1), (3, 3), (4, 3), (5, 7), (8, 7)])
def test_workers_that_are_not_asked_sleep_on(party, woken):
    """Those who are: their number doubles with every group.

    Whoever is woken waits once more afterwards. So does one that a signal stops meanwhile: nobody else, in some run.
    """
    check(300, 8, 1)
    entry = Entry(compiler.build(emit, "generic", 300), "party", 8, party)
    out, workers, stirred = np.zeros(300), pool._pools[8]._workers, []
    expected = [True] * woken + [False] * (7 - woken)
    while expected not in stirred and len(stirred) < 20:
        fall_asleep(8)
        before = [switches(worker) for worker in workers]
        entry(out, None, out)
        fall_asleep(8)
        stirred.append([switches(worker) > number for worker, number in zip(workers, before, strict=True)])
    assert expected in stirred
    assert all(run[:woken] == expected[:woken] for run in stirred)


def status(worker, name):
    """What the system says of a thread."""
    lines = Path(f"/proc/self/task/{worker.native_id}/status").read_text()
    return lines.partition(f"\n{name}:")[2].split()[0]


def sleeps(worker):
    """Whether a thread waits to be woken."""
    return status(worker, "State") == "S"


def switches(worker):
    """How often a thread has stopped to wait."""
    return int(status(worker, "voluntary_ctxt_switches"))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_thread_of_a_team_takes_part_once(threads):
    check_team(threads)


def check_team(threads):
    entry = Entry(compiler.build(emit, "generic", 1), "team", threads)
    out = np.zeros((threads + 1, 2))
    for _ in range(50):
        entry(out, None, out)
    assert (out[:threads] == (50, 50 * threads)).all()
    assert not out[threads:].any()


@pytest.mark.parametrize("granted", [0, 1, 2])
def test_as_many_threads_as_the_system_grants(granted):
    """In a process of its own, as the pool of so many threads stays."""
    code = f"""
        import threading, warnings
        import numpy as np
        import autoconv
        from autoconv.cpu.device import CPU
        started, start = [], threading.Thread.start
        def grudging(thread):
            if thread.name.startswith("autoconv-"):
                if sum(other.is_alive() for other in started) >= {granted}:
                    raise RuntimeError("can't start new thread")
                started.append(thread)
            start(thread)
        threading.Thread.start = grudging
        layer = autoconv.ConvLayer(N=1, C=8, H=9, W=9, K=8, R=3, S=3)
        x, w = np.ones(layer.x_shape, np.float32), np.ones(layer.w_shape, np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = autoconv.plan(layer, "direct", device=CPU.current(4), vendors=False).run(x, w)
        assert (y == 72).all()
        print([str(warning.message) for warning in caught])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "4 threads: can't start new thread: kernels run on 2" in done.stdout
    assert ("2 threads: can't start new thread: kernels run on 1" in done.stdout) == (granted < 1)


def test_many_callers_at_once():
    failures = []

    def caller():
        try:
            check(100, 2, 500)
        except AssertionError as error:
            failures.append(error)

    callers = [threading.Thread(target=caller) for _ in range(5)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failures


@forks
def test_works_after_fork():
    check(50, 3, 10)
    assert exit_code(lambda: check(50, 3, 10) or 0) == 0
    check(50, 3, 10)


@pytest.mark.skipif(futex_number() is None or count_threads().threads < 2, reason="places no workers here")
def test_woken_workers_keep_off_the_callers_processor():
    check(20, 2, 1)
    allowed = os.sched_getaffinity(0)
    try:
        for processor in sorted(allowed)[:2]:
            os.sched_setaffinity(0, {processor})
            fall_asleep(2)
            check(20, 2, 1)
            for worker in pool._pools[2]._workers:
                assert os.sched_getaffinity(worker.native_id) == allowed - {processor}
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(futex_number() is None or count_threads().threads < 2, reason="places no workers here")
def test_a_worker_that_somebody_else_has_placed_stays_there(monkeypatch):
    monkeypatch.setattr(pool, "_pools", {})  # one whose workers nobody has placed yet
    allowed = os.sched_getaffinity(0)
    first, second = sorted(allowed)[:2]
    try:
        check(20, 2, 1)
        (worker,) = pool._pools[2]._workers
        for caller, own in ((second, first), (first, second), (second, second), (first, first)):
            os.sched_setaffinity(worker.native_id, {own})
            os.sched_setaffinity(0, {caller})
            fall_asleep(2)
            check(20, 2, 1)
            assert os.sched_getaffinity(worker.native_id) == {own}
            assert os.sched_getaffinity(0) == {caller}
    finally:
        os.sched_setaffinity(0, allowed)
        pool._pools[2].stop()


@pytest.fixture
def openmp():
    """Kernels run on the threads of an OpenMP runtime."""
    name = ctypes.util.find_library("gomp")
    if name is None:
        pytest.skip("NOT CHECKED: there is no libgomp")
    library = ctypes.CDLL(name)
    pool.borrow(library)
    yield library
    pool.borrow(None)


@pytest.mark.parametrize("n_tasks", [1, 2, 300])
def test_threads_of_openmp_do_every_task_once_while_workers_sleep(openmp, n_tasks):
    pool.borrow(None)
    check(300, 3, 1)
    if futex_number() is not None:
        fall_asleep(3)
    before = [switches(worker) for worker in pool._pools[3]._workers]
    pool.borrow(openmp)
    check(n_tasks, 3, 200)
    check_team(3)
    if futex_number() is not None:
        after = [switches(worker) for worker in pool._pools[3]._workers]
        assert all(b - a <= 1 for a, b in zip(before, after, strict=True))  # one that was about to sleep has its last


def test_no_more_threads_of_openmp_take_part_than_are_asked(openmp):
    seen = set()
    for _ in range(50):
        out = np.full(300, -1.0)
        Entry(compiler.build(emit, "generic", 300), "party", 4, 2)(out, None, out)
        seen |= set(out.astype(int).tolist())
    assert seen <= {0, 1}


def test_threads_of_openmp_keep_their_float_mode(openmp):
    def counts_denormals():
        return bool(np.float32(1e-39) * np.float32(1) != 0)

    check(300, 3, 10)
    kept = []
    member = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: kept.append(counts_denormals()))
    openmp.GOMP_parallel(member, None, 3, 0)
    assert kept == [counts_denormals()] * 3  # which a library may have switched off for all of this process


@forks
def test_a_child_has_threads_of_its_own_again(openmp):
    test_works_after_fork()


@contextmanager
def pools_with(monkeypatch, **settings):
    """Pools of a program of their own."""
    for name, value in settings.items():
        monkeypatch.setattr(pool, name, value)
    monkeypatch.setattr(pool, "_pools", {})
    caches = (pool.program, pool._start)
    for cache in caches:
        cache.cache_clear()
    try:
        yield
        pool._stop()
    finally:
        for cache in caches:
            cache.cache_clear()


def test_idle_workers_without_futex(monkeypatch):
    with pools_with(monkeypatch, futex_number=lambda: None):
        check(20, 2, 20)
        time.sleep(0.01)  # by now the workers look every 50 microseconds
        check(20, 2, 1)


@pytest.mark.parametrize("quantum", [0, 3000])
def test_workers_that_leave_with_tasks_undone(monkeypatch, quantum):
    with pools_with(monkeypatch, QUANTUM=quantum):
        for n_tasks in (2, 300):
            check(n_tasks, 3, 200)
        out = np.full(300, -1.0)
        Entry(compiler.build(emit, "generic", 300), "party", 3)(out, None, out)
        assert set(out) <= ({0} if quantum == 0 and X86 else {0, 1, 2})
        check_team(3)


def test_exit_is_prompt_and_later_launches_still_run():
    script = textwrap.dedent(
        """
        import atexit, sys
        sys.path[:0] = sys.argv[1:]
        import test_pool
        atexit.register(lambda: (test_pool.check(20, 2, 3), print("after")))
        from autoconv.cpu import pool
        test_pool.check(20, 2, 3)
        pool._stop()
        """
    )
    command = [sys.executable, "-c", script, *map(str, Path(__file__).parents[:2])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "after\n"), done.stderr


INTERRUPTED = """
import gc, threading, time
from autoconv.cpu import pool
start = threading.Thread.start

def interrupted(thread):
    start(thread)
    raise KeyboardInterrupt

threading.Thread.start = interrupted
ended = 0
for _ in range(20):
    try:
        pool._pool(3)
    except KeyboardInterrupt:
        ended += 1
    gc.collect()
threading.Thread.start = start
pool._pool(3)
time.sleep(0.1)  # for those who watch what is no longer there to notice
print(ended, threading.active_count())
"""


def test_an_interrupt_while_workers_start_leaves_none_behind():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["20", "3"]), done.stderr
