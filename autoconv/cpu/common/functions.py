"""Functions of vectors: what an expression is made of. The series are those of float32.

`exp` reduces its argument by multiples of ln 2 / 8 in two parts (Cody and Waite, "Software manual for the elementary
functions", 1980, chapter 6); the eight powers are a table, whose elements one instruction picks (Tang, "Table-driven
implementation of the exponential function in IEEE floating-point arithmetic", 1989), and the rest has a short series.
`erf` is an odd quotient of polynomials up to where it rounds to 1: of their degrees it errs least there, by weighted
least squares (Lawson, 1961), and by 1e-8, which is little beside the 3e-7 of its roundings. `log` is formula 4.1.27 of
Abramowitz and Stegun (1964), of numbers between the roots of 1/2 and 2; `log1p` adds to it what is lost where 1 is
added, divided by the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import Function, Value, f32, i32, i64, vec

MAGIC = 1.5 * 2.0**23  # added to a small float, it leaves the nearest integer in the lowest bits
MAGIC_BITS = 0x4B400000
WHOLE = 2.0**23  # from here on all numbers of float32 are whole
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
TABLE_BITS = 3
POWERS = 1 << TABLE_BITS  # of two, from 1 to 2, that a table has: as many as lanes of AVX2
ROOT_BITS, ONE_BITS, MANTISSA = 0x3F3504F3, 0x3F800000, (1 << 23) - 1  # those of the root of 1/2, of 1, of fractions
SMALLEST = 2.0**-126  # normal number
LEAST_EXPONENT = -126 * math.log(2)  # of which the exponential is one
REST = math.log(2) / (2 * POWERS)  # of the argument, at most
# The Taylor series to the fourth power, which is within a**4 / 96 replaced by a**2 times the second (Lanczos, 1956).
SERIES = (1.0, 1.0, 1 / 2 + REST**2 / 24, 1 / 6)

ERF_ABOVE = (1.62486601, 0.264758557, 0.0749936551, 0.00508608622, 0.000415075396, 3.19800188e-06)
ERF_BELOW = (1.44000006, 0.714635789, 0.160675406, 0.0208836999, 0.00161471509, 5.76227794e-05)
ERF_ENDS = 3.72


def polynomial(k: Function, x: Value, coefficients: Sequence[float]) -> Value:
    """The sum of coefficients times powers of x, the constant term first."""
    y = k.const(x.type, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        y = k.fma(y, x, k.const(x.type, c))
    return y


def exp(k: Function, x: Value) -> Value:
    """The exponential; 0 below the smallest normal number, infinity above the largest."""
    falls = x < 0.0  # half of a small one may be no normal number
    y = _half_exp(k, x, 1.0, falls) * k.select(falls, _one(k, x), k.const(x.type, 2.0))
    return k.select(x < LEAST_EXPONENT, k.const(x.type, 0.0), y)


def _half_exp(k: Function, x: Value, times: float, whole: Value | None = None) -> Value:
    """Half of `exp(times * x)`, which is finite wherever that is; `times` is a power of two, or minus one.

    Where `whole` holds, it is not halved. The lowest bits of `n = round(8 / ln 2 * times * x)` say which power of the
    table it is, the others what is added to its exponent; those of `MAGIC` are shifted out.
    """
    low, high = sorted((LEAST_EXPONENT / times, 89.0 / times))
    x = k.select(x < low, k.const(x.type, low), x)
    x = k.select(x > high, k.const(x.type, high), x)
    shifted = k.fma(x, k.const(x.type, times * POWERS / math.log(2)), k.const(x.type, MAGIC))
    n = shifted - MAGIC
    r = k.fma(n, k.const(x.type, -LN2_HIGH / (times * POWERS)), x)
    r = k.fma(n, k.const(x.type, -LN2_LOW / (times * POWERS)), r)
    series = polynomial(k, r, [c * times**i for i, c in enumerate(SERIES)])
    bits = k.bits(shifted, vec(i32, x.type.lanes or 1))
    exponent = (bits << (23 - TABLE_BITS)) & -(1 << 23)
    if whole is not None:
        exponent = exponent + k.select(whole, k.const(bits.type, 1 << 23), k.const(bits.type, 0))
    power = k.bits(_power(k, bits), bits.type) + exponent
    return series * k.bits(power, x.type)


def _power(k: Function, index: Value) -> Value:
    """Half of `2**(i / 8)`, by the lowest bits of an index."""
    lanes = index.type.lanes or 1
    table = k.module.table(k, f32, [2 ** (i / POWERS - 1) for i in range(POWERS)])
    if k.module.lanes(f32) < POWERS or lanes == 1:
        found = k.zero(f32, lanes)
        for lane in range(lanes):
            one = k.load(table + k.cast((k.extract(index, lane) if lanes > 1 else index) & (POWERS - 1), i64))
            found = k.insert(found, one, lane) if lanes > 1 else one
        return found
    powers = k.load(table, POWERS)
    if lanes > POWERS and compiler.host_features().get("avx512f", False):
        all_twice = k.shuffle(powers, powers, range(lanes))
        return k.intrinsic(all_twice.type, "llvm.x86.avx512.permvar.sf.512", all_twice, index)
    places = [min(lane, lanes - 1) for lane in range(-(-lanes // POWERS) * POWERS)]
    found, *more = (
        k.intrinsic(powers.type, "llvm.x86.avx2.permps", powers, k.shuffle(index, index, places[n : n + POWERS]))
        for n in range(0, len(places), POWERS)
    )
    return k.shuffle(found, more[0] if more else found, range(lanes))


def _one(k: Function, x: Value) -> Value:
    return k.const(x.type, 1.0)


def divide(k: Function, a: Value, b: Value) -> Value:
    """A quotient."""
    return k.emit(a.type, f"fdiv {a.type} {a.text}, {b.text}")


def sqrt(k: Function, x: Value) -> Value:
    """The square root."""
    return k.intrinsic(x.type, f"llvm.sqrt.{x.type.suffix}", x)


def _over_sigmoid(k: Function, x: Value) -> Value:
    """One over the logistic function, `1 + exp(-x)`."""
    return k.fma(_half_exp(k, x, -1.0), k.const(x.type, 2.0), _one(k, x))


def _sigmoid(k: Function, x: Value) -> Value:
    return divide(k, _one(k, x), _over_sigmoid(k, x))


def _abs(k: Function, x: Value) -> Value:
    return k.intrinsic(x.type, f"llvm.fabs.{x.type.suffix}", x)


def _tanh(k: Function, x: Value) -> Value:
    far = _one(k, x) - divide(k, _one(k, x), _half_exp(k, x, 2.0) + 0.5)
    near = x * polynomial(k, x * x, [1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835])
    return k.select(_abs(k, x) < 0.25, near, far)


def _erf(k: Function, x: Value) -> Value:
    square = x * x
    y = divide(k, x * polynomial(k, square, ERF_ABOVE), polynomial(k, square, ERF_BELOW))
    y = k.select(x > ERF_ENDS, _one(k, x), y)
    return k.select(x < -ERF_ENDS, k.const(x.type, -1.0), y)


def _log(k: Function, x: Value) -> Value:
    tiny = x < SMALLEST
    bits = k.bits(k.select(tiny, x * 2.0**24, x), vec(i32, x.type.lanes or 1)) + (ONE_BITS - ROOT_BITS)
    m = k.bits((bits & MANTISSA) + ROOT_BITS, x.type)
    n = k.bits((bits >> 23) + MAGIC_BITS, x.type) - (MAGIC + 127)
    n = n - k.select(tiny, k.const(x.type, 24.0), k.const(x.type, 0.0))
    s = divide(k, m - 1.0, m + 1.0)
    y = s * polynomial(k, s * s, [2 / (2 * i + 1) for i in range(5)])
    y = k.fma(n, k.const(x.type, LN2_HIGH), k.fma(n, k.const(x.type, LN2_LOW), y))
    beyond = k.select(x.eq(0.0), k.const(x.type, -math.inf), k.const(x.type, math.nan))
    return k.select(x > 0.0, k.select(x < math.inf, y, x), beyond)


def _log1p(k: Function, x: Value) -> Value:
    whole = x + 1.0
    y, lost = _log(k, whole), divide(k, x - (whole - 1.0), whole)
    return k.select(whole > 0.0, k.select(whole < math.inf, y + lost, y), y)


def _round(k: Function, x: Value) -> Value:
    """The nearest integer, of two as near the even one: beside 2**23 float32 has no room for less."""
    size = _abs(k, x)
    whole = (size + WHOLE) - WHOLE
    return k.select(size < WHOLE, k.select(x < 0.0, -whole, whole), x)


def _larger(k: Function, a: Value, b: Value) -> Value:
    return k.select(b.ne(b), b, k.select(a < b, b, a))


def _smaller(k: Function, a: Value, b: Value) -> Value:
    return k.select(b.ne(b), b, k.select(a > b, b, a))


def _library(name: str) -> Callable[..., Value]:
    """A function of the C library, lane by lane."""

    def call(k: Function, *args: Value) -> Value:
        return k.intrinsic(args[0].type, f"llvm.{name}.{args[0].type.suffix}", *args)

    return call


FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "add": lambda k, a, b: a + b,
    "sub": lambda k, a, b: a - b,
    "mul": lambda k, a, b: a * b,
    "div": divide,
    "max": _larger,
    "min": _smaller,
    "pow": _library("pow"),
    "neg": lambda k, x: -x,
    "abs": _abs,
    "round": _round,
    "sqrt": sqrt,
    "exp": exp,
    "log": _log,
    "log1p": _log1p,
    "erf": _erf,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "relu": lambda k, x: k.relu(x),
    "prelu": lambda k, x, slope: k.select(x < 0.0, x * slope, x),
}

# Which are no more exact than float32 in float64.
FLOAT32_SERIES = frozenset({"exp", "log", "log1p", "erf", "tanh", "sigmoid"})


def value_of(k: Function, expression: Any, inputs: Sequence[Value], like: Value) -> Value:
    """What an expression gives (`common.epilogue.expressions`); equal parts of it are computed once."""
    known: dict[Any, Value] = {}

    def value(part: Any) -> Value:
        if isinstance(part, int):
            return inputs[part]
        if part not in known:
            if part[0] == "constant":
                known[part] = k.const(like.type, part[1])
            elif part[0] == "mul" and isinstance(part[2], tuple) and part[2][0] == "sigmoid":
                known[part] = divide(k, value(part[1]), _over_sigmoid(k, value(part[2][1])))
            else:
                known[part] = FUNCTIONS[part[0]](k, *(value(p) for p in part[1:]))
        return known[part]

    return value(expression)
