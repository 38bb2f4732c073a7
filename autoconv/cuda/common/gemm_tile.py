"""The tiles of a matrix product in scalar arithmetic, `gemm_tile.cuh`: `gemm`, `winograd` and `direct.chwn` have it."""

from __future__ import annotations

from typing import NamedTuple

from autoconv.cuda.codegen.source import Constant

MOST_SUMS_FLOAT64 = 32


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

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The names by which kernels know the tile."""
        names = [(name, int(getattr(self, name))) for name in ("BM", "BN", "BK", "TM", "TN")]
        return (*names, ("PRODUCT_THREADS", self.threads), ("PRODUCT_BLOCKS", self.blocks))
