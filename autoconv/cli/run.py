"""The verb `autoconv run`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import numpy as np

from autoconv.cli.options import OK, as_json
from autoconv.cli.output import print_json
from autoconv.common.text import duration, print_table, size
from autoconv.networks.run.compiled import CompiledNetwork, load

if TYPE_CHECKING:
    from autoconv.networks.run.compiled import StepTime


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Images at a time, where the file leaves that open.")
@click.option("--tune", is_flag=True, help="Time the layers that have no facts yet; else by records and estimates.")
@click.option("--repeat", type=click.IntRange(1, 100_000), default=20, help="Runs to take medians of. [default: 20]")
@as_json
def run(model: str, batch: int | None, tune: bool, repeat: int, as_json: bool) -> int:
    """Run a network from an ONNX file on random numbers, and show where its time goes.

    MODEL may also be a network that `CompiledNetwork.save` wrote.
    """
    net = load(model, batch)
    if tune:
        net.tune()
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(t.shape).astype(t.dtype) for name, t in net.graph.inputs.items()}
    whole = _median_run(net, inputs, repeat)
    steps = net.profile(**inputs, repeat=repeat)
    layers = sum(step.seconds for step in steps if step.is_layer) / max(sum(step.seconds for step in steps), 1e-12)
    if as_json:
        print_json(
            {
                "network": net.graph.name,
                "device": net.device.key,
                "seconds": whole,
                "share_of_layers": layers,
                "arena_bytes": net.arena_bytes,
                "weight_bytes": net.weight_bytes,
                "steps": [vars(step) for step in steps],
            }
        )
        return OK
    print_table(
        f"{net.graph.name} on {net.device.name}",
        ("node", "operator", "by", ">time", ">share"),
        _rows(steps),
        spare=("operator",),
    )
    click.echo(
        f"{duration(whole)} in all; {layers:.0%} of the steps' time in convolutions and fully connected layers; "
        f"{size(net.arena_bytes)} of arrays, {size(net.weight_bytes)} of weights"
    )
    return OK


def _median_run(net: CompiledNetwork, inputs: dict[str, np.ndarray], repeat: int) -> float:
    net.run(**inputs)
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        net.run(**inputs)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def _rows(steps: list[StepTime]) -> list[tuple[str, ...]]:
    total = sum(step.seconds for step in steps)
    return [(s.name, s.operator, s.by, duration(s.seconds), f"{s.seconds / total:.1%}") for s in steps]
