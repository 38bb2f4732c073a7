"""What the verbs of the command write besides their tables: JSON, messages, and how far they have come."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from autoconv.common.text import count, one_line
from autoconv.errors import ConfigError
from autoconv.tuning.planner import resolved_cache

if TYPE_CHECKING:
    from autoconv.tuning.measurement import Event

# The library's arguments that are options of the command as well, where a message gives one in the way of a call. In
# brackets stand the parameters of a candidate, which are none.
ARGUMENTS = (
    *("batch", "budget", "denormals", "deterministic", "exact", "isolate"),
    *("mode", "tolerance", "vendors", "weights", "workspace_limit"),
)
_PLACE = re.compile(r".+?:\d+: ")  # in a file, which has keys and no options
_GIVEN = re.compile(rf"(?<![^\s(])({'|'.join(ARGUMENTS)})=(?:'([^']*)'|([^\s,:;)]*))")


def failure_line(failure: BaseException | str) -> str:
    """What the library, or an exception of it, says: on one line, with options in the place of arguments."""
    text = one_line(failure)
    return text if isinstance(failure, ConfigError) and _PLACE.match(text) else _GIVEN.sub(_option, text)


def _option(given: re.Match[str]) -> str:
    name, value = "--" + given[1].replace("_", "-"), given[2] or given[3]
    return name if value in ("True", "...") else f"{name} {value}"


def print_json(document: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_cut_short(cut_short: Sequence[bool]) -> None:
    """For how many of the layers that are done, if any, the budget was too small."""
    if any(cut_short):
        left = f"{sum(cut_short)} of {count(len(cut_short), 'layer')}"
        click.echo(f"not finished within the budget: {left}; a larger one goes on there")


def say(kind: str, message: str) -> None:
    """One line on standard error: an "error", a "warning" or a "note"."""
    click.echo(f"autoconv: {kind}: {message}", err=True)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("note", one_line(record.getMessage()))


@contextmanager
def notes_said() -> Iterator[None]:
    """Show meanwhile what the library has to say beside warnings."""
    log, notes = logging.getLogger("autoconv"), _Notes()
    log.addHandler(notes)
    try:
        yield
    finally:
        log.removeHandler(notes)


def all_kept() -> bool:
    """Whether all that was timed is on disk; where it is not, a warning has told why."""
    return not resolved_cache(None).lost


def say_interrupted(done: int, total: int) -> None:
    """That some layers are left, of those that are timed one after the other."""
    further = "done, and kept; the same command goes on from there" if all_kept() else "done, and not all of it kept"
    say("error", f"interrupted: {done} of {count(total, 'layer')} {further}")


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
