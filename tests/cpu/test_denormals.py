"""Denormal numbers: what kernels count as 0, what they keep when asked to, and the float mode that callers get back."""

import ctypes
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from guards import run_guarded
from layers import operands
from vectors import INSTRUCTION_SETS

from autoconv import ArrayError, ConvLayer, PlanError, TuningCache, conv2d, plan
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler, launch
from autoconv.cpu.codegen.ir import X86, Module, f16, i32, ptr
from autoconv.cpu.codegen.workers import BUSY, FLUSH, KEEP
from autoconv.cpu.device import CPU
from autoconv.cpu.pool import Entry
from autoconv.registry import algorithms
from autoconv.tuning import reference

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(not X86, reason="only x86's float mode is set"),
]

CONTROL = 0xFFC0  # of MXCSR; the bits below report what happened
UPWARD = 0x5F80  # rounding up, which nobody has by default
TASKS = 200
THREADS = 3
LEAST = float(np.finfo(np.float32).tiny)
DEVICE = CPU.current(threads=2)


def emit_modes(instruction_set):
    """`run`: the float mode of every task; `get` and `set`: that of the caller."""
    m = Module(instruction_set)
    k = m.function("task", *launch.TASK, internal=True)
    context, index, _ = k.args
    out = launch.operands(k, context, i32)[2]
    k.store(k.float_mode(), out + index)
    run = m.function("run", *launch.RUN)
    launch.launch(run, run.args[0], k, TASKS)
    k = m.function("get", ptr(i32))
    k.store(k.float_mode(), k.args[0])
    k = m.function("set", ptr(i32))
    k.set_float_mode(k.load(k.args[0]))
    return m


def modes():
    return compiler.build(emit_modes, "generic")


def call_with_word(name, word):
    word = ctypes.c_uint32(word)
    modes().function(name, ctypes.c_void_p)(ctypes.addressof(word))
    return word.value


@contextmanager
def float_mode(mode):
    """Have this thread compute in a mode, and check that it still does at the end."""
    before = call_with_word("get", 0)
    call_with_word("set", mode)
    try:
        yield
        after = call_with_word("get", 0)
    finally:
        call_with_word("set", before)
    assert after & CONTROL == mode & CONTROL


def check_tasks(entry, want):
    out = np.zeros(TASKS, np.int32)
    entry(out, None, out)
    assert set((out & CONTROL).tolist()) == {want & CONTROL}


@pytest.mark.parametrize("callers", [KEEP, FLUSH, UPWARD])
def test_every_task_has_the_mode_of_its_run_and_the_caller_its_own_afterwards(callers):
    flushing, keeping = (Entry(modes(), "run", THREADS) for _ in range(2))
    keeping.keep_denormals()
    with float_mode(callers):
        for _ in range(20):
            check_tasks(flushing, FLUSH)
            check_tasks(keeping, KEEP)


def test_a_caller_who_finds_the_pool_busy_runs_in_the_mode_too():
    entry = Entry(modes(), "run", THREADS)
    check_tasks(entry, FLUSH)
    busy = ctypes.c_int32.from_address(pool._pools[THREADS].address + BUSY)
    busy.value = 1
    try:
        with float_mode(UPWARD):
            check_tasks(entry, FLUSH)
    finally:
        busy.value = 0


def test_callers_with_modes_of_their_own_at_once():
    failures = []

    def caller(mode, keep):
        entry = Entry(modes(), "run", THREADS)
        if keep:
            entry.keep_denormals()
        try:
            with float_mode(mode):
                for _ in range(300):
                    check_tasks(entry, KEEP if keep else FLUSH)
        except AssertionError as error:
            failures.append(error)

    callers = [threading.Thread(target=caller, args=(mode, n % 2)) for n, mode in enumerate([UPWARD, KEEP, FLUSH])]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failures


def test_a_thread_leaves_the_pool_in_the_mode_in_which_it_came():
    """Of `work`, which a worker runs, called by a thread that reads its own mode afterwards, in a pool that closes."""
    alone = pool._Pool(1)
    alone.stop()
    found = []

    def worker():
        work = pool.program().function("work", ctypes.c_void_p, ctypes.c_int64)
        with float_mode(UPWARD):
            work(alone.address, 1)
        found.append(True)

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert found


def emit_copy(instruction_set, count):
    """`run`: out = a, in float16, through float32."""
    m = Module(instruction_set)
    lanes = m.lanes(f16)
    k = m.function("task", *launch.TASK, internal=True)
    a, _, out = launch.operands(k, k.args[0], f16)[:3]
    with k.loop(0, count, lanes) as i:
        k.store(k.load(a + i, lanes), out + i)
    run = m.function("run", *launch.RUN)
    launch.launch(run, run.args[0], k, 1)
    return m


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_denormals_of_float16_are_read_and_written_as_they_are(instruction_set):
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.empty_like(every)
    Entry(compiler.build(emit_copy, instruction_set, every.size), "run", 1)(every, None, out)
    np.testing.assert_array_equal(out, every)  # NaN equals NaN here


