"""Words: the 32 bits in which neighbouring channels of a pixel, or of a filter, are multiplied and added.

A word of the filters meets the word of the same channels of a pixel, and all their products are added to an int32. With
`pmaddwd` (x86 since SSE2) a word is two numbers of 16 bits, with `vpdpbusd` (AVX-VNNI, AVX512-VNNI) four of 8 bits,
those of pixels without a sign, and with `tdpbusd` (AMX) the words are those of tiles. `plain` is what `vpdpbusd` does,
in arithmetic that every processor has. All are exact: `vpmaddubsw`, whose sums of two products saturate, is not among
them. Source: Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2.
"""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Function, Value, i16, i32, ptr, vec

CHANNELS = {"tdpbusd": 4, "vpdpbusd": 4, "pmaddwd": 2, "plain": 4}  # of a word
PMADDWD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def shift_of(dtype: str, product: str) -> int:
    """What is added to numbers of a type before they are packed: to bytes with a sign, as these have none there."""
    return 128 if dtype == "int8" and CHANNELS[product] == 4 else 0


def add_products(k: Function, product: str, sums: Value, pixels: Value, filters: Value) -> Value:
    """`sums` and the products of words, lane by lane."""
    lanes = sums.type.lanes
    if product == "pmaddwd":
        halves = vec(i16, 2 * lanes)
        return sums + k.intrinsic(sums.type, PMADDWD[lanes], k.bits(pixels, halves), k.bits(filters, halves))
    if product == "vpdpbusd":
        return k.intrinsic(sums.type, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", sums, pixels, filters)
    for n in range(4):
        sums = sums + ((pixels >> 8 * n) & 0xFF) * ((((filters >> 8 * n) & 0xFF) ^ 0x80) - 0x80)
    return sums


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
