"""Matrices transposed: square blocks in registers, by whole cache lines of what is read and of what is written."""

from __future__ import annotations

from collections.abc import Callable

from autoconv.cpu.codegen.ir import LINE, Function, Module, Value, f32
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.lanes import load_range, store_range
from autoconv.cpu.operators import TASK_ELEMENTS


def emit(instruction_set: str, matrices: int, rows: int, columns: int) -> Module:
    """`run` that transposes so many matrices of a, (rows, columns) each, to out.

    A task goes over a rectangle of one matrix in squares of a cache line, along the rows of a or along those of out.
    """
    m = Module(instruction_set)
    lanes = m.lanes(f32)
    line = LINE // f32.bytes
    high, wide = (line if extent >= line else min(lanes, extent) for extent in (rows, columns))
    band = max(TASK_ELEMENTS // wide // high, 1) * high
    bands = max(1, rows // band)
    strip = max(1, TASK_ELEMENTS // (min(rows, band) * wide)) * wide
    strips = max(1, columns // strip)
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, _, out = operands(k, context, f32)[:3]
    matrix = index // (strips * bands) * (rows * columns)
    top, bottom = _part(k, index // strips % bands, bands, band, rows)
    left, right = _part(k, index % strips, strips, strip, columns)

    def block(row: Value, column: Value) -> None:
        _block(
            k, x + matrix + row * columns + column, out + matrix + column * rows + row, (high, wide), (columns, rows)
        )

    def each(first: Value, last: Value, size: int, extent: int, visit: Callable[[Value], None]) -> None:
        """Visit blocks of such a size; the last begins earlier where it would reach beyond the end."""
        with k.loop(first, last - (size - 1), size) as place:
            visit(place)
        if extent % size:
            visit(last - size)  # some once more

    rows_of_blocks, columns_of_blocks = (top, bottom, high, rows), (left, right, wide, columns)
    if _along_source(rows, columns):
        each(*rows_of_blocks, lambda row: each(*columns_of_blocks, lambda column: block(row, column)))
    else:
        each(*columns_of_blocks, lambda column: each(*rows_of_blocks, lambda row: block(row, column)))
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, matrices * strips * bands)
    return m


def _along_source(rows: int, columns: int) -> bool:
    """Whether to go along the rows of the source, and to finish its cache lines one after the other.

    That is where its rows lie farther apart than the target's, and by a multiple of a larger power of two: then a
    cache can keep the lines of a few of them only, as they share the places of one set.
    """
    return columns > rows and columns & -columns > rows & -rows


def _part(k: Function, number: Value, parts: int, extent: int, whole: int) -> tuple[Value, Value]:
    """Where one of the parts of a whole begins and ends; the last takes what is left over."""
    first = number * extent
    return first, k.select(number.eq(parts - 1), k.i64(whole), first + extent)


def _block(k: Function, source: Value, target: Value, size: tuple[int, int], steps: tuple[int, int]) -> None:
    """Transpose so many rows and columns; steps lead from row to row, here and there."""
    lanes, (rows, columns) = k.module.lanes(f32), size
    squares = [(left, top) for left in range(0, columns, lanes) for top in range(0, rows, lanes)]
    if _along_source(steps[1], steps[0]):
        squares.sort(key=lambda square: square[1])
    for left, top in squares:
        width, height = min(lanes, columns - left), min(lanes, rows - top)
        read = [load_range(k, source + (top + n) * steps[0] + left, lanes, 0, width) for n in range(height)]
        read += [k.zero(f32, lanes)] * (lanes - height)
        for n, v in enumerate(k.transpose(read)[:width]):
            store_range(k, v, target + (left + n) * steps[1] + top, 0, height)
