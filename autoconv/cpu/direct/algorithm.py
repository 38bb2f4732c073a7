"""Direct convolution: lanes are output channels, pixels are broadcast; the input is read in place.

A microkernel keeps a tile of `BP` x `BQ` output pixels times `BK` channels in registers over the whole sum,
as Georganas et al. do (arXiv:1808.05567), but without blocking the input: in every step one pixel is
broadcast from wherever the layout has it and multiplied with a vector of packed filters. Padding is never
read and never multiplied: tiles at the border are compiled for the taps that each of their pixels sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.packing import packed_size
from autoconv.cpu.device import CPU
from autoconv.cpu.direct.gradients import emit_wgrad, forward, wgrad_blocking, wgrad_candidates
from autoconv.cpu.direct.gradients_packed import emit_wgrad_packed, packed_blocking
from autoconv.cpu.direct.kernels import Blocking, emit, pieces_of, tiles, unrolled
from autoconv.layer import ConvLayer

MOST_PIECES = 64  # correlations of a strided gradient, each with a program of its own
UNROLLED = 8000  # multiply-adds of one program: LLVM takes a second for them
BUFFER = 32 * 1024  # bytes of a task's sums, where they go over some channels at a time
TILES = {  # pixels by vectors of filters; the first also reads filters where they are
    "avx512": ((28, 1), (14, 2), (6, 4)),
    "avx2": ((12, 1), (6, 2)),
    "generic": ((10, 1), (5, 2)),
}


def _blocking(c: Correlation, params: Params) -> Blocking:
    BK, BP, BQ, BC = (int(params[name]) for name in ("BK", "BP", "BQ", "BC"))
    return Blocking(BK, BP, BQ, params["filters"] == "packed", min(BC, c.C))


def blocked(layer: ConvLayer, device: CPU, params: Params) -> tuple[Blocking, ...]:
    """The blocking of each correlation: the tile asked for, and tasks whose input fits half the second cache.

    Where tasks go through all images before the next block of filters, and some channels at a time, the input comes
    from beyond that cache anyway, and only sums limit a task.
    """
    chosen = []
    for c in pieces_of(layer):
        b = _blocking(c, params)
        positions = sum(run.tiles for run in tiles(c.rows, b.BP))
        row_bytes = layer.itemsize * c.C * c.columns.size
        room = device.facts["l2_bytes"] // 2 // max(row_bytes, 1) - len(c.rows.taps)
        fitting = min(max(room // (b.BP * c.rows.stride), 1), positions)
        most = max(min(BUFFER // _row_bytes(layer, c, b), positions), 1) if b.BC < c.C else fitting
        blocks = math.ceil(c.K / b.BK)
        images = c.N * c.rows.size * row_bytes
        filters = packed_size(c, b.BK) // c.groups * layer.itemsize
        rows = _for_all_threads(min(fitting, most), positions, c.N * c.groups * blocks, device.threads)
        outside = images * blocks + filters < images + filters * c.N * math.ceil(positions / rows)
        if outside:
            rows = _for_all_threads(most, positions, c.N * c.groups * blocks, device.threads)
        chosen.append(replace(b, rows=rows, filters_outside=outside))
    return tuple(chosen)


def _for_all_threads(rows: int, positions: int, others: int, threads: int) -> int:
    """As many rows in a task as leave several for each thread."""
    while rows > 1 and others * math.ceil(positions / rows) < 6 * threads:
        rows = math.ceil(rows / 2)
    return rows


def _row_bytes(layer: ConvLayer, c: Correlation, b: Blocking) -> int:
    """The sums of one row of tiles."""
    return sum(run.tiles for run in tiles(c.columns, b.BQ)) * b.BP * b.BQ * b.BK * layer.accumulator.itemsize


class Direct(GeneratedAlgorithm):
    """Direct convolution by a register-tiled microkernel; takes every layer but gradients of enormous strides."""

    name = "direct"
    takes_all = True
    exact = True
    modules = "direct_kernel", "direct_pack", "direct_wgrad", "direct_wgrad_packed", "pieces"
    skips_padding = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        if layer.direction == "wgrad":
            return wgrad_candidates(layer, device.instruction_set)
        if _pieces(layer) > MOST_PIECES:
            return [{"BK": 1, "BP": 1, "BQ": 1, "BC": 1, "filters": "strided"}]  # for its reason
        c = max(pieces_of(layer), key=lambda c: c.macs)
        lanes = Module(device.instruction_set).lanes(DTYPES[layer.dtype])

        def tile(pixels: int, vectors: int, filters: str) -> Params:
            """The fullest; where that is unrolled too far, of a single row, which takes taps as they come."""
            BK = lanes * min(vectors, math.ceil(c.K / lanes))
            BP, BQ = _fullest(c, pixels)
            params: Params = {"BK": BK, "BP": BP, "BQ": BQ, "BC": c.C, "filters": filters}
            return params if _work(layer, device, params) <= UNROLLED else {**params, "BP": 1, "BQ": _wide(c, pixels)}

        shapes = TILES[device.instruction_set]
        # a broadcast takes an instruction of its own before AVX-512: one vector of filters is too few for it
        several = shapes if device.instruction_set == "avx512" or lanes >= c.K else shapes[1:]
        found = [tile(*shape, "packed") for shape in several]
        found += [self._blocked(layer, device, c, params) for params in found[:2]]
        found.append(tile(*shapes[0], "strided"))
        found += [tile(1, 4, way) for way in ("packed", "strided") if self.why_not(layer, device, found[-1])]
        return list({tuple(params.values()): params for params in found}.values())

    def _blocked(self, layer: ConvLayer, device: CPU, c: Correlation, params: Params) -> Params:
        """The same with filters of a quarter of the first-level cache at a time, where that is worth a buffer."""
        taps = max(len(c.rows.taps) * len(c.columns.taps), 1)
        room = device.facts["l1_bytes"] // (4 * taps * int(params["BK"]) * layer.accumulator.itemsize)
        number = math.ceil(c.C / max(room, 4))
        if number == 1 or _row_bytes(layer, c, _blocking(c, params)) > BUFFER:
            return params
        return {**params, "BC": math.ceil(c.C / (4 * number)) * 4}

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if (pieces := _pieces(layer)) > MOST_PIECES:
            return [f"falls into {pieces} correlations with kernels of their own, more than {MOST_PIECES}"]
        if layer.direction != "wgrad" and (work := _work(layer, device, params)) > UNROLLED:
            return [f"unrolls to {work} multiply-adds, more than {UNROLLED}"]
        return []

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        if not _copies(layer, params):
            return 0
        packed = packed_blocking(layer, device.threads, int(params["BK"]), int(params["BC"]))
        return device.threads * packed.thread_bytes(layer)

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        if params.get("filters") != "packed":
            return 0
        size = sum(packed_size(c, int(params["BK"])) for c in pieces_of(layer))
        return size * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """At peak, but for lanes that hold nothing and for what loading costs beside the multiply-adds."""
        lanes = Module(device.instruction_set).lanes(DTYPES[layer.dtype])
        if layer.direction == "wgrad":
            pixels = params["lanes"] == "pixels"
            c = forward(layer)
            extent, block = (c.columns.count, lanes) if pixels else (c.C, int(params["BC"]))
            cost = (1.5 if pixels else 1.15) * _rounded(extent, block) * (5 if layer.depthwise else 1)
        else:
            cost = 1.4 if params["filters"] == "strided" else 1.1
            cost *= 1 + 1.5 / (int(params["BP"]) * int(params["BQ"]))
            pieces = pieces_of(layer)
            cost *= 1 if int(params["BC"]) == pieces[0].C else 0.95
            cost *= max(_rounded(c.K, int(params["BK"])) for c in pieces)
        return cost * layer.flops / device.peak_flops(layer.dtype) + layer.bytes / device.bandwidth() / 2

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        if layer.direction != "wgrad":
            return compiler.build(emit, device.instruction_set, layer, blocked(layer, device, params))
        BK, BC = int(params["BK"]), int(params["BC"])
        if _copies(layer, params):
            packed = packed_blocking(layer, device.threads, BK, BC)
            return compiler.build(emit_wgrad_packed, device.instruction_set, layer, packed)
        in_place = wgrad_blocking(layer, device.threads, BK, BC)
        return compiler.build(emit_wgrad, device.instruction_set, layer, in_place)


def _pieces(layer: ConvLayer) -> int:
    """Correlations that the layer falls into."""
    if layer.direction != "dgrad":
        return 1
    return min(layer.stride[0], layer.H) * min(layer.stride[1], layer.W)


def _fullest(c: Correlation, pixels: int) -> tuple[int, int]:
    """Rows and columns of the tile, of at most so many pixels, that is fullest on the average; the widest of equals."""
    rows, columns = c.rows.count, c.columns.count

    def tiles_of(tile: tuple[int, int]) -> int:
        return math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])

    return min(((BP, _wide(c, pixels // BP)) for BP in range(1, min(pixels, rows) + 1)), key=tiles_of)


def _wide(c: Correlation, pixels: int) -> int:
    """At most so many columns, of which as few tiles are almost equal."""
    return math.ceil(c.columns.count / math.ceil(c.columns.count / pixels))


def _rounded(extent: int, block: int) -> float:
    """How much more than the extent its whole blocks are."""
    return math.ceil(extent / block) * block / extent


def _copies(layer: ConvLayer, params: Params) -> bool:
    """Whether a gradient of the filters is summed with channels as lanes, which the input has not as neighbours."""
    return layer.direction == "wgrad" and layer.layout == "NCHW" and params["lanes"] != "pixels"


def _work(layer: ConvLayer, device: CPU, params: Params) -> int:
    """The multiply-adds that its program is unrolled to."""
    lanes = Module(device.instruction_set).lanes(DTYPES[layer.dtype])
    vectors = int(params["BK"]) // lanes
    return vectors * sum(unrolled(device.instruction_set, c, _blocking(c, params)) for c in pieces_of(layer))
