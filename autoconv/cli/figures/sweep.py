"""The verb `autoconv sweep`."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from autoconv.cli.figures.places import check_places, page_to, pictures_to
from autoconv.cli.options import (
    FAILED,
    INTERRUPTED,
    OK,
    as_json,
    check_mode,
    device_named,
    isolated,
    layers_meant,
    numbers,
    options_of_plan,
    seconds,
    share,
    some_of,
    threads,
    with_limits,
)
from autoconv.cli.output import all_kept, failure_line, print_cut_short, print_json, progress_bar, say, say_interrupted
from autoconv.common.text import duration, print_table
from autoconv.cpu.device import CPU
from autoconv.errors import FAILURES
from autoconv.layer import DIRECTIONS, ConvLayer
from autoconv.paths import write_whole
from autoconv.tuning.choice import TIMING
from autoconv.tuning.planner import resolved_cache

if TYPE_CHECKING:
    from autoconv.bench.report.study import Studied
    from autoconv.bench.report.sweep import Sweep

EXTENTS = tuple("NCKRH")


@click.command(short_help="A layer as one extent grows: who takes over where.")
@click.argument("what", metavar="LAYER|NET:NAME")
@click.option(
    "--extent", "extents", type=some_of(EXTENTS), metavar="E,...", help=f"Some of {','.join(EXTENTS)}. [default: all]"
)
@click.option("--values", type=numbers, metavar="V,...", help="Of the one extent. [default: around the layer's own]")
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Of a layer of NET. [default: the file's first]")
@click.option("--direction", type=click.Choice(DIRECTIONS), help="Of a layer of NET. [default: the file's, or fwd]")
@click.option("--budget", type=seconds, metavar="TIME", help="For timing all layers together, such as 60s.")
@click.option("--mode", default="profile", help="As for tune; cached times nothing. [default: profile]")
@threads
@with_limits
@isolated
@page_to
@pictures_to
@as_json
def sweep(
    what: str,
    extents: tuple[str, ...] | None,
    values: tuple[int, ...] | None,
    batch: int | None,
    direction: str | None,
    threads: int | None,
    budget: float | None,
    mode: str,
    isolate: bool,
    page: Path | None,
    pictures: Path | None,
    as_json: bool,
    **limits: Any,
) -> int:
    """Let one extent of a layer grow at a time, and show where one algorithm takes over from another.

    N images, C channels, K filters, R height and width of the filters, H height and width of the images. What
    is on record is not timed again, so that the same command goes on where it was interrupted.
    """
    from autoconv.bench.report import sweep as drawing
    from autoconv.bench.report.study import studied
    from autoconv.bench.report.style import write_pictures

    if values is not None and (extents is None or len(extents) > 1):
        raise click.UsageError("--values: expected --extent with one extent as well")
    if page is not None or pictures is not None:
        check_places(page, pictures)
    layer, device, cache = _meant(what, batch, direction), cast(CPU, device_named("cpu", threads)), resolved_cache(None)
    check_mode(mode, device)
    jobs = [(e, v) for e in extents or EXTENTS for v in sorted(values or drawing.values_of(layer, e))]
    layers = [drawing.varied(layer, extent, value) for extent, value in jobs]
    options = options_of_plan(limits) | {"isolate": isolate}
    done: list[tuple[str, int, Studied]] = []
    failed: list[str] = []
    interrupted, end = False, None if budget is None else time.monotonic() + budget
    with progress_bar(len(jobs)) as begin:
        try:
            if mode in TIMING:
                turned = time.monotonic()
                with cache.timing_lock(device.key):
                    end = None if end is None else end + time.monotonic() - turned  # what others take is not ours
                    device.survey()
            for place, ((extent, value), each) in enumerate(zip(jobs, layers, strict=True)):
                left, progress = share(end, len(jobs) - place), begin(place, f"{extent}={value}")
                try:
                    timing = {"mode": mode, "budget": left, "progress": progress}
                    done.append((extent, value, studied(f"{extent}={value}", 1, each, device, cache, options | timing)))
                except FAILURES as error:
                    failed.append(f"{extent}={value}: {failure_line(error)}")
        except KeyboardInterrupt:
            interrupted = True
    grouped = itertools.groupby(done, key=lambda point: point[0])
    sweeps = [drawing.Sweep(extent, tuple((value, s) for _, value, s in points)) for extent, points in grouped]
    if as_json:
        print_json({"layer": layer.key(), "device": device.key, "sweeps": [_json(found) for found in sweeps]})
    else:
        for found in sweeps:
            _print(found)
        if budget is not None:
            print_cut_short([studied.cut_short for *_, studied in done])
    if sweeps and page is not None:
        write_whole(page, drawing.report(layer, sweeps))
    if sweeps and pictures is not None:
        write_pictures(drawing.charts(sweeps), pictures)
    written = [str(place) for place in (page, pictures) if sweeps and place is not None]
    if written and not as_json:
        click.echo(f"written: {', '.join(written)}")
    for line in failed:
        say("error", line)
    if interrupted:
        say_interrupted(len(done), len(jobs))
        return INTERRUPTED
    return FAILED if failed or not all_kept() else OK


def _meant(what: str, batch: int | None, direction: str | None) -> ConvLayer:
    """The one layer that a LAYER or NET:NAME means, at the first of the batch sizes and directions that it has."""
    sizes, ways = None if batch is None else (batch,), None if direction is None else (direction,)
    meant = layers_meant(what, sizes, ways)
    meant = [layer for layer in meant if layer.direction == meant[0].direction]
    different = len({layer.replace(N=1) for layer in meant})
    if different != 1:
        raise click.UsageError(f"{what}: expected one layer, a key or NET:NAME, got {different}")
    return meant[0]


def _print(each: Sweep) -> None:
    rows = []
    for value, studied in each.points:
        others = [candidate for name, candidate in studied.fastest_allowed.items() if name != studied.winner.algorithm]
        second = f"{others[0].algorithm} {studied.seconds(others[0]) / studied.best:.2f}x" if others else "-"
        rate = studied.layer.flops / studied.best / 1e9
        rows.append([str(value), str(studied.winner), duration(studied.best), f"{rate:.1f}", second])
    columns = [f">{each.extent}", "winner", ">time", ">GFLOP/s", "next algorithm"]
    print_table(f"as {each.extent} grows", columns, rows, spare=["next algorithm"])
    for takeover in each.takeovers:
        click.echo(f"{each.extent}: {takeover}")


def _json(each: Sweep) -> dict[str, Any]:
    return {
        "extent": each.extent,
        "points": [
            {
                "value": value,
                "layer": studied.layer.key(),
                "winner": str(studied.winner),
                "seconds": {name: studied.seconds(candidate) for name, candidate in studied.fastest_allowed.items()},
            }
            for value, studied in each.points
        ],
        "takeovers": [vars(takeover) for takeover in each.takeovers],
    }
