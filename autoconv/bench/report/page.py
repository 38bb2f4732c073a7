"""One page of figures and a table, complete in itself: no scripts, and nothing from any other place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from autoconv.bench.report import layers, tradeoffs
from autoconv.bench.report.study import Study
from autoconv.bench.report.style import DARK, LIGHT, Chart, Palette, span, svg
from autoconv.common.text import shape, size

TEMPLATE = Path(__file__).with_name("page.html")


def charts(study: Study) -> list[Chart]:
    """All figures of a study.

    Parameters
    ----------
    study : Study

    Returns
    -------
    list of Chart
    """
    return [*layers.charts(study), *tradeoffs.charts(study)]


def report(study: Study) -> str:
    """The page of a study.

    Parameters
    ----------
    study : Study

    Returns
    -------
    str
        HTML.
    """
    plain = study.plain_gemm
    facts = {
        "all layers": span(study.seconds),
        "of the peak": f"{study.flops / study.seconds / study.peak:.0%}",
        "plain GEMM takes": f"{plain / study.seconds:.1f}×" if plain else "-",
        "operations": f"{study.flops / 1e9:.2f} GFLOP",
        "layers": str(sum(studied.repeat for studied in study.layers)),
        "candidates timed": str(sum(len(studied.facts) for studied in study.layers)),
    }
    about = [
        f"{study.device.name}; batch {study.batch}, {study.direction}, {study.limits.weights} filters; measured until "
        f"{study.when[:10]}"
    ]
    notes = [f"Not among these figures: {name}: {why}" for name, why in study.missing.items()]
    head = ("layer", "shape", "winner", ">time", ">share", ">GFLOP/s", ">workspace", "runner-up")
    rows = [
        (
            studied.title,
            shape(studied.layer),
            str(studied.winner),
            span(studied.best),
            f"{studied.repeat * studied.best / study.seconds:.1%}",
            f"{studied.layer.flops / studied.best / 1e9:.0f}",
            size(studied.limits.workspace(studied.facts[studied.winner])),
            str(next((c for c in studied.ranking if c != studied.winner), "-")),
        )
        for studied in study.layers
    ]
    return page(
        study.network, [study.source, *about] if study.source else about, facts, charts(study), notes, head, rows
    )


def page(
    title: str,
    about: Sequence[str],
    facts: Mapping[str, str],
    figures: Sequence[Chart],
    notes: Sequence[str],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """A page.

    Parameters
    ----------
    title : str
    about : sequence of str
        Lines under the title.
    facts : mapping of str to str
        Figures in large print, by what they are.
    figures : sequence of Chart
    notes : sequence of str
        What a reader has to know, before the figures.
    head : sequence of str
        The columns of the table; `>` before one aligns it to the right.
    rows : sequence of sequences of str
        One cell for each column.

    Returns
    -------
    str
        HTML.
    """
    links = "".join(f'<a href="#{chart.name}">{escape(chart.title)}</a>' for chart in figures)
    parts = [
        f"<header><h1>{escape(title)}</h1>",
        *(f'<p class="muted">{escape(line)}</p>' for line in about),
        "<dl>" + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items()),
        "</dl>",
        f'<nav aria-label="Figures">{links}<a href="#table">All in a table</a></nav></header>',
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        *map(_figure, figures),
        '<h2 id="table">All in a table</h2>',
        _table(head, rows),
    ]
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), light=_colours(LIGHT), dark=_colours(DARK), body="\n".join(parts))


def _figure(chart: Chart) -> str:
    drawn = "\n".join(svg(chart, narrow=narrow) for narrow in (False, True))
    return (
        f'<h2 id="{chart.name}">{escape(chart.title)}</h2>\n'
        f"<figure>\n<figcaption>{escape(chart.caption)}</figcaption>\n{drawn}\n</figure>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kinds = [' class="figure"' if name.startswith(">") else "" for name in head]
    titles = "".join(f"<th{kind}>{escape(name.removeprefix('>'))}</th>" for name, kind in zip(head, kinds, strict=True))
    lines = ("".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n<tr>{titles}</tr>\n{body}\n</table></div>'


def _colours(palette: Palette) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in palette.variables.items())
