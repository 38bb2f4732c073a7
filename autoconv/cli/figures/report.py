"""The verb `autoconv report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from autoconv import networks
from autoconv.cli.figures.places import check_places, page_to, pictures_to
from autoconv.cli.options import FAILED, OK, device_named, options_of_plan, threads, with_limits
from autoconv.cli.output import failure_line, say
from autoconv.cpu.device import CPU
from autoconv.layer import DIRECTIONS
from autoconv.paths import write_whole
from autoconv.records.cache import TuningCache


@click.command(short_help="What is on record of a network, as a page of figures.")
@click.argument("net", metavar="NET")
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Batch size. [default: the file's first]")
@click.option("--direction", type=click.Choice(DIRECTIONS), default="fwd", help="[default: fwd]")
@threads
@with_limits
@page_to
@pictures_to
def report(
    net: str,
    batch: int | None,
    direction: str,
    threads: int | None,
    page: Path | None,
    pictures: Path | None,
    **limits: Any,
) -> int:
    """Draw what is on record of a network's layers: one page that needs nothing else, or pictures.

    Time by algorithm, where the time goes, operation counts, the roofline with every candidate, error and
    workspace against time. Nothing is timed: tune NET first. A layer without a record is named, and left out.
    """
    if page is None and pictures is None:
        raise click.UsageError("expected -o FILE, --png FOLDER or both")
    check_places(page, pictures)
    from autoconv.bench.report.page import charts
    from autoconv.bench.report.page import report as drawn
    from autoconv.bench.report.study import gather
    from autoconv.bench.report.style import write_pictures

    found = networks.load(net, batch)
    size = batch or found.batches[0]
    device = cast(CPU, device_named("cpu", threads))
    study = gather(found, size, direction, device, TuningCache(), options_of_plan(limits))
    if page is not None:
        write_whole(page, drawn(study))
    if pictures is not None:
        write_pictures(charts(study), pictures)
    for name, why in study.missing.items():
        say("warning", f"{name} is left out: {failure_line(why)}")
    written = ", ".join(str(place) for place in (page, pictures) if place is not None)
    click.echo(
        f"{study.network}, batch {size}, {direction}: {len(study.layers)} of {len(found.layers)} layers: {written}"
    )
    return FAILED if study.missing else OK
