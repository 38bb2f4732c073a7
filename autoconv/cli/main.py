"""The command `autoconv`: its verbs, and one line for whatever goes wrong."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import click

from autoconv import __version__
from autoconv.cli.bench import bench
from autoconv.cli.explain import explain
from autoconv.cli.figures.report import report
from autoconv.cli.figures.sweep import sweep
from autoconv.cli.info import info
from autoconv.cli.networks.compare import compare
from autoconv.cli.networks.run import layers, run
from autoconv.cli.options import FAILED, INTERRUPTED, OK, USAGE
from autoconv.cli.output import failure_line, notes_said, say
from autoconv.cli.records import export, import_, show
from autoconv.cli.tune import tune
from autoconv.common.text import one_line
from autoconv.errors import AutoconvError, CacheWarning, PlanError


class _InOrder(click.Group):
    """Its verbs are listed as they were added, the first ones first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Finds the fastest way to compute a convolution layer on this machine, and remembers it.

    A NET is a YAML layer list, an ONNX file, or the name of one that comes with autoconv (see `autoconv info`).

    Exit codes: 0 done; 1 something was refused, failed, or could not be kept on disk, and the rest was done;
    2 bad usage or input; 130 interrupted, with what was done until then kept.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(USAGE)


for verb in (tune, explain, run, layers, compare, report, sweep, show, info, bench, export, import_):
    cli.add_command(verb)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; one line on standard error for whatever is wrong, and never a traceback for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings(), notes_said():
            if any(action == "error" for action, *_ in warnings.filters):  # as by python -W error
                for kind in (CacheWarning, RuntimeWarning):  # of records, and of compiled kernels
                    warnings.filterwarnings("default", category=kind, module="autoconv")
            warnings.showwarning = lambda message, *_, **__: say("warning", one_line(message))
            code = cli.main(args, prog_name="autoconv", standalone_mode=False)
            sys.stdout.flush()
    except click.ClickException as error:
        say("error", one_line(error.format_message()))
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        say("error", "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is quiet
        return FAILED
    except MemoryError as error:
        say("error", f"out of memory: {one_line(error)}")
        return FAILED
    except (AutoconvError, OSError) as error:
        say("error", failure_line(error))
        return FAILED if isinstance(error, PlanError) else USAGE
    return int(code or OK)
