"""How many blocks of a kernel fit a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities")."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 65536  # of a multiprocessor, on every architecture here
REGISTER_UNIT = 256  # registers are given to a warp in units of this
WARP = 32
STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel gets without asking


@dataclass(frozen=True)
class MultiprocessorLimits:
    """What one multiprocessor holds; shared memory in bytes, `reserved` of it taken by every block."""

    threads: int
    blocks: int
    shared: int
    shared_per_block: int
    reserved: int = 1024


LIMITS: dict[int, MultiprocessorLimits] = {
    75: MultiprocessorLimits(1024, 16, 64 << 10, 64 << 10, 0),
    80: MultiprocessorLimits(2048, 32, 164 << 10, 163 << 10),
    86: MultiprocessorLimits(1536, 16, 100 << 10, 99 << 10),
    87: MultiprocessorLimits(1536, 16, 164 << 10, 163 << 10),
    89: MultiprocessorLimits(1536, 24, 100 << 10, 99 << 10),
    90: MultiprocessorLimits(2048, 32, 228 << 10, 227 << 10),
    100: MultiprocessorLimits(2048, 32, 228 << 10, 227 << 10),
    120: MultiprocessorLimits(1536, 24, 100 << 10, 99 << 10),
}


def limits_of(capability: int) -> MultiprocessorLimits:
    """What one holds, by compute capability, times ten; of the nearest known one below it for others."""
    known = [c for c in LIMITS if c <= capability]
    return LIMITS[max(known, default=min(LIMITS))]


def blocks_per_multiprocessor(capability: int, threads: int, registers: int, shared: int) -> int:
    """Blocks resident at once.

    Parameters
    ----------
    capability : int
        Compute capability times ten.
    threads, shared : int
        Of a block; shared memory in bytes.
    registers : int
        Of a thread.

    Examples
    --------
    >>> blocks_per_multiprocessor(90, threads=128, registers=72, shared=19866)  # cuda_occupancy.h says 7
    7
    """
    limits, warps = limits_of(capability), -(-threads // WARP)
    if shared > limits.shared_per_block:
        return 0
    per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // 4 // per_warp * 4 // warps  # each quarter of it serves its own warps
    by_shared = limits.shared // max(shared + limits.reserved, 1) if shared + limits.reserved else limits.blocks
    return min(limits.threads // (warps * WARP), limits.blocks, by_registers, by_shared)


def register_cap(threads: int, blocks: int) -> int:
    """Most registers a thread may have for so many blocks to be resident together."""
    warps = -(-threads // WARP) * blocks
    return min(255, REGISTERS // 4 // -(-warps // 4) // REGISTER_UNIT * REGISTER_UNIT // WARP)
