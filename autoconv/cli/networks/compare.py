"""The verb `autoconv compare`."""

from __future__ import annotations

import math
from typing import cast

import click

from autoconv import networks
from autoconv.bench import strategies
from autoconv.bench.baselines import BASELINES
from autoconv.bench.strategies import CHOOSING, Comparison
from autoconv.cli.options import FAILED, OK, as_json, device_named, isolated, rounds, seconds, some_of, threads
from autoconv.cli.output import all_kept, failure_line, print_json, say, status
from autoconv.common.text import duration, print_table, size
from autoconv.cpu.device import CPU
from autoconv.tuning.timing.full_speed import slowness


@click.command(short_help="A network under fixed strategies, and under our choices.")
@click.argument("net", metavar="NET")
@click.option("--batch", type=click.IntRange(1), default=1, metavar="N", help="[default: 1]")
@click.option("--training", is_flag=True, help="Both gradients as well, with filters that vary.")
@click.option(
    "--against",
    type=some_of(BASELINES),
    default=None,
    metavar="BASELINE,...",
    help=f"Some of {','.join(BASELINES)}. [default: all that are installed]",
)
@threads
@rounds
@click.option("--budget", type=seconds, metavar="TIME", help="For timing the candidates of one layer, such as 2s.")
@isolated
@as_json
def compare(
    net: str,
    batch: int,
    training: bool,
    against: tuple[str, ...] | None,
    threads: int | None,
    rounds: int,
    budget: float | None,
    isolate: bool,
    as_json: bool,
) -> int:
    """Time a network's layers under fixed strategies, and under those that choose.

    direct, gemm, fft and winograd compute every layer that they can by one family of algorithms, the best of its
    candidates on record, and the others as GEMM or directly. heuristic chooses by estimates alone, hybrid by timing the
    few best of those, profile by timing. Other libraries take part where they are installed. What is compared is the
    sum of the layers; `autoconv run --against` races whole networks.
    """
    missing = {name: BASELINES[name].missing() for name in against or BASELINES}
    if against and (lacking := [f"{name}: {', '.join(missing[name])}" for name in against if missing[name]]):
        raise click.UsageError(f"--against: not installed, {'; '.join(lacking)}")
    found = strategies.compare(
        networks.load(net, batch),
        batch,
        cast(CPU, device_named("cpu", threads)),
        training=training,
        baselines=[name for name in missing if not missing[name]],
        rounds=rounds,
        budget=budget,
        isolate=isolate,
        say=status,
    )
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)
    for name, why in found.failures.items():
        say("warning", f"{name}: {why}")
    for label, why in found.left_out.items():
        say("error", f"{label} is left out: {failure_line(why)}")
    unknown = any(math.isnan(cost.seconds) for name, cost in found.costs.items() if name in CHOOSING)
    return FAILED if unknown or found.left_out or not all_kept() else OK


def _print(found: Comparison) -> None:
    best = found.costs["profile"].seconds
    rows = []
    for name, cost in sorted(found.costs.items(), key=lambda item: (math.isnan(item[1].seconds), item[1].seconds)):
        known = not math.isnan(cost.seconds)
        time = (duration(cost.seconds), f"{cost.seconds / best:.2f}") if known else ("-", "-")
        memory = ["-" if nbytes is None else size(nbytes) for nbytes in (cost.workspace, cost.packed)]
        rows.append((name, *time, *memory, str(len(cost.elsewhere) or "")))
    what = "training" if found.training else "inference"
    print_table(
        f"{found.network}, batch {found.batch}, {what}, on {found.device.name}",
        ("strategy", ">time", ">over profile", ">workspace", ">packed filters", ">layers elsewhere"),
        rows,
        spare=(">packed filters",),
    )
    click.echo(
        "time: the sum over all layers, repeats counted; workspace: of the layer that needs most; layers elsewhere: "
        "those that the family cannot compute"
    )
    if found.slow:
        click.echo(f"{slowness(found.slow)}, which disturbs these figures")
