"""Matrices transposed: square blocks in registers, by whole cache lines of what is read."""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Function, Module, Value, f32
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.lanes import load_range, store_range
from autoconv.cpu.operators import TASK_ELEMENTS

LINE = 16  # elements of a cache line


def emit(instruction_set: str, matrices: int, rows: int, columns: int) -> Module:
    """`run` that transposes so many matrices of a, (rows, columns) each, to out.

    A task goes over a rectangle of one matrix, by columns that share cache lines: of these it reads all rows before the
    next, so that no line is fetched twice, while it writes rows of the output from one end to the other.
    """
    m = Module(instruction_set)
    lanes = m.lanes(f32)
    high, wide = min(lanes, rows), min(lanes, columns)
    if columns >= LINE:
        wide = LINE
    band = max(TASK_ELEMENTS // wide // lanes, 1) * lanes
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

    def line(column: Value) -> None:
        with k.loop(top, bottom - (high - 1), high) as row:
            block(row, column)
        if rows % high:
            block(bottom - high, column)  # some rows once more, where a band does not end with a block

    with k.loop(left, right - (wide - 1), wide) as column:
        line(column)
    if columns % wide:
        line(right - wide)  # likewise some columns
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, matrices * strips * bands)
    return m


def _part(k: Function, number: Value, parts: int, extent: int, whole: int) -> tuple[Value, Value]:
    """Where one of the parts of a whole begins and ends; the last takes what is left over."""
    first = number * extent
    return first, k.select(number.eq(parts - 1), k.i64(whole), first + extent)


def _block(k: Function, source: Value, target: Value, size: tuple[int, int], steps: tuple[int, int]) -> None:
    """Transpose rows of a size, at most as many as lanes; steps lead from row to row, there and here."""
    lanes, (rows, columns) = k.module.lanes(f32), size
    for start in range(0, columns, lanes):
        width = min(lanes, columns - start)
        read = [load_range(k, source + row * steps[0] + start, lanes, 0, width) for row in range(rows)]
        read += [k.zero(f32, lanes)] * (lanes - rows)
        for n, v in enumerate(k.transpose(read)[:width]):
            store_range(k, v, target + (start + n) * steps[1], 0, rows)
