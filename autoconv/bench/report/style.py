"""How figures look. One drawing serves light and dark: the page puts its own colours in place of those drawn with."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoconv.common.text import digits, duration
from autoconv.paths import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDE, NARROW = 8.8, 3.2  # inches: a page, and a phone that nobody has to zoom
MARKERS = {
    "direct": "o",
    "gemm": "s",
    "winograd": "^",
    "fft": "D",
    "depthwise": "v",
    "matrix": "P",
    "numpy": "X",
    "torch": "<",
    "onnxruntime": ">",
}
FAMILIES = tuple(MARKERS)  # each has its colour and its marker on every figure; others share the last
OTHERS = "h"


@dataclass(frozen=True)
class Palette:
    """The colours of one scheme: paper, ink, three shades between, and one for each family and for the others."""

    paper: str
    ink: str
    muted: str
    grid: str
    accent: str
    families: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        """By the names that the page's style sheet has for them."""
        plain = {name: getattr(self, name) for name in ("paper", "ink", "muted", "grid", "accent")}
        return plain | {f"c{number}": colour for number, colour in enumerate(self.families)}


LIGHT = Palette(
    paper="#fdfdfb",
    ink="#1c2733",
    muted="#5d6977",
    grid="#dfe3e8",
    accent="#b3261e",
    families=(
        "#2b6cb0",
        "#c9701a",
        "#1f8a5b",
        "#8652e0",
        "#c74a86",
        "#2e565e",
        "#8290a1",
        "#564334",
        "#332fb8",
        "#a68a46",
    ),
)
DARK = Palette(
    paper="#12171d",
    ink="#e6eaee",
    muted="#9aa5b1",
    grid="#2b343e",
    accent="#ff8a80",
    families=(
        "#6aa9ee",
        "#f0a354",
        "#55c795",
        "#d9c4ff",
        "#ffb3d9",
        "#1f8296",
        "#8a949e",
        "#e3d3c2",
        "#7466c8",
        "#9a8750",
    ),
)
SHADES = {
    "ink": ("text.color", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor"),
    "muted": ("axes.labelcolor",),
    "grid": ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"),
    "paper": ("savefig.facecolor",),
}
_VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.variables.items()}
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name may have dollars in it
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "grid.linewidth": 0.7,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.handletextpad": 0.3,
    "legend.columnspacing": 1.4,
    "axes.titleweight": "bold",
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


@dataclass
class Pen:
    """What a figure is drawn with.

    Attributes
    ----------
    palette : Palette
    narrow : bool
        Whether the figure is for a phone.
    tips : list of str
        What a pointer that rests on a mark is told.
    """

    palette: Palette
    narrow: bool
    tips: list[str] = field(default_factory=list)

    def colour(self, family: str) -> str:
        """A family's own."""
        place = FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)
        return self.palette.families[place]

    def mark(self, family: str) -> dict[str, Any]:
        """How a family is marked: nobody has to tell colours apart."""
        look = {"marker": MARKERS.get(family, OTHERS), "color": self.colour(family)}
        return look | {"markersize": 6, "markeredgewidth": 0, "linestyle": ""}

    @property
    def ring(self) -> dict[str, Any]:
        """How a winner is marked, around whatever mark it has."""
        return {"marker": "o", "color": self.palette.ink, "markersize": 9, "markerfacecolor": "none", "linestyle": ""}

    def tip(self, mark: Any, text: str) -> None:
        """Let a mark say something to a pointer that rests on it."""
        mark.set_gid(f"tip{len(self.tips)}")
        self.tips.append(text)

    def panels(self, figure: Figure, count: int) -> Sequence[Axes]:
        """Beside one another; on a phone below one another."""
        rows, columns = (count, 1) if self.narrow else (1, count)
        found: Any = figure.subplots(rows, columns, squeeze=False)
        return list(found.flat)

    def ticks(self, axis: Axis, text: Callable[[float], str]) -> None:
        """A few ticks at round numbers on a logarithmic axis, whether it shows many decades or a part of one."""
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

        low, high = axis.get_view_interval()
        decades, finer = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)), MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3)
        for locator in (*(LogLocator(subs=subs, numticks=4 if self.narrow else 7) for subs in decades), finer):
            places = [place for place in locator.tick_values(low, high) if low <= place <= high]
            if 3 <= len(places) <= 7:
                break
        if self.narrow and locator is finer and len(places) > 4:
            places = places[::2]
        axis.set_minor_locator(NullLocator())
        axis.set_ticks(places, [text(place) for place in places])

    def legend(self, figure: Figure, families: Sequence[str], more: Sequence[Any] = ()) -> None:
        """The families' marks above everything."""
        from matplotlib.lines import Line2D

        handles = [*(Line2D([], [], label=family, **self.mark(family)) for family in families), *more]
        long = max(len(str(handle.get_label())) for handle in handles) > 12
        figure.legend(
            handles=handles,
            loc="outside upper left",
            ncols=(2 if long else 3) if self.narrow else (6 if long else 9),
        )


