"""The verb `autoconv explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from autoconv.cli.options import (
    FAILED,
    OK,
    as_json,
    batches,
    check_mode,
    device_named,
    directions,
    layers_meant,
    on_device,
    options_of_plan,
    threads,
    with_limits,
)
from autoconv.cli.output import all_kept, failure_line, print_json, say
from autoconv.errors import FAILURES
from autoconv.tuning.planner import plan

if TYPE_CHECKING:
    from autoconv.plans import Plan


@click.command(short_help="Every candidate for a layer, or why it is out.")
@click.argument("what", metavar="LAYER|NET[:NAME]")
@batches
@directions
@on_device
@threads
@click.option("--mode", help="As for tune. [default: what is on record, else estimates; nothing is timed]")
@with_limits
@as_json
def explain(
    what: str,
    batch: tuple[int, ...] | None,
    direction: tuple[str, ...] | None,
    device_name: str,
    threads: int | None,
    mode: str | None,
    as_json: bool,
    **limits: Any,
) -> int:
    """Show every candidate for a layer with its time, error and workspace, or why it is out.

    The layer is NET:NAME, or a key; NET alone means all its layers. A key reads like

    fwd-float32-NCHW-N1-C64-H56-W56-K64-R3-S3-padding1x1
    """
    device = device_named(device_name, threads)
    mode = mode or "heuristic"
    check_mode(mode, device)
    plans, failed = [], []
    for layer in layers_meant(what, batch, direction, device):
        try:
            plans.append(plan(layer, mode, device=device, **options_of_plan(limits)))
        except FAILURES as failure:
            failed.append(f"{layer}: {failure_line(failure)}")
    if as_json:
        print_json([_plan_json(found) for found in plans])
    elif plans:
        click.echo("\n\n".join(found.explain() for found in plans))
    for line in failed:
        say("error", line)
    return FAILED if failed or not all_kept() else OK


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
