"""Steps of a grid: what a family may be cut into, in steps fine enough that nothing good lies between them."""

from __future__ import annotations

import functools

from autoconv.cpu.codegen.ir import VECTOR_REGISTERS


def steps(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 9, 13, ...: each at most half as much again as the one before, up to a number and with it.

    >>> steps(10)
    [1, 2, 3, 4, 6, 9, 10]
    """
    found = [min(1, most)]
    while found[-1] < most:
        found.append(min(max(found[-1] + 1, found[-1] * 3 // 2), most))
    return found


def parts(total: int, most: int | None = None) -> list[int]:
    """Sizes of nearly equal parts of a number, the smallest first: up to `most`, or all of it, in steps.

    Parts of one are there however small `most` is.

    >>> parts(13)
    [1, 2, 3, 4, 5, 7, 13]
    >>> parts(13, 0)
    [1]
    """
    largest = total if most is None else min(total, most)
    return sorted({-(-total // -(-total // size)) for size in steps(max(1, largest))})


@functools.lru_cache(64)  # asked several times for every candidate
def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is no larger than `most`, at least 1.

    >>> largest_divisor(12, 5), largest_divisor(7, 5), largest_divisor(7, 0)
    (4, 1, 1)
    """
    return next((n for n in range(min(number, most), 1, -1) if number % n == 0), 1)


def batches(most: int) -> list[int]:
    """Numbers that go together, up to so many: 1, 2, 4, 8, ..., and all.

    >>> batches(10)
    [1, 2, 4, 8, 10]
    """
    return sorted({1, most, *(1 << n for n in range(most.bit_length()))})


@functools.cache
def register_tiles(instruction_set: str) -> tuple[tuple[int, int], ...]:
    """Vectors by broadcast operands whose sums fill the registers, beside the vectors themselves and one broadcast.

    For every number of vectors the largest tile, one of two thirds and one of a power of two; those that load the least
    for every multiply-add come first.
    """
    registers, found = VECTOR_REGISTERS[instruction_set], []
    for vectors in range(1, registers):
        most = (registers - 1 - vectors) // vectors
        if most > 1:
            counts = {most, -(-2 * most // 3), 1 << most.bit_length() - 1}
            found += [(vectors, count) for count in counts if count > 1]
    return tuple(sorted(found, key=lambda tile: (1 / tile[0] + 1 / tile[1], tile)))
