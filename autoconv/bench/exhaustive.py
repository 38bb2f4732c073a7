"""How far from the best of a whole grid a search ends: every candidate of a layer is timed, and the best once more.

`python -m autoconv.bench.exhaustive mixed27:alexnet_conv3 --output FOLDER --seconds 140` times as much of the grid as
fits into the time, and goes on from there when it is called again. When all of it is timed, the tuner's winner, from
the records of the cache, races against the five best of the grid; the ratio of their medians says what the search has
missed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from autoconv import networks, registry
from autoconv.algorithm import Candidate
from autoconv.bench import lines
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.records.schema import Facts
from autoconv.tuning.candidates import CandidateSet
from autoconv.tuning.planner import plan
from autoconv.tuning.worker import Worker

TOGETHER = 8  # candidates between two looks at the clock
FINALISTS = 5


def whole_grid(layer: ConvLayer, device: Device) -> list[Candidate]:
    """Every candidate of a layer that is worth timing, no vendor's, in the order of the estimates."""
    return CandidateSet(layer, device, registry.algorithms(device), frozenset()).worth_timing()


def read(path: Path) -> dict[Candidate, Facts]:
    """What is timed of a grid by today's code: a file of one candidate a line."""
    found = {Candidate.parse(line["candidate"]): Facts.from_json(line["facts"]) for line in lines.read(path)}
    versions = {name: algorithm.version for name, algorithm in registry.by_name(registry.this_device()).items()}
    return {one: facts for one, facts in found.items() if facts.version == versions.get(one.algorithm)}


def extend(path: Path, layer: ConvLayer, device: Device, seconds: float) -> list[Candidate]:
    """Time more of a layer's grid.

    Parameters
    ----------
    path : Path
        The file of what is timed; lines are added to it.
    layer : ConvLayer
    device : Device
    seconds : float
        After which no more are begun.

    Returns
    -------
    list of Candidate
        Those that are left.
    """
    begun, timed = time.monotonic(), read(path)
    left = [candidate for candidate in whole_grid(layer, device) if candidate not in timed]
    if not left:
        return []
    best = sorted((c for c in timed if timed[c].timed), key=lambda c: timed[c].time)[:1]
    worker = Worker(device).begin(layer)
    try:
        worker.enter(best)  # so that those far behind are dropped as soon as they were before
        with lines.adding(path) as add:
            while left and time.monotonic() - begun < seconds:
                block, left = left[:TOGETHER], left[TOGETHER:]
                _keep(add, worker.enter(block))
            # All at the pace of the end: until then, those that came late look the better for it.
            _keep(add, worker.finish())
    finally:
        worker.close()
    return left


def _keep(add: Callable[[Any], None], found: dict[Candidate, Facts]) -> None:
    for candidate, facts in found.items():
        add({"candidate": str(candidate), "facts": facts.to_json()})


def judge(layer: ConvLayer, device: Device, grid: dict[Candidate, Facts], winner: Candidate) -> dict[Candidate, Facts]:
    """The facts of the winner and of the grid's best, raced once more."""
    timed = sorted((c for c in grid if grid[c].timed), key=lambda c: grid[c].time)
    worker = Worker(device)
    try:
        return worker.measure(layer, list(dict.fromkeys([winner, *itertools.islice(timed, FINALISTS)])))
    finally:
        worker.close()


@click.command()
@click.argument("layers", nargs=-1, required=True, metavar="NET:LAYER...")
@click.option("--batch", type=click.IntRange(1), default=1, help="Images. [default: 1]")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of what is timed."
)
@click.option("--seconds", type=click.FloatRange(0), default=3600.0, help="For all layers. [default: 3600]")
def main(layers: Sequence[str], batch: int, output: Path, seconds: float) -> None:
    """Time the whole grid of each NET:LAYER, and hold the tuner's winner against its best."""
    device, end = registry.this_device(), time.monotonic() + seconds
    output.mkdir(parents=True, exist_ok=True)
    for name in layers:
        what, _, one = name.partition(":")
        net = networks.load(what, batch)
        named = net.find(one)
        layer = named.at(*net.stated(named, batch))
        path = output / f"{device.key}-{layer.key()}.jsonl"
        left = extend(path, layer, device, end - time.monotonic())
        if left:
            click.echo(f"{name}: {len(left)} candidates are left; the same command goes on from there")
            continue
        grid = read(path)
        tuned = plan(layer, device=device, isolate=True, vendors=False, weights="constant")
        final = judge(layer, device, grid, tuned.candidate)
        best = min((c for c in final if final[c].timed), key=lambda c: final[c].time)
        ratio = final[tuned.candidate].time / final[best].time
        click.echo(
            f"{name}: {tuned.candidate} {final[tuned.candidate].time:.3g} s, {ratio:.3f} times {best}, "
            f"the best of {len(grid)}; the tuner timed {len(tuned.facts)}"
        )


if __name__ == "__main__":
    main()
