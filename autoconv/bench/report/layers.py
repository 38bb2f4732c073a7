"""Figures with a line for every layer: time by algorithm, where the time goes, operations, shapes, and rates."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoconv.bench.bound import multiplications
from autoconv.bench.report.counts import gemm_multiply_adds, input_over_filters, multiply_adds_per_byte
from autoconv.bench.report.study import PLAIN_GEMM, Studied, Study, exact_algorithms, family_of
from autoconv.bench.report.style import Chart, Pen, plain, span, times
from autoconv.common.candidate import Candidate
from autoconv.common.text import digits

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
            "Every layer by its winner, whose mark ends the bar, as often as the network has it, and in its order.",
            _share,
        ),
        chart(
            "time",
            "Time of each layer, by algorithm",
            "One run of the fastest candidate of each algorithm; the ring is the winner: of those within the noise "
            "one with little workspace. The further apart the marks of a line, the more there is to choose.",
            _time,
        ),
        chart(
            "gap",
            "From a plain GEMM to the peak",
            "Operations of the direct sum per second. Plain GEMM is im2col and "
            "NumPy's matrix product; a library is the fastest on record; exact is our fastest that only reorders "
            "sums; the winner (ring) may need fewer operations than are counted, and so pass the peak (line).",
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
    """As much of a name's end as there is room for beside a figure, without what PyTorch's ONNX files repeat in it.

    These say "/features/features.2/conv/conv.0/conv.0.2/Clip_output_0" of "features.2/conv.0.2/Clip".
    """
    parts = name.replace("_output_0", "").split("/")
    kept = [part for part, after in itertools.pairwise([*parts, ""]) if part and not f"{after}.".startswith(f"{part}.")]
    most, name = 20 if pen.narrow else 32, "/".join(kept)
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _time(study: Study, figure: Figure, pen: Pen) -> None:
    (axes,) = pen.panels(figure, 1)
    for place, studied in zip(rows(axes, study, pen), study.layers, strict=True):
        seconds = [studied.seconds(candidate) for candidate in studied.fastest.values()]
        axes.plot([min(seconds), max(seconds)], [place, place], color=pen.palette.grid, linewidth=1.4, zorder=1)
        for candidate in reversed(studied.fastest.values()):
            (mark,) = axes.plot(studied.seconds(candidate), place, **pen.mark(family_of(candidate)))
            pen.tip(mark, f"{studied.name}: {candidate}, {span(studied.seconds(candidate))}")
        axes.plot(studied.best, place, zorder=4, **pen.ring)
    axes.set(xscale="log", xlabel="time of one run")
    pen.ticks(axes.xaxis, span)
    pen.legend(figure, study.families)


def _share(study: Study, figure: Figure, pen: Pen) -> None:
    (axes,) = pen.panels(figure, 1)
    parts = [studied.repeat * studied.best / study.seconds for studied in study.layers]
    for place, studied, part in zip(rows(axes, study, pen), study.layers, parts, strict=True):
        family = family_of(studied.winner)
        (bar,) = axes.barh(place, 100 * part, height=0.2, color=pen.colour(family))
        axes.plot(100 * part, place, **pen.mark(family))
        pen.tip(bar, f"{studied.title}: {studied.winner}, {span(studied.repeat * studied.best)}")
        text = span(studied.repeat * studied.best) + ("" if pen.narrow else f"  {studied.winner.algorithm}")
        axes.annotate(
            text,
            (100 * part, place),
            xytext=(7, 0),
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
    from matplotlib.lines import Line2D

    (axes,) = pen.panels(figure, 1)
    exact = exact_algorithms(study.device)
    kinds: dict[str, tuple[dict[str, Any], Callable[[Studied], Candidate | None]]] = {
        "plain GEMM": (pen.mark("numpy"), lambda s: s.fastest_of(lambda c: c.algorithm == PLAIN_GEMM)),
        "library": (pen.mark("torch"), lambda s: s.fastest_of(lambda c: s.facts[c].vendor is not None)),
        "exact": (pen.mark("direct"), lambda s: s.fastest_of(lambda c: c.algorithm in exact)),
        "winner": (pen.ring, lambda s: s.winner),
    }
    present = set()
    for place, studied in zip(rows(axes, study, pen), study.layers, strict=True):
        rates = []
        for name, (look, which) in kinds.items():
            if (candidate := which(studied)) is None:
                continue
            present.add(name)
            rates.append(studied.layer.flops / studied.seconds(candidate) / 1e9)
            (mark,) = axes.plot(rates[-1], place, clip_on=False, zorder=3, **look)
            pen.tip(mark, f"{studied.name}, {name}: {candidate}, {digits(rates[-1])} GFLOP/s")
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
    pen.legend(figure, (), [Line2D([], [], label=name, **look) for name, (look, _) in kinds.items() if name in present])


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
    (axes,) = pen.panels(figure, 1)
    present: dict[str, None] = {}
    for place, studied in zip(rows(axes, study, pen), study.layers, strict=True):
        found = operations(studied)
        axes.plot(
            [min(found.values()), max(found.values())], [place] * 2, color=pen.palette.grid, linewidth=1.4, zorder=1
        )
        for family, factor in found.items():
            present[family] = None
            (mark,) = axes.plot(factor, place, **pen.mark(family))
            pen.tip(mark, f"{studied.name}, {family}: {factor * studied.layer.macs / 1e6:.1f} million multiply-adds")
    axes.set(xscale="log", xlabel="times those of the direct sum")
    pen.ticks(axes.xaxis, times)
    pen.legend(figure, list(present))


def _shapes(study: Study, figure: Figure, pen: Pen) -> None:
    left, right = pen.panels(figure, 2)
    for axes, measure, title, name in (
        (left, input_over_filters, "input over filters", "direct"),
        (right, multiply_adds_per_byte, "multiply-adds per byte", "winograd"),
    ):
        values = [measure(studied.layer) for studied in study.layers]
        start = 1.0 if axes is left else min(0.1, *(value / 2 for value in values))
        low, high = min(start, *values), max(start, *values)
        room = max(high / low, 10.0) ** (0.5 if pen.narrow else 0.25)  # for the numbers beside the bars
        axes.set(xscale="log", xlim=(low / room if low < start else low, high * room), title=title)
        lines = rows(axes, study, pen, names=pen.narrow or axes is left)
        for place, studied, value in zip(lines, study.layers, values, strict=True):
            (bar,) = axes.barh(place, value - start, left=start, height=0.6, color=pen.colour(name))
            pen.tip(bar, f"{studied.name}: {value:.3g}")
            axes.annotate(
                digits(value),
                (value, place),
                xytext=(4 if value >= start else -4, 0),
                textcoords="offset points",
                va="center",
                ha="left" if value >= start else "right",
                fontsize=8,
                color=pen.palette.muted,
            )
        pen.ticks(axes.xaxis, plain)
        if axes is left:
            axes.axvline(1, color=pen.palette.muted, linewidth=0.9)
