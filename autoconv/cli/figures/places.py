"""Where the verbs that draw write to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from autoconv.cli.options import check_place

page_to = click.option(
    "-o", "--output", "page", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="A page, as HTML."
)
pictures_to = click.option(
    "--png",
    "pictures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Every figure as a picture, in light and in dark.",
)


def check_places(page: Path | None, pictures: Path | None) -> None:
    """A usage error where there is nothing to draw with, or no place for a page or for pictures."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("to draw needs matplotlib, which is not installed: pip install 'autoconv[report]'")
    check_place("-o", page)
    check_place("--png", pictures)
