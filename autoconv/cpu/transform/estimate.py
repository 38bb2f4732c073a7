"""How long the pipeline of transforms takes: counts of operations and bytes over what the machine was measured for."""

from __future__ import annotations

from autoconv.cpu.common.estimate import busiest, side_by_side
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.geometry import Tiling


def pipeline(tiling: Tiling, machine: Machine, forward: float, inverse: float, computed: float) -> float:
    """Predicted time of one correlation, its filters cold and its input warm.

    Multiply-adds and the streams that feed them go on side by side; transforms come before and after. A workspace that
    nobody used lately is fetched before it is written to.

    Parameters
    ----------
    tiling : Tiling
    machine : Machine
    forward, inverse : float
        Vectors that are transformed before and after the products, in those of the machine's probe.
    computed : float
        Seconds of one thread that did all multiply-adds, its operands in the first cache.

    Returns
    -------
    float
    """
    groups, threads = tiling.correlation.groups, machine.threads
    transforms = machine.transforms(vector(tiling)) * threads
    before = forward / transforms
    before += machine.writing(groups * tiling.chunks * tiling.itemsize * tiling.v_size, _home(tiling, machine))
    after = side_by_side(computed / threads, _streams(tiling, machine)) + inverse / transforms
    batches = _batches(tiling)
    if batches:
        before *= _busiest(batches, tiling.c_blocks, threads)
        after *= _busiest(batches, tiling.k_blocks, threads)
    else:
        alone = busiest(tiling.chunks * groups, threads)
        before, after = before * alone, after * alone
    waits = (2 * groups * len(batches) or 1) * (machine.barrier or 0.0)
    fresh = machine.writing(tiling.workspace_bytes(threads), machine.beyond)
    return before + after + fresh + waits


def _batches(tiling: Tiling) -> list[int]:
    """Chunks of each cooperative batch; none where every chunk is a thread's own."""
    whole, rest = divmod(tiling.chunks, tiling.coop) if tiling.coop else (0, 0)
    return [tiling.coop] * whole + [rest] * (rest > 0)


def _busiest(batches: list[int], blocks: int, threads: int) -> float:
    """Of regions one after the other, whose tasks are a batch's chunks by so many blocks."""
    return sum(busiest(batch * blocks, threads) * batch for batch in batches) / sum(batches)


def vector(tiling: Tiling) -> int:
    """Bytes of a vector."""
    return tiling.lanes * tiling.itemsize


def rates(tiling: Tiling, machine: Machine) -> tuple[float, float]:
    """Vectors per second that a thread multiplies, and loads from its first cache."""
    dtype = "float64" if tiling.itemsize == 8 else "float32"
    return machine.multiply_adds(tiling.instruction_set, dtype, tiling.lanes), machine.loads(vector(tiling))


def gathered(tiling: Tiling) -> float:
    """Vectors of input that are laid out for a row of tiles and a vector of channels."""
    rows = tiling.rows
    return (rows.m + (rows.r - 1) / min(tiling.chunk, rows.tiles)) * tiling.pitch * tiling.columns.period


def _home(tiling: Tiling, machine: Machine) -> float:
    """The working set from which a thread reads transformed inputs: its own chunk's, or what all have written."""
    if tiling.coop:
        shared = tiling.itemsize * min(tiling.coop, tiling.chunks) * tiling.v_size / machine.threads
        return max(shared, 2.0 * machine.caches[1])  # beyond what a thread has to itself
    return float(tiling.itemsize * (tiling.v_size + tiling.points * tiling.m_stride))


def _streams(tiling: Tiling, machine: Machine) -> float:
    """Seconds in which all threads together move what the products read and write.

    Filters come from memory once, and for every further pass over them from where all of them fit; chunks of a batch
    share a block of them. A chunk's input is read for every block of filters; so are its products, written and read.
    """
    chunks, size, threads = tiling.chunks * tiling.correlation.groups, tiling.itemsize, machine.threads
    packed, block = size * tiling.packed_size, size * tiling.u_size
    v, products = size * tiling.v_size, size * tiling.points * tiling.m_stride
    passes = -(-tiling.chunks // tiling.coop) if tiling.coop else tiling.chunks
    filters = packed / machine.memory + packed * (passes - 1) / machine.read.rate(packed + v * threads)
    filters += packed * (tiling.chunks - passes) / machine.read.rate((block + v + products) * threads)
    inputs = machine.reading(v * chunks * tiling.k_blocks, _home(tiling, machine) + (0 if tiling.coop else block))
    moved = products * chunks * tiling.k_blocks
    return filters + inputs + machine.reading(moved, products + block) + machine.writing(moved, products + block)
