"""The command `autoconv`: tune, explain, show, bench, info, export, import.

Exit codes: 0 done; 1 something was refused or failed, and the rest was done; 2 bad usage or bad input;
130 interrupted, with what was done until then kept.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from autoconv import __version__, registry
from autoconv.cli import tables as report
from autoconv.cli.bench import bench
from autoconv.cli.options import (
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    as_json,
    batches,
    device_named,
    directions,
    on_device,
    seconds,
    with_limits,
)
from autoconv.device import Device
from autoconv.errors import AutoconvError, ConfigError, PlanError
from autoconv.layer import DIRECTIONS, ConvLayer
from autoconv.networks import layers as network
from autoconv.networks.layers import NamedLayer, Network
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.tuning.measurement import Event
from autoconv.tuning.planner import MODES, plan

LEAST_BUDGET = 0.05  # seconds of timing for a layer whose turn comes when the budget is spent

Job = tuple[Network, NamedLayer, ConvLayer]


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Finds the fastest way to compute a convolution layer on this machine, and remembers it.

    A NET is a YAML layer list, or the name of one that comes with autoconv (see `autoconv info`).

    Exit codes: 0 done; 1 something was refused or failed, and the rest was done; 2 bad usage or input;
    130 interrupted, with what was done until then kept.
    """


cli.add_command(bench)


@cli.command()
@click.argument("nets", nargs=-1, required=True, metavar="NET...")
@batches
@directions
@on_device
@click.option("--budget", type=seconds, metavar="TIME", help="For timing all layers together, such as 60s.")
@click.option("--mode", default="profile", help="profile, hybrid, heuristic, cached, or a candidate [profile]")
@with_limits
@click.option("--isolate/--no-isolate", default=True, help="Whether a worker process does the timing. [default: yes]")
@as_json
def tune(
    nets: Sequence[str],
    batch: tuple[int, ...] | None,
    direction: tuple[str, ...],
    device_name: str,
    budget: float | None,
    mode: str,
    isolate: bool,
    as_json: bool,
    **limits: Any,
) -> int:
    """Time every candidate for every layer of NET, keep the facts, and show who wins.

    What is on record is not timed again. Ctrl-C keeps what is done; the same command then goes on from
    there.
    """
    started = time.monotonic()
    jobs = _jobs([network.load(net) for net in nets], batch, direction)
    device, cache = device_named(device_name), TuningCache()
    _check_mode(mode, device)
    options = _options(limits) | {"device": device, "cache": cache, "isolate": isolate}
    rows: dict[tuple[str, int, str], list[report.Row]] = {}
    done, interrupted = [], False
    with _meter(len(jobs)) as meter:
        try:
            for place, (net, named, layer) in enumerate(jobs):
                left = None if budget is None else started + budget - time.monotonic()
                share = None if left is None else max(left / (len(jobs) - place), LEAST_BUDGET)
                progress = meter(place, f"{net.name} {named.name}")
                row = _tuned(named, layer, mode, options | {"budget": share, "progress": progress})
                rows.setdefault((net.name, layer.N, layer.direction), []).append(row)
                done.append(row)
        except KeyboardInterrupt:
            interrupted = True
    peaks = {dtype: device.measured_peak(dtype) for dtype in {row.layer.dtype for row in done}}
    tables = [report.Table(*key, tuple(found)) for key, found in rows.items()]
    timed = sum(row.plan.timed for row in done if row.plan)
    failed = [row for row in done if row.error]
    seconds = time.monotonic() - started
    if as_json:
        report.print_json(
            {
                "device": {"name": device.name, "key": device.key, "versions": device.versions},
                "peak_gflops": {dtype: peak / 1e9 for dtype, peak in peaks.items()},
                "tables": [table.to_json(peaks) for table in tables],
                "timed": timed,
                "elapsed": seconds,
                "interrupted": interrupted,
            }
        )
    else:
        for table in tables:
            table.print(peaks)
        click.echo(f"on {device.name}; peak: {_rates(peaks)}")
        click.echo(_summary(len(done), len(jobs), timed, len(failed), seconds))
    for row in failed:
        _say("error", f"{row.name}: {row.error}")
    if interrupted:
        _say("error", f"interrupted: {len(done)} of {len(jobs)} layers are kept, the same command goes on from there")
        return INTERRUPTED
    lost = bool(timed) and not cache.persistent  # of which a warning has told
    return FAILED if failed or lost else OK


