"""Fourier convolution on generated kernels: large filters for little more than small ones.

Overlap-save in tiles of T x T (Stockham 1966; Mathieu, Henaff and LeCun 2014): `1.5 * T * T` multiplications
for `(T - r + 1)**2` outputs of r x r filters, and transforms whose cost does not know the filter. Strided layers
are split into phases, dilated ones into grids.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator

from autoconv.algorithm import PADDING_ONLY, Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis
from autoconv.cpu.device import CPU
from autoconv.cpu.fft.geometry import LENGTHS, Circle, Spectra, Whole, circle, depthwise, pieces
from autoconv.cpu.fft.kernels import emit
from autoconv.layer import ConvLayer

MOST = 3  # sizes of tiles among a layer's candidates, ...
SMALL = 10**7, 5  # ... unless it has so few operations, or its filters fewer taps on a side, that one will do
MOST_PIECES = 2  # correlations of a strided gradient, for the sake of compile time
LARGEST_STEP = 8  # input pixels between neighbours of a piece: more would be loads without end
LARGEST = 256 << 20  # bytes of filter spectra; layers beyond are deep and small in area
HELD = 16 << 20  # bytes of them that stay in the last cache from chunk to chunk
LARGEST_STACK = 256 << 10  # bytes a filter's taps and spectrum take while it is transformed


def _plan(layer: ConvLayer, device: CPU, c: Correlation, circles: tuple[Circle, Circle]) -> Spectra:
    """With chunks of a row of tiles, each thread on its own."""
    m, lengths = zip(*((side.m, side.length) for side in circles), strict=True)
    return Spectra(c, device.instruction_set, layer.accumulator.itemsize, m, 1, 0, lengths, depthwise(layer))


def _parse(params: Params) -> tuple[tuple[int, int], int, int]:
    down, across = map(int, str(params["tile"]).split("x"))
    return (down, across), int(params["rows"]), int(params["share"])


def _circles(c: Correlation, lengths: tuple[int, int]) -> tuple[Circle, Circle] | None:
    down, across = circle(c.rows, lengths[0]), circle(c.columns, lengths[1], pairs=True)
    return (down, across) if down and across else None


def plans(layer: ConvLayer, device: CPU, params: Params) -> tuple[Spectra, ...]:
    """How each correlation of a layer is cut; fewer where some do not fit into the tiles."""
    lengths, rows, share = _parse(params)
    cuts = ((c, _circles(c, lengths)) for c in pieces(layer))
    return tuple(_plan(layer, device, c, cut).resized(rows, share) for c, cut in cuts if cut)


def _cost(plan: Spectra, threads: int, l2_bytes: int) -> float:
    """Predicted cycles, from counts of vector operations; constants fitted on a Zen 4.

    A number of a transform takes some cycles for every doubling of its length, and some for its way through
    memory. Products take a cycle each, and what it takes to load the operands of a register tile; or they wait
    for the filters, which every chunk fetches from the last cache, and the first from memory. All of it slows
    down as what a thread works on outgrows its second cache. What threads share goes through the last one, the
    workspace through memory.
    """
    tiles = plan.correlation.groups * plan.tile_rows * plan.columns.tiles
    inputs, filters = plan.k_blocks if plan.pointwise else plan.c_blocks, plan.k_blocks * plan.vectors
    down, across = (length * (8 + 5 * math.log2(length)) for length in plan.lengths)
    rows = plan.lengths[0] / 2
    forward = plan.columns.span / plan.columns.tiles / 2 * down + rows * across
    inverse = rows * across + plan.kept / 2 * down
    register_tile = plan.chunk_tiles / -(-plan.chunk_tiles // plan.pixels)
    product = tiles * plan.frequencies * plan.depth * filters * (3 + 1.5 / register_tile)
    transforms = tiles * (inputs * forward + filters * inverse)
    tasks, barriers = plan.chunks * plan.correlation.groups, 0.0
    if plan.pointwise:
        tasks *= plan.k_blocks
    elif plan.share:
        tasks = plan.k_blocks * min(plan.share, plan.chunks)
        barriers = 2 * plan.correlation.groups * -(-plan.chunks // plan.share) * 4000.0
        shared = plan.itemsize * plan.v_size * plan.chunks * plan.correlation.groups
        transforms += shared * (1 + plan.k_blocks) / 10
    busiest = -(-tasks // threads) / tasks
    packed = plan.itemsize * plan.packed_size
    product = max(max(product, packed * plan.chunks / (12 if packed < HELD else 4)) * busiest, packed / 5.7)
    near = plan.itemsize * plan.thread_size
    crowded = 1 + 0.25 * min(max(near / l2_bytes - 1, 0), 2)
    return (product + transforms * busiest) * crowded + plan.workspace_bytes(threads) / 5.7 + barriers


def _sizes(axis: CorrelationAxis, pairs: bool) -> list[Circle]:
    """Tiles of an axis, each with fewer inputs in all than those smaller."""
    found: list[Circle] = []
    lengths = LENGTHS if Whole(axis, 1).r > 1 else LENGTHS[:4]
    for side in (circle(axis, length, pairs) for length in lengths):
        if side and (not found or side.tiles * side.length < found[-1].tiles * found[-1].length):
            found.append(side)
    return found


def _schedules(one: Spectra, threads: int, l2_bytes: int, l3_bytes: int) -> Iterator[tuple[float, int, int]]:
    """Predicted cycles, rows of tiles of a chunk, and chunks transformed together."""
    most = max(1, min(one.tile_rows, 64 // one.columns.tiles))
    for rows in sorted({-(-one.tile_rows // -(-one.tile_rows // rows)) for rows in range(1, most + 1)}):
        plan = one.resized(rows, 1)
        together = max(1, min(plan.chunks, l3_bytes // 3 // (plan.v_size * plan.itemsize)))
        for share in (0,) if one.pointwise else (0, together):
            yield _cost(plan.resized(rows, share), threads, l2_bytes), rows, share


@functools.lru_cache(256)
def _ranked(layer: ConvLayer, device: CPU) -> tuple[tuple[tuple[int, int], int, int], ...]:
    """The most promising sizes of tiles, each with its best schedule."""
    main = max(pieces(layer), key=lambda c: c.macs)
    l2, l3 = device.facts["l2_bytes"], device.facts["l3_bytes"]
    found: dict[tuple[int, ...], tuple[float, Spectra]] = {}
    for circles in itertools.product(_sizes(main.rows, False), _sizes(main.columns, True)):
        plan = _plan(layer, device, main, circles)
        if plan.packed_size * plan.itemsize > LARGEST:
            continue
        whole = plan.resized(max(1, 64 // plan.columns.tiles), int(not plan.pointwise))
        cost = min(_cost(some, device.threads, l2) for some in (plan, whole))
        # of a size and its mirror image one is enough
        lengths = tuple(sorted(plan.lengths)) if main.rows == main.columns else plan.lengths
        if lengths not in found or cost < found[lengths][0]:
            found[lengths] = cost, plan
    chosen = []
    most = 1 if layer.flops < SMALL[0] or max(layer.R, layer.S) < SMALL[1] else MOST
    for _, plan in sorted(found.values(), key=lambda entry: entry[0])[: 2 * most]:
        cost, rows, share = min(_schedules(plan, device.threads, l2, l3))
        chosen.append((cost, plan.lengths, rows, share))
    return tuple(choice[1:] for choice in sorted(chosen)[:most])


class TiledFFT(GeneratedAlgorithm):
    """Tiles of `tile` inputs for fwd and dgrad: `rows` of tiles of a chunk, `share` of chunks."""

    name = "fft"
    spreads_nonfinite = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        ranked = () if layer.direction == "wgrad" else _ranked(layer, device)
        some = ranked or (((32, 32), 1, 0),)  # one to say why not
        return [{"tile": f"{T[0]}x{T[1]}", "rows": rows, "share": share} for T, rows, share in some]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if layer.direction == "wgrad":
            return ["wgrad: a sum over pixels, for which a tile's spectrum is as large as its filter's"]
        found = pieces(layer)
        if len(found) > MOST_PIECES:
            return [f"falls into {len(found)} correlations with their own kernels, more than {MOST_PIECES}"]
        if any(not axis.taps for c in found for axis in (c.rows, c.columns)):
            return [f"stride {layer.stride[0]}x{layer.stride[1]} leaves inputs that no tap sees"]
        if layer.sees_padding_only:
            return [PADDING_ONLY]
        lengths, rows, share = _parse(params)
        if rows < 1 or share < 0:
            return [f"rows={rows},share={share}: rows of tiles to a chunk, at least 1, and chunks to share"]
        if wrong := [length for length in lengths if length not in LENGTHS]:
            return [f"tiles of {wrong[0]}: allowed are {', '.join(map(str, LENGTHS))}"]
        sides = [Whole(axis, 1) for c in found for axis in (c.rows, c.columns)]
        reasons = []
        if depthwise(layer) and any(side.phases > 1 for side in sides):
            reasons.append("strided and depthwise: the phases of a channel would have to be summed")
        if depthwise(layer) and share:
            reasons.append(f"share={share}: channels of a depthwise layer have nothing to share")
        if all(side.r == 1 for side in sides):
            reasons.append(f"the filter is {layer.R}x{layer.S}: no neighbouring taps in any phase of its stride")
        if (period := max(side.period for side in sides)) > LARGEST_STEP:
            reasons.append(f"its pieces are {period} pixels apart, more than {LARGEST_STEP}")
        cuts = plans(layer, device, params)
        if len(cuts) < len(found):
            taps = f"{max(side.r for side in sides[::2])}x{max(side.r for side in sides[1::2])}"
            return [*reasons, f"filters of {taps} leave nothing of tiles of {lengths[0]}x{lengths[1]}"]
        if (packed := self.packed_bytes(layer, device, params)) > LARGEST:
            reasons.append(f"the filters' spectra take {packed >> 20} MiB, more than {LARGEST >> 20}")
        if (stack := max(plan.pack_stack for plan in cuts)) > LARGEST_STACK:
            reasons.append(f"a filter takes {stack >> 10} KiB of stack, more than {LARGEST_STACK >> 10}")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return max(plan.workspace_bytes(device.threads) for plan in plans(layer, device, params))

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return layer.accumulator.itemsize * sum(plan.packed_size for plan in plans(layer, device, params))

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        cuts = plans(layer, device, params)
        cycles = sum(_cost(plan, device.threads, device.facts["l2_bytes"]) for plan in cuts)
        rate = device.peak_flops(layer.dtype) / (2 * cuts[0].lanes * device.threads)
        return cycles / rate + layer.bytes / device.bandwidth() / 4

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, plans(layer, device, params))
