"""How long the pipeline of transforms takes: counts of operations and bytes over what the machine was measured for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoconv.cpu.common.estimate import busiest, meeting, side_by_side
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.geometry import Tiling


class Counts(NamedTuple):
    """What a correlation consists of.

    Attributes
    ----------
    forward, inverse : float
        Vectors that are transformed before and after the products, in those of the machine's probe.
    computed : float
        Seconds of one thread that did all multiply-adds, its operands in the first cache.
    """

    forward: float
    inverse: float
    computed: float


class Sides(NamedTuple):
    """Seconds of a correlation's parts, if all threads had equal shares of them.

    Attributes
    ----------
    before : float
        The input transformed, and written.
    computed, streams : float
        The products, and what is moved for them meanwhile.
    handed : float
        What it takes besides for every thread but one that comes to read what the others have transformed.
    after : float
        The products transformed.
    """

    before: float
    computed: float
    streams: float
    handed: float
    after: float

    def regions(self, party: int) -> tuple[float, float]:
        """Seconds of the input's region and of the products', if so many take part.

        Multiply-adds and the streams that feed them go on side by side; transforms come before and after.

        Parameters
        ----------
        party : int

        Returns
        -------
        before, after : float
            As much work as if all threads had equal shares of it.
        """
        fed = self.streams + (party - 1) * self.handed
        return self.before, side_by_side(self.computed, fed) + self.after


def sides(tiling: Tiling, machine: Machine, counts: Counts) -> Sides:
    """What a correlation's transforms, products and streams take.

    Parameters
    ----------
    tiling : Tiling
    machine : Machine
    counts : Counts

    Returns
    -------
    Sides
    """
    transforms = machine.transforms(vector(tiling)) * machine.threads
    written = tiling.correlation.groups * tiling.chunks * tiling.itemsize * tiling.v_size
    return Sides(
        counts.forward / transforms + machine.writing(written, _home(tiling, machine)),
        counts.computed / machine.threads,
        _streams(tiling, machine),
        machine.handing(written, tiling.itemsize * tiling.shared_size) if tiling.coop else 0.0,
        counts.inverse / transforms,
    )


class Forecast(NamedTuple):
    """How long a layer takes, and how many threads take part, so that it takes no longer.

    Attributes
    ----------
    seconds : float
    party : int
    """

    seconds: float
    party: int


def forecast(cut: Sequence[tuple[Tiling, Counts]], machine: Machine) -> Forecast:
    """Predicted time of correlations one after the other, their filters cold and their input warm.

    Parameters
    ----------
    cut : sequence of (Tiling, Counts)
    machine : Machine

    Returns
    -------
    Forecast
        Of all threads, or a half of them, a quarter, and so on, whoever takes least.
    """
    known = [(tiling, sides(tiling, machine, counts)) for tiling, counts in cut]
    parties = {-(-machine.threads >> n) for n in range(machine.threads.bit_length() + 1)}
    return min(Forecast(sum(_pipeline(*one, machine, party) for one in known), party) for party in parties)


def _pipeline(tiling: Tiling, parts: Sides, machine: Machine, party: int) -> float:
    """Seconds of a party.

    A workspace that nobody used lately is fetched before it is written to.
    """
    groups = tiling.correlation.groups
    before, after = (region * machine.threads / party for region in parts.regions(party))
    batches = _batches(tiling)
    if batches:
        before *= _busiest(batches, tiling.c_blocks * tiling.sections, party)
        after *= _busiest(batches, tiling.k_tasks, party)
    else:
        alone = busiest(tiling.tasks, party)
        before, after = before * alone, after * alone
    waits = (2 * groups * len(batches) or 1) * meeting(machine, party)
    fresh = machine.writing(tiling.workspace_bytes(), machine.beyond)
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
        shared = tiling.itemsize * tiling.shared_size / machine.threads
        return max(shared, 2.0 * machine.caches[1])  # beyond what a thread has to itself
    return float(tiling.itemsize * (tiling.v_size + tiling.points * tiling.m_stride))


def _streams(tiling: Tiling, machine: Machine) -> float:
    """Seconds in which all threads together move what the products read and write.

    Filters come from memory once, and for every further pass over them from where all of them fit; chunks of a batch
    share a block of them. A chunk's input is read for every task, a few tiles of each vector of channels at a time,
    which is in jumps. Products are written and read on end.
    """
    chunks, size, threads = tiling.chunks * tiling.correlation.groups, tiling.itemsize, machine.threads
    packed, block = size * tiling.packed_size, size * tiling.u_size
    v, products = size * tiling.v_size, size * tiling.points * tiling.m_stride
    passes = -(-tiling.chunks // tiling.coop) if tiling.coop else tiling.chunks
    filters = packed / machine.memory + packed * (passes - 1) / machine.read.rate(packed + v * threads)
    filters += packed * (tiling.chunks - passes) / machine.read.rate((block + v + products) * threads)
    home = _home(tiling, machine) + (0 if tiling.coop else block)
    inputs = machine.jumping(v * chunks * tiling.k_tasks, home, home * (threads if tiling.coop else 1))
    moved = products * chunks * tiling.k_blocks
    return filters + inputs + machine.reading(moved, products + block) + machine.writing(moved, products + block)
