"""The geometry of Winograd's gradient of the filters: blocks, slices of chunks, and where everything lies in memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autoconv.cpu.codegen.ir import VECTOR_REGISTERS
from autoconv.cpu.common.panel import in_lines
from autoconv.cpu.transform.geometry import HEADER, split_evenly
from autoconv.cpu.winograd.geometry import WinogradTiling

FILTER_VECTORS = 4  # of a block, at most
# Filters of the product's register tile, by registers, for one to three vectors of channels.
_REGISTER_TILES = {32: (28, 14, 9), 16: (12, 6, 4)}


@dataclass(frozen=True)
class WgradTiling:
    """The forward pass in tiles and chunks, of which `slices` are summed apart.

    A vector of channels of a chunk is transformed in `sections` tasks. Memory is counted in elements of the type
    computed with.
    """

    forward: WinogradTiling
    slices: int
    sections: int

    # Blocks of channels and filters.

    @functools.cached_property
    def lanes(self) -> int:
        """Channels of a vector."""
        return self.forward.lanes

    @functools.cached_property
    def vectors(self) -> int:
        """Vectors of channels multiplied together; a last block may be short of some."""
        blocks = self.forward.c_blocks
        return 3 if blocks % 3 == 0 and blocks % 2 else min(2, blocks)

    @functools.cached_property
    def channel_blocks(self) -> int:
        """Blocks of channels of a group."""
        return -(-self.forward.c_blocks // self.vectors)

    @functools.cached_property
    def BC(self) -> int:
        """Channels of a block."""
        return self.vectors * self.lanes

    @functools.cached_property
    def k_vectors(self) -> int:
        """Vectors of filters of a group."""
        return -(-self.forward.correlation.K // self.lanes)

    @functools.cached_property
    def filter_blocks(self) -> int:
        """Blocks of filters of a group."""
        return -(-self.k_vectors // FILTER_VECTORS)

    @functools.cached_property
    def BF(self) -> int:
        """Filters of a block, whole vectors."""
        return -(-self.k_vectors // self.filter_blocks) * self.lanes

    @functools.cached_property
    def register_tiles(self) -> list[tuple[int, int]]:
        """How many tiles of how many filters a block is multiplied in."""
        most = _REGISTER_TILES[VECTOR_REGISTERS[self.forward.instruction_set]][self.vectors - 1]
        return split_evenly(self.BF, most)

    # Chunks.

    @functools.cached_property
    def steps(self) -> int:
        """Chunks of a slice, but for the last ones."""
        return -(-self.forward.chunks // self.slices)

    @functools.cached_property
    def section_rows(self) -> int:
        """Rows of tiles of a section."""
        return -(-self.forward.chunk // self.sections)

    # Memory: V as in the forward pass, Y[point][filter block][tile][filter], sums[slice][block][filter][tap][channel].

    @functools.cached_property
    def y_stride(self) -> int:
        """From point to point of the transformed dy: an odd number of vectors."""
        return (self.filter_blocks * self.BF * self.forward.chunk_tiles // self.lanes | 1) * self.lanes

    @functools.cached_property
    def y_size(self) -> int:
        """The transformed dy of a chunk."""
        return self.forward.points * self.y_stride

    @functools.cached_property
    def v_size(self) -> int:
        """The transformed input of a chunk, with room for the vectors that the last block reads and forgets."""
        return self.forward.v_size + self.vectors * self.forward.chunk_tiles * self.lanes

    @functools.cached_property
    def taps(self) -> int:
        """Taps of a subfilter."""
        return self.forward.rows.r * self.forward.columns.r

    @functools.cached_property
    def block_size(self) -> int:
        """The sums of a block."""
        return self.BF * self.taps * self.BC

    @functools.cached_property
    def sums_size(self) -> int:
        """The sums of a slice."""
        return self.filter_blocks * self.channel_blocks * self.block_size

    @functools.cached_property
    def y_pitch(self) -> int:
        """Columns of a buffered row of dy."""
        return -(-self.forward.columns.tiles * self.forward.columns.m // self.lanes) * self.lanes

    @functools.cached_property
    def thread_size(self) -> int:
        """A thread's buffers: rows of input or of dy, raw and half transformed; or a row of points of products."""
        rows, columns = self.forward.rows, self.forward.columns
        inputs = self.forward.raw_size + rows.tile * self.forward.pitch * self.lanes
        return max(inputs, (rows.m + rows.tile) * self.y_pitch * self.lanes, columns.tile * self.BF * self.BC)

    @functools.cached_property
    def elements(self) -> tuple[int, int, int]:
        """All V, Y and sums."""
        return self.slices * self.v_size, self.slices * self.y_size, self.slices * self.sums_size

    def workspace_bytes(self) -> int:
        """Scratch memory of a run."""
        elements = sum(self.elements) + self.forward.threads * self.thread_size
        return HEADER + self.forward.itemsize * in_lines(elements)
