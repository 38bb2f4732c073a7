"""How long a kernel should take, by what its blocks ask of a multiprocessor and the whole of it of L2 and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoconv.cuda.codegen.occupancy import WARP, limits_of
from autoconv.cuda.codegen.source import Unit

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

# Of the peaks by clock and width, what large products and copies keep: cuBLAS on an H100 reaches 71 % in float32 and
# 85 % in tf32 (power lowers the clock), a copy on an H200 90 % of the memory's bandwidth.
SUSTAINED, COPIED = 0.8, 0.9
LAUNCH_SECONDS = 3e-6  # from one kernel's end to the next one's first block, and back
MEMORY_CLOCKS = 600  # from a load to its value, where no cache has it
SHARED_BYTES = 128  # a clock, of a multiprocessor
LINK_BYTES = 64  # a clock, from the L2 to one multiprocessor
# Bytes a clock from the L2 to all multiprocessors (NVIDIA, "A100 Tensor Core GPU Architecture", 2020; an H100's has as
# many slices), by compute capability, times ten; elsewhere so many to each of them, which is a guess.
L2_BYTES, GUESSED_L2_BYTES = {80: 5120, 90: 5120}, 16
# Of the tensor cores' peak, what `mma.sync` reaches where there is a faster instruction: Luo et al., "Dissecting the
# NVIDIA Hopper Architecture through Microbenchmarking and Multiple Level Analysis" (2025), arXiv:2501.12084.
MMA_SYNC = {90: 0.63}
# Of the tensor cores' peak, what cuBLAS reaches where rows begin at multiples of so few bytes, as it then cannot copy
# 16 of them at once: on an H100 and an H200 100 to 160 TFLOP/s in float16 with 8 bytes, 25 to 45 with 2. What 4 bytes
# and other GPUs do is a guess.
LIBRARY_ALIGNED = {8: 0.2, 4: 0.1, 2: 0.05}
# Of a library's product: rows and columns of a block, the least of a depth that is divided, and into how many blocks;
# of another kernel, the bytes of a block.
LIBRARY_TILE, LIBRARY_DEPTH, LIBRARY_BLOCKS, LIBRARY_PASS = 128, 512, 256, 1 << 14


@dataclass(frozen=True)
class Demand:
    """What one launch asks for: `memory` of all blocks, and from `slots` on of each.

    Attributes
    ----------
    blocks, threads, held, allocated : int
        Blocks, threads to each, how many of them a multiprocessor is meant to hold, and bytes of its shared memory
        that each of them takes.
    slots : float
        Instructions that the block's warps issue.
    products : float
        Multiply-adds.
    pipe : str
        What computes them: "float32", "float64", or of tensor cores "mma" and "wgmma" in 16 bits and "mma.tf32" and
        "wgmma.tf32".
    shared, cached : float
        Bytes from and to shared memory, and from and to the L2.
    delay : float
        Clocks in which a block, were it alone, would do nothing else: the first slice on its way, the way out.
    waiting : float
        Clocks in which values of one slice after the other are on their way to a block, while it computes.
    memory : float
        Bytes from and to memory.
    launches : float
        1; or 0 of what blocks of the launch before still do when the others have ended.
    """

    blocks: int
    threads: int
    held: int
    allocated: int
    slots: float
    products: float = 0.0
    pipe: str = "float32"
    shared: float = 0.0
    cached: float = 0.0
    delay: float = MEMORY_CLOCKS
    waiting: float = 0.0
    memory: float = 0.0
    launches: float = 1

    def together(self, capability: int) -> int:
        """Blocks that a multiprocessor really holds."""
        limits = limits_of(capability)
        by_shared = limits.shared // (self.allocated + limits.reserved) if self.allocated else self.held
        return max(1, min(self.held, limits.threads // self.threads, by_shared))

    def clocks(self, together: int, rate: float, l2: float) -> float:
        """Of so many blocks of a multiprocessor, if nothing but its units limited them.

        Parameters
        ----------
        together : int
        rate, l2 : float
            A clock, of this multiprocessor: multiply-adds of its pipe, and bytes from the L2.

        Returns
        -------
        float
        """
        schedulers = min(4, together * self.threads / WARP)
        return together * max(
            self.slots / schedulers,
            self.products / rate,
            self.shared / SHARED_BYTES,
            self.cached / min(LINK_BYTES, l2),
        )


def demand(unit: Unit, slots: float, pipe: str = "float32", **more: float) -> Demand:
    """Of one of our kernels: `slots` and what else is said are of a block, `memory` of the launch."""
    return Demand(math.prod(unit.grid), unit.threads, unit.blocks, unit.shared, slots, pipe=pipe, **more)


def streaming(unit: Unit, nbytes: float, slots: float = 40.0) -> Demand:
    """Of a kernel that moves so many bytes and computes little: so many instructions to a thread."""
    blocks = math.prod(unit.grid)
    return demand(unit, slots * unit.threads / WARP, cached=nbytes / blocks, memory=nbytes)


def library_product(
    rows: int, columns: int, depth: int, batch: int, itemsize: int, factor: int = 1, pitch: int = 16
) -> Demand:
    """Of a library's product of matrices, which may read them from the L2: as good tiles would compute it.

    `factor` real multiply-adds to each product: 4 where numbers are complex. Of 16 bits, on tensor cores: there the
    bytes from row to row count, of which `pitch` is a common divisor.
    """
    blocks = -(-rows // LIBRARY_TILE) * -(-columns // LIBRARY_TILE) * batch
    parts = max(1, min(depth // LIBRARY_DEPTH, LIBRARY_BLOCKS // blocks))
    depth = -(-depth // parts)
    products = float(LIBRARY_TILE**2 * depth * factor)
    if itemsize < 4:
        products /= LIBRARY_ALIGNED.get(math.gcd(pitch, 16), 1.0)
    return Demand(
        blocks * parts,
        256,
        2,
        0,
        0.0 if itemsize < 4 else products / WARP * 1.1,
        products,
        {2: "wgmma", 4: "float32"}.get(itemsize // (2 if factor > 1 else 1), "float64"),
        cached=2.0 * LIBRARY_TILE * depth * itemsize + LIBRARY_TILE**2 * itemsize,
        delay=2.0 * MEMORY_CLOCKS,
    )


def library_pass(nbytes: float, slots: float, memory: float) -> Demand:
    """Of a library's kernel that reads and writes so many bytes, its warps issuing so many instructions."""
    blocks = max(1, math.ceil(nbytes / LIBRARY_PASS))
    return Demand(blocks, 256, 4, 0, slots / blocks, cached=nbytes / blocks, memory=memory)


