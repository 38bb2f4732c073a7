"""The step of a kernel's innermost loop: one or two tiles on the left by as many on the right, part by part."""

from __future__ import annotations

from collections.abc import Callable

from autoconv.cpu.codegen.ir import Function, Value
from autoconv.cpu.matrix.geometry import PRODUCTS

SUMS, LEFT, RIGHT = 0, 4, 6  # the first tile of each kind: sums of up to 2 x 2, and the operands

Place = Callable[[int, int], Value]  # of a part of a tile


def sums_of(tiles: tuple[int, int]) -> dict[tuple[int, int], int]:
    """The tile of sums of each pair on the left and on the right."""
    return {(i, j): SUMS + 2 * i + j for i in range(tiles[0]) for j in range(tiles[1])}


def emit_begin(k: Function, sums: dict[int, Value], pitch: int, add: Value) -> None:
    """Have tiles of sums go on from memory where `add` is not 0, else begin with zero."""
    with k.if_(add.ne(0)):
        for tile, place in sums.items():
            k.tile_load(tile, place, pitch)
    with k.else_():
        for tile in sums:
            k.tile_zero(tile)


def emit_step(
    k: Function, products: int, tiles: tuple[int, int], left: Place, right: Place, pitches: tuple[int, int]
) -> None:
    """The products of parts in their order, each loading what the one before has not."""
    held: tuple[int | None, int | None] = None, None
    for i, j in PRODUCTS[products]:
        for tile in range(tiles[0] if i != held[0] else 0):
            k.tile_load(LEFT + tile, left(i, tile), pitches[0])
        for tile in range(tiles[1] if j != held[1] else 0):
            k.tile_load(RIGHT + tile, right(j, tile), pitches[1])
        held = i, j
        for (a, b), tile in sums_of(tiles).items():
            k.tile_multiply(tile, LEFT + a, RIGHT + b)
