"""The verbs that concern what is on record: `autoconv show`, `export` and `import`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoconv.cli.options import FAILED, OK, USAGE, as_json, device_named
from autoconv.cli.output import failure_line, print_json, say
from autoconv.common.text import count, duration, print_table
from autoconv.errors import AutoconvError, RecordError
from autoconv.layer import ConvLayer
from autoconv.records.cache import ImportReport, TuningCache
from autoconv.records.limits import Limits, ranking

if TYPE_CHECKING:
    from autoconv.records.schema import Record

ANYTHING = Limits(allow_tf32=True)  # by which `show` names a winner: filters vary, so that packing counts


@click.command(short_help="Who won on which device, in which race.")
@click.option(
    "--device", "device_name", metavar="NAME", help="Only this one: cpu, cuda, cuda:N. [default: all of yours]"
)
@click.option("--all", "every", is_flag=True, help="With what comes with autoconv and is of other devices.")
@as_json
def show(device_name: str | None, every: bool, as_json: bool) -> int:
    """List what is on record: the winner of every layer on every device, its race, and the versions that ran.

    This machine comes first. What comes with autoconv and is of other devices is only counted, but in JSON.
    """
    cache, here = TuningCache(), device_named(device_name or "cpu").key
    records = [record for record in cache.records() if device_name is None or record.device == here]
    if as_json:
        print_json([standing(record) for record in records])
        return OK
    listed = [record for record in records if every or record.device == here or cache.is_own(record)]
    for device in sorted(dict.fromkeys(record.device for record in listed), key=lambda device: device != here):
        print_standings(device, [standing(record) for record in listed if record.device == device])
    if not listed:
        click.echo("nothing on record yet: try `autoconv tune alexnet`")
    if others := len(records) - len(listed):
        click.echo(f"{others} records of other devices come with autoconv: `autoconv show --all` lists them")
    return OK


@click.command("export", short_help="Write the records as JSON, to share them.")
@click.argument("path", metavar="FILE", type=click.Path())
@click.option("--device", "device_key", metavar="KEY", help="Only this device's, by the key that show prints.")
@as_json
def export(path: str, device_key: str | None, as_json: bool) -> int:
    """Write the records to FILE as JSON, to share them; into a folder, one file per device."""
    cache = TuningCache()
    known = {record.device for record in cache.records() if cache.is_own(record)}
    if device_key is not None and device_key not in known:
        others = f": expected one of {', '.join(sorted(known))}" if known else ", nor for any other"
        raise click.UsageError(f"--device {device_key}: nothing is on record for this device{others}")
    written = cache.export(path, device_key)
    if as_json:
        print_json({"path": str(path), "records": written})
    else:
        click.echo(f"{count(written, 'record')} written to {path}")
    return OK


@click.command("import", short_help="Merge the records of others.")
@click.argument("paths", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@as_json
def import_(paths: Sequence[Path], as_json: bool) -> int:
    """Merge records that `autoconv export` wrote, here or elsewhere. Every one is checked."""
    cache = TuningCache()
    reports, unread = dict[str, ImportReport](), list[str]()
    for path in paths:
        try:
            reports[str(path)] = cache.import_(path)
        except RecordError as error:
            unread.append(failure_line(error))
    code = OK if cache.persistent and not unread else FAILED
    for name, found in reports.items():
        if not as_json:
            click.echo(f"{name}: {found.taken} new, {found.merged} merged, {found.known} known already")
        for reason in found.refused:
            code = FAILED
            say("error", reason)
    for line in unread:
        say("error", line)
    if not reports:
        return USAGE
    if as_json:
        print_json({name: dataclasses.asdict(found) for name, found in reports.items()})
    return code


def standing(record: Record) -> dict[str, Any]:
    """Who wins a record when anything is allowed, and where that comes from; plain JSON types."""
    facts = record.facts()
    try:
        arrays = ConvLayer.parse(record.layer).bytes
    except AutoconvError:  # it is of a version that knows other layers
        arrays = 0
    best = next(iter(ranking(facts, ANYTHING, arrays)), None)
    races = [race for race in record.races if best is None or (best in race.facts and race.facts[best].timed)]
    return {
        "device": record.device,
        "layer": record.layer,
        "winner": str(best) if best else None,
        "seconds": ANYTHING.cost(facts[best]) if best else None,
        "candidates": len(facts),
        "races": [
            {"id": r.id, "when": r.when, "isolated": r.isolated, "candidates": len(r.facts), "versions": r.versions}
            for r in races
        ],
    }


def print_standings(device: str, standings: Sequence[dict[str, Any]]) -> None:
    """The winners on one device as a table."""
    rows = []
    for found in standings:
        last = found["races"][-1]
        versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        rows.append(
            [
                found["layer"],
                found["winner"] or "none",
                duration(found["seconds"]) if found["seconds"] else "-",
                str(found["candidates"]),
                last["when"][:16].replace("T", " ") + ("" if last["isolated"] else ", in process"),
                versions,
            ]
        )
    columns = ["layer", "winner", ">time", ">candidates", "raced (UTC)", "versions"]
    print_table(device, columns, rows, spare=["versions", ">candidates", "raced (UTC)"])
