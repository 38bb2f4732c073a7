"""The command `autoconv`."""

from autoconv.cli.main import main

__all__ = ["main"]
