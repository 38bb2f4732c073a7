"""Figures with a line for every layer: time by algorithm, where the time goes, operations, shapes, and rates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autoconv.bench.bound import multiplications
from autoconv.bench.report.counts import gemm_multiply_adds, input_over_filters, multiply_adds_per_byte
from autoconv.bench.report.study import PLAIN_GEMM, Studied, Study, exact_algorithms, family_of
from autoconv.bench.report.style import Chart, Pen
from autoconv.common.candidate import Candidate
from autoconv.common.text import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.235  # inches
AROUND = 1.15  # of axis and legend


def charts(study: Study) -> list[Chart]:
    """The figures of a study, in the order in which they are read."""

    def chart(
        name: str, title: str, caption: str, draw: Callable[[Study, Figure, Pen], None], panels: int = 1
    ) -> Chart:
        rows = ROW * len(study.layers) + AROUND

        def height(pen: Pen) -> float:
            return rows * panels if pen.narrow else rows

        return Chart(name, title, caption, height, functools.partial(draw, study))

    return [
        chart(
            "share",
            "Where the time goes",
            "Every layer by its winner, as often as the network has it, in the network's order.",
            _share,
        ),
        chart(
            "time",
            "Time of each layer, by algorithm",
            "One run of the fastest candidate of each algorithm; the ring is the "
            "winner. The further apart the marks of a line, the more there is to choose.",
            _time,
        ),
        chart(
            "gap",
            "From a plain GEMM to the peak",
            "Operations of the direct sum per second. Plain GEMM is im2col and "
            "NumPy's matrix product; a library is the fastest on record; exact is our fastest that only reorders "
            "sums; the winner may need fewer operations than are counted, and so pass the peak (line).",
            _gap,
        ),
        chart(
            "operations",
            "Multiply-adds, by algorithm",
            "Relative to the direct sum, transforms not counted. GEMM: the "
            "product that im2col makes, in whole register tiles of this machine. Winograd and FFT: as their fastest "
            "candidates cut the layer.",
            _operations,
        ),
        chart(
            "shapes",
            "What the layers are made of",
            "First the elements of the padded input for every coefficient of the "
            "filters; where it is below one, filters are what has to be moved. Then multiply-adds for every byte of "
            "padded input, filters and output.",
            _shapes,
            panels=2,
        ),
    ]


def rows(axes: Axes, study: Study, pen: Pen, *, names: bool = True) -> range:
    """Give every layer a line, the first on top, and name it."""
    places = range(len(study.layers))
    axes.set_yticks(places, [short(studied.title, pen) if names else "" for studied in study.layers])
    axes.set_ylim(len(study.layers) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    return places


def short(name: str, pen: Pen) -> str:
    """As much of a name's end as there is room for beside a figure."""
    most = 18 if pen.narrow else 32
    return name if len(name) <= most else f"…{name[1 - most :]}"


