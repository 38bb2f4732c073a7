"""How `gemm.packed` cuts its work: tiles of a plane, panels of tiles, blocks of filters and channels."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Params
from autoconv.cpu.codegen.ir import DTYPES, LINE, Module
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.grid import parts, register_tiles
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cpu.device import CPU

SUMS = 32 * 1024  # bytes of a task's sums, where they go over some channels at a time
MOST_TILES = 256  # in a task: what is noted of each lies on the stack


class PackedGemmBlocking(NamedTuple):
    """How the work is cut: TK channels by TQ pixels in registers, BC channels of the sum at a time.

    A task is a panel of so many `tiles` by one of `chunks` parts of the filters; each of the threads keeps the panel
    that it copied last, for the next part.
    """

    TK: int
    TQ: int
    BC: int
    tiles: int
    chunks: int
    threads: int


class PlaneTiles(NamedTuple):
    """A plane's pixels as tiles of almost equal length: `longer` of `length` + 1, then the others."""

    tiles: int
    length: int
    longer: int

    @classmethod
    def of(cls, pixels: int, TQ: int) -> PlaneTiles:
        tiles = math.ceil(pixels / TQ)
        return cls(tiles, *divmod(pixels, tiles))

    @property
    def lengths(self) -> list[int]:
        """Those that occur, the longest first."""
        return [self.length + 1, self.length] if self.longer else [self.length]


def product(layer: ConvLayer) -> Correlation:
    """The layer's one correlation with a tap; the others of a strided gradient, which are zero, come after it."""
    return correlations(layer)[0]


def pixels_of(problem: Correlation) -> int:
    """Output pixels of a plane, without zeros between them."""
    return problem.rows.count * problem.columns.count


def spreads(problem: Correlation) -> bool:
    """Whether there are zeros between the outputs."""
    return (problem.rows.output_stride, problem.columns.output_stride) != (1, 1)


def pitch_of(elements: int) -> int:
    """Elements from one line of so many to the next: not a power of two, which would share few sets of a cache."""
    return -(-elements // 16) * 16 + 16


def micropanel_pitch(problem: Correlation, TQ: int) -> int:
    """Elements from one tile's copied pixels to the next one's."""
    return pitch_of(problem.C * TQ)


def gathered_pitch(blocking: PackedGemmBlocking) -> int:
    """Elements from one channel's outputs to the next one's, where a panel's are gathered."""
    return pitch_of(blocking.tiles * blocking.TQ)


def thread_bytes(problem: Correlation, blocking: PackedGemmBlocking, itemsize: int) -> int:
    """A thread's part of the workspace: a line for the number of the panel that it holds, and the panel.

    Behind it a block's outputs, where they are to be spread.
    """
    gathered = blocking.TK * gathered_pitch(blocking) if spreads(problem) else 0
    return LINE + (blocking.tiles * micropanel_pitch(problem, blocking.TQ) + gathered) * itemsize


@functools.lru_cache(64)
def grid_of(layer: ConvLayer, device: CPU) -> list[dict[str, int]]:
    """Register tiles by channels at a time by panels that fit the L2 cache.

    Of channels at a time those whose block of filters is at least an eighth of the L1 cache, as the sums go to memory
    and back between them; a task has room for the sums of so many tiles only.
    """
    problem, itemsize = product(layer), layer.accumulator.itemsize
    m = Module(device.instruction_set)
    lanes = m.lanes(DTYPES[layer.dtype])
    grid = []
    for vectors, TQ in register_tiles(device.instruction_set):
        TK = vectors * lanes
        if vectors > 1 and rounded(problem.K, TK) >= 1.5 * problem.K:
            continue  # most of the lanes would hold nothing
        least = device.machine.caches[0] // (8 * TK * itemsize)
        tiles = problem.N * PlaneTiles.of(pixels_of(problem), TQ).tiles
        fit = max(1, min(MOST_TILES, device.machine.caches[1] // (micropanel_pitch(problem, TQ) * itemsize)))
        for BC in dict.fromkeys(min(-(-n // m.terms) * m.terms, problem.C) for n in reversed(parts(problem.C))):
            if least > BC and BC < problem.C:
                break
            most = min(fit, SUMS // (TK * TQ * itemsize)) if BC < problem.C else fit
            few = (n for n in reversed(parts(tiles, most)) if 4 * n >= min(tiles, most))
            grid += [{"TK": TK, "TQ": TQ, "BC": BC, "panels": math.ceil(tiles / together)} for together in few]
    return grid


def rounded(K: int, TK: int) -> int:
    """Filters of whole blocks."""
    return math.ceil(K / TK) * TK


def blocking_of(layer: ConvLayer, device: CPU, params: Params) -> PackedGemmBlocking:
    """The cut that the parameters name, with parts of the filters enough for the threads."""
    problem = product(layer)
    TK, TQ, BC, panels = (int(params[name]) for name in ("TK", "TQ", "BC", "panels"))
    tiles = problem.N * PlaneTiles.of(pixels_of(problem), TQ).tiles
    blocks = math.ceil(problem.K / TK)
    chunks = 1
    while panels * chunks * problem.groups < 8 * device.threads and chunks * 2 <= blocks:
        chunks *= 2
    return PackedGemmBlocking(TK, TQ, BC, math.ceil(tiles / panels), chunks, device.threads)
