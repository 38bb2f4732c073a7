"""Direct convolution: lanes are output channels, pixels are broadcast; the input is read in place.

A microkernel keeps a tile of `TP` x `TQ` output pixels times `TK` channels in registers over the whole sum, without
blocking the input: in every step one pixel is broadcast from wherever the layout has it and multiplied with a vector of
packed filters. Padding is never read and never multiplied: tiles at the border are compiled for the taps that each of
their pixels sees.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator

from autoconv.algorithm import Params
from autoconv.common.candidate import text_of
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, Module
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import correlation_count, flat_correlations
from autoconv.cpu.common.grid import parts, register_tiles, steps
from autoconv.cpu.common.packing import packed_size
from autoconv.cpu.device import CPU
from autoconv.cpu.direct.estimate import seconds, wgrad_seconds
from autoconv.cpu.direct.geometry import (
    BUFFER,
    blocking,
    blockings,
    even_columns,
    sums_bytes,
    unrolled,
)
from autoconv.cpu.direct.gradients import emit_wgrad, wgrad_blocking, wgrad_candidates
from autoconv.cpu.direct.gradients_packed import emit_wgrad_packed, packed_blocking
from autoconv.cpu.direct.kernels import emit
from autoconv.layer import ConvLayer

MOST_CORRELATIONS = 64  # of a strided gradient, each with code of its own
MOST_UNROLLED = 8000  # multiply-adds of one program: LLVM takes a second for them
LEAST_BLOCK = 16  # channels of the sum at a time, between which the sums go to memory and back, ...
MULTIPLE = 4  # ... in whole rounds of the unrolled loop over them


class Direct(GeneratedAlgorithm):
    """Direct convolution by a register-tiled microkernel; takes every layer but gradients of enormous strides.

    Parameters of `fwd` and `dgrad`: a register tile of `TK` filters by `TP` x `TQ` pixels, `BC` channels of the sum at
    a time, and whether the `filters` are packed or read where they are ("strided"). Parameters of `wgrad`: a register
    tile of `TK` filters by `BC` channels, with neighbouring pixels or channels as `lanes`.

    Sources: Georganas et al., "Anatomy of high-performance deep learning convolutions on SIMD architectures" (2018),
    arXiv:1808.05567, for the microkernel; Zhang, Franchetti and Low, "High performance zero-memory overhead direct
    convolutions" (2018), arXiv:1809.10170, for output channels as lanes and no copy of the input.
    """

    name = "direct"
    takes_all = True
    exact = True
    skips_padding = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        """Besides what is declared: a gradient that falls into so many correlations takes minutes to compile."""
        reasons = super().unsupported(layer)
        if (count := correlation_count(layer)) > MOST_CORRELATIONS:
            stride = "x".join(map(str, layer.stride))
            reasons.append(
                f"stride: expected a gradient of at most {MOST_CORRELATIONS} correlations, each with code of its own, "
                f"got {count} of stride {stride}"
            )
        return reasons

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        if layer.direction == "wgrad":
            return wgrad_candidates(layer, device.instruction_set)
        return (params for params in _grid(layer, device) if not self._too_much(layer, device, params))

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if frozenset(params.items()) in _listed(layer, device):
            return [] if layer.direction == "wgrad" else self._too_much(layer, device, params)
        return [f"{text_of(params)}: expected parameters among those that are listed for such a layer"]

    def _too_much(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        """What is against parameters of the grid."""
        C, BC = max(c.C for c in flat_correlations(layer)), int(params["BC"])
        if BC < 1 or (BC < C and BC % MULTIPLE):
            return [f"BC={BC}: expected {C}, or fewer channels in multiples of {MULTIPLE}"]
        if (count := unrolled(layer, device, params)) > MOST_UNROLLED:
            tile = text_of({name: params[name] for name in ("TK", "TP", "TQ")})
            return [f"{tile}: expected at most {MOST_UNROLLED} multiply-adds in the unrolled program, got {count}"]
        return []

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        if not _copies(layer, params):
            return 0
        packed = packed_blocking(layer, device.threads, int(params["TK"]), int(params["BC"]))
        return device.threads * packed.thread_bytes(layer)

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        if params.get("filters") != "packed":
            return 0
        size = sum(packed_size(c, int(params["TK"])) for c in flat_correlations(layer))
        return size * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        return (wgrad_seconds if layer.direction == "wgrad" else seconds)(layer, device, params)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        if layer.direction != "wgrad":
            return compiler.build(emit, device.instruction_set, layer, blockings(layer, device, params))
        TK, BC = int(params["TK"]), int(params["BC"])
        if _copies(layer, params):
            packed = packed_blocking(layer, device.threads, TK, BC)
            return compiler.build(emit_wgrad_packed, device.instruction_set, layer, packed)
        in_place = wgrad_blocking(layer, device.threads, TK, BC)
        return compiler.build(emit_wgrad, device.instruction_set, layer, in_place)


@functools.lru_cache(16)  # what is asked of one candidate of a layer is asked of all
def _listed(layer: ConvLayer, device: CPU) -> set[frozenset[tuple[str, int | str]]]:
    """All parameters there are, be they too much or not: code is generated for no others."""
    wgrad = layer.direction == "wgrad"
    found = wgrad_candidates(layer, device.instruction_set) if wgrad else _grid(layer, device)
    return {frozenset(params.items()) for params in found}


def _grid(layer: ConvLayer, device: CPU) -> Iterator[Params]:
    """Register tiles by the rows and columns that make up their pixels by channels at a time, and by how filters lie.

    At last tiles of a single pixel, which are unrolled the least.
    """
    c = max(flat_correlations(layer), key=lambda c: c.macs)
    lanes = Module(device.instruction_set).lanes(DTYPES[layer.dtype])
    needed = math.ceil(c.K / lanes)
    tiles = [(vectors, pixels) for vectors, pixels in register_tiles(device.instruction_set) if vectors <= needed]
    seen = set()
    for (vectors, pixels), way in itertools.product([*tiles, (min(needed, 4), 1)], ("packed", "strided")):
        for TP in steps(min(pixels, c.rows.count)):
            TQ = even_columns(c, pixels // TP)
            for n in reversed(parts(c.C)) if way == "packed" else (c.C,):
                BC = min(-(-n // MULTIPLE) * MULTIPLE, c.C)
                params: Params = {"TK": lanes * vectors, "TP": TP, "TQ": TQ, "BC": BC, "filters": way}
                if BC < c.C and (BC < LEAST_BLOCK or sums_bytes(layer, c, blocking(c, params)) > BUFFER):
                    break
                if (key := tuple(params.values())) not in seen:
                    seen.add(key)
                    yield params


def _copies(layer: ConvLayer, params: Params) -> bool:
    """Whether a gradient of the filters is summed with channels as lanes, which are no neighbours in the input."""
    return layer.direction == "wgrad" and layer.layout == "NCHW" and params["lanes"] != "pixels"
