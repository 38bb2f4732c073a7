"""Where the verbs that draw write to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

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
    if page is not None and not page.absolute().parent.is_dir():
        raise click.UsageError(f"-o {page}: there is no folder {page.parent}")
    if pictures is not None and not pictures.is_dir():
        raise click.UsageError(f"--png {pictures}: there is no such folder")
