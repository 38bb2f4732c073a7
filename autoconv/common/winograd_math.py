"""Cook-Toom transforms for minimal filtering F(m, r), exact, for any m and r.

`y = AT ((G w) * (BT x))` gives the m outputs of a correlation of m + r - 1 inputs `x` with r taps `w`
in m + r - 1 multiplications instead of m r; in two dimensions the transforms are applied on both sides.

The linear convolution of polynomials of degrees m - 1 and r - 1 is found by evaluating both at
m + r - 1 points (Toom 1963, Cook 1966): `s = V^-1 ((V_r w) * (V_m u))`, V being the Vandermonde matrix of
the points. Transposing it as a linear map of u gives the correlation: `AT = V_m^T, G = V_r, BT = V^-T`
(Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", 2016).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

Matrix = tuple[tuple[Fraction, ...], ...]

# Small values, and values close to 1 in pairs of sign and inverse, keep the transforms well conditioned
# (Barabasz, Anderson, Soodhalter and Gregg, "Error Analysis and Improving the Accuracy of Winograd Convolution for Deep
# Neural Networks", 2020).
POINTS = tuple(
    Fraction(numerator, denominator)
    for numerator, denominator in (
        *((0, 1), (1, 1), (-1, 1), (1, 2), (-2, 1), (-1, 2), (2, 1)),
        *((-1, 4), (4, 1), (1, 4), (-4, 1), (3, 4), (-4, 3), (-3, 4), (4, 3)),
    )
)


@dataclass(frozen=True)
class Transforms:
    """The matrices of F(m, r), as exact fractions.

    `AT` is m by n, `G` n by r and `BT` n by n, with n = m + r - 1. The last row belongs to the point at
    infinity. Rows of `BT` are scaled to whole polynomials, as Lavin & Gray write them, so that `G`,
    which is applied once per filter, takes the division.
    """

    m: int
    r: int
    points: tuple[Fraction, ...]
    AT: Matrix
    G: Matrix
    BT: Matrix

    @property
    def tile(self) -> int:
        """Inputs of a tile: m + r - 1."""
        return self.m + self.r - 1

    def arrays(self, dtype: Any = "float64") -> tuple[Any, Any, Any]:
        """`AT, G, BT` rounded to a NumPy dtype."""
        AT, G, BT = (np.array(matrix, dtype=float).astype(dtype) for matrix in (self.AT, self.G, self.BT))
        return AT, G, BT


def _product(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of prod (z - root), lowest first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [s - root * c for s, c in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return coefficients


@functools.cache
def transforms(m: int, r: int, points: tuple[Fraction, ...] | None = None) -> Transforms:
    """The transforms of F(m, r) on m + r - 2 finite points and infinity.

    Parameters
    ----------
    m, r : int
        Outputs and taps, at least 1 each.
    points : distinct fractions, or None for the first m + r - 2 of `POINTS`

    Raises
    ------
    ValueError
        When m or r is below 1, or the points are too few, too many or not distinct.

    Examples
    --------
    >>> f = transforms(2, 3)
    >>> f.tile, [int(v) for v in f.BT[0]]
    (4, [1, 0, -1, 0])
    """
    if m < 1 or r < 1:
        raise ValueError(f"F({m}, {r}): expected at least 1 output and 1 tap, got {m} and {r}")
    n = m + r - 1
    chosen = POINTS[: n - 1] if points is None else tuple(Fraction(point) for point in points)
    if len(chosen) != n - 1 or len(set(chosen)) != n - 1:
        raise ValueError(f"F({m}, {r}): expected {n - 1} distinct points, got {', '.join(map(str, chosen))}")
    AT = [[Fraction(0)] * n for _ in range(m)]
    G, BT = [], []
    for j, point in enumerate(chosen):
        others = [other for other in chosen if other != point]
        # A Lagrange basis polynomial is a row of the inverse Vandermonde matrix, transposed.
        lagrange = [*_product(others), Fraction(0)]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        for i in range(m):
            AT[i][j] = point**i
        sign = -1 if scale < 0 else 1
        G.append(tuple(sign * point**i / scale for i in range(r)))
        BT.append(tuple(sign * value for value in lagrange))
    AT[m - 1][n - 1] = Fraction(1)
    G.append((*(Fraction(0),) * (r - 1), Fraction(1)))
    BT.append(tuple(_product(chosen)))
    return Transforms(m, r, chosen, tuple(map(tuple, AT)), tuple(G), tuple(BT))
