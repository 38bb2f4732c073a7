"""Winograd convolution on generated kernels: many layers' fewest multiplications, at the price of rounding.

F(m x m, r x r) needs `(m + r - 1)**2` multiplications for `m * m` outputs instead of `m * m * r * r` (Winograd,
"Arithmetic Complexity of Computations", 1980; Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks",
2016): for 3x3 filters 4 times fewer with m = 4, 5.4 times with m = 7. Filters of one row or column are transformed on
one axis. Strided layers are split into polyphase components of the filter, dilated ones into output residue classes,
large filters into blocks of taps: see `geometry`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from autoconv.accuracy import bound_for, terms
from autoconv.algorithm import Params
from autoconv.cpu.common.algorithm import Emitter
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis, correlations
from autoconv.cpu.common.grid import batches, parts
from autoconv.cpu.common.sums import FINER_TERMS, WINOGRAD_TERMS
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.cached import cached_for_model
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.ahead import worth_fetching
from autoconv.cpu.transform.algorithm import TransformAlgorithm
from autoconv.cpu.transform.estimate import Counts
from autoconv.cpu.transform.geometry import unfit
from autoconv.cpu.winograd.estimate import counts
from autoconv.cpu.winograd.geometry import (
    StreamedTiling,
    WinogradAxis,
    WinogradTiling,
    cap,
    refusals_of,
    share_of_error,
    single_channels,
    sizes,
    usual_error,
    winograd_axis,
)
from autoconv.cpu.winograd.kernels import emit
from autoconv.layer import ConvLayer

MOST_TILES = 256  # of a chunk
MOST_CORRELATIONS = 4  # of a strided gradient, for the sake of compile time


class Cut(NamedTuple):
    """How tiles are cut into chunks, and sums into parts."""

    rows: int
    coop: int
    terms: int = WINOGRAD_TERMS


def outputs(params: Params) -> tuple[int, int]:
    """Of a tile, down and across."""
    down, across = map(int, str(params["m"]).split("x"))
    return down, across


class Winograd(TransformAlgorithm[WinogradTiling]):
    """F(m x m, r x r) for fwd and dgrad.

    Tiles of `m` outputs; chunks of `rows` of tiles; cooperative batches of `coop` chunks, 0 for threads on their own.
    """

    name = "winograd"
    directions = ("fwd", "dgrad")
    groupings = ("dense", "grouped")
    spreads_nonfinite = True
    finer: ClassVar[Params] = {"terms": FINER_TERMS}  # sums in shorter parts
    emitter: ClassVar[Emitter] = staticmethod(emit)

    def tiling(self, layer: ConvLayer, device: CPU, c: Correlation, m: tuple[int, int], cut: Cut) -> WinogradTiling:
        """How one correlation of a layer is cut."""
        how = c, device.instruction_set, layer.accumulator.itemsize, device.threads, m, cut.rows, cut.coop
        tiling = WinogradTiling(*how, terms=cut.terms)
        return StreamedTiling(*how, terms=cut.terms) if worth_fetching(layer, tiling, device.machine) else tiling

    def tilings(self, layer: ConvLayer, device: CPU, params: Params) -> tuple[WinogradTiling, ...]:
        """How each of them is."""
        cut = Cut(**{name: int(params[name]) for name in Cut._fields if name in params})
        return _tilings(self.tiling, layer, device, outputs(params), cut)

    def sizes(self, axis: CorrelationAxis) -> Sequence[int]:
        """Sizes of tiles worth trying along an axis."""
        return sizes(axis)

    def unsupported(self, layer: ConvLayer) -> list[str]:
        return super().unsupported(layer) or single_channels(layer) + unfit(layer, MOST_CORRELATIONS)

    def worth_listing(self, tiling: WinogradTiling) -> bool:
        """Whether candidates that cut a layer into such tiles are any use, however tiles are cut into chunks."""
        return True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterator[Params]:
        """Sizes by chunks of up to `MOST_TILES` tiles, of each thread's own or in batches that the LLC holds."""
        main = max(correlations(layer), key=lambda c: c.macs)
        square = main.rows == main.columns  # of a size and its mirror image one is enough
        for m in itertools.product(self.sizes(main.rows), self.sizes(main.columns)):
            if square and m[0] > m[1]:
                continue
            one = self.tiling(layer, device, main, m, Cut(1, 0))
            if not self.worth_listing(one):
                continue
            for rows in parts(one.tile_rows, MOST_TILES // one.columns.tiles):
                tiling = self.tiling(layer, device, main, m, Cut(rows, 0))
                most = device.machine.caches[2] // (tiling.v_size * tiling.itemsize)
                for coop in (0, *batches(max(1, min(tiling.chunks, most)))):
                    yield {"m": f"{m[0]}x{m[1]}", "rows": rows, "coop": coop}

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if (terms := int(params.get("terms", WINOGRAD_TERMS))) < 1:  # as a record of any origin may say
            return [f"terms: expected at least 1, got {terms}"]
        return refusals_of(outputs(params), self.tilings(layer, device, params))

    def counts(self, tiling: WinogradTiling, machine: Machine) -> Counts:
        return counts(tiling, machine)

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return bound_for(layer, self.cap(itertools.chain.from_iterable(self._axes(layer, params))))

    def usual_error(self, layer: ConvLayer, params: Params, rms: bool = False) -> float:
        channels = (layer.K if layer.direction == "dgrad" else layer.C) // layer.groups
        share = share_of_error(channels, int(params.get("terms", WINOGRAD_TERMS)))
        return bound_for(
            layer, share * max(usual_error(*axes, terms(layer), rms) for axes in self._axes(layer, params))
        )

    def _axes(self, layer: ConvLayer, params: Params) -> Iterator[tuple[WinogradAxis, WinogradAxis]]:
        """Of each correlation."""
        down, across = outputs(params)
        return ((winograd_axis(c.rows, down), winograd_axis(c.columns, across)) for c in correlations(layer))

    def cap(self, axes: Iterable[WinogradAxis]) -> float:
        """Largest float32 error."""
        return cap(axes)


@cached_for_model(16)  # what is asked of one candidate of a grid comes together
def _tilings(
    tiling: Callable[..., WinogradTiling], layer: ConvLayer, device: CPU, m: tuple[int, int], cut: Cut
) -> tuple[WinogradTiling, ...]:
    return tuple(tiling(layer, device, c, m, cut) for c in correlations(layer))
