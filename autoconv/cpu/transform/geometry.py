"""The geometry of a correlation in tiles: unit-stride sums, chunks of tiles, and where everything lies in memory.

Transforms of tiles want neighbouring taps and unit stride. Along an axis where output i sees input
`stride*i + dilation*t + offset` through tap t, every problem falls into such sums, with
`period = lcm(stride, dilation)` (polyphase decomposition: Vaidyanathan, "Multirate Digital Filters, Filter Banks,
Polyphase Networks, and Applications", 1990):

- outputs fall into `residues`, classes of equal residue modulo `period / stride`: a dilated filter sees each class of
  them on its own;
- taps fall into `components`, the polyphase components of the filter, of equal residue modulo `period / dilation`: a
  strided layer has several;
- between a class and a component both walk the input in steps of `period`;
- a component with too many taps for a tile is cut into `blocks` of neighbours.

The blocks of all components, together the `subfilters`, are summed like channels, before the inverse transform.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from autoconv.algorithm import PADDING_ONLY
from autoconv.cpu.codegen.ir import VECTOR_BYTES, Value
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, correlation_count, correlations
from autoconv.cpu.common.estimate import busiest
from autoconv.layer import ConvLayer

HEADER = 64  # bytes of the workspace in front: two words for what of a run is being computed
EVEN = 1.1  # times its fair share that the busiest thread of a region may do, before its tasks are made smaller
LARGEST_PERIOD = 36  # input pixels between neighbours: more would be loads without end


@dataclass(frozen=True)
class TiledAxis:
    """One axis of a correlation in tiles of m outputs."""

    axis: CorrelationAxis
    m: int

    @functools.cached_property
    def dilation(self) -> int:
        """Inputs between taps; a single tap is as good as a neighbour."""
        return self.axis.dilation if len(self.axis.taps) > 1 else self.axis.stride

    @functools.cached_property
    def period(self) -> int:
        """Inputs between the neighbours of an output residue class, and of a polyphase component."""
        return math.lcm(self.axis.stride, self.dilation)

    @functools.cached_property
    def residues(self) -> int:
        """Output residue classes."""
        return self.period // self.axis.stride

    @functools.cached_property
    def components(self) -> int:
        """Polyphase components of the filter."""
        return self.period // self.dilation

    @functools.cached_property
    def blocks(self) -> int:
        """Into how many blocks the taps of a component are cut."""
        return 1

    @functools.cached_property
    def subfilters(self) -> int:
        """Blocks of all components; number `block * components + component`."""
        return self.components * self.blocks

    @functools.cached_property
    def r(self) -> int:
        """Taps of a subfilter, the shorter ones filled up with zeros."""
        return -(-len(self.axis.taps) // self.subfilters)

    @functools.cached_property
    def tile(self) -> int:
        """Inputs of a tile."""
        return self.m + self.r - 1

    @functools.cached_property
    def count(self) -> int:
        """Outputs of the first residue class; others may have one less."""
        return -(-self.axis.count // self.residues)

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of a residue class."""
        return -(-self.count // self.m)

    @functools.cached_property
    def span(self) -> int:
        """Inputs under the tiles of a residue class."""
        return self.tiles * self.m + self.r - 1


def unfit(layer: ConvLayer, most: int) -> list[str]:
    """Every reason against transforms of tiles of a layer's fwd or dgrad, whatever the tiles.

    It may fall into `most` correlations, for the sake of compile time: each has kernels of its own.
    """
    if layer.sees_padding_only:
        return [PADDING_ONLY]
    stride = "x".join(map(str, layer.stride))
    if (number := correlation_count(layer)) > most:
        return [f"stride {stride}: expected at most {most} correlations, got {number}"]
    axes = [axis for c in correlations(layer) for axis in (c.rows, c.columns)]
    if not all(axis.taps for axis in axes):
        return [f"stride {stride}: expected taps that see every input, got a {layer.R}x{layer.S} filter"]
    tiled, reasons = [TiledAxis(axis, 1) for axis in axes], []
    if all(axis.r == 1 for axis in tiled):
        reasons.append(
            f"filter: expected neighbouring taps in a polyphase component, got {layer.R}x{layer.S}, stride {stride}"
        )
    if (period := max(axis.period for axis in tiled)) > LARGEST_PERIOD:
        reasons.append(f"neighbouring taps: expected at most {LARGEST_PERIOD} inputs apart, got {period}")
    return reasons


def split_evenly(total: int, most: int) -> list[tuple[int, int]]:
    """A number as few nearly equal parts of at most `most`: pairs of how many, and how large."""
    parts = -(-total // most)
    small, larger = divmod(total, parts)
    return [(n, size) for n, size in ((larger, small + 1), (parts - larger, small)) if n]


def odd(vectors: int) -> int:
    """An odd number of vectors, so that many streams that far apart do not meet in one set of a cache."""
    return vectors | 1


@dataclass(frozen=True)
class Tiling(ABC):
    """One correlation cut into tiles, chunks of tiles and blocks of channels.

    A chunk is up to `chunk_rows` rows of tiles, all chunks nearly alike; all tiles of a chunk are multiplied in one go.
    `coop` chunks are a cooperative batch, transformed together by all `threads`; 0 leaves each thread to its own chunk.
    Memory is counted in elements of the type computed with.
    """

    correlation: Correlation
    instruction_set: str
    itemsize: int
    threads: int
    m: tuple[int, int]
    chunk_rows: int
    coop: int

    ahead: ClassVar[bool] = False  # whether images are fetched while products are computed

    # What a family decides.

    @property
    @abstractmethod
    def rows(self) -> TiledAxis:
        """The vertical axis."""

    @property
    @abstractmethod
    def columns(self) -> TiledAxis:
        """The horizontal axis."""

    @property
    @abstractmethod
    def points(self) -> int:
        """Numbers of a transformed tile."""

    @property
    @abstractmethod
    def vectors(self) -> int:
        """Vectors of filters of the product's register tile."""

    @property
    @abstractmethod
    def most_tiles(self) -> int:
        """Most tiles of the product's register tile."""

    @property
    def filter_axes(self) -> tuple[TiledAxis, TiledAxis]:
        """Both axes as they cut the filters."""
        return self.rows, self.columns

    # Channels.

    @functools.cached_property
    def lanes(self) -> int:
        """Channels of a vector."""
        return VECTOR_BYTES[self.instruction_set] // self.itemsize

    @functools.cached_property
    def TK(self) -> int:
        """Filters of the product's register tile."""
        return self.vectors * self.lanes

    @functools.cached_property
    def k_blocks(self) -> int:
        """Blocks of TK filters of a group."""
        return -(-self.correlation.K // self.TK)

    @functools.cached_property
    def abreast(self) -> int:
        """Blocks of filters by which a point is multiplied before the next one."""
        return 1

    @functools.cached_property
    def k_tasks(self) -> int:
        """Tasks of a chunk: as many blocks of filters in each as go abreast, fewer in the last one."""
        return -(-self.k_blocks // self.abreast)

    @functools.cached_property
    def subfilters(self) -> int:
        """Subfilters of both axes."""
        return self.rows.subfilters * self.columns.subfilters

    @functools.cached_property
    def mixed(self) -> bool:
        """Whether the channels of several subfilters share a vector, being few."""
        return self.subfilters > 1 and self.correlation.C // self.lanes == 0

    @functools.cached_property
    def subfilter_depth(self) -> int:
        """Channels of a subfilter, filled up to vectors where subfilters do not share them."""
        C = self.correlation.C
        return C if self.mixed or self.subfilters == 1 else -(-C // self.lanes) * self.lanes

    @functools.cached_property
    def depth(self) -> int:
        """Terms of the sum over channels and subfilters."""
        return self.subfilters * self.subfilter_depth

    @functools.cached_property
    def c_blocks(self) -> int:
        """Vectors of the sum's terms."""
        return -(-self.depth // self.lanes)

    @functools.cached_property
    def packed_depth(self) -> int:
        """Terms of the sum in the packed filters."""
        return self.depth

    # Tiles.

    @functools.cached_property
    def tile_rows(self) -> int:
        """Rows of tiles, of all residue classes and images."""
        return self.rows.residues * self.columns.residues * self.correlation.N * self.rows.tiles

    @functools.cached_property
    def chunk_sizes(self) -> list[tuple[int, int]]:
        """How many chunks of a group have how many rows of tiles, the larger ones first."""
        return split_evenly(self.tile_rows, self.chunk_rows)

    @functools.cached_property
    def chunk(self) -> int:
        """Rows of tiles of a chunk, at most."""
        return self.chunk_sizes[0][1]

    @functools.cached_property
    def chunks(self) -> int:
        """Chunks of a group."""
        return sum(count for count, _ in self.chunk_sizes)

    def chunk_at(self, index: Value) -> tuple[Value, Value]:
        """The first row of tiles of a chunk, and how many it has."""
        first = index * self.tile_rows // self.chunks
        return first, (index + 1) * self.tile_rows // self.chunks - first

    @functools.cached_property
    def tasks(self) -> int:
        """Tasks where each thread is left to its own chunk."""
        return self.correlation.groups * self.chunks

    @functools.cached_property
    def batch(self) -> int:
        """Chunks of a cooperative batch, but for the last one; 0 where there are none."""
        return min(self.coop, self.chunks)

    @functools.cached_property
    def sections(self) -> int:
        """Parts of a batch's chunk, each a task for every vector of channels: as few as end together.

        Where they never do, as many as bring them nearest to it.
        """
        if not self.coop:
            return 1
        tasks, parts = self.batch * self.c_blocks, range(1, self.chunk + 1)
        even = (n for n in parts if busiest(tasks * n, self.threads) <= EVEN)
        return next(even, None) or min(parts, key=lambda n: busiest(tasks * n, self.threads))

    @functools.cached_property
    def chunk_tiles(self) -> int:
        """Tiles of a chunk."""
        return self.chunk * self.columns.tiles

    # Memory: V[point][c block][tile][lane], M[point][vector][tile][lane], U[group][k block][point][c][filter]. The
    # inverse transform takes a vector of filters at a time: the lines it reads hold two tiles of it, not the next one.

    @functools.cached_property
    def v_tile(self) -> int:
        """From tile to tile of the transformed input."""
        return self.lanes

    @functools.cached_property
    def v_stride(self) -> int:
        """From point to point of the transformed input."""
        return odd(self.c_blocks * self.chunk_tiles) * self.lanes

    @functools.cached_property
    def v_size(self) -> int:
        """The transformed input of a chunk."""
        return self.points * self.v_stride

    @functools.cached_property
    def m_tile(self) -> int:
        """From tile to tile of the products."""
        return self.lanes

    @functools.cached_property
    def m_vector(self) -> int:
        """From vector to vector of filters of the products."""
        return self.chunk_tiles * self.lanes

    @functools.cached_property
    def m_stride(self) -> int:
        """From point to point of the products."""
        return odd(self.chunk_tiles * self.vectors) * self.lanes

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
    def m_size(self) -> int:
        """Products of a chunk by a block of filters."""
        return self.points * self.m_stride

    @functools.cached_property
    def output_size(self) -> int:
        """Products of a chunk by all blocks of filters that go abreast, and rows of output."""
        return self.abreast * self.m_size + self.rows.m * self.out_pitch * self.lanes

    @functools.cached_property
    def scratch_size(self) -> int:
        """A thread's buffers: rows of input, raw and half transformed; or products and rows of output."""
        return max(self.raw_size + self.rows.tile * self.pitch * self.lanes, self.output_size)

    @functools.cached_property
    def u_stride(self) -> int:
        """From point to point of the transformed filters."""
        return self.packed_depth * self.TK

    @functools.cached_property
    def u_size(self) -> int:
        """The transformed filters of one block of one group."""
        return self.points * self.u_stride

    @functools.cached_property
    def packed_size(self) -> int:
        """All transformed filters."""
        return self.correlation.groups * self.k_blocks * self.u_size

    @functools.cached_property
    def shared_size(self) -> int:
        """What threads share: the transformed input of a cooperative batch."""
        return self.batch * self.v_size

    @functools.cached_property
    def thread_size(self) -> int:
        """What each thread has to itself."""
        return self.scratch_size + (0 if self.coop else self.v_size)

    def workspace_bytes(self) -> int:
        """Scratch memory of a run."""
        return HEADER + self.itemsize * (self.shared_size + self.threads * self.thread_size)
