"""Where the data files lie that come with autoconv."""

from __future__ import annotations

from pathlib import Path


def shipped(folder: str) -> Path:
    """The folder of data files (`configs` or `cache`) that came with this installation.

    A wheel carries them inside the package; an editable install finds them at the root of the
    repository, recognised by its pyproject.toml, so that a stranger's `cache` beside an installed
    package is never taken for ours. The folder may be missing; the path then names where it belongs.
    """
    package = Path(__file__).parent
    root = package.parent
    if not (package / folder).is_dir() and (root / "pyproject.toml").is_file() and (root / folder).is_dir():
        return root / folder
    return package / folder
