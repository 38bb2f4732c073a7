"""The probes of a machine do what they are credited with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import vectors

from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, LINE, VECTOR_BYTES, Module
from autoconv.cpu.codegen.words import CHANNELS, vector_products
from autoconv.cpu.device import CPU
from autoconv.cpu.machine import probes
from autoconv.cpu.pool import Entry


@pytest.mark.parametrize("instruction_set", vectors.INSTRUCTION_SETS)
@pytest.mark.parametrize(("dtype", "precision"), [("float32", 1e-2), ("float64", 1e-9)])
def test_the_peak_probe_does_the_multiply_adds_it_is_credited_with(
    instruction_set: str, dtype: str, precision: float
) -> None:
    lanes = Module(instruction_set).lanes(DTYPES[dtype])
    out = np.zeros((2, lanes), dtype)
    run = Entry(compiler.build(probes.emit_peak, instruction_set, dtype), probes.PEAK, 1)
    run(np.full(lanes, probes.FACTOR, dtype), np.array([1, 1, 1]), out)
    first = sum(probes.FACTOR * (n + 1) for n in range(probes.CHAINS))
    np.testing.assert_allclose(out[0], first * (1 + probes.FACTOR) ** probes.ROUNDS, rtol=precision)
    assert not out[1].any()


@pytest.mark.parametrize("instruction_set", vectors.INSTRUCTION_SETS)
def test_the_probe_of_words_does_the_products_it_is_credited_with(instruction_set: str) -> None:
    lanes = VECTOR_BYTES[instruction_set] // 4
    factor = np.arange(1, lanes + 1, dtype=np.int32) * 0x01030507
    out = np.zeros((2, lanes), np.int32)
    product = vector_products(instruction_set)[0]
    run = Entry(compiler.build(probes.emit_words, instruction_set, product), probes.WORDS, 1)
    run(factor, np.array([1, 1, 1]), out)
    narrow = np.int16 if CHANNELS[product] == 2 else np.int8
    pixels = np.int16 if CHANNELS[product] == 2 else np.uint8  # without a sign
    sums = factor + np.arange(probes.CHAINS, dtype=np.int32)[:, None]
    filters = factor.view(narrow).astype(np.int32).reshape(lanes, -1)
    for _ in range(probes.ROUNDS):
        numbers = sums.view(pixels).astype(np.int32).reshape(probes.CHAINS, lanes, -1)
        sums = sums + np.einsum("nlc,lc->nl", numbers, filters)
    np.testing.assert_array_equal(out[0], np.bitwise_xor.reduce(sums))
    assert not out[1].any()


@pytest.mark.parametrize("instruction_set", vectors.INSTRUCTION_SETS)
class TestProbesOfMemory:
    """What each probe touches, element by element."""

    def run(self, instruction_set: str, probe: str, a: Any, out: Any, numbers: tuple[int, int, int]) -> None:
        Entry(compiler.build(probes.emit, instruction_set), probe, 1)(a, np.array(numbers), out)

    def test_reading_sees_every_element_of_the_range_and_none_beyond(self, instruction_set: str) -> None:
        lanes = VECTOR_BYTES[instruction_set] // 4
        number = 3 * probes.STREAMS * lanes
        for place in range(number + 1):
            a = np.zeros(number + lanes, np.int32)
            a[place] = 1 << place % 31
            out = np.zeros(lanes, np.int32)
            self.run(instruction_set, probes.READ, a, out, (1, number, 2))
            assert out.sum() == (a[place] if place < number else 0)

    @pytest.mark.parametrize("probe", [probes.WRITE, probes.STREAM])
    def test_writing_fills_the_range_and_nothing_beyond(self, instruction_set: str, probe: str) -> None:
        number = 2 * probes.STREAMS * VECTOR_BYTES[instruction_set] // 4
        out = CPU.current().empty((number + 16,), "float32")
        out[...] = 0.0
        self.run(instruction_set, probe, out, out, (1, number, 1))
        assert out[:number].all()  # zeros might be written faster than anything else
        assert not out[number:].any()

    def test_every_thread_writes_its_range_and_reads_the_next_one_s(self, instruction_set: str) -> None:
        lanes = VECTOR_BYTES[instruction_set] // 4
        step, threads = probes.STREAMS * lanes, 3
        a, out = np.zeros(threads * step + 1, np.float32), np.zeros((threads + 1, lanes), np.float32)
        run = Entry(compiler.build(probes.emit, instruction_set), probes.HAND, threads)
        run(a, np.array([threads, step, 1]), out)
        assert (a[:-1].reshape(threads, step) == [[1.0], [2.0], [3.0]]).all()
        assert (out == [[2.0], [3.0], [1.0], [0.0]]).all()
        assert a[-1] == 0.0
        a[:] = 7.0
        run(a, np.array([threads, 0, 1]), out)
        assert (a == 7.0).all()
        assert not out.any()  # nothing was read

    def test_a_chain_is_followed_from_where_the_last_run_ended(self, instruction_set: str) -> None:
        out = np.zeros(1, np.int64)
        chain = np.array([3, 0, 1, 2], np.int64)
        for expected in (2, 0, 2):
            self.run(instruction_set, probes.CHASE, chain, out, (1, 1, 2))
            assert out[0] == expected

    def test_jumps_go_to_any_line_of_a_thread_s_range_and_to_none_beyond(self, instruction_set: str) -> None:
        line = LINE // 8
        number, rounds = 128 * line, 1 << 12
        a = np.zeros(2 * number, np.int64)
        a[number:] = 1 << 62
        places = np.arange(number // line)
        a[places * line] = 1 << places % 61  # in every line its first number
        states = np.random.default_rng(0).integers(1 << 62, size=probes.JUMPS).astype(np.uint64)
        out = np.zeros(2 * probes.JUMPS, np.int64)
        out[: probes.JUMPS] = states
        drawn = set()
        for _ in range(rounds // probes.JUMPS):
            states = states * np.uint64(probes.FACTOR_64) + np.uint64(probes.TERM_64)
            drawn |= set(((states >> np.uint64(32)) % np.uint64(number) // np.uint64(line)).tolist())
        self.run(instruction_set, probes.JUMP, a, out, (1, number, rounds))
        np.testing.assert_array_equal(out[: probes.JUMPS].view(np.uint64), states)  # where the next run goes on
        assert out[probes.JUMPS] == np.bitwise_or.reduce(a[:number])
        assert drawn == set(places)

    def test_a_transform_combines_every_point_with_every_other(self, instruction_set: str) -> None:
        lanes, n = VECTOR_BYTES[instruction_set] // 4, probes.STREAMS
        a = np.random.default_rng(0).standard_normal((3, n, lanes)).astype(np.float32)
        out = np.zeros((n, 3, lanes), np.float32)
        self.run(instruction_set, probes.TRANSFORM, a, out, (1, a.size, 1))
        matrix = np.eye(n)
        for distance in (1, 2, 4):
            weight = 0.25 * distance
            step = np.zeros((n, n))
            for low in (i for i in range(n) if not i & distance):
                high = low | distance
                step[low, [low, high]] = 1, weight
                step[high, [low, high]] = weight, -1
            matrix = step @ matrix
        assert matrix.all()
        np.testing.assert_allclose(out, np.einsum("pq,tql->ptl", matrix, a), rtol=1e-5, atol=1e-5)
