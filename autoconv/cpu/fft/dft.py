"""Fourier transforms as vector code: every lane transforms a sequence of its own, so nothing is shuffled.

Cooley and Tukey (1965): a transform of length `a * b` is b transforms of length a, a multiplication by
roots of unity, and a transforms of length b. Short lengths are written out; longer ones take two loops over
short ones, with a line of numbers on the stack between them.
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autoconv.cpu.codegen.ir import Function, Type, Value

SHORT = 16  # longest transform written out as a whole, ...
STEP = 10  # ... and as a step of a longer one: complex numbers held in registers at a time


class Complex(NamedTuple):
    """A vector of complex numbers."""

    re: Value
    im: Value

    def __add__(self, other: Complex) -> Complex:  # type: ignore[override]
        return Complex(self.re + other.re, self.im + other.im)

    def __sub__(self, other: Complex) -> Complex:
        return Complex(self.re - other.re, self.im - other.im)

    @property
    def over_i(self) -> Complex:
        """Times -i."""
        return Complex(self.im, -self.re)

    @property
    def swapped(self) -> Complex:
        """Real and imaginary part exchanged: the inverse transform is the forward one between two exchanges."""
        return Complex(self.im, self.re)


def _root(x: Complex, power: int, n: int) -> Complex:
    """Times `exp(-2 pi i power / n)`, a constant."""
    k = x.re.k
    eighths, rest = divmod(8 * (power % n), n)
    if rest or eighths % 2:
        w = cmath.exp(-2j * math.pi * power / n)
        if not rest:  # (1 - i) / sqrt 2 and its turns
            x = Complex(x.re + x.im, x.im - x.re)
            return _root(Complex(x.re * math.sqrt(0.5), x.im * math.sqrt(0.5)), eighths // 2, 4)
        return times(x, k.const(x.re.type, w.real), k.const(x.re.type, w.imag))
    for _ in range(eighths // 2):
        x = x.over_i
    return x


def times(x: Complex, re: Value, im: Value) -> Complex:
    """A complex product."""
    k = x.re.k
    return Complex(k.fma(-x.im, im, x.re * re), k.fma(x.re, im, x.im * re))


def dft(xs: Sequence[Complex]) -> list[Complex]:
    """`X[k] = sum of x[j] exp(-2 pi i j k / n)`, written out."""
    n = len(xs)
    a = next((a for a in (4, 2, 3, 5) if n % a == 0), n)
    if n == 1:
        return list(xs)
    if n == 2:
        return [xs[0] + xs[1], xs[0] - xs[1]]
    if n == 4:
        even, odd = dft(xs[::2]), dft(xs[1::2])
        turned = odd[1].over_i
        return [even[0] + odd[0], even[1] + turned, even[0] - odd[0], even[1] - turned]
    if a == n:
        return _odd(xs)
    b = n // a
    inner = [dft(xs[j::b]) for j in range(b)]
    out: list[Complex] = [xs[0]] * n
    for first in range(a):
        for second, value in enumerate(dft([_root(inner[j][first], j * first, n) for j in range(b)])):
            out[first + a * second] = value
    return out


def _odd(xs: Sequence[Complex]) -> list[Complex]:
    """Of odd length, by what is even and odd in j: cosines of sums and sines of differences."""
    n, k = len(xs), xs[0].re.k
    half = range(1, n // 2 + 1)
    sums = {j: xs[j] + xs[n - j] for j in half}
    differences = {j: xs[j] - xs[n - j] for j in half}
    out = [functools.reduce(lambda total, value: total + value, sums.values(), xs[0])] * n
    for f in half:
        even, odd = list(xs[0]), []
        for part in range(2):
            for j in half:
                cosine = k.const(xs[0].re.type, math.cos(2 * math.pi * (j * f % n) / n))
                even[part] = k.fma(cosine, sums[j][part], even[part])
            total = differences[1][part] * math.sin(2 * math.pi * f / n)
            for j in half[1:]:
                sine = k.const(xs[0].re.type, math.sin(2 * math.pi * (j * f % n) / n))
                total = k.fma(sine, differences[j][part], total)
            odd.append(total)
        turned = Complex(*odd).over_i
        out[f], out[n - f] = Complex(*even) + turned, Complex(*even) - turned
    return out


@functools.cache
def factors(n: int, even: str = "") -> tuple[int, int] | None:
    """The steps `a, b` of a transform of length n, the one named being even; None where there are none."""
    pairs = [(a, n // a) for a in range(1, STEP + 1) if n % a == 0 and n // a <= STEP]
    if n <= SHORT:
        pairs = [(1, n)]
    elif even:
        pairs = [pair for pair in pairs if pair[even == "b"] % 2 == 0]
    return min(pairs, key=lambda pair: (max(pair), pair), default=None)


Load = Callable[[Value, int], Complex]
Store = Callable[[Value, int, Complex], None]


class FourierTransform:
    """Writes transforms of one length: `load(i, j)` gives the number at `i + j`, `store(i, j, x)` takes one.

    `i` is known when the kernel runs, `j` when it is written. `fold` promises that `j >= n / 2` exactly where
    `i + j >= n / 2`; `pairs` that `j` alone says whether `i + j` is even.
    """

    def __init__(self, k: Function, element: Type, lanes: int, n: int, *, fold: bool = False, pairs: bool = False):
        self.k, self.element, self.lanes, self.n = k, element, lanes, n
        self.pairs = pairs
        split = factors(n, "a" if fold else "b" if pairs else "")
        assert split is not None
        self.a, self.b = split
        if self.a > 1:
            self.line = k.scratch(element, 2 * n * lanes)
            roots = [cmath.exp(-2j * math.pi * i * j / n) for j in range(self.b) for i in range(self.a)]
            self.roots = k.module.table(k, element, [part for root in roots for part in (root.real, root.imag)])

    def write(self, load: Load, store: Store) -> None:
        """The transform."""
        k, a, b, lanes = self.k, self.a, self.b, self.lanes
        if a == 1:
            zero = k.i64(0)
            for j, x in enumerate(dft([load(zero, j) for j in range(b)])):
                store(zero, j, x)
            return
        step = 2 if self.pairs else 1
        for parity in range(step):
            with k.loop(0, b, step) as i:
                xs = dft([load(i, parity + b * j) for j in range(a)])
                roots, target = self.roots + (i + parity) * (2 * a), self.line + (i + parity) * (2 * lanes)
                for j, x in enumerate(xs):
                    if j:
                        x = times(x, *(k.broadcast(roots + (2 * j + part), lanes) for part in range(2)))
                    put(x, target + j * (2 * b * lanes), lanes)
        with k.loop(0, a) as i:
            source = self.line + i * (2 * b * lanes)
            for j, x in enumerate(dft([get(k, source + j * (2 * lanes), lanes, lanes) for j in range(b)])):
                store(i, a * j, x)


def get(k: Function, p: Value, apart: int, lanes: int) -> Complex:
    """A complex number whose parts are some elements apart."""
    return Complex(k.load(p, lanes), k.load(p + apart, lanes))


def put(x: Complex, p: Value, apart: int) -> None:
    """Store a complex number, its parts some elements apart."""
    x.re.k.store(x.re, p)
    x.re.k.store(x.im, p + apart)
