"""The geometry of a Winograd convolution: tiles, grids, phases, and where everything lies in memory.

Minimal filtering F(m, r) wants neighbouring taps and unit stride. Along an axis where output i sees input
`step*i + gap*t + first` through tap t, every problem falls into such pieces: outputs are dealt out to `grids`
(a dilated filter sees each on its own), taps to `phases` (of a strided filter), and between a grid and a
phase both walk the input in steps of `period = lcm(step, gap)`. Where the taps of a phase are too many for a
tile, they are cut into `blocks` of neighbours. Phases and blocks, together `parts`, are summed like channels,
before the inverse transform.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

from autoconv.common.winograd_math import Transforms, transforms
from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis

# Points by size of tile. In pairs of sign, so that transforms share half their work; of those, the ones with
# the smallest measured float32 errors whose products are short binary fractions.
_POINTS = {
    1: "",
    2: "0",
    3: "1 -1",
    4: "0 1 -1",
    5: "1/2 -1/2 5/4 -5/4",
    6: "0 3/4 -3/4 3/2 -3/2",
    7: "1/4 -1/4 1 -1 2 -2",
    8: "0 1/2 -1/2 1 -1 2 -2",
    9: "1/4 -1/4 5/8 -5/8 5/4 -5/4 2 -2",
}
LARGEST_TILE = max(_POINTS)
# Pixels by vectors of the product's register tile, when filters fill one vector and when they fill two.
_REGISTER_TILES = {"avx512": {1: 28, 2: 14}, "avx2": {1: 12, 2: 6}, "generic": {1: 12, 2: 6}}


@functools.cache
def minimal(m: int, r: int) -> Transforms:
    """The transforms of F(m, r) on this engine's points."""
    return transforms(m, r, tuple(map(Fraction, _POINTS[m + r - 1].split())))