def in_time(axes: Axes) -> None:
    """Name the ticks of a logarithmic axis of seconds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis
    axes.set_xscale("log")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 30 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds).replace("us", "µs")))
    axis.set_minor_formatter(NullFormatter())


def times(value: float) -> str:
    """A factor, as people write it."""
    return f"{value:.2g}×" if value < 10 else f"{value:.0f}×"


def _time(study: Study, figure: Figure, pen: Pen) -> None:
    (axes,) = pen.panels(figure, 1)
    for place, studied in zip(rows(axes, study, pen), study.layers, strict=True):
        seconds = [studied.seconds(candidate) for candidate in studied.fastest.values()]
        axes.plot([min(seconds), max(seconds)], [place, place], color=pen.palette.grid, linewidth=1.4, zorder=1)
        for candidate in reversed(studied.fastest.values()):
            family = family_of(candidate)
            (mark,) = axes.plot(
                studied.seconds(candidate), place, pen.marker(family), color=pen.colour(family), markersize=5.5
            )
            pen.tip(mark, f"{studied.name}: {candidate}, {duration(studied.seconds(candidate))}")
        axes.plot(studied.best, place, "o", markersize=10, markerfacecolor="none", color=pen.palette.ink, zorder=4)
    in_time(axes)
    pen.legend(figure, study.families)


def _share(study: Study, figure: Figure, pen: Pen) -> None:
    (axes,) = pen.panels(figure, 1)
    parts = [studied.repeat * studied.best / study.seconds for studied in study.layers]
    for place, studied, part in zip(rows(axes, study, pen), study.layers, parts, strict=True):
        family = family_of(studied.winner)
        (bar,) = axes.barh(place, 100 * part, height=0.68, color=pen.colour(family))
        pen.tip(bar, f"{studied.title}: {studied.winner}, {duration(studied.repeat * studied.best)}")
        text = f"{duration(studied.repeat * studied.best)}" + ("" if pen.narrow else f"  {studied.winner.algorithm}")
        axes.annotate(
            text.replace("us", "µs"),
            (100 * part, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=pen.palette.muted,
        )
    axes.set_xlim(0, 100 * max(parts) * (1.45 if pen.narrow else 1.3))
    axes.set_xlabel("% of the time of all layers")
    won = dict.fromkeys(family_of(studied.winner) for studied in study.layers)
    pen.legend(figure, [family for family in study.families if family in won])


def _gap(study: Study, figure: Figure, pen: Pen) -> None:
    (axes,) = pen.panels(figure, 1)
    exact = exact_algorithms(study.device)
    kinds: dict[str, tuple[str, str, Callable[[Studied], Candidate | None]]] = {
        "plain GEMM": ("X", pen.colour("numpy"), lambda s: s.fastest_of(lambda c: c.algorithm == PLAIN_GEMM)),
        "library": ("h", pen.colour("torch"), lambda s: s.fastest_of(lambda c: s.facts[c].vendor is not None)),
        "exact": ("o", pen.colour("direct"), lambda s: s.fastest_of(lambda c: c.algorithm in exact)),
        "winner": ("^", pen.colour("winograd"), lambda s: s.winner),
    }
    present = []
    for place, studied in zip(rows(axes, study, pen), study.layers, strict=True):
        rates = []
        for name, (marker, colour, which) in kinds.items():
            if (candidate := which(studied)) is None:
                continue
            present.append(name)
            rates.append(studied.layer.flops / studied.seconds(candidate) / 1e9)
            (mark,) = axes.plot(rates[-1], place, marker, color=colour, markersize=6, zorder=3)
            pen.tip(mark, f"{studied.name}, {name}: {candidate}, {rates[-1]:.0f} GFLOP/s")
        axes.plot([min(rates), max(rates)], [place, place], color=pen.palette.grid, linewidth=1.4, zorder=1)
    axes.axvline(study.peak / 1e9, color=pen.palette.accent, linewidth=1.2)
    axes.annotate(
        "peak",
        (study.peak / 1e9, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, 2),
        textcoords="offset points",
        fontsize=8.5,
        color=pen.palette.accent,
    )
    axes.set_xlim(0, None)
    axes.set_xlabel("GFLOP/s")
    _kinds(figure, pen, [(name, *kinds[name][:2]) for name in kinds if name in present])


def _kinds(figure: Figure, pen: Pen, kinds: Sequence[tuple[str, str, str]]) -> None:
    """A legend of other things than families: name, marker, colour."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], marker=m, color=c, linestyle="", markersize=6, label=name) for name, m, c in kinds]
    pen.legend(figure, (), handles)


def operations(studied: Studied) -> dict[str, float]:
    """Multiply-adds relative to the direct sum: of GEMM, and of those transforms that were timed."""
    layer, device = studied.layer, studied.device
    found = {"direct": 1.0, "gemm": gemm_multiply_adds(layer, device) / layer.macs}
    for family in ("winograd", "fft"):
        candidate = studied.fastest_of(lambda c, name=family: c.algorithm == name)  # type: ignore[misc]
        products = multiplications(layer, device, candidate) if candidate is not None else None
        if products is not None:
            found[family] = products / layer.macs
    return found


def _operations(study: Study, figure: Figure, pen: Pen) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    (axes,) = pen.panels(figure, 1)
    present: dict[str, None] = {}
    for place, studied in zip(rows(axes, study, pen), study.layers, strict=True):
        found = operations(studied)
        axes.plot(
            [min(found.values()), max(found.values())], [place] * 2, color=pen.palette.grid, linewidth=1.4, zorder=1
        )
        for family, factor in found.items():
            present[family] = None
            (mark,) = axes.plot(factor, place, pen.marker(family), color=pen.colour(family), markersize=6)
            pen.tip(mark, f"{studied.name}, {family}: {factor * studied.layer.macs / 1e6:.1f} million multiply-adds")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda factor, _: times(factor)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("multiply-adds, the direct sum's being 1")
    pen.legend(figure, list(present))


def _shapes(study: Study, figure: Figure, pen: Pen) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    left, right = pen.panels(figure, 2)
    for axes, measure, title, name in (
        (left, input_over_filters, "input over filters", "direct"),
        (right, multiply_adds_per_byte, "multiply-adds per byte", "winograd"),
    ):
        base = 1.0 if axes is left else 0.0
        for place, studied in zip(rows(axes, study, pen, names=pen.narrow or axes is left), study.layers, strict=True):
            value = measure(studied.layer)
            start = base or 0.1
            (bar,) = axes.barh(place, value - start, left=start, height=0.6, color=pen.colour(name))
            pen.tip(bar, f"{studied.name}: {value:.3g}")
            axes.annotate(
                f"{value:.3g}" if value < 1000 else f"{value:.0f}",
                (value, place),
                xytext=(4 if value >= start else -4, 0),
                textcoords="offset points",
                va="center",
                ha="left" if value >= start else "right",
                fontsize=8,
                color=pen.palette.muted,
            )
        axes.set_xscale("log")
        values = [measure(studied.layer) for studied in study.layers]
        axes.set_xlim(min(values) / 4 if base else 0.1, max(*values, 1.0) * 6)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title)
        if base:
            axes.axvline(1, color=pen.palette.muted, linewidth=0.9)
