"""The verbs that read a network's file: `autoconv run` and `autoconv layers`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from click.core import ParameterSource

from autoconv import networks
from autoconv.algorithm import Array
from autoconv.cli.options import FAILED, OK, as_json, device_named, isolated, on_device, rounds, some_of, threads
from autoconv.cli.options import tolerance as error
from autoconv.cli.output import all_kept, failure_line, print_json, say, status
from autoconv.common.text import duration, print_table, size
from autoconv.cpu.device import CPU
from autoconv.errors import ConfigError
from autoconv.networks.compiled.loading import load
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.operators import random_inputs
from autoconv.networks.yaml_writer import text_of
from autoconv.paths import write_whole
from autoconv.tuning.timing.full_speed import slowness

if TYPE_CHECKING:
    from autoconv.bench.networks.race import NetworkRace
    from autoconv.networks.compiled.listing import StepTime


ALL = "all"  # runtimes that are installed


def _runtimes(text: str) -> tuple[str, ...]:
    """Names of runtimes, or "all"."""
    from autoconv.bench.networks.runtimes import RUNTIMES

    return some_of((*RUNTIMES, ALL))(text)


def _installed(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those runtimes, all of which have to be installed; or all that are."""
    from autoconv.bench.networks.runtimes import RUNTIMES

    missing = {name: runtime.missing() for name, runtime in RUNTIMES.items()}
    found = tuple(name for name in RUNTIMES if not missing[name]) if ALL in names else names
    lacking = [f"{name}: {', '.join(missing[name])}" for name in found or missing if missing[name]]
    if lacking:
        raise click.UsageError(f"--against: not installed, {'; '.join(lacking)}")
    return found


@click.command(short_help="A network from an ONNX file: where its time goes, and races.")
@click.argument("model", metavar="MODEL")
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Images at a time, where the file leaves that open.")
@on_device
@threads
@click.option("--tune", is_flag=True, help="Time the layers that have no facts yet; else by records and estimates.")
@isolated
@click.option(
    "--tolerance",
    type=error,
    metavar="ERROR",
    help="Largest error expected of the outputs, such as 2e-6.",
)
@click.option(
    "--repeat", type=click.IntRange(1, 100_000), metavar="N", default=20, help="Runs to take medians of. [default: 20]"
)
@click.option("--alone", is_flag=True, help="Time every node by itself as well, its filters out of cache.")
@click.option(
    "--against", type=_runtimes, metavar="RUNTIME,...", help="Race these as well; all: every one that is installed."
)
@rounds
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder whose networks.json keeps the race.",
)
@as_json
def run(
    model: str,
    batch: int | None,
    device_name: str,
    threads: int | None,
    tune: bool,
    isolate: bool,
    tolerance: float | None,
    repeat: int,
    alone: bool,
    against: tuple[str, ...] | None,
    rounds: int,
    folder: Path | None,
    as_json: bool,
) -> int:
    """Run a network from an ONNX file on random numbers, and show where its time goes.

    MODEL may also be a network that `CompiledNetwork.save` wrote.

    With --against the whole of it is raced, interleaved, with other runtimes in processes of their own, in float32
    and on as many threads of a CPU: onnxruntime, openvino, torch, torch_cl (channels_last), torch_compiled (with
    freezing), ncnn, mnn. Their answers are compared with ours.
    """
    if against and Path(model).suffix != ".onnx":
        raise click.UsageError(f"--against: expected an ONNX file, got {model}")
    if folder is not None and not against:
        raise click.UsageError("--output: expected --against as well, whose race it keeps")
    if not against and _given("rounds"):
        raise click.UsageError("--rounds: expected --against as well, whose race has them")
    if not tune and _given("isolate"):
        raise click.UsageError("--isolate, --no-isolate: expected --tune as well, which times layers")
    if tolerance is not None and against:
        raise click.UsageError("--tolerance: expected without --against, which races what runs without one")
    if device_name != "cpu":
        for option, given in (("--alone", alone), ("--against", against)):
            if given:
                raise click.UsageError(f"{option}: expected with --device cpu alone, got --device {device_name}")
    names = _installed(against) if against else ()
    device = device_named(device_name, threads)
    net = load(model, batch, device=device, tolerance=None if tune else tolerance)
    if folder is not None:
        _check_folder(folder)
    if tune:
        net.tune(tolerance=tolerance, isolate=isolate)
    with device.selected():
        inputs = {name: device.asarray(array) for name, array in random_inputs(net.graph.inputs).items()}
    whole = _median_run(net, inputs, repeat)
    steps = net.profile(*inputs.values(), repeat=repeat)
    cold = sum(step.seconds for step in net.profile(*inputs.values(), repeat=repeat, alone=True)) if alone else None
    layers = sum(step.seconds for step in steps if step.is_layer) / max(sum(step.seconds for step in steps), 1e-12)
    raced = _raced(net, Path(model), names, rounds) if names else None
    unkept = None if raced is None or folder is None else _why_not_kept(raced, folder)
    if as_json:
        document: dict[str, Any] = {
            "network": net.graph.name,
            "device": net.device.key,
            "seconds": whole,
            "share_of_layers": layers,
            **({"seconds_alone": cold} if cold is not None else {}),
            "arena_bytes": net.arena_bytes,
            "weight_bytes": net.weight_bytes,
            "error": net.error,
            "steps": [vars(step) for step in steps],
        }
        print_json(document | ({"race": raced.to_json()} if raced is not None else {}))
    else:
        print_table(
            f"{net.graph.name} on {net.device.name}",
            ("node", "operator", "by", ">time", ">share"),
            _rows(steps),
            spare=("operator",),
        )
        click.echo(
            f"{duration(whole)} in all; {layers:.0%} of the steps' time in convolutions and fully connected layers; "
            f"{size(net.arena_bytes)} of arrays, {size(net.weight_bytes)} of weights; "
            f"an error of {net.error:.1e} expected"
        )
        if cold:  # a network may have no steps
            click.echo(
                f"{duration(cold)} are the steps' times added up, each measured alone with filters out of cache; "
                f"the whole takes {whole / cold:.2f} of that"
            )
        if raced is not None:
            _print_race(raced)
    for name, why in raced.failures.items() if raced is not None else ():
        say("error", f"{name}: {why}")
    if unkept is not None:
        say("error", failure_line(unkept))
    failed = unkept is not None or (raced is not None and raced.failures)
    return FAILED if failed or not all_kept() else OK


