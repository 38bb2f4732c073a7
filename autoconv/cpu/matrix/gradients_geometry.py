"""How the gradient of the filters is cut for tiles: strips of outputs, 32 of which are the depth of a product."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from autoconv.cpu.codegen.ir import LINE
from autoconv.cpu.codegen.tiles import TILE_ROWS
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, flat_correlations
from autoconv.cpu.common.tiles.products import DEPTH, parts_of
from autoconv.cpu.matrix.geometry import MatrixBlocking, Panel, PanelAxis, blocking
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class WgradCut:
    """Where things are in the workspace; outputs are numbered as in the `Panel` of a strip, zeros between the rows.

    The rows of an operand are its channels, each with the numbers of a strip in order. Those of dy are multiplied as
    they are. Those of x are turned: a line holds two neighbouring numbers of 16 channels, and where taps skip an odd
    number there is a copy whose pairs begin at the odd ones. A task multiplies `filters` tiles by `channels` tiles.
    """

    c: Correlation
    b: MatrixBlocking
    filters: int
    channels: int

    @functools.cached_property
    def panel(self) -> Panel:
        """The numbering of outputs, and what each tap skips."""
        return Panel(self.c, self.b)

    @property
    def parts(self) -> int:
        """Of each number."""
        return parts_of(self.b.products)

    @property
    def steps(self) -> int:
        """Products of tiles over the outputs of a strip."""
        return math.ceil(self.panel.tiles * TILE_ROWS / DEPTH)

    @property
    def components(self) -> int:
        """Of x."""
        return len(self.panel.rows.residues) * len(self.panel.columns.residues)

    @property
    def copies(self) -> int:
        """Of a component: pairs from even numbers on, and from odd ones where a tap wants them."""
        return 2 if any(skip % 2 for _, skip in self.taps) else 1

    @functools.cached_property
    def taps(self) -> tuple[tuple[int, int], ...]:
        """The component that each tap sees, and the places that it skips."""
        return tuple(divmod(skip, self.panel.component) for skip in self.panel.taps)

    @property
    def length(self) -> int:
        """Numbers of a row of x, of one component: whole pairs, one more for the odd ones."""
        return math.ceil((self.steps * DEPTH + self.panel.component - self.panel.tiles * TILE_ROWS) / DEPTH) * DEPTH

    @property
    def rows_bytes(self) -> int:
        """Of 16 rows of x before they are turned, which a thread keeps to itself; an odd pair may reach beyond them."""
        return self.parts * self.components * TILE_ROWS * self.length * 2 + LINE

    @property
    def copy_bytes(self) -> int:
        """Of the lines of one copy of a component of 16 channels."""
        return self.length // 2 * LINE

    @property
    def x_part(self) -> int:
        """Bytes of a part of 16 channels of x."""
        return self.components * self.copies * self.copy_bytes

    @property
    def dy_row(self) -> int:
        """Bytes from a row of dy to the next, an odd number of lines."""
        return (self.steps | 1) * LINE

    @property
    def dy_part(self) -> int:
        """Bytes of a part of 16 filters of dy."""
        return TILE_ROWS * self.dy_row

    @property
    def tiles(self) -> tuple[int, int]:
        """Of filters and of channels, of a group."""
        return math.ceil(self.c.K / TILE_ROWS), math.ceil(self.c.C / TILE_ROWS)

    @property
    def sums_bytes(self) -> int:
        """Of a group: `[taps][filters][channels]`, whole tiles of them."""
        filters, channels = self.tiles
        return len(self.taps) * filters * channels * TILE_ROWS * TILE_ROWS * 4

    @property
    def places(self) -> tuple[int, int, int, int]:
        """Where x, dy, the sums and the threads' own rows begin, after a line for the number of the strip."""
        filters, channels = (self.c.groups * tiles for tiles in self.tiles)
        x = LINE
        dy = x + channels * self.parts * self.x_part
        sums = dy + filters * self.parts * self.dy_part
        return x, dy, sums, sums + self.c.groups * self.sums_bytes

    @property
    def workspace_bytes(self) -> int:
        """All of it."""
        return self.places[3] + self.b.threads * self.rows_bytes

    @property
    def outputs(self) -> tuple[PanelAxis, PanelAxis]:
        """The axes of dy, as of an input that a single tap sees."""

        def axis(a: CorrelationAxis, outputs: int) -> PanelAxis:
            return PanelAxis(CorrelationAxis(a.count, a.count, 1, 0, 1, (0,)), outputs)

        return axis(self.c.rows, self.b.rows), axis(self.c.columns, self.b.columns)

    @property
    def strips(self) -> tuple[int, int, int]:
        """Of images, rows and columns."""
        c, b = self.c, self.b
        extents = (c.N, b.images), (c.rows.count, b.rows), (c.columns.count, b.columns)
        images, rows, columns = (math.ceil(extent / part) for extent, part in extents)
        return images, rows, columns


def wgrad_cut(layer: ConvLayer, products: int, strip: int, threads: int) -> WgradCut:
    """Strips of about so many outputs; blocks as large as leave every thread several."""
    (c,) = flat_correlations(layer.replace(direction="fwd"))
    b = replace(blocking(c, products, strip, c.C, threads), chunks=1)
    filters, channels = WgradCut(c, b, 1, 1).tiles
    side = 8
    while side > 2 and c.groups * math.ceil(filters / side) * math.ceil(channels / side) < 4 * threads:
        side //= 2
    return WgradCut(c, b, side, side)
