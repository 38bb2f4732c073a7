"""How `gemm.packed` and `gemm.strassen` cut their work: tiles of a plane, panels of tiles, blocks of filters, channels.

`gemm.strassen` halves the pixels of a plane, the channels and the blocks of filters first, and multiplies seven sums of
such parts: what is cut is then a half of each. A tile of the one half of a plane goes with one of the other half, and
so does a block of filters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Params
from autoconv.cpu.codegen.ir import DTYPES, LINE, Module
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.grid import parts, register_tiles
from autoconv.cpu.common.panel import pitch_of
from autoconv.cpu.machine.cached import cached_for_model
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cpu.device import CPU

SUMS = 32 * 1024  # bytes of a task's sums, where they go over some channels at a time
MOST_TILES = 256  # in a task: what is noted of each lies on the stack
HALVED_TILES = 8  # that a panel may have even if it leaves the L2 cache, halved: each reads all sums of filters
SEVEN = 7  # products of sums of parts, in place of eight of the parts


class PackedGemmBlocking(NamedTuple):
    """How the work is cut: TK channels by TQ pixels in registers, BC channels of the sum at a time.

    A task is a panel of so many `tiles` by one of `chunks` parts of the filters; each of the threads keeps the panel
    that it copied last, for the next part. `halved`, tiles and filters are counted in pairs, and channels are half.
    """

    TK: int
    TQ: int
    BC: int
    tiles: int
    chunks: int
    threads: int
    halved: bool = False

    @property
    def products(self) -> int:
        """Micropanels of a tile (or of a pair of them), each multiplied by filters of its own."""
        return SEVEN if self.halved else 1


class PlaneTiles(NamedTuple):
    """Pixels of a plane, or of its half, as tiles of almost equal length: `longer` of `length` + 1, then the others."""

    tiles: int
    length: int
    longer: int

    @classmethod
    def of(cls, problem: Correlation, TQ: int, halved: bool = False) -> PlaneTiles:
        pixels = half_or_all(pixels_of(problem), halved)
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


def half_or_all(number: int, halved: bool) -> int:
    """All of a number, or the first half, which is the larger one."""
    return -(-number // 2) if halved else number


def blocks_of(problem: Correlation, TK: int, halved: bool = False) -> int:
    """Blocks of a group's filters, or pairs of them: the last block may be without filters."""
    return half_or_all(math.ceil(problem.K / TK), halved)


def block_size(problem: Correlation, blocking: PackedGemmBlocking) -> int:
    """Elements of a packed block of filters, or of the seven sums of a pair's parts."""
    return blocking.products * half_or_all(problem.C, blocking.halved) * blocking.TK


def packed_blocks(problem: Correlation, blocking: PackedGemmBlocking) -> int:
    """Elements of all packed blocks of filters."""
    return problem.groups * blocks_of(problem, blocking.TK, blocking.halved) * block_size(problem, blocking)


def packed_filters(problem: Correlation, blocking: PackedGemmBlocking) -> int:
    """Elements of all that is packed: halved, the blocks are followed by the scale of every channel of either half."""
    scales = 2 * problem.groups * half_or_all(problem.C, True) if blocking.halved else 0
    return packed_blocks(problem, blocking) + scales


def spreads(problem: Correlation) -> bool:
    """Whether there are zeros between the outputs."""
    return (problem.rows.output_stride, problem.columns.output_stride) != (1, 1)


def micropanel_pitch(problem: Correlation, TQ: int, halved: bool = False) -> int:
    """Elements from one tile's copied pixels to the next one's."""
    return pitch_of(half_or_all(problem.C, halved) * TQ)


def panel_size(problem: Correlation, blocking: PackedGemmBlocking) -> int:
    """Elements of a panel's micropanels."""
    return blocking.tiles * blocking.products * micropanel_pitch(problem, blocking.TQ, blocking.halved)


def gathered_pitch(blocking: PackedGemmBlocking) -> int:
    """Elements from one channel's outputs to the next one's, where a panel's are gathered."""
    return pitch_of(blocking.tiles * blocking.TQ)


def thread_bytes(problem: Correlation, blocking: PackedGemmBlocking, itemsize: int) -> int:
    """A thread's part of the workspace: a line for the number of the panel that it holds, and the panel.

    Behind it a block's outputs, where they are to be spread, or the sums of four blocks of outputs, where it is halved.
    """
    gathered = blocking.TK * gathered_pitch(blocking) if spreads(problem) else 0
    sums = 4 * blocking.tiles * blocking.TK * blocking.TQ if blocking.halved else 0
    return LINE + (panel_size(problem, blocking) + gathered + sums) * itemsize


@cached_for_model(64)
def grid_of(layer: ConvLayer, device: CPU, halved: bool = False) -> list[dict[str, int]]:
    """Register tiles by channels at a time by panels that fit the L2 cache.

    Of channels at a time those whose block of filters is at least an eighth of the L1 cache, as the sums go to memory
    and back between them; a task has room for the sums of so many tiles only. Halves that have to be filled up until
    there is more to multiply than without them are left out; their panels may be larger than the L2 cache.
    """
    problem, itemsize = product(layer), layer.accumulator.itemsize
    m = Module(device.instruction_set)
    lanes = m.lanes(DTYPES[layer.dtype])
    depth, micropanels = half_or_all(problem.C, halved), SEVEN if halved else 1
    grid = []
    for vectors, TQ in register_tiles(device.instruction_set):
        TK = vectors * lanes
        if halved and not saves(problem, TK):
            continue
        if not halved and vectors > 1 and math.ceil(problem.K / TK) * TK >= 1.5 * problem.K:
            continue  # most of the lanes would hold nothing
        least = device.machine.caches[0] // (8 * TK * itemsize)
        tiles = problem.N * PlaneTiles.of(problem, TQ, halved).tiles
        panel = micropanels * micropanel_pitch(problem, TQ, halved) * itemsize
        fit = max(1, min(MOST_TILES, device.machine.caches[1] // panel))
        for BC in dict.fromkeys(min(-(-n // m.terms) * m.terms, depth) for n in reversed(parts(depth))):
            if least > BC and depth > BC:
                break
            most = min(fit, SUMS // (TK * TQ * itemsize)) if depth > BC and not halved else fit
            most = max(most, HALVED_TILES) if halved else most
            few = (n for n in reversed(parts(tiles, most)) if 4 * n >= min(tiles, most))
            grid += [{"TK": TK, "TQ": TQ, "BC": BC, "panels": math.ceil(tiles / together)} for together in few]
    return grid


def saves(problem: Correlation, TK: int) -> bool:
    """Whether seven products of halves, filled up as they have to be, multiply less than the whole product does."""
    halves = half_or_all(problem.C, True) * half_or_all(pixels_of(problem), True) * blocks_of(problem, TK, True) * TK
    return SEVEN * halves < problem.C * pixels_of(problem) * problem.K


def blocking_of(layer: ConvLayer, device: CPU, params: Params, halved: bool = False) -> PackedGemmBlocking:
    """The cut that the parameters name, with parts of the filters enough for the threads."""
    problem = product(layer)
    TK, TQ, BC, panels = (int(params[name]) for name in ("TK", "TQ", "BC", "panels"))
    tiles = problem.N * PlaneTiles.of(problem, TQ, halved).tiles
    blocks = blocks_of(problem, TK, halved)
    chunks = 1
    while panels * chunks * problem.groups < 8 * device.threads and chunks * 2 <= blocks:
        chunks *= 2
    return PackedGemmBlocking(TK, TQ, BC, math.ceil(tiles / panels), chunks, device.threads, halved)
