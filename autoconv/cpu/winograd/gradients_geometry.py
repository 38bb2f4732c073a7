"""The geometry of Winograd's gradient of the filters: blocks, slices of chunks, and where everything lies in memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autoconv.cpu.transform.geometry import Plan
from autoconv.cpu.transform.matrix import split_evenly

HEADER = 64  # bytes of the workspace in front: group and step
FILTER_VECTORS = 4  # of a block, at most
# Filters of the product's register tile, for one to three vectors of channels.
_REGISTER_TILES = {"avx512": (28, 14, 9), "avx2": (12, 6, 4), "generic": (12, 6, 4)}


@dataclass(frozen=True)
class WgradPlan:
    """The forward pass in tiles and chunks, of which `slices` are summed apart; `parts` tasks transform one's vector.

    Memory is counted in elements of the type computed with.
    """

    tiles: Plan
    slices: int
    parts: int

    # Blocks of channels and filters.

    @functools.cached_property
    def lanes(self) -> int:
        """Channels of a vector."""
        return self.tiles.lanes

    @functools.cached_property
    def vectors(self) -> int:
        """Vectors of channels multiplied together; a last block may be short of some."""
        blocks = self.tiles.c_blocks
        return 3 if blocks % 3 == 0 and blocks % 2 else min(2, blocks)

    @functools.cached_property
    def channel_blocks(self) -> int:
        """Blocks of channels of a group."""
        return -(-self.tiles.c_blocks // self.vectors)

    @functools.cached_property
    def CB(self) -> int:
        """Channels of a block."""
        return self.vectors * self.lanes

    @functools.cached_property
    def k_vectors(self) -> int:
        """Vectors of filters of a group."""
        return -(-self.tiles.correlation.K // self.lanes)

    @functools.cached_property
    def filter_blocks(self) -> int:
        """Blocks of filters of a group."""
        return -(-self.k_vectors // FILTER_VECTORS)

    @functools.cached_property
    def KB(self) -> int:
        """Filters of a block, whole vectors."""
        return -(-self.k_vectors // self.filter_blocks) * self.lanes

    @functools.cached_property
    def register_tiles(self) -> list[tuple[int, int]]:
        """How many tiles of how many filters a block is multiplied in."""
        return split_evenly(self.KB, _REGISTER_TILES[self.tiles.instruction_set][self.vectors - 1])

    # Chunks.

    @functools.cached_property
    def steps(self) -> int:
        """Chunks of a slice, but for the last ones."""
        return -(-self.tiles.chunks // self.slices)

    @functools.cached_property
    def part_rows(self) -> int:
        """Rows of tiles of a task that transforms."""
        return -(-self.tiles.chunk // self.parts)

    # Memory: V as in the forward pass, Y[point][filter block][tile][filter], sums[slice][block][filter][tap][channel].

    @functools.cached_property
    def y_stride(self) -> int:
        """From point to point of the transformed dy: an odd number of vectors."""
        return (self.filter_blocks * self.KB * self.tiles.chunk_tiles // self.lanes | 1) * self.lanes

    @functools.cached_property
    def y_size(self) -> int:
        """The transformed dy of a chunk."""
        return self.tiles.points * self.y_stride

    @functools.cached_property
    def v_size(self) -> int:
        """The transformed input of a chunk, with room for the vectors that the last block reads and forgets."""
        return self.tiles.v_size + self.vectors * self.tiles.chunk_tiles * self.lanes

    @functools.cached_property
    def taps(self) -> int:
        """Taps of a part."""
        return self.tiles.rows.r * self.tiles.columns.r

    @functools.cached_property
    def block_size(self) -> int:
        """The sums of a block."""
        return self.KB * self.taps * self.CB

    @functools.cached_property
    def sums_size(self) -> int:
        """The sums of a slice."""
        return self.filter_blocks * self.channel_blocks * self.block_size

    @functools.cached_property
    def y_pitch(self) -> int:
        """Columns of a buffered row of dy."""
        return -(-self.tiles.columns.tiles * self.tiles.columns.m // self.lanes) * self.lanes

    @functools.cached_property
    def thread_size(self) -> int:
        """A thread's buffers: rows of input or of dy, raw and half transformed; or a row of points of products."""
        rows, columns = self.tiles.rows, self.tiles.columns
        inputs = self.tiles.raw_size + rows.tile * self.tiles.pitch * self.lanes
        return max(inputs, (rows.m + rows.tile) * self.y_pitch * self.lanes, columns.tile * self.KB * self.CB)

    @functools.cached_property
    def elements(self) -> tuple[int, int, int]:
        """All V, Y and sums."""
        return self.slices * self.v_size, self.slices * self.y_size, self.slices * self.sums_size

    def workspace_bytes(self, threads: int) -> int:
        """Scratch memory of a run."""
        return HEADER + self.tiles.itemsize * -(-(sum(self.elements) + threads * self.thread_size) // 16) * 16
