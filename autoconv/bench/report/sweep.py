"""One extent at a time: every algorithm as a curve, and where each takes over from another."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoconv.bench.report.page import Table, page, remarks
from autoconv.bench.report.study import Studied, family_of
from autoconv.bench.report.style import Chart, Pen, span
from autoconv.common.text import digits
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXTENTS = {
    "N": "images",
    "C": "channels",
    "K": "filters",
    "R": "height and width of the filters",
    "H": "height and width",
}
FILTERS = (1, 3, 5, 7, 9, 11)
IMAGES = (1, 2, 4, 8, 16, 32)
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of an extent, where no values are given
STYLES = ("-", "--", ":", "-.")  # of the curves of a family


@dataclass(frozen=True, eq=False)
class Sweep:
    """A layer as one of its extents grows.

    Attributes
    ----------
    extent : str
        One of `EXTENTS`.
    points : tuple of (int, Studied)
        Values, ascending, and the layers that have them.
    """

    extent: str
    points: tuple[tuple[int, Studied], ...]

    @property
    def algorithms(self) -> list[str]:
        """Those that were timed, and allowed, anywhere, the most often fastest ones first."""
        found: dict[str, int] = {}
        for _, studied in self.points:
            for algorithm in studied.fastest_allowed:
                found[algorithm] = found.get(algorithm, 0) + (algorithm == studied.winner.algorithm)
        return sorted(found, key=lambda algorithm: (-found[algorithm], algorithm))

    def curve(self, algorithm: str) -> list[tuple[int, float]]:
        """Seconds of the algorithm's fastest candidate that the limits allow, at the values at which there is one."""
        return [
            (value, studied.seconds(studied.fastest_allowed[algorithm]))
            for value, studied in self.points
            if algorithm in studied.fastest_allowed
        ]

    @property
    def takeovers(self) -> list[Takeover]:
        """Where the winner's algorithm changes."""
        found = []
        for (low, before), (high, after) in itertools.pairwise(self.points):
            old, new = before.winner.algorithm, after.winner.algorithm
            if old != new:
                found.append(Takeover(old, new, low, high, _crossing(low, before, high, after)))
        return found


@dataclass(frozen=True)
class Takeover:
    """One algorithm wins up to a value, and another from the next one on.

    Attributes
    ----------
    old, new : str
    low, high : int
        The last value that the one wins, and the first that the other wins.
    at : float or None
        Where their curves cross between these; None where one of them was not timed, or not allowed, at both.
    """

    old: str
    new: str
    low: int
    high: int
    at: float | None

    def __str__(self) -> str:
        near = f", crossing near {self.at:.3g}" if self.at is not None and self.low < self.at < self.high else ""
        return f"{self.old} up to {self.low}, {self.new} from {self.high}{near}"


def _crossing(low: int, before: Studied, high: int, after: Studied) -> float | None:
    """Where two curves meet that are straight between two points, both axes being logarithmic."""
    old, new = before.winner.algorithm, after.winner.algorithm
    if new not in before.fastest_allowed or old not in after.fastest_allowed:
        return None
    ahead = math.log(before.seconds(before.fastest_allowed[new]) / before.seconds(before.fastest_allowed[old]))
    behind = math.log(after.seconds(after.fastest_allowed[old]) / after.seconds(after.fastest_allowed[new]))
    if ahead < 0 or behind < 0 or ahead + behind == 0:  # within the noise a smaller workspace wins
        return None
    return low * math.pow(high / low, ahead / (ahead + behind))


def values_of(layer: ConvLayer, extent: str) -> list[int]:
    """Values for a sweep where none are given: the layer's own and others around it, of valid layers.

    Parameters
    ----------
    layer : ConvLayer
    extent : str
        One of `EXTENTS`.

    Returns
    -------
    list of int
        Ascending.
    """
    own = getattr(layer, extent)
    fixed: dict[str, tuple[int, ...]] = {"N": IMAGES, "R": FILTERS}
    around = fixed.get(extent) or tuple(round(own * factor) for factor in FACTORS)
    return sorted(value for value in {own, *around} if value >= 1 and _valid(layer, extent, value))


def _valid(layer: ConvLayer, extent: str, value: int) -> bool:
    try:
        varied(layer, extent, value)
    except ValueError:
        return False
    return True


