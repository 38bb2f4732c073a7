"""One page of figures and a table, complete in itself: no scripts, and nothing from any other place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from autoconv.bench.report import layers, tradeoffs
from autoconv.bench.report.study import Studied, Study
from autoconv.bench.report.style import DARK, LIGHT, Chart, Palette, span, svg, times
from autoconv.common.text import count, digits, operations, shape, size
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.model import BUSY

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Table:
    """The figures of a page as numbers.

    Attributes
    ----------
    caption : str
        What the columns say.
    head : sequence of str
        Their names; `>` before one aligns the column to the right.
    rows : sequence of sequences of str
        One cell for each column.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


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
    facts = {
        "layers on record" if study.missing else "all layers": span(study.seconds),
        "of the peak": f"{study.flops / study.seconds / study.peak:.0%}",
        "operations": operations(study.flops),
        "layers": str(sum(studied.repeat for studied in study.layers)),
        "candidates timed": str(sum(len(studied.facts) for studied in study.layers)),
    }
    if study.plain_gemm is not None:
        facts["plain GEMM takes"] = times(study.plain_gemm / study.seconds)
    about = [
        f"{study.device.name}; batch {study.batch}, {study.direction}, {study.limits.weights} filters; measured until "
        f"{study.when[:10]}"
    ]
    notes: dict[str, list[str]] = {remark: [] for remark in remarks(study.device)}
    if study.missing:
        missing = f"Not among these figures: {count(len(study.missing), 'layer')}"
        notes[missing] = [f"{name}: {why}" for name, why in study.missing.items()]
    meant = study.batch, study.direction
    own = [s for s in study.layers if (s.layer.N, s.layer.direction) != meant]
    if own:
        title = f"At a batch size or in a direction of its own: {count(len(own), 'layer')}"
        notes[title] = [f"{s.name}: batch {s.layer.N}, {s.layer.direction}" for s in own]
    table = Table(
        "The time of one run; the share of all layers, as often as the network has them; operations of the direct sum "
        "per second; scratch memory; and how many times as long the second best takes. A shape is input, filters, "
        "s for stride, d for dilation and g for groups.",
        ("layer", ">time", ">share", "winner", "runner-up", "shape", ">GFLOP/s", ">workspace"),
        [
            (
                studied.title,
                span(studied.best),
                f"{studied.repeat * studied.best / study.seconds:.1%}",
                str(studied.winner),
                _second(studied),
                shape(studied.layer),
                digits(studied.layer.flops / studied.best / 1e9),
                size(studied.limits.workspace(studied.facts[studied.winner])),
            )
            for studied in study.layers
        ],
    )
    return page(study.network, [study.source, *about] if study.source else about, facts, charts(study), notes, table)


def _second(studied: Studied) -> str:
    """The best after the winner, and how many times as long it takes."""
    found = next((candidate for candidate in studied.ranking if candidate != studied.winner), None)
    return "-" if found is None else f"{found} {studied.seconds(found) / studied.best:.2f}×"


def remarks(device: CPU) -> list[str]:
    """What a reader has to know of the machine.

    Parameters
    ----------
    device : CPU

    Returns
    -------
    list of str
    """
    busy = device.machine.busy
    if busy <= BUSY:
        return []
    return [
        f"Others used {busy:.0%} of the processor while the peak and the bandwidths were measured, which may be higher "
        "than is said here: autoconv info measures them again."
    ]


def page(
    title: str,
    about: Sequence[str],
    facts: Mapping[str, str],
    figures: Sequence[Chart],
    notes: Mapping[str, Sequence[str]],
    table: Table,
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
    notes : mapping of str to sequence of str
        What a reader has to know, before the figures; and what unfolds under it.
    table : Table

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
        *(_note(note, more) for note, more in notes.items()),
        *map(_figure, figures),
        '<h2 id="table">All in a table</h2>',
        _table(table),
    ]
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), light=_colours(LIGHT), dark=_colours(DARK), body="\n".join(parts))


def _note(note: str, more: Sequence[str]) -> str:
    if not more:
        return f'<p class="note">{escape(note)}</p>'
    lines = "".join(f"<li>{escape(line)}</li>" for line in more)
    return f'<details class="note"><summary>{escape(note)}</summary><ul>{lines}</ul></details>'


def _figure(chart: Chart) -> str:
    drawn = "\n".join(svg(chart, narrow=narrow) for narrow in (False, True))
    return (
        f'<h2 id="{chart.name}">{escape(chart.title)}</h2>\n'
        f"<figure>\n<figcaption>{escape(chart.caption)}</figcaption>\n{drawn}\n</figure>"
    )


def _table(table: Table) -> str:
    kinds = [' class="figure"' if name.startswith(">") else "" for name in table.head]
    named = zip(table.head, kinds, strict=True)
    titles = "".join(f'<th scope="col"{kind}>{escape(name.removeprefix(">"))}</th>' for name, kind in named)
    cells = (zip(row, kinds, strict=True) for row in table.rows)
    body = "\n".join("<tr>" + "".join(f"<td{kind}>{_cell(text)}</td>" for text, kind in row) + "</tr>" for row in cells)
    return (
        f'<p class="muted">{escape(table.caption)}</p>\n'
        '<div class="scroll" role="region" aria-labelledby="table" tabindex="0"><table>\n'
        f"<thead><tr>{titles}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cell(text: str) -> str:
    """A cell whose long names may break where a part of them ends."""
    return re.sub(r"(?<=[\[,/])(?=.)", "<wbr>", escape(text))


def _colours(palette: Palette) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in palette.variables.items())