def beyond_cache(device: CUDA, scratch: float) -> float:
    """Bytes of memory that scratch takes when it is written and read again: none where half of the L2 holds it."""
    return 0.0 if scratch <= int(device.facts["l2_bytes"]) / 2 else 2.0 * scratch


def products_per_clock(device: CUDA, pipe: str) -> float:
    """Multiply-adds of one multiprocessor, by a pipe as a `Demand` names it."""
    facts = device.facts
    instruction, _, narrow = pipe.partition(".")
    tensor = instruction in ("mma", "wgmma")
    peak = device.peak_flops("float16" if tensor else pipe) / (2 if narrow else 1)
    share = MMA_SYNC.get(int(facts["compute_capability"]), 1.0) if instruction == "mma" else 1.0
    return share * peak / 2 / float(facts["clock_hz"]) / int(facts["multiprocessors"])


def seconds(device: CUDA, demands: list[Demand]) -> float:
    """Of launches one after the other.

    Blocks come in rounds that fill the GPU, and a last one that may not: there a multiprocessor has fewer blocks, down
    to one, which has its units for itself but waits for its own memory. Memory is busy meanwhile, but who waits for it
    does not always meet another one that computes: of what either would take alone, the root of the sum of squares lies
    between the larger one and the sum. It was chosen on what 874 candidates took on an H100, and errs by 14 % there
    (median); the larger one alone by 21 %.
    """
    facts = device.facts
    capability, multiprocessors = int(facts["compute_capability"]), int(facts["multiprocessors"])
    clock, bandwidth = SUSTAINED * float(facts["clock_hz"]), COPIED * device.bandwidth()
    total = 0.0
    for one in demands:
        held = one.together(capability)
        rounds, rest = divmod(one.blocks, held * multiprocessors)
        last = -(-rest // multiprocessors)
        l2 = L2_BYTES.get(capability, GUESSED_L2_BYTES * multiprocessors) / min(multiprocessors, one.blocks)
        rate = products_per_clock(device, one.pipe)
        alone = one.delay + max(one.waiting, one.clocks(1, rate, l2))
        clocks = rounds * max(alone, one.clocks(held, rate, l2))
        if last:
            clocks += max(alone, one.clocks(last, rate, l2))
        total += math.hypot((clocks + one.delay) / clock, one.memory / bandwidth) + one.launches * LAUNCH_SECONDS
    return total
