"""Words of channels (`codegen.words`) as pixels and filters are packed into them."""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Function, Value, i16, i32, ptr, vec
from autoconv.cpu.codegen.words import CHANNELS


def shift_of(dtype: str, product: str) -> int:
    """What is added to numbers of a type before they are packed: to bytes with a sign, as these have none there."""
    return 128 if dtype == "int8" and CHANNELS[product] == 4 else 0


def repeated(number: Value, product: str) -> Value:
    """A word of one number for every channel."""
    if CHANNELS[product] == 4:
        return (number & 0xFF) * 0x01010101
    return (number & 0xFFFF) * 0x00010001


def joined(numbers: list[Value], product: str) -> Value:
    """Words of int32 numbers, one for each channel."""
    bits = 32 // CHANNELS[product]
    word = numbers[0] & ((1 << bits) - 1)
    for n, number in enumerate(numbers[1:], 1):
        word = word | ((number & ((1 << bits) - 1)) << bits * n)
    return word


def widened(k: Function, v: Value, dtype: str, product: str) -> Value:
    """Bytes of an input as int32, as they are packed."""
    wide = vec(i32, v.type.lanes)
    if dtype == "uint8":
        return k.zext(v, wide)
    return k.cast(v, wide) + shift_of(dtype, product)


def whole_words(k: Function, p: Value, lanes: int, dtype: str, product: str) -> Value:
    """Vectors of words of neighbouring bytes."""
    if CHANNELS[product] == 4:
        v = k.load(k.bits(p, ptr(i32)), lanes, align=1)
        return v ^ -0x7F7F7F80 if dtype == "int8" else v
    v = k.load(p, 2 * lanes)
    halves = vec(i16, 2 * lanes)
    return k.bits(k.zext(v, halves) if dtype == "uint8" else k.cast(v, halves), vec(i32, lanes))
