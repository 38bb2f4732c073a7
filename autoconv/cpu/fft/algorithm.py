"""Fourier convolution on generated kernels: large filters for little more than small ones.

Overlap-save in tiles of T x T (Stockham, "High-speed convolution and correlation", 1966; Mathieu, Henaff and LeCun,
"Fast Training of Convolutional Networks through FFTs", 2014): `1.5 * T * T` multiplications for `(T - r + 1)**2`
outputs of r x r filters, and transforms whose cost does not know the filter. Strided layers are split into polyphase
components of the filter, dilated ones into output residue classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import ClassVar

from autoconv.algorithm import Params
from autoconv.cpu.common.algorithm import Emitter
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis
from autoconv.cpu.common.grid import batches, parts
from autoconv.cpu.device import CPU
from autoconv.cpu.fft.estimate import counts
from autoconv.cpu.fft.geometry import (
    LENGTHS,
    CircularAxis,
    FourierTiling,
    channelwise,
    circular,
    fourier_correlations,
)
from autoconv.cpu.fft.kernels import emit
from autoconv.cpu.machine.cached import cached_for_model
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.algorithm import TransformAlgorithm
from autoconv.cpu.transform.estimate import Counts, forecast
from autoconv.cpu.transform.geometry import TiledAxis, unfit
from autoconv.layer import ConvLayer

MOST_SIZES = 8  # sizes of tiles in a layer's grid
MOST_TILES = 64  # of a chunk
MOST_CORRELATIONS = 2  # of a strided gradient, for the sake of compile time
LARGEST = 256 << 20  # bytes of filter spectra; layers beyond are deep and small in area
LARGEST_STACK = 256 << 10  # bytes a filter's taps and spectrum take while it is transformed


def _parse(params: Params) -> tuple[tuple[int, int], int, int]:
    down, across = map(int, str(params["tile"]).split("x"))
    return (down, across), int(params["rows"]), int(params["coop"])


def _axes(c: Correlation, lengths: tuple[int, int]) -> tuple[CircularAxis, CircularAxis] | None:
    down, across = circular(c.rows, lengths[0]), circular(c.columns, lengths[1], pairs=True)
    return (down, across) if down and across else None


def _sizes(axis: CorrelationAxis, pairs: bool) -> list[CircularAxis]:
    """Tiles of an axis, each with fewer inputs in all than those smaller."""
    found: list[CircularAxis] = []
    lengths = LENGTHS if TiledAxis(axis, 1).r > 1 else LENGTHS[:4]
    for tiled in (circular(axis, length, pairs) for length in lengths):
        if tiled and (not found or tiled.tiles * tiled.length < found[-1].tiles * found[-1].length):
            found.append(tiled)
    return found


class TiledFFT(TransformAlgorithm[FourierTiling]):
    """Spectra of tiles for fwd and dgrad.

    Tiles of `tile` inputs; chunks of `rows` of tiles; cooperative batches of `coop` chunks, 0 for threads on their own.
    """

    name = "fft"
    directions = ("fwd", "dgrad")
    spreads_nonfinite = True
    emitter: ClassVar[Emitter] = staticmethod(emit)

    def tiling(
        self, layer: ConvLayer, device: CPU, c: Correlation, axes: tuple[CircularAxis, CircularAxis]
    ) -> FourierTiling:
        """How one correlation of a layer is cut, with chunks of a row of tiles, each thread on its own."""
        m, lengths = zip(*((axis.m, axis.length) for axis in axes), strict=True)
        itemsize = layer.accumulator.itemsize
        return FourierTiling(c, device.instruction_set, itemsize, device.threads, m, 1, 0, lengths, channelwise(layer))

    def tilings(self, layer: ConvLayer, device: CPU, params: Params) -> tuple[FourierTiling, ...]:
        """How each of them is; fewer where some do not fit into the tiles."""
        lengths, rows, coop = _parse(params)
        cuts = ((c, _axes(c, lengths)) for c in fourier_correlations(layer))
        return tuple(self.tiling(layer, device, c, axes).resized(rows, coop) for c, axes in cuts if axes)

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        if reasons := unfit(layer, MOST_CORRELATIONS):
            return reasons
        found = fourier_correlations(layer)
        if channelwise(layer) and any(TiledAxis(a, 1).components > 1 for c in found for a in (c.rows, c.columns)):
            stride = "x".join(map(str, layer.stride))
            reasons.append(
                f"depthwise: expected one polyphase component, as channels are not summed, got stride {stride}"
            )
        if not all(_axes(c, (LENGTHS[-1], LENGTHS[-1])) for c in found):
            reasons.append(f"filter: expected to fit tiles of {LENGTHS[-1]}x{LENGTHS[-1]}, got {layer.R}x{layer.S}")
        return reasons

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterator[Params]:
        """Sizes by chunks of up to `MOST_TILES` tiles, of each thread's own or in batches that the LLC holds."""
        for one in _pairs(self.tiling, layer, device):
            for rows in parts(one.tile_rows, MOST_TILES // one.columns.tiles):
                tiling = one.resized(rows, 1)
                most = device.machine.caches[2] // (tiling.v_size * tiling.itemsize)
                for coop in (0,) if one.channelwise else (0, *batches(max(1, min(tiling.chunks, most)))):
                    yield {"tile": f"{one.lengths[0]}x{one.lengths[1]}", "rows": rows, "coop": coop}

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        lengths, rows, coop = _parse(params)
        reasons = []
        if rows < 1 or coop < 0:
            reasons.append(f"rows, coop: expected at least 1 and 0, got {rows} and {coop}")
        if coop and channelwise(layer):
            reasons.append(f"coop of a depthwise layer: expected 0, as its channels share no input, got {coop}")
        if wrong := [length for length in lengths if length not in LENGTHS]:
            reasons.append(f"tile: expected lengths of {', '.join(map(str, LENGTHS))}, got {wrong[0]}")
        if reasons:
            return reasons
        found, cuts = fourier_correlations(layer), self.tilings(layer, device, params)
        if len(cuts) < len(found):
            R, S = (max(TiledAxis(getattr(c, axis), 1).r for c in found) for axis in ("rows", "columns"))
            return [f"tile: expected larger than filters of {R}x{S}, got {params['tile']}"]
        if (packed := self.packed_bytes(layer, device, params)) > LARGEST:
            reasons.append(f"the filters' spectra: expected at most {LARGEST >> 20} MiB, got {packed >> 20}")
        if (stack := max(tiling.pack_stack for tiling in cuts)) > LARGEST_STACK:
            reasons.append(f"stack for a filter: expected at most {LARGEST_STACK >> 10} KiB, got {stack >> 10}")
        return reasons

    def counts(self, tiling: FourierTiling, machine: Machine) -> Counts:
        return counts(tiling, machine)


@cached_for_model(64)
def _pairs(cut: Callable[..., FourierTiling], layer: ConvLayer, device: CPU) -> tuple[FourierTiling, ...]:
    """The most promising sizes of tiles."""
    main = max(fourier_correlations(layer), key=lambda c: c.macs)
    found: dict[tuple[int, ...], tuple[float, FourierTiling]] = {}
    for axes in itertools.product(_sizes(main.rows, False), _sizes(main.columns, True)):
        tiling = cut(layer, device, main, axes)
        # how many rows suit a size differs between sizes, so that one number of them would favour some
        chunks = parts(tiling.tile_rows, MOST_TILES // tiling.columns.tiles)[::-2]
        cuts = [tiling, *(tiling.resized(rows, int(not tiling.channelwise)) for rows in chunks)]
        cost = min(forecast([(some, counts(some, device.machine))], device.machine).seconds for some in cuts)
        # of a size and its mirror image one is enough
        lengths = tuple(sorted(tiling.lengths)) if main.rows == main.columns else tiling.lengths
        if lengths not in found or cost < found[lengths][0]:
            found[lengths] = cost, tiling
    # of those that are all too large some are named, to be refused for it
    fitting = [entry for entry in found.values() if _fits(entry[1])]
    ranked = sorted(fitting or found.values(), key=lambda entry: entry[0])
    return tuple(tiling for _, tiling in ranked[:MOST_SIZES])


def _fits(tiling: FourierTiling) -> bool:
    """Whether its filters' spectra do, in memory and on the stack."""
    return tiling.packed_size * tiling.itemsize <= LARGEST and tiling.pack_stack <= LARGEST_STACK
