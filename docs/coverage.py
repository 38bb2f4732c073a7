"""The tables of the page on coverage, computed from what the algorithms declare, when the site is built.

`python docs/coverage.py` prints them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.layer import DIRECTIONS, DTYPES, GROUPINGS, LAYOUTS

KINDS = {"cpu": "CPU", "cuda": "CUDA"}
COLUMNS = {"directions": DIRECTIONS, "dtypes": tuple(DTYPES), "layouts": LAYOUTS, "groupings": GROUPINGS}


def algorithms(kind: str) -> list[Algorithm[Any]]:
    """Those of our own, in the order of the device's table of contents."""
    families = import_module(f"autoconv.{kind}").FAMILIES
    found = [a for name in families for a in import_module(f"autoconv.{kind}.{name}").ALGORITHMS]
    return [algorithm for algorithm in found if algorithm.vendor is None]


def table(kind: str) -> str:
    """A row for each algorithm of a kind of device, as Markdown."""
    lines = [
        "| algorithm | directions | types | layouts | channels | dilated | epilogue |",
        "|---|---|---|---|---|---|---|",
    ]
    for algorithm in algorithms(kind):
        cells = [f"`{algorithm.name}`"]
        for name, every in COLUMNS.items():
            declared = getattr(algorithm, name)
            some = [v for v in every if v in declared] or declared  # integers are not among all types
            cells.append("all" if set(declared) == set(every) else ", ".join(some))
        cells.append("yes" if algorithm.dilated else "no")
        applied = [direction for direction in algorithm.directions if direction in algorithm.epilogue]
        cells.append(", ".join(applied) if set(algorithm.directions) != {"wgrad"} and applied else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs calls this for every page."""
    for kind in KINDS:
        mark = f"<!-- coverage: {kind} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, table(kind))
    return markdown


if __name__ == "__main__":
    for kind, name in KINDS.items():
        print(f"{name}\n\n{table(kind)}\n")
