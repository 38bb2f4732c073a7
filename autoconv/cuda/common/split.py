"""Split-K: products whose depth may be divided, their parts summed by the last block of a tile to come."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Kernel, Params
from autoconv.cuda.codegen.occupancy import WARP
from autoconv.cuda.codegen.source import Constant, Unit
from autoconv.cuda.common.algorithm import Chain, CudaAlgorithm, Tickets, ceil_div
from autoconv.cuda.common.model import MEMORY_CLOCKS, Demand
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

# A single tile, as of a first layer's wgrad, still reaches nearly all multiprocessors of a large GPU (132 of an H200).
MOST_PARTS = 128
MOST_AT_ONCE = 8  # parts that one block sums; of more, a block to each group sums that first
SUM_SLOTS = 3  # instructions of a warp to 32 sums of 16 bytes each: address, load, and additions


class Parts(NamedTuple):
    """What waits of a product in parts: so many tiles, so many sums of each, and of those so many of a thread.

    The threads that have a tile may be several teams, each with tickets of its own.
    """

    tiles: int
    sums: int
    each: int
    teams: int = 1

    @property
    def at_once(self) -> int:
        """Parts on their way to a thread that adds them, as `split.cuh` says."""
        return 1 if self.each > 32 else 2 if self.each > 16 else 4


class SplitProduct(CudaAlgorithm):
    """A product in SPLIT parts of its depth (split-K), which go to the workspace; the last block of a tile sums them.

    The tickets that tell it are NVIDIA's, "threadFenceReduction" (CUDA samples); CUTLASS has them as "serial" split-K,
    in which blocks wait for each other.
    """

    exact = True

    @abstractmethod
    def parts(self, layer: ConvLayer, params: Params) -> Parts:
        """What waits, of the launch that leaves the most."""

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        split = params["SPLIT"]
        return [] if split in range(1, MOST_PARTS + 1) else [f"SPLIT={split}: expected 1 to {MOST_PARTS}"]

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return self.scratch_bytes(layer, params)

    def scratch_bytes(self, layer: ConvLayer, params: Params) -> int:
        """Where the parts wait."""
        split, parts = int(params["SPLIT"]), self.parts(layer, params)
        return split * parts.tiles * parts.sums * layer.accumulator.itemsize if split > 1 else 0

    def tickets(self, layer: ConvLayer, device: CUDA, params: Params) -> Tickets | None:
        """The counters of a kernel; none where no block sums parts."""
        split, parts = int(params["SPLIT"]), self.parts(layer, params)
        if split == 1:
            return None
        groups = ceil_div(split, fan_in(split))
        return Tickets(device, parts.tiles * parts.teams * (groups + 1 if groups > 1 else 1))

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        launches = self.load(device, self.units(layer, params))
        workspace = self.workspace_bytes(layer, device, params)
        return Chain([(launch, PRODUCT) for launch in launches], workspace, tickets=self.tickets(layer, device, params))

    def sum_demands(self, unit: Unit, layer: ConvLayer, parts: Parts, params: Params) -> list[Demand]:
        """Of the blocks that come last, while the others have ended: of each group of parts, and of all groups.

        What they move from and to memory is counted with the product.
        """
        split, found = int(params["SPLIT"]), []
        groups = ceil_div(split, fan_in(split))
        for blocks, count in ((groups, fan_in(split)), (1, groups)):
            if count > 1:
                nbytes = float(count * parts.sums * layer.accumulator.itemsize)
                slots = SUM_SLOTS * nbytes / 16 / WARP
                # sums on their way out, the ticket on its way back, and then the parts that come in together
                waits = 2 + ceil_div(count, parts.at_once)
                found.append(
                    Demand(
                        parts.tiles * blocks, unit.threads, unit.blocks, unit.shared, slots,
                        cached=nbytes, delay=waits / 2 * MEMORY_CLOCKS, launches=0,
                    )
                )  # fmt: skip
        return found


PRODUCT = ("a", "b", "out", "bias", "residual", "workspace", "tickets")  # the arguments of a product's kernel


def fan_in(split: int) -> int:
    """Parts that one block sums: all, or as many as there are groups of them.

    >>> fan_in(8), fan_in(9), fan_in(128)
    (8, 3, 12)
    """
    return split if split <= MOST_AT_ONCE else math.isqrt(split - 1) + 1


def split_constants(params: Params) -> tuple[Constant, ...]:
    """What `split.cuh` is told."""
    split = int(params["SPLIT"])
    return ("SPLIT", split), ("FAN_IN", fan_in(split))


def splits(blocks: int, wanted: int, slices: int, least: int) -> list[int]:
    """Parts of the depth to try: 1; and what fills the device once, or half of it, or as nearly as the depth allows.

    Parameters
    ----------
    blocks, wanted : int
        Those of the undivided product, and as many as the device holds.
    slices, least : int
        Slices of the depth, and how many of them make a part worth its share of the sum.
    """
    most = min(MOST_PARTS, slices // least)
    return sorted({1, *(whole(min(most, wanted // blocks // waves), slices) for waves in (1, 2))})


def whole(parts: int, slices: int) -> int:
    """The parts that have work when so many share the slices, each as many but the last; 1 at least."""
    return ceil_div(slices, ceil_div(slices, parts)) if parts > 1 else 1