def _tuned(named: NamedLayer, layer: ConvLayer, mode: str, options: dict[str, Any]) -> report.Row:
    """The plan for a layer of a network, or why there is none."""
    found, error = None, None
    try:
        found = plan(layer, mode, **options)
    except (AutoconvError, OSError, MemoryError, RuntimeError) as failure:
        error = _one_line(failure)
    return report.Row(named.name, layer, named.repeat, found, error)


def _summary(done: int, total: int, timed: int, failed: int, seconds: float) -> str:
    layers = f"{done} layers" if done == total else f"{done} of {total} layers"
    work = f"{timed} candidates timed" if timed else "nothing timed"
    return f"{layers}, {work}" + (f", {failed} failed" if failed else "") + f", in {seconds:.1f} s"


def _rates(peaks: dict[str, float]) -> str:
    return ", ".join(f"{peak / 1e9:.0f} GFLOP/s in {dtype}" for dtype, peak in sorted(peaks.items())) or "not measured"


@cli.command()
@click.argument("what", metavar="LAYER|NET[:NAME]")
@batches
@directions
@on_device
@click.option("--mode", help="As for tune. [default: what is on record, else estimates; nothing is timed]")
@with_limits
@as_json
def explain(
    what: str,
    batch: tuple[int, ...] | None,
    direction: tuple[str, ...],
    device_name: str,
    mode: str | None,
    as_json: bool,
    **limits: Any,
) -> int:
    """Show every candidate for a layer with its time, error and workspace, or why it is out.

    The layer is a key such as fwd-float32-NCHW-N1-C64-H56-W56-K64-R3-S3-padding1x1, or NET:NAME; NET
    alone means all its layers.
    """
    device = device_named(device_name)
    _check_mode(mode or "heuristic", device)
    plans = [plan(x, mode or "heuristic", device=device, **_options(limits)) for x in _layers(what, batch, direction)]
    if as_json:
        report.print_json([_plan_json(found) for found in plans])
    else:
        click.echo("\n\n".join(found.explain() for found in plans))
    return OK


def _plan_json(found: Plan) -> dict[str, Any]:
    return {
        "layer": found.layer.key(),
        "device": found.device.key,
        "candidate": str(found.candidate),
        "from": found.source,
        "timed": found.timed,
        "workspace_bytes": found.workspace_bytes,
        "ranking": found.ranking,
        "facts": {name: facts.to_json() for name, facts in found.facts.items()},
        "reasons": {name: list(reasons) for name, reasons in found.reasons.items()},
    }


def _layers(what: str, batch: tuple[int, ...] | None, direction: tuple[str, ...]) -> list[ConvLayer]:
    """The layers an argument of `explain` means."""
    if re.match(rf"({'|'.join(DIRECTIONS)})-", what) and not Path(what).exists():
        return [ConvLayer.parse(what)]
    try:
        net, name = network.load(what), None
    except ConfigError:
        head, colon, name = what.rpartition(":")
        if not colon or Path(what).exists():
            raise
        net = network.load(head)
    wanted = {net.find(name).name} if name else {named.name for named in net.layers}
    return [layer for _, named, layer in _jobs([net], batch, direction) if named.name in wanted]


