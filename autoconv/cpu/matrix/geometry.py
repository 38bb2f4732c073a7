"""How `matrix` cuts its work: strips of pixels whose lines are rows of tiles, blocks of filters, blocks of channels.

A *line* is the 64 bytes of a pixel's block of 32 channels, in bfloat16. A panel holds the lines of a strip: of every
component of the input (see `PanelAxis`) the rows, one after the other and `pitch` lines apart, so that a tap of the
filter is a number of lines to skip, for all outputs alike; outputs are numbered as the lines are, with the pitch of the
panel, and 16 that follow one another are the rows of a tile, wherever a row of the image ends.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from autoconv.cpu.codegen.ir import LINE
from autoconv.cpu.codegen.tiles import TILE_BYTES, TILE_ROWS
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis
from autoconv.cpu.common.tiles.products import DEPTH, FILTERS, parts_of


@dataclass(frozen=True)
class PanelAxis:
    """One axis of a panel that serves `outputs` neighbouring outputs.

    It holds the polyphase components of the input that taps see: of residue r, at place j, the input
    `stride * (first output + j) + offset + r`. Output i sees through a tap place `i + skip` of the tap's component.
    """

    axis: CorrelationAxis
    outputs: int

    def _divided(self, tap: int) -> tuple[int, int]:
        return divmod(self.axis.dilation * tap, self.axis.stride)

    @functools.cached_property
    def residues(self) -> tuple[int, ...]:
        """Of the components, in their order."""
        return tuple(sorted({self._divided(tap)[1] for tap in range(len(self.axis.taps))}))

    def component(self, tap: int) -> int:
        """Number of the component that a tap sees."""
        return self.residues.index(self._divided(tap)[1])

    def skip(self, tap: int) -> int:
        """Places from an output's own to the one it sees through a tap."""
        return self._divided(tap)[0]

    @property
    def places(self) -> int:
        """Of each component."""
        return self.outputs + max(map(self.skip, range(len(self.axis.taps))), default=0)

    @property
    def shared(self) -> int:
        """Places of padding at the end that may be those at the beginning of what follows."""
        axis = self.axis
        if self.outputs < axis.count:
            return 0
        before = (-((r + axis.offset) // axis.stride) for r in self.residues)
        inside = (-((r + axis.offset - axis.size) // axis.stride) for r in self.residues)
        both = (min(first, self.places - end) for first, end in zip(before, inside, strict=True))
        return min(max(0, min(both, default=0)), self.places - 1)


@dataclass(frozen=True)
class MatrixBlocking:
    """How one correlation is cut.

    A strip is so many `images` by `rows` by `columns` of outputs; a task is a strip by one of `chunks` parts of the
    filters. `BC` channels are summed before the next strip's worth of tiles, `products` of parts for each.
    """

    products: int
    images: int
    rows: int
    columns: int
    BC: int
    chunks: int
    threads: int


@dataclass(frozen=True)
class Panel:
    """Where things are in a strip's panel, in lines; and how many tiles of outputs it has."""

    c: Correlation
    b: MatrixBlocking

    @functools.cached_property
    def rows(self) -> PanelAxis:
        """The rows that it holds."""
        return PanelAxis(self.c.rows, self.b.rows)

    @functools.cached_property
    def columns(self) -> PanelAxis:
        """The columns that it holds."""
        return PanelAxis(self.c.columns, self.b.columns)

    @property
    def pitch(self) -> int:
        """Lines from one row to the next, of outputs too."""
        return self.columns.places - self.columns.shared

    @property
    def held(self) -> int:
        """Rows of an image, of outputs too."""
        return self.rows.places

    @property
    def tiles(self) -> int:
        """Of outputs, from the first to the last one of the strip."""
        last = ((self.b.images - 1) * self.held + self.b.rows - 1) * self.pitch + self.b.columns
        return math.ceil(last / TILE_ROWS)

    @property
    def linear(self) -> bool:
        """Whether outputs lie as they are numbered, each as far from the next."""
        rows, columns, o = self.c.rows, self.c.columns, self.c.output
        whole = self.pitch == self.b.columns and rows.output_stride * o.row == (
            self.pitch * columns.output_stride * o.column
        )
        return self.b.images == 1 and (self.b.rows == 1 or whole)

    @property
    def summed(self) -> int:
        """Tiles of outputs whose sums wait for others: those of two, where each pair can be stored by itself."""
        return min(2, self.tiles) if self.linear and self.b.BC >= self.c.C else self.tiles

    @property
    def component(self) -> int:
        """Lines of a component; rows are filled by whole vectors, which reach beyond the last one."""
        farthest = (self.held - self.b.rows) * self.pitch + self.columns.places - self.b.columns
        return self.tiles * TILE_ROWS + farthest + TILE_ROWS

    @property
    def block(self) -> int:
        """Lines of 32 channels: an odd number, so that blocks fall into different sets of a cache."""
        return self.component * len(self.rows.residues) * len(self.columns.residues) | 1

    @property
    def blocks(self) -> int:
        """Of channels."""
        return math.ceil(self.c.C / DEPTH)

    @property
    def part(self) -> int:
        """Lines of one part of the numbers."""
        return self.block * self.blocks

    @property
    def taps(self) -> tuple[int, ...]:
        """The lines that each tap skips, in the filter's order."""
        rows, columns = self.rows, self.columns
        return tuple(
            (rows.component(r) * len(columns.residues) + columns.component(s)) * self.component
            + rows.skip(r) * self.pitch
            + columns.skip(s)
            for r in range(len(self.c.rows.taps))
            for s in range(len(self.c.columns.taps))
        )

    @property
    def panel_bytes(self) -> int:
        """Of the panel; none where no tap sees anything."""
        return LINE * self.part * parts_of(self.b.products) if self.taps else 0

    @property
    def thread_bytes(self) -> int:
        """A thread's part of the workspace: a line for the number of the strip that it holds, the panel, and the sums.

        Sums are read by whole vectors, which reach beyond the last one.
        """
        return LINE + self.panel_bytes + (self.summed + 1) * TILE_ROWS * FILTERS * 4


def filter_tiles(c: Correlation) -> int:
    """Tiles of a group's filters."""
    return math.ceil(c.K / TILE_ROWS)


def packed_bytes(c: Correlation, products: int) -> int:
    """Of the packed filters: `[groups][K/32][C/32][taps][part]` of one tile or two."""
    taps = len(c.rows.taps) * len(c.columns.taps)
    return c.groups * filter_tiles(c) * math.ceil(c.C / DEPTH) * taps * parts_of(products) * TILE_BYTES


def blocking(c: Correlation, products: int, strip: int, BC: int, threads: int) -> MatrixBlocking:
    """Strips of about so many outputs, and as many parts of the filters as leave every thread several tasks."""
    rows, columns = c.rows.count, c.columns.count
    whole = MatrixBlocking(products, 1, rows, columns, min(BC, c.C), 1, threads)
    panel = Panel(c, whole)
    images = strip // (panel.held * panel.pitch)
    if images > 1:
        b = replace(whole, images=_even(c.N, images))
    elif (fit := max(strip // panel.pitch, 1)) < rows or columns > strip:
        b = replace(whole, rows=_even(rows, fit))
        if columns > strip:
            b = replace(b, columns=min(columns, -(-_even(columns, strip) // FILTERS) * FILTERS))
    else:
        b = whole
    blocks = math.ceil(c.K / FILTERS)
    chunks = 1
    while strips(c, b) * chunks < 4 * threads and chunks < blocks:
        chunks = min(2 * chunks, blocks)
    return replace(b, chunks=chunks)


def _even(extent: int, most: int) -> int:
    """The length of as few parts of an extent as are no longer than `most`."""
    return math.ceil(extent / math.ceil(extent / most))


def strips(c: Correlation, b: MatrixBlocking) -> int:
    """Of all groups."""
    extents = (c.N, b.images), (c.rows.count, b.rows), (c.columns.count, b.columns)
    return c.groups * math.prod(math.ceil(extent / part) for extent, part in extents)
