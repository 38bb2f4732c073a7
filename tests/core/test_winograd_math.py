"""The Cook-Toom transforms, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoconv.common.winograd_math import POINTS, Transforms, transforms

ALL = [(m, r) for m in range(1, 9) for r in range(1, 9)]
USED = [(2, 3), (4, 3), (6, 3), (4, 5), (3, 2), (3, 4), (3, 6), (5, 4)]
LAVIN = tuple(map(Fraction, (0, 1, -1, 2, -2, 3, -3)))


@pytest.mark.parametrize(("m", "r"), ALL)
def test_exact_for_every_pair_of_unit_vectors(m: int, r: int) -> None:
    """Bilinear, so that unit inputs and unit taps prove it: output i of input k and tap j is [k = i + j]."""
    f = transforms(m, r)
    assert (len(f.AT), len(f.G), len(f.BT)) == (m, f.tile, f.tile)
    for i in range(m):
        for j in range(r):
            for k in range(f.tile):
                got = sum(f.AT[i][n] * f.G[n][j] * f.BT[n][k] for n in range(f.tile))
                assert got == (k == i + j)


@given(
    m=st.integers(1, 5),
    r=st.integers(1, 5),
    points=st.lists(st.fractions(-5, 5, max_denominator=6), min_size=9, max_size=9, unique=True),
    data=st.data(),
)
def test_exact_on_any_points(m: int, r: int, points: list[Fraction], data: st.DataObject) -> None:
    f = transforms(m, r, tuple(points[: m + r - 2]))
    numbers = st.fractions(-3, 3, max_denominator=4)
    x = data.draw(st.lists(numbers, min_size=f.tile, max_size=f.tile))
    w = data.draw(st.lists(numbers, min_size=r, max_size=r))
    products = [
        sum((g * v for g, v in zip(G, w, strict=True)), Fraction(0))
        * sum((b * v for b, v in zip(BT, x, strict=True)), Fraction(0))
        for G, BT in zip(f.G, f.BT, strict=True)
    ]
    y = [sum((a * v for a, v in zip(row, products, strict=True)), Fraction(0)) for row in f.AT]
    assert y == [sum((x[i + j] * w[j] for j in range(r)), Fraction(0)) for i in range(m)]


@pytest.mark.parametrize(("m", "r"), USED)
def test_matrices_of_the_network_sizes_are_exact_in_float16(m: int, r: int) -> None:
    """`AT` and `BT`, applied at every run, hold numbers that even float16 has."""
    f = transforms(m, r)
    for exact, rounded in zip((f.AT, f.BT), (f.arrays("float16")[0], f.arrays("float16")[2]), strict=True):
        assert [list(map(Fraction, map(float, row))) for row in rounded] == [list(row) for row in exact]


def test_the_smallest_filters_need_additions_only() -> None:
    """F(2, 3): inputs and outputs are only added and subtracted, and filters halved."""
    f = transforms(2, 3)
    assert {abs(v) for row in (*f.AT, *f.BT) for v in row} == {0, 1}
    assert {abs(v) for row in f.G for v in row} == {0, Fraction(1, 2), 1}


def amplification(f: Transforms) -> float:
    """How much larger than the direct sum's the terms of one output get in one dimension, at worst.

    `max_i sum_j |AT_ij| (sum |G_j|) (sum |BT_j|) / r`: rounding errors grow by at most this factor
    (its square in two dimensions), typically by far less. Any scaling of the rows leaves it alone.
    """
    AT, G, BT = (np.abs(matrix) for matrix in f.arrays())
    return float((AT @ (G.sum(1) * BT.sum(1))).max() / f.r)


@pytest.mark.parametrize(("m", "r"), [(4, 3), (6, 3), (4, 5)])
def test_default_points_amplify_less_than_small_integers(m: int, r: int) -> None:
    assert amplification(transforms(m, r)) < amplification(transforms(m, r, LAVIN[: m + r - 2]))


def test_amplification_bounds_the_growth_of_terms() -> None:
    """By hand for F(1, 1), which is one product, and F(2, 3): (1 + 3 + 1/2...) worked out from its identities."""
    assert amplification(transforms(1, 1)) == 1
    # Rows of F(2, 3): |G| sums 1, 3/2, 3/2, 1 and |BT| sums 2 each; the first output adds rows 0 to 2.
    assert amplification(transforms(2, 3)) == pytest.approx((1 + 1.5 + 1.5) * 2 / 3)


def test_arrays_are_the_fractions() -> None:
    f = transforms(4, 3)
    for exact, array in zip((f.AT, f.G, f.BT), f.arrays("float32"), strict=True):
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, np.array(exact, dtype=float), rtol=1e-7)


def test_points_are_distinct() -> None:
    assert len(set(POINTS)) == len(POINTS)


@pytest.mark.parametrize(
    ("m", "r", "points"),
    [(0, 3, None), (3, 0, None), (2, 3, (0, 1)), (2, 3, (0, 1, 1)), (2, 3, (0, 1, 2, 3)), (30, 3, None)],
)
def test_refused(m: int, r: int, points: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"F\("):
        transforms(m, r, points if points is None else tuple(map(Fraction, points)))