@dataclass(frozen=True)
class Chart:
    """One figure of a page.

    Attributes
    ----------
    name : str
        Its own on the page, and of its files.
    title, caption : str
        What it shows, and how to read it.
    height : callable
        Inches, of a pen.
    draw : callable
        Draws on a figure with a pen.
    """

    name: str
    title: str
    caption: str
    height: Callable[[Pen], float]
    draw: Callable[[Figure, Pen], None]


def svg(chart: Chart, *, narrow: bool) -> str:
    """The figure as an element of a page, in the page's colours.

    Parameters
    ----------
    chart : Chart
    narrow : bool
        For a phone.

    Returns
    -------
    str
        An `svg` element without a size of its own, whose names are its own on the page.
    """
    own = f"{chart.name}-{'narrow' if narrow else 'wide'}"
    pen, out = Pen(LIGHT, narrow), io.StringIO()
    with _styled(LIGHT, own):
        _drawn(chart, pen).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg class="{own.rpartition("-")[2]}" role="img" \1>', text, count=1
    )
    text = re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--sans)", text)
    text = re.sub(r'<g id="tip(\d+)">', lambda match: f"<g><title>{escape(pen.tips[int(match[1])])}</title>", text)
    text = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"{own}-", text)
    return text.replace(">", f"><title>{escape(chart.title)}</title>", 1)


def write_pictures(charts: Sequence[Chart], folder: Path) -> None:
    """Write figures as pictures, in light and in dark.

    Parameters
    ----------
    charts : sequence of Chart
    folder : Path
        Made, where there is none.
    """
    folder.mkdir(exist_ok=True)
    for chart in charts:
        for palette, ending in ((LIGHT, ""), (DARK, "-dark")):
            with _styled(palette):
                figure = _drawn(chart, Pen(palette, narrow=False))
                _entitle(figure, chart.title)
                out = io.BytesIO()
                figure.savefig(out, format="png", dpi=150)
            write_whole(folder / f"{chart.name}{ending}.png", out.getvalue())


def _entitle(figure: Figure, title: str) -> None:
    """Put a title above a legend, which a title of the figure would lie upon."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=12, weight="bold")
    figure.set_figheight(figure.get_figheight() + 0.3)
    for legend in figure.legends:
        legend.set_title(title, font)
        legend.set_alignment("left")
    if not figure.legends:
        figure.suptitle(title, x=0.01, ha="left", fontproperties=font)


def span(seconds: float) -> str:
    """A duration with a micro sign, which a page and a picture have whatever a terminal has."""
    return duration(seconds).replace("us", "µs")


def plain(value: float) -> str:
    """A number in as few characters as say it."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def times(value: float) -> str:
    """A factor, as people write it."""
    return f"{digits(value)}×"


@contextmanager
def _styled(palette: Palette, own: str = "autoconv") -> Iterator[None]:
    """Matplotlib as it comes, but for our settings; names that it makes up are those of a figure."""
    import matplotlib as mpl

    shades = {setting: getattr(palette, shade) for shade, settings in SHADES.items() for setting in settings}
    settings: Any = _SETTINGS | shades | {"svg.hashsalt": own}
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def _drawn(chart: Chart, pen: Pen) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(NARROW if pen.narrow else WIDE, chart.height(pen)), layout="constrained")
    chart.draw(figure, pen)
    return figure