def varied(layer: ConvLayer, extent: str, value: int) -> ConvLayer:
    """The layer with another extent, and with what belongs to it.

    Filters stay square, if they are, and padding that keeps an image's size goes on doing so; images keep their
    shape; a depthwise layer has as many groups as channels, and filters in proportion.

    Parameters
    ----------
    layer : ConvLayer
    extent : str
        One of `EXTENTS`.
    value : int

    Returns
    -------
    ConvLayer

    Raises
    ------
    LayerError
        When there is no such layer.
    """
    changes: dict[str, Any] = {extent: value}
    if extent == "C" and layer.depthwise:
        changes |= {"groups": value, "K": layer.K // layer.C * value}
    if extent == "H":
        changes["W"] = max(1, round(value * layer.W / layer.H))
    if extent == "R":
        changes["S"] = S = value if layer.S == layer.R else layer.S
        if layer.padding == _halves(layer.R, layer.S, layer.dilation):
            changes["padding"] = _halves(value, S, layer.dilation)
    return layer.replace(**changes)


def _halves(R: int, S: int, dilation: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Padding of half a filter on each side."""
    rows, columns = (R - 1) * dilation[0] // 2, (S - 1) * dilation[1] // 2
    return (rows, rows), (columns, columns)


def charts(sweeps: Sequence[Sweep]) -> list[Chart]:
    """A figure for each extent.

    Parameters
    ----------
    sweeps : sequence of Sweep

    Returns
    -------
    list of Chart
    """
    return [
        Chart(
            f"sweep-{sweep.extent}",
            f"As {sweep.extent} grows: {EXTENTS[sweep.extent]}",
            "Operations of the direct sum per second, by the fastest allowed candidate of each algorithm. The rings "
            "are winners: of those within the noise one with little workspace. The level line is the measured peak, "
            f"the dashed ones are where another algorithm takes over. {_story(sweep)}.",
            lambda pen: 5.0 if pen.narrow else 4.6,
            functools.partial(_draw, sweep),
        )
        for sweep in sweeps
    ]


def _story(sweep: Sweep) -> str:
    """Who wins where, in words."""
    won = sweep.points[0][1].winner.algorithm
    return "Winners: " + ("; ".join(map(str, sweep.takeovers)) or f"{won} throughout")


def _draw(sweep: Sweep, figure: Figure, pen: Pen) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullLocator

    (axes,) = pen.panels(figure, 1)
    layers = {value: studied.layer for value, studied in sweep.points}
    drawn: dict[str, int] = {}
    handles = []
    for algorithm in sweep.algorithms:
        family = algorithm.partition(".")[0]
        style = STYLES[drawn.get(family, 0) % len(STYLES)]
        drawn[family] = drawn.get(family, 0) + 1
        rates = [(value, layers[value].flops / seconds / 1e9) for value, seconds in sweep.curve(algorithm)]
        look = pen.mark(family) | {"linestyle": style, "markersize": 5}
        axes.plot(*zip(*rates, strict=True), linewidth=1.5, **look)
        handles.append(Line2D([], [], label=algorithm, **look))
    for value, studied in sweep.points:
        rate = studied.layer.flops / studied.best / 1e9
        (mark,) = axes.plot(value, rate, zorder=4, **pen.ring)
        pen.tip(mark, f"{sweep.extent}={value}: {studied.winner}, {span(studied.best)}, {digits(rate)} GFLOP/s")
    for takeover in sweep.takeovers:
        axes.axvline(
            takeover.at or math.sqrt(takeover.low * takeover.high),
            color=pen.palette.muted,
            linewidth=0.9,
            linestyle=(0, (4, 3)),
        )
    device = sweep.points[0][1].device
    axes.axhline(device.peak_flops(sweep.points[0][1].layer.dtype) / 1e9, color=pen.palette.accent, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(layers), [str(value) for value in layers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, None)
    axes.set(xlabel=f"{sweep.extent}, {EXTENTS[sweep.extent]}", ylabel="GFLOP/s")
    axes.grid(axis="y")
    pen.legend(figure, (), handles)


def report(layer: ConvLayer, sweeps: Sequence[Sweep]) -> str:
    """The page of a layer's sweeps.

    Parameters
    ----------
    layer : ConvLayer
    sweeps : sequence of Sweep

    Returns
    -------
    str
        HTML.
    """
    device = sweeps[0].points[0][1].device
    every = [(sweep.extent, value, studied) for sweep in sweeps for value, studied in sweep.points]
    won = {family_of(studied.winner) for *_, studied in every}
    facts = {
        "layers": str(len({studied.layer for *_, studied in every})),
        "algorithms timed": str(len({algorithm for sweep in sweeps for algorithm in sweep.algorithms})),
        "families that win somewhere": str(len(won)),
        "takeovers": str(sum(len(sweep.takeovers) for sweep in sweeps)),
    }
    rows = [
        (
            f"{extent}={value}",
            str(studied.winner),
            span(studied.best),
            digits(studied.layer.flops / studied.best / 1e9),
        )
        for extent, value, studied in every
    ]
    table = Table(
        "The time of one run, and operations of the direct sum per second.",
        ("extent", "winner", ">time", ">GFLOP/s"),
        rows,
    )
    about = [str(layer), f"on {device.name}"]
    return page("One extent at a time", about, facts, charts(sweeps), dict.fromkeys(remarks(device), ()), table)
