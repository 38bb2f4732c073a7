"""The pipeline of a convolution by transforms of tiles: `y = inverse(product(transformed filters, transform(x)))`.

A chunk of tiles goes through three steps: its input is laid out with channels in lanes and transformed along columns
and then along rows; every point of all its tiles is multiplied with the transformed filters by a register-tiled
product over channels; the products are transformed back and stored with the fused epilogue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from autoconv.cpu.codegen.ir import Function, Module, Value, i64, ptr
from autoconv.cpu.codegen.launch import CONTEXT, RUN, TASK, launch, operands
from autoconv.cpu.transform.filters import FilterStage
from autoconv.cpu.transform.geometry import HEADER, split_evenly
from autoconv.cpu.transform.input import InputStage
from autoconv.cpu.transform.output import OutputStage
from autoconv.cpu.transform.stage import Stage, T
from autoconv.layer import ConvLayer


def each_register_tile(k: Function, split: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Value, Value]]:
    """The size, the first tile and the number of every register tile of a chunk."""
    first = number = 0
    for count, size in split:
        with k.loop(0, count) as n:
            yield size, n * size + first, n + number
        first += count * size
        number += count


class TransformWriter(Stage[T], ABC):
    """Writes the functions of one correlation; a family gives the transforms and the product."""

    input_stage: ClassVar[type[InputStage[Any]]]
    filter_stage: ClassVar[type[FilterStage[Any]]]

    def __init__(self, m: Module, layer: ConvLayer, tiling: T, number: int, packed: int) -> None:
        super().__init__(m, layer, tiling, number)
        self.packed = packed

    def emit(self) -> Function:
        """What runs this correlation, given the context."""
        tiling, stage = self.tiling, (self.m, self.layer, self.tiling, self.number)
        self.input = self.input_stage(*stage).emit(in_turn=not tiling.coop and tiling.c_blocks > 1)
        row_counts = sorted(rows for _, rows in tiling.chunk_sizes)
        splits = [self.split(rows * tiling.columns.tiles) for rows in row_counts]
        sizes = sorted({size for split in splits for _, size in split})
        self.register_tiles = min(sum(count for count, _ in split) for split in splits)
        self.registers = {size: self.product_of(size) for size in sizes}
        self.products = {rows: self.product(rows, split) for rows, split in zip(row_counts, splits, strict=True)}
        self.unpack = OutputStage(*stage).emit()
        self.inverse = self.inverse_transform()
        self.output = self._output()
        return self.run_cooperative() if tiling.coop else self.run_independent()

    def split(self, tiles: int) -> list[tuple[int, int]]:
        """The register tiles of so many tiles: pairs of how many, and how large."""
        return split_evenly(tiles, self.tiling.most_tiles)

    @abstractmethod
    def product_of(self, size: int) -> Function:
        """The register tile: one point of `size` tiles by a block of filters, summed over channels."""

    @abstractmethod
    def product(self, rows: int, split: Sequence[tuple[int, int]]) -> Function:
        """`(v, u, products)`: all points of all tiles of a chunk by a block of filters, in register tiles.

        Where images are fetched ahead, also `(x, y, first, block)`: the first row of tiles, and the block's number.
        Where several blocks go abreast, also `(number)` of them.
        """

    @abstractmethod
    def inverse_transform(self) -> Function:
        """`(products, strip)`: a row of tiles back from its points, for one vector of filters."""

    # Schedules.

    def operands(self, k: Function) -> list[Value]:
        """Of a function whose first argument is the context: x, u, y, bias, residual and workspace."""
        stored = self.stored
        return operands(k, k.args[0], stored, self.real, stored, stored, stored)

    def run_independent(self) -> Function:
        """Every thread takes chunks, and keeps all of a chunk to itself."""
        tiling = self.tiling
        k = self.function("chunk", *TASK)
        _, index, thread = k.args
        x, u, y, bias, residual, workspace = self.operands(k)
        group = index // tiling.chunks
        first, rows = tiling.chunk_at(index % tiling.chunks)
        scratch = k.bytes_at(workspace, HEADER, self.real) + thread * tiling.thread_size
        v = scratch + tiling.scratch_size
        with k.loop(0, tiling.c_blocks) as block:
            k.call(self.input, x, v, scratch, first, rows, group, block)
        with k.loop(0, tiling.k_tasks) as block:
            k.call(self.output, v, u, scratch, x, y, bias, residual, first, rows, group, block)
        run = self.function("independent", CONTEXT)
        launch(run, run.args[0], k, tiling.tasks)
        return run

    def run_cooperative(self) -> Function:
        """All threads transform the input of a batch of chunks; then each takes blocks of filters of a chunk."""
        tiling = self.tiling
        tasks = []
        for name in ("inputs", "outputs"):
            k = self.function(name, *TASK)
            _, index, thread = k.args
            x, u, y, bias, residual, workspace = self.operands(k)
            header = k.bits(workspace, ptr(i64))
            group, start = k.load(header), k.load(header + 1)
            shared = k.bytes_at(workspace, HEADER, self.real)
            scratch = shared + tiling.shared_size + thread * tiling.thread_size
            section, rest = index % tiling.sections, index // tiling.sections
            if name == "inputs":
                chunk, block = rest // tiling.c_blocks, rest % tiling.c_blocks
            else:
                batch = k.min(tiling.chunks - start, tiling.coop)
                chunk, block = index % batch, index // batch
            v = shared + chunk * tiling.v_size
            first, rows = tiling.chunk_at(start + chunk)
            if name == "inputs":
                skipped = section * rows // tiling.sections
                some = (section + 1) * rows // tiling.sections - skipped
                v = v + skipped * (tiling.columns.tiles * tiling.v_tile)
                k.call(self.input, x, v, scratch, first + skipped, some, group, block)
            else:
                k.call(self.output, v, u, scratch, x, y, bias, residual, first, rows, group, block)
            tasks.append(k)
        k = self.function("cooperative", CONTEXT)
        workspace = self.operands(k)[-1]
        header = k.bits(workspace, ptr(i64))  # group, and first chunk of the cooperative batch
        with k.loop(0, tiling.correlation.groups) as group, k.loop(0, tiling.chunks, tiling.coop) as start:
            k.store(group, header)
            k.store(start, header + 1)
            batch = k.min(tiling.chunks - start, tiling.coop)
            launch(k, k.args[0], tasks[0], batch * (tiling.c_blocks * tiling.sections))
            launch(k, k.args[0], tasks[1], batch * tiling.k_tasks)
        return k

    def _output(self) -> Function:
        """Multiply a chunk by a block of filters, transform back and store."""
        tiling, c, real, stored = self.tiling, self.tiling.correlation, ptr(self.real), ptr(self.stored)
        k = self.function("output", real, real, real, stored, stored, stored, stored, i64, i64, i64, i64)
        v, u, products, x, y, bias, residual, first, rows, group, block = k.args
        images = [x, y, first, block] if tiling.ahead else []
        number = [k.min(tiling.k_blocks - block * tiling.abreast, tiling.abreast)] if tiling.abreast > 1 else []
        u = u + (self.packed + (group * tiling.k_blocks + block * tiling.abreast) * tiling.u_size)
        if len(self.products) == 1:
            k.call(self.products[tiling.chunk], v, u, products, *images, *number)
        else:
            with k.if_(rows.eq(tiling.chunk)):
                k.call(self.products[tiling.chunk], v, u, products, *images, *number)
            with k.else_():
                k.call(self.products[tiling.chunk - 1], v, u, products, *images, *number)
        strip = products + tiling.abreast * tiling.m_size
        vertical, horizontal = tiling.rows, tiling.columns
        with k.loop(0, rows) as t:
            image, row = (first + t) // vertical.tiles, (first + t) % vertical.tiles
            residue, n = image // c.N, image % c.N
            down, across = residue // horizontal.residues, residue % horizontal.residues
            columns = (horizontal.axis.count - across + (horizontal.residues - 1)) // horizontal.residues
            place = across * horizontal.axis.output_stride + horizontal.axis.output_start
            corner = n * c.output.image + group * c.output.group + place * c.output.column
            with k.loop(0, tiling.abreast * tiling.vectors) as vector:
                channel = block * (tiling.abreast * tiling.TK) + vector * tiling.lanes
                live = c.K - channel
                with k.if_(live > 0):
                    of_block = products
                    if tiling.abreast > 1:
                        of_block, vector = products + vector // tiling.vectors * tiling.m_size, vector % tiling.vectors
                    row_of_tiles = of_block + (t * (horizontal.tiles * tiling.m_tile) + vector * tiling.m_vector)
                    k.call(self.inverse, row_of_tiles, strip)
                    with k.loop(0, vertical.m) as i:
                        p = (row * vertical.m + i) * vertical.residues + down
                        with k.if_(p < vertical.axis.count):
                            h = p * vertical.axis.output_stride + vertical.axis.output_start
                            at = corner + h * c.output.row + channel * c.output.channel
                            source = strip + i * (tiling.out_pitch * tiling.lanes)
                            past = y + at, residual + at, bias + (group * c.K + channel)
                            k.call(self.unpack, source, *past, live, columns)
        return k


def emit(
    writer: type[TransformWriter[T]],
    instruction_set: str,
    layer: ConvLayer,
    tilings: Sequence[T],
    matrix_unit: str | None = None,
) -> Module:
    """`run` and `pack` for the correlations of a layer, with a family's transforms and product."""
    m = Module(instruction_set, matrix_unit=matrix_unit)
    runs, packs = [], []
    packed = 0
    for number, tiling in enumerate(tilings):
        runs.append(writer(m, layer, tiling, number, packed).emit())
        packs.append(writer.filter_stage(m, layer, tiling, number, packed).emit())
        packed += tiling.packed_size
    k = m.function("run", *RUN)
    for run in runs:
        k.call(run, k.args[0])
    k = m.function("pack", *RUN)
    for task, tasks in packs:
        launch(k, k.args[0], task, tasks)
    return m
