"""What the verbs of the command write besides their tables: JSON, messages, and how far they have come."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from autoconv.tuning.measurement import Event


def print_json(document: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def say(kind: str, message: str) -> None:
    """One line on standard error: an "error" or a "warning"."""
    click.echo(f"autoconv: {kind}: {message}", err=True)


def say_interrupted(done: int, total: int) -> None:
    """That some layers are left, of those that are timed one after the other."""
    say("error", f"interrupted: {done} of {total} layers are done and kept; the same command goes on from there")


def status(line: str) -> None:
    """What is going on, on one line of standard error that the next overwrites; only on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{line}\r", err=True, nl=False)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, str], Callable[[Event], None] | None]]:
    """A progress bar with the time left, on standard error, and only on a terminal."""
    if not sys.stderr.isatty():
        yield lambda place, label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar, text = BarColumn(bar_width=24), TextColumn("{task.description}", markup=False)
    with Progress(bar, TimeRemainingColumn(), text, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total)

        def begin(place: int, label: str) -> Callable[[Event], None]:
            shown.update(task, completed=place, description=label)

            def on_event(event: Event) -> None:
                half = 0.5 if event.stage == "race" else 0.0
                part = 1.0 if event.stage == "done" else half + 0.5 * min(event.done / max(event.total, 1), 1.0)
                shown.update(
                    task, completed=place + part, description=f"{label}: {event.stage} {event.candidate or ''}"
                )

            return on_event

        yield begin
