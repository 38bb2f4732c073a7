"""How `int8` cuts its work: strips of rows, whose pixels are packed into lines of words, and blocks of filters.

A *line* is a pixel's channels (of a group), packed into words. A strip's panel holds the lines of all input rows that
its outputs see, with those of padding, row after row, so that a tap of the filter is a number of bytes to skip, for all
outputs alike. Rows of the same residue modulo the stride lie together: then a row of outputs is `numbers` outputs after
the one above it, whatever the stride, where outputs are numbered as they lie `stride` lines apart; and tiles, whose
rows must lie equally far apart, run on from row to row.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from autoconv.cpu.codegen.ir import LINE, VECTOR_BYTES, VECTOR_REGISTERS
from autoconv.cpu.codegen.tiles import TILE_ROWS, WORDS
from autoconv.cpu.codegen.words import CHANNELS
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.layer import ConvLayer

WORD = 4  # bytes


@dataclass(frozen=True)
class Cut:
    """How a layer is cut.

    A `product` multiplies words; a strip has so many `rows` of outputs; registers hold `TK` filters by `TP` outputs;
    each of the `chunks` of the filters is a task of its own; a vector has so many `lanes` of words.
    """

    product: str
    rows: int
    TK: int
    TP: int
    chunks: int
    lanes: int


@dataclass(frozen=True)
class Panel:
    """Where things are: in a strip's panel, among the packed filters, in a thread's memory."""

    layer: ConvLayer
    cut: Cut

    @functools.cached_property
    def tiles(self) -> bool:
        """Whether words are multiplied by tiles."""
        return self.cut.product == "tdpbusd"

    @functools.cached_property
    def correlation(self) -> Correlation:
        """The layer's."""
        return correlations(self.layer)[0]

    @functools.cached_property
    def C(self) -> int:
        """Channels of a group."""
        return self.layer.C // self.layer.groups

    @functools.cached_property
    def K(self) -> int:
        """Filters of a group."""
        return self.layer.K // self.layer.groups

    @functools.cached_property
    def words(self) -> int:
        """Of a pixel."""
        return math.ceil(self.C / CHANNELS[self.cut.product])

    @functools.cached_property
    def depth(self) -> int:
        """Words that are multiplied tap by tap before the next block of them: as many as a row of a tile, or all."""
        return WORDS if self.tiles else self.words

    @functools.cached_property
    def blocks(self) -> int:
        """Of words."""
        return math.ceil(self.words / self.depth)

    @functools.cached_property
    def line(self) -> int:
        """Bytes of a line of one block of words: lines are written by whole vectors."""
        return WORD * math.ceil(self.depth / self.cut.lanes) * self.cut.lanes

    @functools.cached_property
    def flat(self) -> bool:
        """Whether each output sees the pixel in its own place only, so that a strip is a single long row."""
        layer = self.layer
        return (layer.R, layer.S, layer.stride, layer.padding) == (1, 1, (1, 1), ((0, 0), (0, 0)))

    @functools.cached_property
    def lengths(self) -> tuple[int, int]:
        """Rows of outputs, and outputs of a row, as the panel has them."""
        return (1, self.cut.rows * self.layer.Q) if self.flat else (self.cut.rows, self.layer.Q)

    @functools.cached_property
    def held(self) -> int:
        """Rows of the input."""
        return (self.lengths[0] - 1) * self.layer.stride[0] + self.layer.filter_extent[0]

    @functools.cached_property
    def alike(self) -> int:
        """Rows of the input of each residue modulo the stride."""
        return math.ceil(self.held / self.layer.stride[0])

    @functools.cached_property
    def pitch(self) -> int:
        """Lines of a row."""
        stride = self.layer.stride[1]
        return math.ceil(((self.lengths[1] - 1) * stride + self.layer.filter_extent[1]) / stride) * stride

    @functools.cached_property
    def numbers(self) -> int:
        """Outputs from one row to the next."""
        return self.pitch // self.layer.stride[1]

    @functools.cached_property
    def step(self) -> int:
        """Bytes from an output's first line to the next one's."""
        return self.layer.stride[1] * self.line

    @functools.cached_property
    def taps(self) -> tuple[int, ...]:
        """The bytes that each tap skips."""
        layer = self.layer
        found = []
        for r in range(layer.R):
            down, residue = divmod(r * layer.dilation[0], layer.stride[0])
            found += [
                ((residue * self.alike + down) * self.pitch + s * layer.dilation[1]) * self.line for s in range(layer.S)
            ]
        return tuple(found)

    @functools.cached_property
    def side(self) -> int:
        """Tiles of outputs, a whole number of pairs where there is more than one."""
        last = (self.lengths[0] - 1) * self.numbers + self.lengths[1]
        tiles = math.ceil(last / TILE_ROWS)
        return tiles if tiles == 1 else math.ceil(tiles / 2) * 2

    @functools.cached_property
    def block_bytes(self) -> int:
        """Of the lines of one block of words; tiles reach beyond the last one."""
        lines = self.layer.stride[0] * self.alike * self.pitch
        beyond = self.side * TILE_ROWS * self.layer.stride[1] if self.tiles else 0
        return (lines + beyond) * self.line

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The bytes from the panel's first line to each output's."""
        rows, length = self.lengths
        return tuple((row * self.numbers + q) * self.step for row in range(rows) for q in range(length))

    @functools.cached_property
    def sums(self) -> int:
        """Outputs of a block of filters whose sums are kept: of the strip, or of all tiles."""
        return self.side * TILE_ROWS if self.tiles else len(self.starts)

    @functools.cached_property
    def stored(self) -> tuple[int, int]:
        """Rows of outputs that are stored one at a time, and their length; without tiles all are one row."""
        return self.lengths if self.tiles else (1, len(self.starts))

    @functools.cached_property
    def own(self) -> int:
        """Bytes of a thread: a line for what it holds, the panel, sums, and a block's offsets and scales."""
        content = LINE + self.blocks * self.block_bytes + (self.sums + 2) * self.cut.TK * WORD
        return math.ceil(content / LINE) * LINE

    @functools.cached_property
    def filter_blocks(self) -> int:
        """Of a group."""
        return math.ceil(self.K / self.cut.TK)

    @functools.cached_property
    def filter_words(self) -> int:
        """Vectors of TK words of a block's filters; one more holds the sums of each filter."""
        return self.blocks * len(self.taps) * self.depth + 1

    @functools.cached_property
    def packed_bytes(self) -> int:
        """Of all filters: `[groups][K/TK]` blocks of `[words' blocks][taps][words][TK]`, and the sums `[TK]`."""
        return self.layer.groups * self.filter_blocks * self.filter_words * self.cut.TK * WORD

    @functools.cached_property
    def strips(self) -> int:
        """Of an image."""
        return math.ceil(self.layer.P / self.cut.rows)

    @functools.cached_property
    def tasks(self) -> int:
        """Of the layer."""
        return self.layer.N * self.layer.groups * self.strips * self.cut.chunks


def cut_of(layer: ConvLayer, threads: int, instruction_set: str, product: str, NV: int, TP: int, strip: int) -> Cut:
    """Strips of about so many outputs, and as many chunks of the filters as leave every thread several tasks."""
    lanes = VECTOR_BYTES[instruction_set] // WORD
    TK = 2 * TILE_ROWS if product == "tdpbusd" else NV * lanes
    rows = math.ceil(layer.P / math.ceil(layer.P / max(strip // layer.Q, 1)))
    outputs = rows * layer.Q
    TP = math.ceil(outputs / math.ceil(outputs / TP))
    tasks = layer.N * layer.groups * math.ceil(layer.P / rows)
    blocks = math.ceil(layer.K // layer.groups / TK)
    return Cut(product, rows, TK, TP, min(blocks, math.ceil(4 * threads / tasks)), lanes)


def register_tiles(instruction_set: str) -> list[tuple[int, int]]:
    """The vectors of filters and outputs whose sums fit into registers with what they are multiplied from."""
    room = VECTOR_REGISTERS[instruction_set] - 2  # one for a pixel, one for a product
    found = [(NV, (room - NV) // NV) for NV in (2, 1, 3, 4)]
    return [*found, *((NV, TP - 1) for NV, TP in found[:1])]
