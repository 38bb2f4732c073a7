"""Numbers as sums of bfloat16 parts.

A float32 is the sum of three, a float16 of two. The first part is the number rounded, the next one what is left of it
rounded, and so on (Henry, Tang and Heinecke, 2019, arXiv:1904.06376). Of numbers that would round to infinity the first
part is the largest bfloat16, so that finite numbers have finite parts; infinities and NaN are in a later part.
"""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Function, Value, i16, i32, vec
from autoconv.cpu.codegen.tiles import SIGN

LARGEST = 0x7F7F0000  # the bits of the largest bfloat16, as a float32


def split(k: Function, v: Value, parts: int) -> list[Value]:
    """The parts of a vector of float32, as 16 bits each; a single one is the upper half of the number itself."""
    lanes = v.type.lanes
    if parts == 1:
        return [k.cast(k.bits(v, vec(i32, lanes)) >> 16, vec(i16, lanes))]
    found = []
    for n in range(parts):
        part = k.to_bfloat(v if n else _bounded(k, v))
        found.append(part)
        if n + 1 < parts:
            v = v - k.bits(_word(k, part) << 16, v.type)
    return found


def _bounded(k: Function, v: Value) -> Value:
    """No larger than the largest bfloat16; infinities and NaN become it."""
    bits = k.bits(v, vec(i32, v.type.lanes))
    magnitude = k.min(bits & ~SIGN, LARGEST)
    return k.bits(magnitude | (bits & SIGN), v.type)


def _word(k: Function, part: Value) -> Value:
    """16 bits in the lower half of 32."""
    return k.zext(part, vec(i32, part.type.lanes))


def split_pairs(k: Function, even: Value, odd: Value, parts: int) -> list[Value]:
    """Of each part, pairs of bfloat16: an element of `even` in the lower half of 32 bits, one of `odd` in the upper."""
    both = zip(split(k, even, parts), split(k, odd, parts), strict=True)
    return [_word(k, low) | (_word(k, high) << 16) for low, high in both]
