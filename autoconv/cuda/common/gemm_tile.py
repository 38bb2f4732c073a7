"""The tiles of a matrix product in scalar arithmetic, `gemm_tile.cuh`: `gemm`, `winograd` and `direct.chwn` have it."""

from __future__ import annotations

import math
from typing import NamedTuple

from autoconv.cuda.codegen.source import Constant, Unit
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand, demand

MOST_SUMS_FLOAT64 = 32
READ_BYTES = 256  # that shared memory is busy for with 128 bits to each lane of a warp, many of which ask for the same
LOOP_SLOTS = 20  # instructions of a slice that are neither products nor part of an operand's way


class Fetch(NamedTuple):
    """How an operand comes to shared memory: in runs of so many neighbours, the stores of one, what finds one."""

    run: int
    stores: int
    indexing: float


def single(itemsize: int, indexing: float) -> Fetch:
    """Of values that come one by one: those of four bytes go past the registers, and need no store."""
    return Fetch(1, 0 if itemsize == 4 else 1, indexing)


class GemmTile(NamedTuple):
    """What a block computes, what a thread computes of it, and how many blocks a multiprocessor shall hold."""

    BM: int
    BN: int
    BK: int
    TM: int
    TN: int
    blocks: int

    @property
    def threads(self) -> int:
        """Of a block: its warps compute 4 TM x 8 TN each."""
        return self.BM // (4 * self.TM) * (self.BN // (8 * self.TN)) * 32

    def no_float64(self) -> list[str]:
        """The reason against it where each sum takes two of a thread's registers."""
        if self.TM * self.TN <= MOST_SUMS_FLOAT64:
            return []
        return [f"float64: expected at most {MOST_SUMS_FLOAT64} sums to a thread, got {self.TM}x{self.TN}"]

    def shared(self, accumulator: int) -> int:
        """Bytes of shared memory: both slices twice, rows padded by four."""
        return 2 * self.BK * (self.BM + 4 + self.BN + 4) * accumulator

    def halved(self) -> GemmTile:
        """The same for float64, whose sums and slices take twice the room."""
        return self._replace(blocks=max(self.blocks // 2, 1))

    def slice_slots(self, a: Fetch, b: Fetch, accumulator: int) -> float:
        """Instructions of a warp to a slice."""
        products = self.TM * self.TN * self.BK
        reads = self.BK * (self.TM + self.TN) * accumulator / 16
        fetches = sum(
            -(-extent * self.BK // (fetch.run * self.threads)) * (1 + fetch.indexing + fetch.stores)
            for extent, fetch in ((self.BM, a), (self.BN, b))
        )
        return products + reads + fetches + LOOP_SLOTS

    def demand(
        self,
        unit: Unit,
        slices: float,
        fetches: tuple[Fetch, Fetch],
        accumulator: int,
        cached: float,
        memory: float,
        stretches: int = 1,
    ) -> Demand:
        """Of the product kernel, so many slices to a block.

        Parameters
        ----------
        unit : Unit
        slices : float
        fetches : two Fetch
            Of the operand that has the rows, and of the other one.
        accumulator : int
            Bytes of a sum.
        cached : float
            Bytes of a slice that come from the L2.
        memory : float
            Bytes from and to memory, of the launch.
        stretches : int
            Of the depth: the sums of each but the first are added to those before it, which wait in the L2.
        """
        warps, sums = self.threads / 32, self.BM * self.BN
        reads = self.BK * (self.TM + self.TN) * accumulator / 16 * READ_BYTES
        way_out = 3 * (2 * stretches - 1) * self.TM * self.TN
        return demand(
            unit,
            warps * (slices * self.slice_slots(*fetches, accumulator) + way_out),
            products=slices * sums * self.BK,
            pipe="float64" if accumulator == 8 else "float32",
            shared=slices * (warps * reads + self.BK * (self.BM + self.BN) * accumulator),
            cached=slices * cached + (2 * stretches - 1) * sums * accumulator,
            delay=2.0 * stretches * MEMORY_CLOCKS + way_out * math.ceil(warps / 4),
            waiting=2.0 * (slices - 1) * MEMORY_CLOCKS,  # one operand of the next slice at a time is on its way
            memory=memory,
        )

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The names by which kernels know the tile."""
        names = [(name, int(getattr(self, name))) for name in ("BM", "BN", "BK", "TM", "TN")]
        return (*names, ("PRODUCT_THREADS", self.threads), ("PRODUCT_BLOCKS", self.blocks))