GEOMETRIES = {
    "3x3": {"N": 2, "C": 9, "H": 12, "W": 13, "K": 17, "R": 3, "S": 3, "padding": 1},
    "7x7": {"N": 1, "C": 3, "H": 16, "W": 17, "K": 8, "R": 7, "S": 7, "padding": 3, "layout": "NHWC"},
    "1x1": {"N": 2, "C": 16, "H": 9, "W": 8, "K": 24, "R": 1, "S": 1},
    "bfloat16": {"N": 2, "C": 16, "H": 9, "W": 8, "K": 24, "R": 1, "S": 1, "dtype": "bfloat16"},
    "depthwise": {"N": 2, "C": 6, "H": 12, "W": 13, "K": 6, "R": 3, "S": 3, "padding": 1, "groups": 6},
    "strided": {"N": 1, "C": 8, "H": 12, "W": 13, "K": 8, "R": 3, "S": 3, "padding": 1, "stride": 2},
}
SCALES = {"operands": (LEAST / 4, 1.0), "products": (1e-20, 1e-20), "some": (LEAST, 1.0)}


def cases():
    """The first candidate of every generated family, for each geometry and direction that it takes."""
    for geometry, extents in GEOMETRIES.items():
        for direction in ("fwd", "dgrad", "wgrad"):
            layer = ConvLayer(**extents, direction=direction)
            for family in algorithms(DEVICE):
                if family.vendor is None and family.pool == "autoconv":
                    able = (c for c in family.all(layer, DEVICE) if not family.why_not(layer, DEVICE, c.params))
                    if (candidate := next(able, None)) is not None:
                        yield pytest.param(family, layer, candidate, id=f"{geometry}-{direction}-{family.name}")


@pytest.mark.parametrize(("family", "layer", "candidate"), list(cases()))
def test_families_count_denormals_as_0_or_keep_them(family, layer, candidate):
    for scale in SCALES:
        check_scale(family, layer, candidate, scale)


def check_scale(family, layer, candidate, scale):
    a, b, _, _ = operands(layer)
    a, b = (array * array.dtype.type(factor) for array, factor in zip((a, b), SCALES[scale], strict=True))
    want, magnitude = reference.convolve(layer, a, b), reference.magnitude(layer, a, b).max()
    relative = family.bound(layer, candidate.params) * magnitude
    absolute = family.absolute_bound(layer, candidate.params, max(abs(a).max(), abs(b).max()))
    flushed = run_guarded(family, layer, DEVICE, candidate, (a, b, None, None), "after")
    assert np.abs(flushed - want).max() <= relative + absolute
    if scale == "operands":
        assert not flushed.any()
    if not family.keeps_denormals:  # no plan asks it to
        return
    kept = run_guarded(Keeping(family), layer, DEVICE, candidate, (a, b, None, None), "after")
    unit = 2.0**-133 if layer.dtype == "bfloat16" else 0.0  # of the output's denormals; of the sums' 2**-149
    assert np.abs(kept - want).max() <= relative + absolute * 2.0**-23 + unit
    if scale != "some":
        assert kept.any()


class Keeping:
    """A family whose kernels keep denormals."""

    def __init__(self, family):
        self.family = family

    def build(self, *args):
        kernel = self.family.build(*args)
        kernel.keep_denormals()
        return kernel


LAYER = ConvLayer(N=1, C=4, H=6, W=6, K=4, R=3, S=3, padding=1)
TINY = np.full(LAYER.x_shape, LEAST / 64, np.float32)
ONES = np.ones(LAYER.w_shape, np.float32)


def test_a_plan_counts_denormals_as_0_and_one_that_keeps_them_is_another_of_the_same_record(tmp_path):
    cache = TuningCache(tmp_path)
    flushing = plan(LAYER, "hybrid", cache=cache, budget=0.01)
    keeping = plan(LAYER, "hybrid", cache=cache, budget=0.01, denormals="keep")
    assert (flushing.timed > 0, keeping.timed) == (True, 0)
    assert keeping.candidate == flushing.candidate
    direct = [plan(LAYER, "direct", cache=cache, denormals=what) for what in ("flush", "keep")]
    flushed, kept = (made.run(TINY, ONES) for made in direct)
    assert not flushed.any()
    np.testing.assert_allclose(kept, reference.convolve(LAYER, TINY, ONES), rtol=1e-3)
    assert plan(LAYER, "direct", cache=cache) is direct[0]
    np.testing.assert_array_equal(conv2d(TINY, ONES, padding=1, mode="direct", denormals="keep"), kept)


def test_filters_packed_by_a_plan_that_flushes_are_no_use_to_one_that_keeps():
    flushing, keeping = (plan(LAYER, "heuristic", weights="constant", denormals=what) for what in ("flush", "keep"))
    with pytest.raises(ArrayError, match=r"packed for .* with denormals='keep', got some for .*denormals='flush'"):
        keeping.run(TINY, flushing.pack(ONES))


def test_algorithms_that_cannot_keep_denormals_are_left_out(monkeypatch):
    name = plan(LAYER, "heuristic").candidate.algorithm
    family = next(a for a in algorithms(CPU.current()) if a.name == name)
    monkeypatch.setattr(type(family), "keeps_denormals", False)
    assert plan(LAYER, "heuristic", denormals="keep").candidate.algorithm != name
    with pytest.raises(PlanError, match=rf"denormals='keep' leaves {name} out, .* or no denormals='keep'"):
        plan(LAYER, name, denormals="keep")


@pytest.mark.parametrize("wrong", ["zero", True, None])
def test_other_ways_with_denormals_are_refused(wrong):
    with pytest.raises(PlanError, match=rf"denormals={wrong!r}: expected 'flush' or 'keep'"):
        plan(LAYER, "heuristic", denormals=wrong)
