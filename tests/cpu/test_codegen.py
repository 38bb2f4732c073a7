"""The kernel language: every construct, on every instruction set this processor has."""

import ml_dtypes
import numpy as np
import pytest
from emitted import call, emit_tables
from vectors import INSTRUCTION_SETS

from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module, bf16, f16, f32, f64, i8, i32, i64, ptr, vec, widened

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
sets = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
NUMPY = {f32: np.float32, f64: np.float64, f16: np.float16, bf16: ml_dtypes.bfloat16}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(tmp_path / "kernels"))


def emit_copy(instruction_set, source, target):
    m = Module(instruction_set)
    a, b = DTYPES[source], DTYPES[target]
    lanes = m.lanes(a)
    k = m.function("copy", ptr(a), ptr(b), i64)
    x, y, n = k.args
    with k.loop(0, n, lanes) as i:
        mask = k.mask(n - i, lanes)
        k.store(k.load(x + i, lanes, mask=mask), y + i, mask=mask)
    k = m.function("copy_scalar", ptr(a), ptr(b), i64)
    x, y, n = k.args
    with k.loop(0, n) as i:
        k.store(k.load(x + i), y + i)
    return m


def emit_deinterleave(instruction_set, name):
    """Even and odd elements of 2n apart: at laundered addresses, from fenced values."""
    m = Module(instruction_set)
    element = DTYPES[name]
    lanes = m.lanes(element)
    k = m.function("deinterleave", ptr(element), ptr(element), i64)
    x, y, n = k.args
    with k.loop(0, n, lanes) as i:
        here, there = k.launder(x + 2 * i), k.launder(y + i)
        pair = [k.load(here + q * lanes, lanes) for q in range(2)]
        for odd in range(2):
            v = k.arithmetic_fence(k.shuffle(*pair, range(odd, 2 * lanes, 2)))
            k.store(v, there + odd * n)
    return m


@sets
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_constants_in_memory_are_rounded_to_their_type(instruction_set, name):
    got = np.empty(4, name)
    call(compiler.build(emit_tables, instruction_set, name), "read", got)
    assert got.tolist() == np.array([0.1, 2.0, -3.5, 1e30], name).tolist()


def test_equal_constants_are_in_memory_once():
    m = Module("generic")
    k = m.function("read", ptr(f32))
    tables = [m.table(k, element, [1, 2]) for element in (f32, f32, f64)]
    first, again, other = (table.text for table in tables)
    assert first == again != other
    for table in tables:
        k.prefetch(table)
    assert str(m).count("internal constant") == 2


@sets
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_types_widen_and_round_like_numpy(instruction_set, name):
    narrow = NUMPY[DTYPES[name]]
    every = np.arange(1 << 16, dtype=np.uint16).view(narrow)
    exact = every.astype(np.float32)
    with np.errstate(invalid="ignore"):
        ties = exact[:-1] / 2 + exact[1:] / 2
        random = np.random.default_rng(0).integers(0, 1 << 32, 100_003, dtype=np.uint32).view(np.float32)
    wide = np.concatenate([exact, ties, random])
    with np.errstate(all="ignore"):
        rounded = wide.astype(narrow).astype(np.float32)
    for function in ("copy", "copy_scalar"):
        got = np.empty_like(exact)
        call(compiler.build(emit_copy, instruction_set, name, "float32"), function, every, got, every.size)
        np.testing.assert_array_equal(got, exact)
        got = np.empty(wide.size, narrow)
        call(compiler.build(emit_copy, instruction_set, "float32", name), function, wide, got, wide.size)
        np.testing.assert_array_equal(got.astype(np.float32), rounded)


@sets
def test_masked_remainders_touch_nothing_else(instruction_set):
    for name in ("float32", "float64", "float16", "bfloat16"):
        program = compiler.build(emit_copy, instruction_set, name, name)
        for n in range(1, 40):
            x = np.arange(n).astype(NUMPY[DTYPES[name]])
            y = np.full(n + 40, 99).astype(x.dtype)
            call(program, "copy", x, y, n)
            assert (y[:n] == x).all()
            assert (y[n:] == 99).all()


def emit_single(instruction_set, name):
    """Store lanes of which optimisation finds how many there are: as many as the vector's place says."""
    m = Module(instruction_set)
    element = DTYPES.get(name, i8)
    source = i32 if element is i8 else f32
    lanes = m.lanes(f32)
    k = m.function("single", ptr(source), ptr(element))
    x, y = k.args
    for n in range(1, lanes + 1):
        with k.loop(0, 1) as i:
            v = k.load(x + i, lanes)
            v = k.cast(v, vec(i8, lanes)) if element is i8 else v
            k.store(v, y + (n - 1) * 2 * lanes, mask=k.mask(n - i, lanes))
    return m