def _given(name: str) -> bool:
    """Whether an option was given, be it with its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _check_folder(folder: Path) -> None:
    """An error where a folder could not keep a race, before there is one."""
    from autoconv.bench.networks.race import kept

    folder.mkdir(parents=True, exist_ok=True)
    _ = kept(folder)


def _why_not_kept(raced: NetworkRace, folder: Path) -> ConfigError | OSError | None:
    """Keep a race in a folder; or what is in the way, as a full disk, which is to cost no table."""
    from autoconv.bench.networks.race import keep

    try:
        keep(raced, folder)
    except (ConfigError, OSError) as error:
        return error
    return None


def _raced(net: CompiledNetwork, model: Path, names: tuple[str, ...], rounds: int) -> NetworkRace:
    from autoconv.bench.networks.race import race_network

    batch = next((t.shape[0] for t in net.graph.inputs.values() if t.shape), 1)
    assert isinstance(net.device, CPU)
    return race_network(model, dict(net.graph.inputs), batch, net.device, names, rounds, say=status)


def _median_run(net: CompiledNetwork, inputs: dict[str, Array], repeat: int) -> float:
    """Seconds of a run, until its end."""
    taken = []
    with net.device.selected():
        for _ in range(1 + repeat):
            start = time.perf_counter()
            net.run(*inputs.values())  # by place: an input may have any name
            net.device.synchronize()
            taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def _rows(steps: list[StepTime]) -> list[tuple[str, ...]]:
    total = sum(step.seconds for step in steps)
    return [(s.name, s.operator, s.by, duration(s.seconds), f"{s.seconds / total:.1%}") for s in steps]


def _print_race(raced: NetworkRace) -> None:
    from autoconv.bench.networks.runtimes import RUNTIMES
    from autoconv.bench.suites import OURS

    rows = []
    for name, seconds in sorted(raced.seconds.items(), key=lambda pair: pair[1]):
        version = "" if name == OURS else RUNTIMES[name].version
        memory = raced.memory[name]
        error = f"{raced.errors[name]:.1e}" if name in raced.errors else "-"
        told = "-" if memory is None else size(memory)
        ratio = raced.against(name) if name != OURS else None
        rows.append((name, version, duration(seconds), "-" if ratio is None else str(ratio), told, error))
    print_table(
        f"{raced.network}, batch {raced.batch}",
        ("runtime", "version", ">time", ">over ours", ">memory", ">difference"),
        rows,
        spare=("version",),
    )
    click.echo(
        f"over ours: its time divided by autoconv's, median of {raced.rounds} interleaved rounds [95 % interval]; "
        "memory: what the first runs took beyond the loaded network; difference: of answers, of the largest value"
    )
    if raced.slow:
        click.echo(f"{slowness(raced.slow)}, which disturbs these figures")


@click.command(short_help="The layers of a network as a YAML list.")
@click.argument("net", metavar="NET")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to. [default: standard output]",
)
def layers(net: str, output: Path | None) -> int:
    """Write the layers of a network as a layer list in YAML, which tune, bench and compare read.

    Of an ONNX file come the convolutions and fully connected layers, with what can be fused into them.
    """
    text = text_of(networks.load(net))
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(output, text)
    return OK
