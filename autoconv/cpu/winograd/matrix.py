"""Matrix-vector products with small exact matrices as code.

Large tiles have more factors than a processor has registers, and each that waits in memory is a load. So rows and
columns that mirror each other share theirs where one is a multiple of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from autoconv.cpu.codegen.ir import VECTOR_REGISTERS, Function, Value, f32

Row = Sequence[Fraction]


def _term(k: Function, total: Value | None, factor: Fraction, x: Value) -> Value:
    """The sum so far plus `factor * x`."""
    if total is None:
        return x if factor == 1 else -x if factor == -1 else x * _constant(factor, x)
    if abs(factor) == 1:
        return total + x if factor == 1 else total - x
    return k.fma(k.const(x.type, _constant(factor, x)), x, total)


def _constant(factor: Fraction, x: Value) -> float:
    return float(np.float32(float(factor))) if x.type.scalar == f32 else float(factor)


def _dot(k: Function, row: Row, xs: Sequence[Value], columns: Sequence[int]) -> Value | None:
    """The sum of a row's terms in some columns; None where all are zero."""
    total = None
    for c in sorted((c for c in columns if row[c]), key=lambda c: row[c] != 1):  # a plain term starts the sum for free
        total = _term(k, total, row[c], xs[c])
    return total


def _mirrored(a: Row, b: Row) -> tuple[list[int], list[int]] | None:
    """Where two rows are equal and where opposite, if they are one or the other everywhere, and both somewhere."""
    equal, opposite = list[int](), list[int]()
    for c, (mine, its) in enumerate(zip(a, b, strict=True)):
        if mine == its:
            if mine:
                equal.append(c)
        elif mine == -its:
            opposite.append(c)
        else:
            return None
    return (equal, opposite) if equal and opposite else None


def _pairs(rows: Sequence[Row]) -> list[tuple[int, int, list[int], list[int]]]:
    """Rows that mirror each other, two by two, with where they are equal and opposite."""
    found, used = [], set[int]()
    for i, j in itertools.combinations(range(len(rows)), 2):
        if not used & {i, j} and (split := _mirrored(rows[i], rows[j])):
            used |= {i, j}
            found.append((i, j, *split))
    return found


def _factor(row: Row, columns: Sequence[int]) -> Fraction | None:
    """What a half without a plain term is multiplied by in the end, so that it has one; None where that would round."""
    if any(abs(row[c]) == 1 for c in columns):
        return None
    factor = row[columns[-1]]
    return factor if all(_exact(row[c] / factor) for c in columns) else None


def _exact(factor: Fraction) -> bool:
    """Whether it is a float32."""
    return Fraction(float(np.float32(float(factor)))) == factor


def _mirror_images(
    k: Function, row: Row, xs: Sequence[Value], equal: Sequence[int], opposite: Sequence[int]
) -> tuple[Value, Value]:
    """The sum of a row's two halves, and their difference.

    A factor that all of a half shares takes no instruction: their sum is a multiply-add. What is left of the half often
    has the other one's factors.
    """
    odd_factor = _factor(row, opposite)
    even_factor = None if odd_factor else _factor(row, equal)
    even = _dot(k, [f / (even_factor or 1) for f in row], xs, equal)
    odd = _dot(k, [f / (odd_factor or 1) for f in row], xs, opposite)
    assert even is not None
    assert odd is not None
    if odd_factor:
        factor = k.const(odd.type, _constant(odd_factor, odd))
        return k.fma(factor, odd, even), k.fma(factor, -odd, even)
    if even_factor:
        factor = k.const(even.type, _constant(even_factor, even))
        return k.fma(factor, even, odd), k.fma(factor, even, -odd)
    return even + odd, even - odd


def matrix_vector(k: Function, matrix: Sequence[Row], xs: Sequence[Value]) -> list[Value]:
    """The product of an exact matrix and a vector of values.

    Points in pairs of sign make rows of the input's transform, and columns of the output's, equal in some
    places and opposite in the others: each such pair shares its two halves.
    """
    transposed = list(zip(*matrix, strict=True))
    halves = _pairs(transposed)
    values, columns = list(xs), [list(column) for column in transposed]
    for i, j, equal, opposite in halves:
        values[i], values[j] = xs[i] + xs[j], xs[i] - xs[j]
        columns[i] = [f if r in equal else Fraction(0) for r, f in enumerate(transposed[i])]
        columns[j] = [f if r in opposite else Fraction(0) for r, f in enumerate(transposed[i])]
    if len({abs(f) for column in columns for f in column} - {0, 1}) > VECTOR_REGISTERS[k.module.instruction_set]:
        for _, j, _, _ in halves:
            factor = next(f for f in columns[j] if f)
            quotients = [f / factor for f in columns[j]]
            if abs(factor) != 1 and all(map(_exact, quotients)):  # then they are often those of column i
                values[j], columns[j] = values[j] * _constant(factor, values[j]), quotients
    rows = list(zip(*columns, strict=True))
    every = range(len(values))
    out: list[Value | None] = [None] * len(rows)
    shared = set[int]()
    for i, j, equal, opposite in _pairs(rows):
        out[i], out[j] = _mirror_images(k, rows[i], values, equal, opposite)
        shared |= {i, j}
    for i, row in enumerate(rows):
        if i not in shared:
            out[i] = _dot(k, row, values, every)
    zero = k.const(xs[0].type, 0)
    return [zero if value is None else value for value in out]
