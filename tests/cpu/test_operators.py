"""Kernels between convolutions: each against its operator in float64, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from graphs import agree, compiled, graph_of
from vectors import INSTRUCTION_SETS, device_with

from autoconv.common.arrays import collapsed
from autoconv.cpu import pool
from autoconv.cpu.operators import windows
from autoconv.networks.operators import (
    LRN,
    Concat,
    Elementwise,
    Normalization,
    Operator,
    Pad,
    Pool,
    Reduce,
    Resize,
    Slice,
    Softmax,
    Transpose,
    activations,
)

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
NO = ((0, 0), (0, 0))


def pools(reduction: Any, **fields: Any) -> Pool:
    return Pool(reduction=reduction, **({"window": (3, 3)} | fields))


def taken(axis: int, places: Iterable[int]) -> Resize:
    """Copies of what lies at such places of an axis."""
    seen = tuple((place,) for place in places)
    return Resize(axis, seen, ((1.0,),) * len(seen))


CASES: dict[str, tuple[Operator, list[tuple[int, ...]]]] = {
    "sum of arrays": (Elementwise(("add", 0, 1)), [(2, 3, 5, 7), (2, 3, 5, 7)]),
    "by channel": (Elementwise(("relu", ("add", ("mul", 0, 1), 2))), [(2, 3, 5, 7), (3, 1, 1), (3, 1, 1)]),
    "by column": (Elementwise(("sub", 0, 1)), [(4, 3, 19), (19,)]),
    "both repeated": (Elementwise(("mul", 0, 1)), [(4, 1, 9), (1, 5, 1)]),
    "five inputs": (Elementwise(("add", ("add", ("add", ("add", 0, 1), 2), 3), 4)), [(3, 33)] * 5),
    "many tasks": (Elementwise(("add", 0, 1)), [(3, 50_000), (3, 1)]),
    "many rows": (Elementwise(("mul", 0, 0)), [(70, 300, 3)]),
    "one element": (Elementwise(("add", 0, 1.0)), [(1, 1)]),
    "shuffled channels": (Transpose((0, 2, 1, 3, 4)), [(2, 3, 4, 5, 6)]),
    "channels last": (Transpose((0, 2, 3, 1)), [(2, 21, 5, 7)]),
    "channels first": (Transpose((0, 3, 1, 2)), [(1, 5, 8, 16)]),
    "colours last": (Transpose((0, 2, 3, 1)), [(2, 3, 5, 7)]),
    "colours first": (Transpose((0, 3, 1, 2)), [(2, 5, 7, 3)]),
    "a long matrix": (Transpose((1, 0)), [(2500, 18)]),
    "whole lines": (Transpose((0, 2, 1)), [(2, 35, 50)]),
    "planes of a power of two": (Transpose((0, 2, 3, 1)), [(1, 24, 32, 68)]),
    "a wide matrix": (Transpose((1, 0)), [(19, 2500)]),
    "backwards": (Transpose((2, 1, 0)), [(9, 4, 17)]),
    "every other": (Slice((0, 1, 8), (2, 2, 4), (1, 2, -2)), [(2, 4, 9)]),
    "joined": (Concat(2), [(2, 3, 4), (2, 3, 1), (2, 3, 9)]),
    "padded": (Pad((0, 0, 1, 2), (0, 1, 0, 3), -1.5), [(2, 3, 4, 5)]),
    "max": (pools("max", stride=(2, 2), padding=((1, 1), (1, 1))), [(2, 3, 15, 21)]),
    "max, odd": (
        pools("max", window=(2, 5), stride=(3, 1), padding=((1, 0), (2, 4)), dilation=(2, 1)), [(1, 2, 9, 11)],
    ),
    "max, narrow": (pools("max", stride=(1, 3)), [(1, 2, 5, 5)]),
    "max of many rows, narrow": (pools("max", padding=((1, 1), (1, 1))), [(2, 3, 37, 15)]),
    "mean of many rows, narrow": (pools("mean", window=(2, 2), stride=(2, 2)), [(2, 3, 70, 5)]),
    "max beyond the padding": (pools("max", window=(2, 2), stride=(2, 2), overhang=(1, 1)), [(1, 3, 7, 17)]),
    "mean": (pools("mean", stride=(2, 2), padding=((1, 1), (1, 1))), [(2, 3, 14, 22)]),
    "mean of padding, too": (pools("mean", padding=((1, 2), (0, 1)), include_padding=True), [(2, 3, 8, 9)]),
    "mean beyond the padding": (
        pools("mean", stride=(2, 2), padding=((1, 1), (1, 1)), overhang=(1, 0), include_padding=True), [(2, 3, 9, 9)],
    ),
    "mean of dilated windows": (pools("mean", dilation=(2, 3), padding=((2, 2), (3, 3))), [(1, 2, 9, 40)]),
    "max, channels last": (
        pools("max", stride=(2, 2), padding=((1, 1), (0, 1)), overhang=(1, 0), layout="NHWC"), [(2, 14, 21, 75)],
    ),
    "mean, channels last": (
        pools("mean", stride=(1, 2), padding=((1, 2), (4, 1)), dilation=(1, 2), layout="NHWC"), [(1, 9, 8, 20)],
    ),
    "mean of padding, too, channels last": (
        pools("mean", padding=((1, 2), (0, 1)), include_padding=True, layout="NHWC"), [(2, 5, 9, 3)],
    ),
    "mean of parts of a long row": (pools("mean", window=(2, 40), stride=(2, 37), padding=((0, 0), (3, 39))),
                                    [(2, 3, 4, 200)]),
    "largest of parts of a long row": (pools("max", window=(1, 30), stride=(1, 30), dilation=(1, 2)), [(1, 2, 3, 95)]),
    "mean of many rows": (pools("mean", window=(300, 2), stride=(7, 2), padding=((30, 9), (0, 1))), [(2, 3, 310, 41)]),
    "largest of many rows": (pools("max", window=(257, 1)), [(1, 2, 260, 20)]),
    "mean of an image, channels last": (Reduce("mean", (1, 2)), [(2, 7, 7, 130)]),
    "mean of an image": (Reduce("mean", (2, 3)), [(2, 5, 7, 7)]),
    "sum of rows": (Reduce("sum", (1,)), [(9, 1000)]),
    "sum of channels": (Reduce("sum", (1,)), [(3, 70, 20, 9)]),
    "largest of columns": (Reduce("max", (0, 1)), [(8, 20, 3)]),
    "mean of long columns": (Reduce("mean", (1,)), [(2, 9000, 75)]),
    "mean of axes in the middle": (Reduce("mean", (1, 2)), [(2, 3, 4, 5, 1, 3)]),
    "largest of few": (Reduce("max", (2,)), [(3, 4, 3)]),
    "softmax": (Softmax(1), [(3, 1000)]),
    "softmax of few": (Softmax(1), [(4, 5, 1, 1)]),
    "softmax of channels": (Softmax(1), [(3, 70, 20, 9)]),
    "softmax of two": (Softmax(0), [(2, 3)]),
    "softmax of long columns": (Softmax(1), [(2, 9000, 75)]),
    "normalised rows": (Normalization(axis=1, epsilon=1e-5), [(3, 1000)]),
    "normalised rows of few": (Normalization(axis=2, epsilon=1e-2), [(4, 90, 3)]),
    "normalised rows of one": (Normalization(axis=1, epsilon=1e-2), [(40, 1)]),
    "many normalised rows, with a scale for elements": (
        Normalization(axis=1, epsilon=1e-5, affine="elements"), [(3000, 5, 7), (35,), (35,)],
    ),
    "normalised images": (Normalization(axis=2, epsilon=1e-5, affine="rows"), [(3, 6, 9, 11), (6,), (6,)]),
    "the root of the mean square": (Normalization(axis=1, epsilon=1e-5, centred=False), [(70, 50)]),
    "the root of the mean square, with a scale for rows": (
        Normalization(axis=1, epsilon=1e-5, centred=False, affine="rows"), [(70, 50), (7,), (7,)],
    ),
    "lrn": (LRN(size=5, alpha=1e-1, beta=0.75, bias=1.0), [(2, 9, 5, 7)]),
    "lrn of fewer channels": (LRN(size=7, alpha=0.3, beta=0.75, bias=1.0), [(2, 2, 3, 5)]),
    "lrn of one channel at a time": (LRN(size=1, alpha=0.3, beta=0.75, bias=1.0), [(1, 3, 3, 3)]),
    "lrn, even and of another power": (LRN(size=4, alpha=0.5, beta=0.6, bias=2.0), [(1, 9, 3, 7)]),
    "lrn of just so many channels": (LRN(size=32, alpha=1.0, beta=0.75, bias=1.0), [(1, 40, 3, 9)]),
    "lrn of many channels": (LRN(size=34, alpha=1.0, beta=0.6, bias=1.0), [(2, 75, 3, 7)]),
    "lrn of all channels": (LRN(size=2**31 - 1, alpha=1e9, beta=0.5, bias=1e-8), [(1, 300, 5, 5)]),
    "nearest": (Resize(2, ((0,), (0,), (1,), (1,), (2,)), ((1.0,),) * 5), [(2, 3, 3, 9)]),
    "between many": (Resize(1, (tuple(range(40)), (7,) * 40), ((0.025,) * 40,) * 2), [(2, 40, 19)]),
    "between two": (Resize(3, ((0, 1), (1, 2), (2, 2)), ((0.5, 0.5), (0.25, 0.75), (1.0, 0.0))), [(2, 3, 4, 3)]),
    "copies of vectors and a rest": (taken(1, [0, 0, 2, 1]), [(3, 3, 37)]),
    "rows twice as long": (taken(3, [n // 2 for n in range(80)]), [(2, 3, 2, 40)]),
    "rows of half a vector": (taken(2, [n // 2 for n in range(18)]), [(5, 3, 9)]),
    "rows of three": (taken(2, [n // 2 for n in range(6)]), [(5, 3, 3)]),
    "rows by reflection": (taken(2, [3, 2, 1, *range(37), 35, 34, 33, 32, 31]), [(2, 3, 37)]),
    "rows of pixels of three": (taken(2, [2, 1, *range(20), 0, 1]), [(2, 5, 20, 3)]),
    "every other of a row": (taken(2, range(0, 80, 2)), [(2, 3, 80)]),
    "every fifth of a row": (taken(2, range(0, 200, 5)), [(2, 3, 200)]),
    "any of a row": (taken(2, [(7 * n) % 100 for n in range(90)]), [(2, 3, 100)]),
    "rows between two": (Resize(2, tuple((n * 2 // 3, n * 2 // 3 + 1) for n in range(45)),
                                ((0.75, 0.25), (0.25, 0.75), (1.0, 0.0)) * 15), [(2, 3, 31)]),
}  # fmt: skip


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_their_operators(case: str, instruction_set: str) -> None:
    operator, shapes = CASES[case]
    graph = graph_of(operator, *shapes)
    net = compiled(graph, device_with(instruction_set, 2))
    assert "all by kernels of ours" in net.explain()
    agree(net, graph, 3e-6)


# Rows, images in either layout, channels, and what NumPy computes.
MEANS = (
    *(((1,), (90, 3)), ((1,), (9, 1000)), ((2, 3), (2, 5, 10, 11)), ((1, 2), (2, 10, 11, 150))),
    *(((0,), (77, 9)), ((1,), (2, 77, 13, 11)), ((0, 2), (7, 3, 11))),
)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_mean_of_equal_numbers_is_that_number(instruction_set: str) -> None:
    for axes, shape in MEANS:
        kept = [1 if axis in axes else extent for axis, extent in enumerate(shape)]
        expected = np.random.default_rng(0).uniform(-10, 10, kept).astype(np.float32)
        net = compiled(graph_of(Reduce("mean", axes), shape), device_with(instruction_set, 2))
        np.testing.assert_array_equal(net.run(np.broadcast_to(expected, shape)), expected)


# How far a function may be from its value, in units of the largest: |y - f(x)| / max(|f(x)|, least).
FUNCTIONS: dict[str, tuple[Any, float, tuple[float, float], float]] = {
    "exp": (("exp", 0), 3e-7, (-87.33, 88.7), 0),
    "the least exp": (("exp", 0), 3e-7, (-87.336, -86.5), 0),
    "sigmoid": (("sigmoid", 0), 3e-7, (-80, 80), 0),
    "tanh": (("tanh", 0), 4e-7, (-20, 20), 0),
    "tanh near 0": (("tanh", 0), 8e-7, (-1, 1), 0),
    "erf": (("erf", 0), 3e-7, (-6, 6), 1),
    "log": (("log", 0), 4e-7, (0.01, 100), 0),
    "log near 1": (("log", 0), 4e-7, (0.9, 1.1), 0),
    "log1p": (("log1p", 0), 4e-7, (-0.9, 50), 0),
    "log1p near 0": (("log1p", 0), 4e-7, (-1e-4, 1e-4), 0),
    "softplus": (activations.SOFTPLUS, 8e-7, (-87.33, 30), 0),
    "mish": (activations.MISH, 1.5e-6, (-87.33, 30), 0),
    "sqrt": (("sqrt", 0), 1e-7, (0, 100), 0),
    "pow": (("pow", 0, 0.6), 3e-7, (0.01, 100), 0),
    "silu": (("mul", 0, ("sigmoid", 0)), 4e-7, (-80, 80), 0),
    "hard swish": (("mul", 0, ("min", ("max", ("add", ("mul", 0, 1 / 6), 0.5), 0.0), 1.0)), 3e-7, (-6, 6), 1),
    "leaky": (("prelu", 0, 0.1), 1e-7, (-6, 6), 0),
    "the rest": (("div", ("neg", ("abs", 0)), ("add", 1.0, ("mul", 0, 0))), 4e-7, (-6, 6), 0),
}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_exact_as_float32(name: str, instruction_set: str) -> None:
    expression, tolerance, (low, high), least = FUNCTIONS[name]
    operator = Elementwise(expression)
    x = np.linspace(low, high, 4001, dtype=np.float32)
    y = compiled(graph_of(operator, x.shape), device_with(instruction_set, 2)).run(x)
    expected = operator.evaluate(x.astype(np.float64))
    assert (np.abs(y - expected) <= tolerance * np.maximum(np.abs(expected), max(least, 1e-30))).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("expression", ["exp", "log", "log1p", "sigmoid", "tanh", "erf"])
def test_functions_give_the_same_bits_wherever_a_number_lies(expression: str, instruction_set: str) -> None:
    x = np.linspace(-20, 20, 31, dtype=np.float32)  # vectors of 16, 8, 4 and 2, and a single number
    net = compiled(graph_of(Elementwise((expression, 0)), x.shape), device_with(instruction_set, 2))
    np.testing.assert_array_equal(net.run(x), net.run(x[::-1].copy())[::-1])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_functions_of_what_is_no_number_or_has_no_end(instruction_set: str) -> None:
    device = device_with(instruction_set, 2)
    x = np.array([np.nan, np.inf, -np.inf, 100.0, -100.0, 0.0, -0.0, 88.5], np.float32)
    for expression in ("exp", "log", "log1p", "sigmoid", "tanh", "erf", "relu", "abs"):
        with np.errstate(all="ignore"):
            expected = Elementwise((expression, 0)).evaluate(x.astype(np.float64)).astype(np.float32)
        y = compiled(graph_of(Elementwise((expression, 0)), x.shape), device).run(x)
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-37, err_msg=expression)
    for expression in (("max", 0, 1), ("min", 0, 1), ("max", 1, 0), ("min", 1, 0)):
        y = compiled(graph_of(Elementwise(expression), x.shape, x.shape)).run(x, np.ones_like(x))
        np.testing.assert_array_equal(y, Elementwise(expression).evaluate(x, np.ones_like(x)))


@pytest.mark.parametrize("expression", [("mul", 0, 1e300), ("sub", 1e39, 0), ("div", 0, -1e300), ("max", -1e50, 0)])
def test_numbers_beyond_float32_are_infinite(expression: Any) -> None:
    x = np.array([1.5, -2.0, 3e38, np.inf], np.float32)
    with np.errstate(all="ignore"):
        expected = Elementwise(expression).evaluate(x)
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(compiled(graph_of(Elementwise(expression), x.shape)).run(x), expected)


@pytest.mark.parametrize("window", [(1, 112), (5000, 1)])
def test_pools_of_long_windows_are_written_in_few_lines(window: tuple[int, int]) -> None:
    """And not an element of the window after the other, for as many windows as a vector has lanes."""
    shape = windows.PoolShape("max", 8, window, (1, 1), window, window, ((0, 0), (0, 0)), (1, 1), False)
    assert str(windows.emit("generic", shape)).count("\n") < 1000


def test_a_row_of_pools_fetches_the_rows_that_one_further_down_sees_first() -> None:
    shape = windows.PoolShape("max", 8, (112, 112), (56, 56), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), False)
    assert str(windows.emit("avx512", shape)).count("call void @llvm.prefetch") == 2 * 112 * 4 // 64


def test_a_pool_keeps_what_is_no_number() -> None:
    x = np.ones((1, 1, 8, 12), np.float32)
    x[0, 0, 3, 4] = np.nan
    for reduction in ("max", "mean"):
        operator = pools(reduction)
        y = compiled(graph_of(operator, x.shape)).run(x)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(operator.evaluate(x)))


def test_dimensions_that_follow_each_other_in_memory_are_one() -> None:
    assert collapsed((1, 1), [(1, 1)]) == ((1,), ((1,),))
    assert collapsed((2, 1, 3), [(3, 9, 1), (0, 5, 0)]) == ((6,), ((1,), (0,)))
    assert collapsed((2, 3), [(3, 1), (1, 2)]) == ((2, 3), ((3, 1), (1, 2)))