@cli.command()
@click.option("--device", "device_name", metavar="NAME", help="Only this one: cpu, cuda, cuda:N. [default: all]")
@as_json
def show(device_name: str | None, as_json: bool) -> int:
    """List what is on record: the winner of every layer on every device, its race, and the versions that ran."""
    only = None if device_name is None else device_named(device_name).key
    found = [report.standing(record) for record in TuningCache().records() if only in (None, record.device)]
    if as_json:
        report.print_json(found)
    for device in [] if as_json else dict.fromkeys(entry["device"] for entry in found):
        report.print_standings(device, [entry for entry in found if entry["device"] == device])
    if not found and not as_json:
        click.echo("nothing on record yet: try `autoconv tune alexnet`")
    return OK


@cli.command()
@on_device
@as_json
def info(device_name: str, as_json: bool) -> int:
    """Describe the device, the software, the cache, and what is missing and how to get it."""
    found = report.information(device_named(device_name), TuningCache())
    if as_json:
        report.print_json(found)
    else:
        report.print_information(found)
    return OK


@cli.command("export")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--device", "device_key", metavar="KEY", help="Only this device's, by the key that show prints.")
@as_json
def export(path: Path, device_key: str | None, as_json: bool) -> int:
    """Write the records to FILE as JSON, to share them; into a folder, one file per device."""
    cache = TuningCache()
    known = {record.device for record in cache.records()}
    if device_key is not None and device_key not in known:
        raise click.UsageError(
            f"--device {device_key}: of this nothing is on record; known are {', '.join(sorted(known)) or 'none'}"
        )
    count = cache.export(path, device_key)
    if as_json:
        report.print_json({"path": str(path), "records": count})
    else:
        click.echo(f"{count} records written to {path}")
    return OK


@cli.command("import")
@click.argument("paths", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@as_json
def import_(paths: Sequence[Path], as_json: bool) -> int:
    """Merge records that `autoconv export` wrote, here or elsewhere. Every one is checked."""
    cache = TuningCache()
    reports = {str(path): cache.import_(path) for path in paths}
    code = OK if cache.persistent else FAILED
    for path, found in reports.items():
        if not as_json:
            click.echo(f"{path}: {found.taken} new, {found.merged} merged, {found.known} known already")
        for reason in found.refused:
            code = FAILED
            _say("error", reason)
    if as_json:
        report.print_json({path: dataclasses.asdict(found) for path, found in reports.items()})
    return code


def _jobs(nets: Sequence[Network], batch: tuple[int, ...] | None, direction: tuple[str, ...]) -> list[Job]:
    return [
        (net, named, named.at(size, way))
        for net in nets
        for size in batch or net.batches
        for way in direction
        for named in net.layers
    ]


def _options(limits: dict[str, Any]) -> dict[str, Any]:
    """The limits as `plan` takes them."""
    return limits | {"vendors": {"loaded": "loaded", "all": True, "none": False}[limits["vendors"]]}


def _check_mode(mode: str, device: Device) -> None:
    known = [algorithm.name for algorithm in registry.algorithms(device)]
    if mode not in MODES and mode.partition("[")[0] not in known:
        raise click.UsageError(f"--mode {mode!r}: allowed are {', '.join((*MODES, *known))}, or one of its candidates")


@contextmanager
def _meter(total: int) -> Iterator[Callable[[int, str], Callable[[Event], None] | None]]:
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


def _one_line(error: BaseException | str) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _say(kind: str, message: str) -> None:
    click.echo(f"autoconv: {kind}: {message}", err=True)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; one line on standard error for whatever is wrong, and never a traceback for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say("warning", _one_line(message))
            code = cli.main(args, prog_name="autoconv", standalone_mode=False)
            sys.stdout.flush()
    except click.ClickException as error:
        _say("error", " ".join(error.format_message().split()))
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        _say("error", "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is quiet
        return FAILED
    except (AutoconvError, OSError) as error:
        _say("error", _one_line(error))
        return FAILED if isinstance(error, PlanError) else USAGE
    return int(code or OK)
