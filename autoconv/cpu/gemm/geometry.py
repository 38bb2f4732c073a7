"""How `gemm` cuts its work: register tiles, ranges of channels, chunks of filters, and panels of the input."""

from __future__ import annotations

import math
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, VECTOR_BYTES, VECTOR_REGISTERS, Module, widened
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.estimate import PAGE
from autoconv.cpu.common.panel import PanelRow, in_lines, segments_of
from autoconv.layer import ConvLayer

SUMS = 32 * 1024  # bytes of a task's sums, where there are several ranges of channels


class GemmBlocking(NamedTuple):
    """How the work is cut: TK channels by NV vectors in registers, BC channels of a sum at a time.

    The pixels of a tile then stay in the L1 cache for all blocks of filters, which are half the L2 cache. Filters of
    blocks side by side may lie whole pages apart: as many of them as the L1 cache has pages fit into a set of it.
    """

    TK: int
    NV: int
    BC: int
    nt: bool
    threads: int
    l1_bytes: int
    l2_bytes: int

    @property
    def most_blocks(self) -> int:
        """Blocks side by side."""
        return max(1, self.l1_bytes // PAGE)


class ChannelRange(NamedTuple):
    """Channels of a sum that are added in one go, and whether they are the first and the last of it."""

    C: int
    begins: bool = True
    ends: bool = True

    @classmethod
    def all(cls, C: int, each: int) -> list[ChannelRange]:
        """All channels, so many each, the last ones what is left."""
        starts = range(0, C, each)
        return [cls(min(each, C - c), c == 0, c == starts[-1]) for c in starts]


def odd_pixels(instruction_set: str, TK: int, NV: int) -> int:
    """How many single pixels a tile can hold besides its vectors: a register each, with channels as lanes."""
    return max(0, min(4, VECTOR_REGISTERS[instruction_set] - TK * NV - NV - 2)) if TK & (TK - 1) == 0 else 0


class PixelTiles(NamedTuple):
    """`times` tiles of `pixels` each from pixel `start` on, `odd` of them single ones, over `blocks` blocks of filters.

    A tile of fewer vectors takes more blocks, so that it has as many sums, none of which waits for the one before.
    """

    start: int
    times: int
    pixels: int
    odd: int
    blocks: int


def pixel_tiles(instruction_set: str, lanes: int, pixels: int, blocking: GemmBlocking) -> list[PixelTiles]:
    """A line of pixels as tiles, whole ones first.

    Pixels beyond the last vector are single ones, whose vectors hold channels: in a tile with others where registers
    are left, otherwise in one of their own, unless a vector of pixels in part takes no more multiplications.
    """
    TK, NV = blocking.TK, blocking.NV
    odd = 0 if blocking.nt else odd_pixels(instruction_set, TK, NV)
    wide = -(-TK // lanes)  # vectors of a single pixel
    tiles = []
    for start, times, size in segments_of(pixels, lanes, NV, odd):
        vectors, rest = divmod(size, lanes)
        if rest and vectors and rest <= odd:
            tiles.append(PixelTiles(start, times, size, rest, 1))
            continue
        alone = rest if TK & (TK - 1) == 0 and rest * wide < TK else 0
        if together := size - alone:
            tiles.append(PixelTiles(start, times, together, 0, NV // -(-together // lanes)))
        if alone:
            blocks = max(1, min(blocking.most_blocks, TK * NV // (alone * wide)))
            tiles.append(PixelTiles(start + together, times, alone, alone, blocks))
    return tiles


def blocks_of(K: int, TK: int) -> list[tuple[int, int]]:
    """Channel blocks as (channels, how many)."""
    return [(width, count) for width, count in ((TK, K // TK), (K % TK, 1)) if width and count]


def chunks_of(
    problem: Correlation, blocking: GemmBlocking, itemsize: int, most: int, tiles: list[PixelTiles]
) -> tuple[int, int, list[PixelTiles]]:
    """Blocks of TK channels, at most so many, whose filters fill half of the L2 cache; how many chunks; and the tiles.

    Chunks are of whole groups of the blocks that a tile takes, which takes no more than there are in one.
    """
    blocks = -(-problem.K // blocking.TK)
    taps = len(problem.rows.taps) * len(problem.columns.taps)
    kept = max(1, min(most, blocking.l2_bytes // 2 // (blocking.TK * problem.C * taps * itemsize)))
    each = -(-blocks // -(-blocks // kept))
    together = min(kept, max(tile.blocks for tile in tiles))
    if each < blocks:
        each = min(-(-each // together), kept // together) * together
    return each, -(-blocks // each), [tile._replace(blocks=min(tile.blocks, each)) for tile in tiles]


class InPlaceCut(NamedTuple):
    """An image that is read in place: `chunks` of `kept` blocks of filters each, and `spans` of its `units`.

    A unit is a tile of pixels, but for single ones, which go with the last. A task is a span by a chunk; `sums_size`
    are the elements of one block's sums of the largest tile.
    """

    kept: int
    chunks: int
    tiles: list[PixelTiles]
    units: int
    spans: int
    sums_size: int

    @classmethod
    def cut(cls, problem: Correlation, instruction_set: str, layer: ConvLayer, blocking: GemmBlocking) -> InPlaceCut:
        """Spans of up to eight tiles, as long as every thread has eight tasks."""
        element = DTYPES[layer.dtype]
        lanes, itemsize = Module(instruction_set).lanes(element), widened(element).bytes
        tiles = pixel_tiles(instruction_set, lanes, problem.rows.count * problem.columns.count, blocking)
        sums_size = blocking.TK * lanes * max(-(-tile.pixels // lanes) for tile in tiles)
        several = problem.C > blocking.BC
        most = SUMS // (sums_size * itemsize) if several else problem.K
        kept, chunks, tiles = chunks_of(problem, blocking, itemsize, most, tiles)
        units = sum(tile.times for tile in tiles if tile.pixels > tile.odd) or 1
        others = problem.N * problem.groups * chunks
        together = max(1, min(8, units * others // (8 * blocking.threads)))
        return cls(kept, chunks, tiles, units, -(-units // together), sums_size)


def panel_chunks(
    problem: Correlation, instruction_set: str, layer: ConvLayer, blocking: GemmBlocking, panel: PanelCut
) -> tuple[int, int, list[PixelTiles]]:
    """As `chunks_of`, with the tiles of a line of a panel's pixels."""
    element = DTYPES[layer.dtype]
    line = problem.columns.count * (panel.rows if panel.flat else 1)
    tiles = pixel_tiles(instruction_set, Module(instruction_set).lanes(element), line, blocking)
    return chunks_of(problem, blocking, widened(element).bytes, problem.K, tiles)


def tasks_of(instruction_set: str, layer: ConvLayer, blocking: GemmBlocking) -> int:
    """How many tasks threads share."""
    (problem,) = correlations(layer)
    images = problem.N * problem.groups
    if (panel := panel_cut(instruction_set, layer, blocking)) is not None:
        _, chunks, _ = panel_chunks(problem, instruction_set, layer, blocking, panel)
        return images * -(-problem.rows.count // panel.rows) * chunks
    cut = InPlaceCut.cut(problem, instruction_set, layer, blocking)
    return images * cut.spans * cut.chunks


def in_place(problem: Correlation) -> bool:
    """Whether outputs see the pixel they stand on, and no other."""
    return all(
        (len(axis.taps), axis.offset, axis.stride, axis.output_stride, axis.count) == (1, 0, 1, 1, axis.size)
        for axis in (problem.rows, problem.columns)
    )


class PanelCut(NamedTuple):
    """The output cut into chunks of `rows` rows, for whose pixels the input is copied to a panel of C channels.

    A panel holds `held` rows like `row` of each channel, and channels lie `pitch` elements apart.
    Under a 1x1 filter without padding (`flat`) the rows of a panel follow one another without gaps, as those of the
    output do, and are cut into tiles as one line of pixels.
    """

    row: PanelRow
    rows: int
    flat: bool
    held: int
    pitch: int

    @classmethod
    def cut(cls, problem: Correlation, lanes: int, itemsize: int, blocking: GemmBlocking) -> PanelCut:
        """Chunks with the fewest vectors for the busiest thread, whose panels fill half of the L2 cache."""
        P, Q = problem.rows.count, problem.columns.count
        R, S = len(problem.rows.taps), len(problem.columns.taps)
        padded = any(not (axis.sees(0, 0) and axis.sees(axis.count - 1, 0)) for axis in (problem.rows, problem.columns))
        flat = R == S == 1 and not padded
        row = PanelRow(problem.columns, lanes)

        def sized(rows: int) -> PanelCut:
            held = rows if flat else (rows - 1) * problem.rows.stride + problem.rows.dilation * (R - 1) + 1
            pitch = in_lines(rows * Q + lanes) if flat else held * row.pitch
            return cls(row, rows, flat, held, pitch)

        def aligned(rows: int) -> bool:
            return not (blocking.nt and (rows * Q % lanes or (P - rows) * Q % lanes))

        def fits(rows: int) -> bool:
            return problem.C * sized(rows).pitch * itemsize <= blocking.l2_bytes // 2

        def cost(rows: int) -> float:
            segments = segments_of(rows * Q if flat else Q, lanes, blocking.NV, 0)
            vectors = sum(segment.times * -(-segment.pixels // lanes) for segment in segments) * (1 if flat else rows)
            tasks = problem.N * problem.groups * -(-P // rows)
            return -(-tasks // blocking.threads) * (vectors + 1)

        sizes = [rows for rows in (*range(1, min(P, 64)), P) if aligned(rows)]
        return sized(min(filter(fits, sizes), key=lambda rows: (cost(rows), -rows), default=sizes[0]))

    def elements(self, channels: int) -> int:
        """Of a thread's panel of so many channels."""
        return in_lines(channels * self.pitch)


def panel_cut(instruction_set: str, layer: ConvLayer, blocking: GemmBlocking) -> PanelCut | None:
    """How the input is copied; None where the image is read in place."""
    (problem,) = correlations(layer)
    wide = widened(DTYPES[layer.dtype])
    lanes = VECTOR_BYTES[instruction_set] // wide.bytes
    return None if in_place(problem) else PanelCut.cut(problem, lanes, wide.bytes, blocking)


def workspace_elements(instruction_set: str, layer: ConvLayer, blocking: GemmBlocking) -> int:
    """Elements of every thread's panel."""
    cut = panel_cut(instruction_set, layer, blocking)
    return 0 if cut is None else cut.elements(layer.C // layer.groups)


def packed_elements(layer: ConvLayer) -> int:
    """Filters as `groups, K / TK, C, R, S, TK`; the last block is as narrow as K leaves it."""
    return layer.K * (layer.C // layer.groups) * layer.R * layer.S


def line_pixels(layer: ConvLayer) -> int:
    """Pixels that follow one another and are cut into tiles as one line: planes of 1x1 layers, else rows."""
    whole = (layer.R, layer.S) == (1, 1) and layer.padding == ((0, 0), (0, 0))
    return math.prod(layer.output_shape[2:]) if whole else layer.output_shape[3]


def idle_lanes(instruction_set: str, layer: ConvLayer, blocking: GemmBlocking) -> float:
    """How much more than its pixels the vectors of a line hold; a single pixel takes a lane for each channel."""
    lanes, pixels = VECTOR_BYTES[instruction_set] // layer.accumulator.itemsize, line_pixels(layer)
    vectors = 0.0
    for tile in pixel_tiles(instruction_set, lanes, pixels, blocking):
        whole, single = -(-(tile.pixels - tile.odd) // lanes), tile.odd * -(-blocking.TK // lanes)
        vectors += tile.times * (whole + single / blocking.TK)
    return vectors * lanes / pixels
