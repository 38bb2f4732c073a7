"""Products of tiles of numbers in parts, and the step of an innermost loop: up to two tiles by two, part by part."""

from __future__ import annotations

from collections.abc import Callable

from autoconv.cpu.codegen.ir import Function, Value
from autoconv.cpu.codegen.tiles import TILE_ROWS

DEPTH = 32  # numbers of a row of an operand, each a bfloat16
FILTERS = 2 * TILE_ROWS  # of a block
PRODUCTS = {  # parts of both operands that are multiplied, the small ones first, neighbours sharing one of them
    1: ((0, 0),),
    3: ((0, 1), (0, 0), (1, 0)),
    6: ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)),
}
SUMS, LEFT, RIGHT = 0, 4, 6  # the first tile of each kind: sums of up to 2 x 2, and the operands

Place = Callable[[int, int], Value]  # of a part of a tile
Products = tuple[tuple[int, int], ...]


def parts_of(products: int) -> int:
    """Of each number."""
    return 1 + max(part for part, _ in PRODUCTS[products])


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
    k: Function, products: Products, tiles: tuple[int, int], left: Place, right: Place, pitches: tuple[int, int]
) -> None:
    """The products of parts in their order, each loading what the one before has not loaded."""
    held: tuple[int | None, int | None] = None, None
    for i, j in products:
        for tile in range(tiles[0] if i != held[0] else 0):
            k.tile_load(LEFT + tile, left(i, tile), pitches[0])
        for tile in range(tiles[1] if j != held[1] else 0):
            k.tile_load(RIGHT + tile, right(j, tile), pitches[1])
        held = i, j
        for (a, b), tile in sums_of(tiles).items():
            k.tile_multiply(tile, LEFT + a, RIGHT + b)
