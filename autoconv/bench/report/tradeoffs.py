"""Figures with a mark for every candidate: the roofline, and what accuracy and scratch memory cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoconv.bench.report.study import Studied, Study, family_of
from autoconv.bench.report.style import Chart, Pen, plain, times
from autoconv.common.candidate import Candidate
from autoconv.common.text import digits, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = 48  # limits that are tried, between the smallest and the largest that make a difference
LEAST_ERROR = 1e-9  # an axis of logarithms has no 0
LEAST_WORKSPACE = 512  # bytes; drawn for none


def charts(study: Study) -> list[Chart]:
    """The figures of a study, in the order in which they are read."""
    return [
        Chart(
            "roofline",
            "Roofline, with every candidate",
            "Each column of marks is a layer, each mark one candidate that was "
            "timed; the ring is the winner. Lines: the measured peak, and the measured bandwidth of memory and "
            "caches, by which operands come in once. What needs fewer operations than the direct sum, which is "
            "counted, can pass the peak.",
            lambda pen: 5.2 if pen.narrow else 4.9,
            functools.partial(_roofline, study),
        ),
        Chart(
            "error",
            "Error against time",
            "First every candidate, its measured error (the largest, relative to the sum of "
            "absolute products) and its time over that of its layer's winner. Then what all layers take together "
            "under a tolerance, from where every layer has a candidate that keeps to it.",
            lambda pen: 6.4 if pen.narrow else 3.7,
            functools.partial(_error, study),
        ),
        Chart(
            "workspace",
            "Workspace against time",
            "First every candidate, its scratch memory and its time over that of its "
            "layer's winner. Then what all layers take together under a limit of workspace, the best choice at every "
            "limit, from where every layer has one.",
            lambda pen: 6.4 if pen.narrow else 3.7,
            functools.partial(_workspace, study),
        ),
    ]


def _roofline(study: Study, figure: Figure, pen: Pen) -> None:
    (axes,) = pen.panels(figure, 1)
    machine, palette = study.device.machine, pen.palette
    intensities = [studied.layer.arithmetic_intensity for studied in study.layers]
    low, high = min(*intensities, study.peak / machine.memory) / 2, max(intensities) * 2
    fastest, slowest = 0.0, math.inf
    for family in reversed(study.families):
        marks = [
            (studied.layer.arithmetic_intensity, studied.layer.flops / studied.seconds(candidate) / 1e9)
            for studied, candidate, _ in study.every()
            if family_of(candidate) == family
        ]
        axes.plot(*zip(*marks, strict=True), **_one_of_many(pen, family))
        fastest, slowest = max([fastest, *(y for _, y in marks)]), min([slowest, *(y for _, y in marks)])
    for studied, intensity in zip(study.layers, intensities, strict=True):
        rate = studied.layer.flops / studied.best / 1e9
        (mark,) = axes.plot(intensity, rate, zorder=4, **pen.ring)
        pen.tip(mark, f"{studied.name}: {studied.winner}, {digits(rate)} GFLOP/s at {intensity:.1f} FLOP per byte")
    roof = [axes.axhline(study.peak / 1e9, color=palette.accent, label=f"peak, {study.peak / 1e9:.0f} GFLOP/s")]
    rates = {
        "L2": machine.read.rate(machine.threads * machine.caches[1] // 2),
        "L3": machine.read.rate(machine.caches[2] // 2),
        "memory": machine.memory,
    }
    for (level, rate), style in zip(rates.items(), (":", "--", "-."), strict=True):
        ridge = study.peak / rate
        if ridge > low:
            label = f"{level}, {rate / 1e9:.0f} GB/s"
            line = ([low / 4, ridge], [low / 4 * rate / 1e9, study.peak / 1e9])
            roof += axes.plot(*line, style, color=palette.accent, linewidth=1.2, label=label)
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(slowest / 1.5, max(fastest, study.peak / 1e9) * 1.6)
    axes.set_xlabel("operations for every byte of operands")
    axes.set_ylabel("GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        pen.ticks(axis, plain)
    axes.grid()
    pen.legend(figure, study.families, roof)


def _one_of_many(pen: Pen, family: str) -> dict[str, Any]:
    """How a candidate is marked where others may lie under it."""
    return pen.mark(family) | {"markersize": 4.5, "alpha": 0.65}


def _error(study: Study, figure: Figure, pen: Pen) -> None:
    left, right = pen.panels(figure, 2)
    _candidates(study, left, pen, lambda s, c: max(s.facts[c].error, LEAST_ERROR))
    left.set(yscale="log", ylabel="error", title="every candidate")
    pen.ticks(left.yaxis, plain)
    errors = [max(facts.error, LEAST_ERROR) for _, _, facts in study.every()]
    low, high = min(errors), 2 * max(errors)  # past what makes a difference, so that a line is seen
    _under(study, right, pen, _between(low, high), "tolerance")
    right.set(xscale="log", xlim=(low, high), xlabel="tolerance", title="all layers under a tolerance")
    pen.ticks(right.xaxis, plain)
    pen.legend(figure, study.families)


def _workspace(study: Study, figure: Figure, pen: Pen) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    left, right = pen.panels(figure, 2)
    _candidates(study, left, pen, lambda s, c: max(s.limits.workspace(s.facts[c]), LEAST_WORKSPACE))
    left.set(ylabel="workspace", title="every candidate")
    most = max(study.limits.workspace(facts) for _, _, facts in study.every())
    limits = [0.0, *_between(LEAST_WORKSPACE, 2 * max(most, LEAST_WORKSPACE))]
    _under(study, right, pen, limits, "workspace_limit")
    right.set(xlabel="workspace limit", title="all layers under a limit")
    for axes, which in ((left, "y"), (right, "x")):
        axes.set(**{f"{which}scale": "log"})
        axis = axes.yaxis if which == "y" else axes.xaxis
        ticks = [LEAST_WORKSPACE, *(1 << n for n in range(12, 31, 4) if 1 << n <= 2 * most)]
        axis.set_ticks(ticks[::2] if pen.narrow and which == "x" else ticks)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(_bytes))
    pen.legend(figure, study.families)


def _bytes(value: float, _: object = None) -> str:
    return "none" if value <= LEAST_WORKSPACE else size(int(value)).replace(".00", "").replace(".0", "")


def _between(low: float, high: float) -> list[float]:
    """Steps of one factor."""
    return [low * (high / low) ** (step / (STEPS - 1)) * (1 + 1e-9) for step in range(STEPS)]


def _candidates(study: Study, axes: Axes, pen: Pen, measure: Callable[[Studied, Candidate], float]) -> None:
    """A mark for every candidate, at its time over that of its layer's winner."""
    for family in reversed(study.families):
        marks = [
            (studied.seconds(candidate) / studied.best, measure(studied, candidate))
            for studied, candidate, _ in study.every()
            if family_of(candidate) == family
        ]
        axes.plot(*zip(*marks, strict=True), **_one_of_many(pen, family))
    axes.set(xscale="log", xlabel="time over that of the layer's winner")
    pen.ticks(axes.xaxis, times)
    axes.grid()


def _under(study: Study, axes: Axes, pen: Pen, limits: list[float], name: str) -> None:
    """What all layers take under limits, over what they take without."""
    from matplotlib.ticker import FuncFormatter

    found = [(limit, study.under(**{name: int(limit) if name == "workspace_limit" else limit})) for limit in limits]
    kept = [(max(limit, 1e-12), seconds / study.seconds) for limit, seconds in found if seconds is not None]
    if name == "workspace_limit":
        kept = [(max(limit, LEAST_WORKSPACE), factor) for limit, factor in kept]
    if kept:
        axes.plot(*zip(*kept, strict=True), drawstyle="steps-post", color=pen.palette.accent, linewidth=1.6)
    axes.axhline(1, color=pen.palette.muted, linewidth=0.9)
    more = max([0.1, *(factor - 1 for _, factor in kept)])  # not so little that noise would look like much
    axes.set_ylim(1 - 0.05 * more, 1 + 1.05 * more)
    axes.set_ylabel("time over that without a limit")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: times(value)))
    axes.grid()
