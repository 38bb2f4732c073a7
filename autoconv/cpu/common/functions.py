"""Functions of vectors: what an expression is made of. The series are those of float32.

`exp` reduces its argument by multiples of ln 2 in two parts (Cody and Waite, "Software manual for the elementary
functions", 1980, chapter 6) and takes the Taylor series of the rest; `erf` is formula 7.1.26 of Abramowitz and Stegun
(1964), with the Taylor series near 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoconv.cpu.codegen.ir import Function, Value, i32, vec

MAGIC = 1.5 * 2.0**23  # added to a small float, it leaves the nearest integer in the lowest bits
MAGIC_BITS = 0x4B400000
WHOLE = 2.0**23  # from here on all numbers of float32 are whole
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4


def polynomial(k: Function, x: Value, coefficients: Sequence[float]) -> Value:
    """The sum of coefficients times powers of x, the constant term first."""
    y = k.const(x.type, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        y = k.fma(y, x, k.const(x.type, c))
    return y


def exp(k: Function, x: Value) -> Value:
    """The exponential; 0 below the smallest normal number, infinity above the largest."""
    x = k.select(x < -87.0, k.const(x.type, -87.0), x)
    x = k.select(x > 89.0, k.const(x.type, 89.0), x)
    shifted = k.fma(x, k.const(x.type, 1 / math.log(2)), k.const(x.type, MAGIC))
    n = shifted - MAGIC
    r = k.fma(n, k.const(x.type, -LN2_HIGH), x)
    r = k.fma(n, k.const(x.type, -LN2_LOW), r)
    power = k.bits((k.bits(shifted, vec(i32, x.type.lanes or 1)) - (MAGIC_BITS - 126)) << 23, x.type)  # half of 2**n
    return polynomial(k, r, [1 / math.factorial(i) for i in range(8)]) * power * 2.0


def _one(k: Function, x: Value) -> Value:
    return k.const(x.type, 1.0)


def divide(k: Function, a: Value, b: Value) -> Value:
    """A quotient."""
    return k.emit(a.type, f"fdiv {a.type} {a.text}, {b.text}")


def sqrt(k: Function, x: Value) -> Value:
    """The square root."""
    return k.intrinsic(x.type, f"llvm.sqrt.{x.type.suffix}", x)


def _sigmoid(k: Function, x: Value) -> Value:
    return divide(k, _one(k, x), exp(k, -x) + 1.0)


def _abs(k: Function, x: Value) -> Value:
    return k.intrinsic(x.type, f"llvm.fabs.{x.type.suffix}", x)


def _tanh(k: Function, x: Value) -> Value:
    far = _one(k, x) - divide(k, k.const(x.type, 2.0), exp(k, x * 2.0) + 1.0)
    near = x * polynomial(k, x * x, [1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835])
    return k.select(_abs(k, x) < 0.25, near, far)


def _erf(k: Function, x: Value) -> Value:
    size = _abs(k, x)
    t = divide(k, _one(k, x), k.fma(size, k.const(x.type, 0.3275911), _one(k, x)))
    sums = t * polynomial(k, t, [0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429])
    far = _one(k, x) - sums * exp(k, -(x * x))
    far = k.select(x < 0.0, -far, far)
    terms = [2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(8)]
    return k.select(size < 0.5, x * polynomial(k, x * x, terms), far)


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
    "log": _library("log"),
    "erf": _erf,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "relu": lambda k, x: k.relu(x),
    "prelu": lambda k, x, slope: k.select(x < 0.0, x * slope, x),
}

FLOAT32_SERIES = frozenset({"exp", "erf", "tanh", "sigmoid"})  # which are no more exact than that in float64


def value_of(k: Function, expression: Any, inputs: Sequence[Value], like: Value) -> Value:
    """What an expression gives (`common.epilogue.expressions`); equal parts of it are computed once."""
    known: dict[Any, Value] = {}

    def value(part: Any) -> Value:
        if isinstance(part, int):
            return inputs[part]
        if part not in known:
            if part[0] == "constant":
                known[part] = k.const(like.type, part[1])
            else:
                known[part] = FUNCTIONS[part[0]](k, *(value(p) for p in part[1:]))
        return known[part]

    return value(expression)
