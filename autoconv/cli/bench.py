"""The verb `autoconv bench`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from autoconv.bench.baselines import PEERS, restrict
from autoconv.bench.suites import FEWEST_ROUNDS, Setting, Suite, run_suite
from autoconv.cli.options import FAILED, INTERRUPTED, OK, as_json, batches, device_named, some_of, words
from autoconv.cpu.device import CPU, INSTRUCTION_SETS
from autoconv.errors import PlanError
from autoconv.layer import DIRECTIONS
from autoconv.networks import layers as network

DEFAULT_SUITE = "mixed27"
PHASES = ("check", "tune", "table")  # of the run on a GPU


@click.command()
@click.argument("suites", nargs=-1, metavar="[SUITE...]")
@batches
@click.option(
    "--against", type=some_of(PEERS), metavar="PEER,...", help="Some of torch,torch_cl,onnxruntime. [default: all]"
)
@click.option("--rounds", type=click.IntRange(FEWEST_ROUNDS, 1000), default=9, help="How often each runs. [default: 9]")
@click.option(
    "--weights",
    type=click.Choice(["constant", "varying"]),
    default="constant",
    help="varying: filters are new in every run, so that transforming them counts. [default: constant]",
)
@click.option("--direction", type=click.Choice(DIRECTIONS), default="fwd", help="[default: fwd]")
@click.option("--exact", is_flag=True, help="Ours: only algorithms that do no more to a sum than reorder it.")
@click.option("--fresh", is_flag=True, help="A new output in every run, for ours and for the peers.")
@click.option("--threads", type=click.IntRange(1, 1024), help="For everybody. [default: all]")
@click.option("--isa", type=click.Choice(INSTRUCTION_SETS), help="Hold ours, and what peers can be, to these vectors.")
@click.option("--layers", "names", type=words, metavar="NAME,...", help="Only these layers. [default: all]")
@click.option("--without", type=words, metavar="NAME,...", help="All but these layers.")
@click.option("--chart", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw a chart, as PNG.")
@click.option("--device", "device_name", metavar="NAME", default="cpu", help="cpu, or cuda or cuda:N: see below.")
@click.option("--budget", type=click.FloatRange(0, 1e6), default=540.0, help="GPU: seconds to spend. [default: 540]")
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path, file_okay=False), help="GPU: for the results."
)
@click.option(
    "--phase",
    "phases",
    type=some_of(PHASES),
    default=",".join(PHASES),
    metavar="PHASE,...",
    help=f"GPU: some of {','.join(PHASES)}. [default: all]",
)
@click.option("--export", "exporting", is_flag=True, help="GPU: write the records as they are shipped, too.")
@as_json
def bench(
    suites: Sequence[str],
    batch: tuple[int, ...] | None,
    against: tuple[str, ...] | None,
    rounds: int,
    weights: str,
    direction: str,
    exact: bool,
    fresh: bool,
    threads: int | None,
    isa: str | None,
    names: tuple[str, ...] | None,
    without: tuple[str, ...] | None,
    chart: Path | None,
    device_name: str,
    budget: float,
    folder: Path | None,
    phases: tuple[str, ...],
    exporting: bool,
    as_json: bool,
) -> int:
    """Measure our own kernels against PyTorch and ONNX Runtime, layer by layer, in one run.

    A SUITE is a layer list as for tune; without one, mixed27: 27 layers of all kinds. What is not on record
    is tuned first. A run in which a peer is missing, or not at its default settings, is INCOMPLETE: it
    says so, and the exit code is 1.

    On a GPU (--device cuda) it is against cuDNN, autotuned by PyTorch: kernels are checked against float64,
    then SUITE (AlexNet, VGG-16, ResNet-50 and GoogLeNet, unless given) is tuned and compared. Results are lines
    of JSON in the folder that -o names, from where the same command goes on; table.md there sums them up.
    """
    if device_name != "cpu":
        return _on_gpu(device_name, folder, phases, budget, suites, batch, exporting)
    from autoconv.bench import reports as bench_report
    from autoconv.cli import tables as report

    if chart is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--chart needs matplotlib, which is not installed: pip install 'autoconv[report]'")
    if chart is not None and not chart.absolute().parent.is_dir():
        raise click.UsageError(f"--chart {chart}: no such folder")
    nets = [(network.load(name), name != DEFAULT_SUITE) for name in suites or (DEFAULT_SUITE,)]
    for net, _ in nets:
        for name in (*(names or ()), *(without or ())):
            net.find(name)
    device, restrictions = _held(threads, isa)
    setting = Setting(
        device=device,
        exact=exact,
        peers=_peers(against, direction),
        direction=direction,
        constant=weights == "constant",
        fresh=fresh,
        rounds=rounds,
        restrictions=restrictions,
    )
    done: list[Suite] = []
    for net, whole in nets:
        for size in batch or net.batches:
            if not (done and done[-1].interrupted):
                chosen = _chosen(net, names, without)
                done.append(run_suite(net, size, setting, names=chosen, network=whole, say=_say))
                if not as_json:
                    bench_report.print_suite(done[-1])
    if as_json:
        report.print_json([bench_report.to_json(suite) for suite in done])
    if chart is not None:
        bench_report.chart(done, chart)
    if any(suite.interrupted for suite in done):
        return INTERRUPTED
    return FAILED if any(suite.incomplete for suite in done) else OK


def _on_gpu(
    device_name: str,
    folder: Path | None,
    phases: tuple[str, ...],
    budget: float,
    suites: Sequence[str],
    batch: tuple[int, ...] | None,
    exporting: bool,
) -> int:
    from autoconv.bench import gpu
    from autoconv.bench.gpu.helper import TUNING
    from autoconv.bench.gpu.report import markdown, missing
    from autoconv.records.cache import TuningCache

    if folder is None:
        raise click.UsageError("--device on a GPU: -o DIR is wanted, where results are kept")
    device = device_named(device_name)
    if batch is not None and len(batch) > 1:
        raise click.UsageError("--batch: one number, on a GPU")
    wanted = gpu.targets(suites or gpu.NETWORKS, batch[0] if batch else gpu.BATCH)
    results, left = gpu.run(device, folder, phases, budget, wanted, say=_say)
    text = markdown(results, wanted, left)
    (folder / "table.md").write_text(text, encoding="utf-8")
    if exporting:
        (folder / "cache").mkdir(exist_ok=True)
        TuningCache(folder / TUNING, system=None).export(folder / "cache")
    click.echo(text, nl=False)
    return FAILED if missing(results, wanted, left) or any("failure" in result for result in results) else OK


def _chosen(
    net: network.Network, names: tuple[str, ...] | None, without: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """The layers to take; None for all."""
    if without is None:
        return names
    return tuple(n.name for n in net.layers if n.name not in without and (names is None or n.name in names))


def _held(threads: int | None, isa: str | None) -> tuple[CPU, dict[str, str]]:
    """The processor, held to some threads and vectors, and the environment variables that hold the peers likewise."""
    try:
        device = CPU.current(threads, isa)
        return device, restrict(isa) if isa and device.instruction_set != CPU.current().instruction_set else {}
    except PlanError as error:
        raise click.UsageError(str(error)) from None


def _peers(against: tuple[str, ...] | None, direction: str) -> tuple[str, ...]:
    """Those asked for, or all, that are installed."""
    able = [name for name, peer in PEERS.items() if direction in peer.directions]
    if against and (unable := [name for name in against if name not in able]):
        raise click.UsageError(f"--against {','.join(unable)}: has no {direction}; allowed are {','.join(able)}")
    return tuple(name for name in against or able if not PEERS[name].missing())


def _say(line: str) -> None:
    """What is going on, on one line of standard error that the next overwrites; only on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{line}\r", err=True, nl=False)