@dataclass(frozen=True)
class Side:
    """One axis of a correlation in tiles of m outputs."""

    axis: CorrelationAxis
    m: int

    @functools.cached_property
    def gap(self) -> int:
        """Inputs between taps; a single tap is as good as a neighbour."""
        return self.axis.dilation if len(self.axis.taps) > 1 else self.axis.stride

    @functools.cached_property
    def period(self) -> int:
        """Inputs between the neighbours of a piece."""
        return math.lcm(self.axis.stride, self.gap)

    @functools.cached_property
    def grids(self) -> int:
        """Into how many pieces outputs fall."""
        return self.period // self.axis.stride

    @functools.cached_property
    def phases(self) -> int:
        """Into how many pieces taps fall."""
        return self.period // self.gap

    @functools.cached_property
    def blocks(self) -> int:
        """Into how many blocks the taps of a phase are cut."""
        return -(-len(self.axis.taps) // (self.phases * max(LARGEST_TILE + 1 - self.m, 1)))

    @functools.cached_property
    def parts(self) -> int:
        """Blocks of all phases; part number `block * phases + phase`."""
        return self.phases * self.blocks

    @functools.cached_property
    def r(self) -> int:
        """Taps of a part, the shorter ones filled up with zeros."""
        return -(-len(self.axis.taps) // self.parts)

    @functools.cached_property
    def tile(self) -> int:
        """Inputs of a tile, and its points."""
        return self.m + self.r - 1

    @functools.cached_property
    def count(self) -> int:
        """Outputs of the first grid; others may have one less."""
        return -(-self.axis.count // self.grids)

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of a grid."""
        return -(-self.count // self.m)

    @functools.cached_property
    def span(self) -> int:
        """Inputs under the tiles of a grid."""
        return self.tiles * self.m + self.r - 1

    @functools.cached_property
    def transforms(self) -> Transforms:
        """Of F(m, r)."""
        return minimal(self.m, self.r)


@functools.lru_cache(1024)
def side_of(axis: CorrelationAxis, m: int) -> Side:
    """An axis in tiles of m outputs, or of one where a single tap leaves nothing to save."""
    side = Side(axis, m)
    return side if side.r > 1 else Side(axis, 1)


def _odd(vectors: int) -> int:
    """An odd number of vectors, so that many streams that far apart do not meet in one set of a cache."""
    return vectors | 1


@dataclass(frozen=True)
class Plan:
    """One correlation cut into tiles, chunks of tiles and blocks of channels.

    A chunk is `chunk` rows of tiles; all tiles of a chunk are multiplied in one go. `share` chunks are
    transformed together by all threads; 0 leaves each thread to its own chunk. Memory is counted in
    elements of the type computed with.
    """

    correlation: Correlation
    instruction_set: str
    itemsize: int
    m: tuple[int, int]
    chunk_rows: int
    share: int

    @functools.cached_property
    def lanes(self) -> int:
        """Channels of a vector."""
        return VECTOR_BYTES[self.instruction_set] // self.itemsize

    @functools.cached_property
    def rows(self) -> Side:
        """The vertical axis."""
        return side_of(self.correlation.rows, self.m[0])

    @functools.cached_property
    def columns(self) -> Side:
        """The horizontal axis."""
        return side_of(self.correlation.columns, self.m[1])

    # Channels.

    @functools.cached_property
    def vectors(self) -> int:
        """Vectors of filters multiplied together."""
        return min(2, -(-self.correlation.K // self.lanes))

    @functools.cached_property
    def KB(self) -> int:
        """Filters multiplied together."""
        return self.vectors * self.lanes

    @functools.cached_property
    def k_blocks(self) -> int:
        """Blocks of filters of a group."""
        return -(-self.correlation.K // self.KB)

    @functools.cached_property
    def pixels(self) -> int:
        """Most tiles of a register tile."""
        return _REGISTER_TILES[self.instruction_set][self.vectors]

    @functools.cached_property
    def parts(self) -> int:
        """Parts of both axes."""
        return self.rows.parts * self.columns.parts

    @functools.cached_property
    def mixed(self) -> bool:
        """Whether the channels of several parts share a vector, being few."""
        return self.parts > 1 and self.correlation.C // self.lanes == 0

    @functools.cached_property
    def part_depth(self) -> int:
        """Channels of a part, filled up to vectors where parts do not share them."""
        C = self.correlation.C
        return C if self.mixed or self.parts == 1 else -(-C // self.lanes) * self.lanes

    @functools.cached_property
    def depth(self) -> int:
        """Terms of the sum over channels and parts."""
        return self.parts * self.part_depth

    @functools.cached_property
    def c_blocks(self) -> int:
        """Vectors of the sum's terms."""
        return -(-self.depth // self.lanes)

    # Tiles.

    @functools.cached_property
    def points(self) -> int:
        """Points of a tile."""
        return self.rows.tile * self.columns.tile

    @functools.cached_property
    def tile_rows(self) -> int:
        """Rows of tiles, of all grids and images."""
        return self.rows.grids * self.columns.grids * self.correlation.N * self.rows.tiles

    @functools.cached_property
    def chunk(self) -> int:
        """Rows of tiles of a chunk."""
        return min(self.chunk_rows, self.tile_rows)

    @functools.cached_property
    def chunks(self) -> int:
        """Chunks of a group."""
        return -(-self.tile_rows // self.chunk)

    @functools.cached_property
    def last_chunk(self) -> int:
        """Rows of tiles of the last chunk."""
        return self.tile_rows - (self.chunks - 1) * self.chunk

    @functools.cached_property
    def chunk_tiles(self) -> int:
        """Tiles of a chunk."""
        return self.chunk * self.columns.tiles

    # Memory: V[point][c block][tile][lane], M[point][tile][filter], U[group][k block][point][c][filter].

    @functools.cached_property
    def v_stride(self) -> int:
        """From point to point of the transformed input."""
        return _odd(self.c_blocks * self.chunk_tiles) * self.lanes

    @functools.cached_property
    def v_size(self) -> int:
        """The transformed input of a chunk."""
        return self.points * self.v_stride

    @functools.cached_property
    def m_stride(self) -> int:
        """From point to point of the products."""
        return _odd(self.chunk_tiles * self.vectors) * self.lanes

    @functools.cached_property
    def pitch(self) -> int:
        """Columns of a buffered row of input."""
        return -(-self.columns.span // self.lanes) * self.lanes

    @functools.cached_property
    def out_pitch(self) -> int:
        """Columns of a buffered row of output."""
        return -(-self.columns.tiles * self.columns.m // self.lanes) * self.lanes

    @functools.cached_property
    def raw_size(self) -> int:
        """Rows of input under a chunk's tiles of one image, for one vector of channels."""
        rows = min(self.chunk, self.rows.tiles) * self.rows.m + self.rows.r - 1
        return rows * self.pitch * self.lanes

    @functools.cached_property
    def scratch_size(self) -> int:
        """A thread's buffers: rows of input, raw and half transformed; or products and rows of output."""
        inputs = self.raw_size + self.rows.tile * self.pitch * self.lanes
        outputs = self.points * self.m_stride + self.rows.m * self.out_pitch * self.lanes
        return max(inputs, outputs)

    @functools.cached_property
    def u_size(self) -> int:
        """The transformed filters of one block of one group."""
        return self.points * self.depth * self.KB

    @functools.cached_property
    def packed_size(self) -> int:
        """All transformed filters."""
        return self.correlation.groups * self.k_blocks * self.u_size

    @functools.cached_property
    def shared_size(self) -> int:
        """What threads share."""
        return min(self.share, self.chunks) * self.v_size

    @functools.cached_property
    def thread_size(self) -> int:
        """What each thread has to itself."""
        return self.scratch_size + (0 if self.share else self.v_size)

    def workspace_bytes(self, threads: int) -> int:
        """Scratch memory of a run, with a word for the number of the group of chunks in front."""
        return 64 + self.itemsize * (self.shared_size + threads * self.thread_size)
