"""Numbers as sums of bfloat16 parts.

A float32 is the sum of three, a float16 of two. The first part is the number rounded, the next one what is left of it
rounded, and so on (Henry, Tang and Heinecke, 2019, arXiv:1904.06376). Of numbers that would round to infinity the first
part is the largest bfloat16, so that finite numbers have finite parts; infinities and NaN are in a later part.
"""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Function, Value, i32, vec
from autoconv.cpu.codegen.tiles import SIGN, UPPER

LARGEST = 0x7F7F0000  # the bits of the largest bfloat16, as a float32


def split(k: Function, v: Value, parts: int) -> list[Value]:
    """The parts of a vector of float32, each in the upper half of 32 bits; a single one is the number itself."""
    bits = vec(i32, v.type.lanes)
    if parts == 1:
        return [k.bits(v, bits)]
    found = []
    for n in range(parts):
        part = k.zext(k.to_bfloat(v if n else _bounded(k, v)), bits) << 16
        found.append(part)
        if n + 1 < parts:
            v = v - k.bits(part, v.type)
    return found


def _bounded(k: Function, v: Value) -> Value:
    """No larger than the largest bfloat16; infinities and NaN become it."""
    bits = k.bits(v, vec(i32, v.type.lanes))
    magnitude = k.min(bits & ~SIGN, LARGEST)
    return k.bits(magnitude | (bits & SIGN), v.type)


def split_pairs(k: Function, even: Value, odd: Value, parts: int) -> list[Value]:
    """Of each part, pairs of bfloat16: an element of `even` in the lower half of 32 bits, one of `odd` in the upper."""
    both = zip(split(k, even, parts), split(k, odd, parts), strict=True)
    return [(low >> 16) | (high & UPPER) for low, high in both]
