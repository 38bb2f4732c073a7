"""Words: the 32 bits in which neighbouring channels of a pixel, or of a filter, are multiplied and added.

A word of the filters meets the word of the same channels of a pixel, and all their products are added to an int32. With
`pmaddwd` (x86 since SSE2) a word is two numbers of 16 bits, with `vpdpbusd` (AVX-VNNI, AVX512-VNNI) four of 8 bits,
those of pixels without a sign, and with `tdpbusd` (AMX) the words are those of tiles. `plain` is what `vpdpbusd` does,
in arithmetic that every processor has. All are exact: `vpmaddubsw`, whose sums of two products saturate, is not among
them. Source: Intel, "64 and IA-32 Architectures Software Developer's Manual", volume 2.
"""

from __future__ import annotations

from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import Function, Value, i16, vec

CHANNELS = {"tdpbusd": 4, "vpdpbusd": 4, "pmaddwd": 2, "plain": 4}  # of a word
PMADDWD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
NEEDED = {  # of a processor, for a product on vectors of an instruction set
    "vpdpbusd": {"avx512": "avx512vnni", "avx2": "avxvnni"},
    "pmaddwd": {"avx512": "avx512bw", "avx2": "avx2", "generic": "sse2"},
}


def vector_products(instruction_set: str) -> tuple[str, ...]:
    """How this processor can multiply words in vectors of an instruction set, the fastest first."""
    there = compiler.host_features()
    able = [product for product, needs in NEEDED.items() if there.get(needs.get(instruction_set, ""), False)]
    return (*able, "plain")


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