@sets
@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
def test_masks_that_optimisation_finds_store_nothing_else(instruction_set, name):
    program = compiler.build(emit_single, instruction_set, name)
    lanes = Module(instruction_set).lanes(f32)
    x = np.arange(1, lanes + 1, dtype="int32" if name == "int8" else "float32")
    y = np.full((lanes, 2 * lanes), 99).astype(np.int8 if name == "int8" else NUMPY[DTYPES[name]])
    call(program, "single", x, y)
    want = np.full((lanes, 2 * lanes), 99)
    for n in range(lanes):
        want[n, : n + 1] = x[: n + 1]
    np.testing.assert_array_equal(y.astype(np.float32), want)


def emit_transpose(instruction_set, name):
    m = Module(instruction_set)
    element = DTYPES[name]
    lanes = m.lanes(element)
    k = m.function("transpose", ptr(element), ptr(element))
    x, y = k.args
    rows = [k.load(x + n * lanes, lanes) for n in range(lanes)]
    for n, row in enumerate(k.transpose(rows)):
        k.store(row, y + n * lanes)
    return m


@sets
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_laundered_addresses_and_fenced_values_are_what_they_were(instruction_set, name):
    n = 32
    x, y = np.arange(2 * n, dtype=name), np.zeros(2 * n, name)
    call(compiler.build(emit_deinterleave, instruction_set, name), "deinterleave", x, y, n)
    np.testing.assert_array_equal(y, np.concatenate([x[::2], x[1::2]]))


@sets
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_transpose(instruction_set, name):
    lanes = Module(instruction_set).lanes(DTYPES[name])
    x = np.arange(lanes * lanes, dtype=name).reshape(lanes, lanes)
    y = np.empty_like(x)
    call(compiler.build(emit_transpose, instruction_set, name), "transpose", x, y)
    np.testing.assert_array_equal(y, x.T)


def emit_control(instruction_set):
    m = Module(instruction_set)
    half = m.function("half", i64, ptr(i64), internal=True)
    half.store(half.args[0] // 2, half.args[1])
    k = m.function("collatz", ptr(i64), ptr(i64))
    x, steps = k.args
    n, count, place = k.var(k.load(x)), k.var(k.i64(0)), k.scratch(i64, 1)
    with k.forever() as leave_if:
        leave_if(n.get().eq(1))
        with k.if_((n.get() & 1).eq(0)):
            k.call(half, n.get(), place)
            n.set(k.load(place))
        with k.else_():
            n.set(3 * n.get() + 1)
        count.add(1)
    k.store(count.get(), steps)
    k = m.function("triangle", ptr(i64), ptr(i64))
    x, total = k.args
    sums = k.var(k.i64(0))
    with k.loop(0, k.load(x)) as i, k.loop(0, i + 1) as j:
        sums.add(j)
    k.store(sums.get(), total)
    k = m.function("arithmetic", ptr(f32), ptr(f32))
    x, y = k.args
    lanes = m.lanes(f32)
    v = k.load(x, lanes)
    results = [k.relu(v), k.fma(v, v, k.splat(k.load(x), lanes)), 1.0 - v, -v, k.splat(k.sum(v), lanes)]
    for n, result in enumerate(results):
        k.store(result, y + n * lanes)
    return m


@sets
def test_control_flow_and_arithmetic(instruction_set):
    program = compiler.build(emit_control, instruction_set)
    out = np.zeros(1, np.int64)
    call(program, "collatz", np.array([27]), out)
    assert out == 111
    for n, expected in ((0, 0), (1, 0), (4, 10)):
        call(program, "triangle", np.array([n]), out)
        assert out == expected
    lanes = Module(instruction_set).lanes(f32)
    x = np.arange(lanes, dtype=np.float32) - 1.5
    y = np.empty((5, lanes), np.float32)
    call(program, "arithmetic", x, y)
    np.testing.assert_array_equal(y, [np.maximum(x, 0), x * x + x[0], 1 - x, -x, np.full(lanes, x.sum())])
    x[1] = np.nan
    call(program, "arithmetic", x, y)
    assert np.isnan(y[0, 1])


def emit_sweep(instruction_set, together):
    m = Module(instruction_set)
    k = m.function("sweep", ptr(i64), i64, i64)
    x, start, stop = k.args
    place = k.var(k.i64(0))

    def note(i):
        k.store(i, x + place.get())
        place.add(1)

    k.sweep(start, stop, together, note)
    return m


@pytest.mark.parametrize("together", [1, 3, 4])
def test_a_sweep_goes_through_all_numbers_in_order(together):
    program = compiler.build(emit_sweep, INSTRUCTION_SETS[0], together)
    for start, stop in [(0, 0), (0, 3), (2, 13), (-5, 4), (0, 24), (7, 2)]:
        seen = np.full(40, -99, np.int64)
        call(program, "sweep", seen, start, stop)
        numbers = list(range(start, stop))
        np.testing.assert_array_equal(seen, numbers + [-99] * (40 - len(numbers)))


def test_the_language_refuses_what_would_surprise():
    m = Module("generic")
    k = m.function("f", i64)
    with pytest.raises(TypeError, match=r"k\.if_"):
        bool(k.args[0] < 1)
    with pytest.raises(ValueError, match="at least once"), k.loop(3, 3):
        pass
    with pytest.raises(ValueError, match="at once"), k.else_():
        pass
    assert widened(f16) == f32
