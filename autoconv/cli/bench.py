"""The verb `autoconv bench`."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autoconv import networks
from autoconv.bench.baselines import ALL_BASELINES, BASELINES, DTYPES, restrict
from autoconv.cli.options import (
    FAILED,
    INTERRUPTED,
    OK,
    as_json,
    batches,
    check_device,
    check_place,
    device_named,
    networks_of,
    rounds,
    seconds,
    some_of,
    threads,
    words,
)
from autoconv.cli.output import all_kept, failure_line, print_json, say, status
from autoconv.common import split_products
from autoconv.cpu.device import CPU, LEVELS, host_level
from autoconv.errors import PlanError
from autoconv.layer import DIRECTIONS
from autoconv.paths import write_whole

if TYPE_CHECKING:
    from autoconv.bench.gpu.agenda import Target
    from autoconv.bench.suites import Suite

DEFAULT_SUITE = "mixed27"
GPU_BUDGET = 540.0  # seconds
PHASES = ("check", "tune", "table")  # of the run on a GPU
OF_GPU = ("phases", "exporting", "dry_run", "archive", "part_mib")
OF_CPU = (
    *("against", "rounds", "weights", "direction", "dtype", "exact", "fresh"),
    *("threads", "isa", "names", "without", "chart", "as_json"),
)


@click.command(short_help="Our kernels against other libraries, layer by layer.")
@click.argument("suites", nargs=-1, metavar="[SUITE...]")
@batches
@click.option(
    "--against",
    type=some_of(ALL_BASELINES),
    metavar="BASELINE,...",
    help=f"Some of {','.join(BASELINES)}; in 16 bits of "
    f"{','.join(name for name, baseline in ALL_BASELINES.items() if 'bfloat16' in baseline.dtypes)}. "
    "[default: all]",
)
@rounds
@click.option(
    "--weights",
    type=click.Choice(["constant", "varying"]),
    default="constant",
    help="varying: filters are new in every run, so that transforming them is timed. [default: constant]",
)
@click.option("--direction", type=click.Choice(DIRECTIONS), default="fwd", help="[default: fwd]")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", help="Of all layers. [default: float32]")
@click.option("--exact", is_flag=True, help="autoconv: only algorithms that do no more to a sum than reorder it.")
@click.option("--fresh", is_flag=True, help="A new output in every run, for autoconv and for the baselines.")
@threads
@click.option("--isa", type=click.Choice(LEVELS), help="Vector instructions that autoconv and PyTorch may use.")
@click.option("--layers", "names", type=words, metavar="NAME,...", help="Only these layers. [default: all]")
@click.option("--without", type=words, metavar="NAME,...", help="All but these layers.")
@click.option(
    "--chart",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw a chart: .png, .svg or .pdf, as the name ends. [without an ending: PNG]",
)
@click.option("--device", "device_name", metavar="NAME", default="cpu", help="cpu, or cuda or cuda:N: see above.")
@click.option("--budget", type=seconds, metavar="TIME", help="Time to spend. [default: no limit; GPU: 540s]")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the results; the same command goes on where they end.",
)
@click.option(
    "--phase",
    "phases",
    type=some_of(PHASES),
    metavar="PHASE,...",
    help=f"GPU: some of {','.join(PHASES)}. [default: all]",
)
@click.option("--export", "exporting", is_flag=True, help="GPU: also write the records as files to be shipped.")
@click.option("--dry-run", is_flag=True, help="GPU: only say what would be done, and when; needs no GPU.")
@click.option(
    "--archive",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="GPU: FILE.000 and so on hold the folder from one machine to the next.",
)
@click.option(
    "--part",
    "part_mib",
    type=click.IntRange(1, 1 << 20),
    default=48,
    help="GPU: most MiB of such a file. [default: 48]",
)
@as_json
def bench(
    suites: Sequence[str],
    batch: tuple[int, ...] | None,
    against: tuple[str, ...] | None,
    rounds: int,
    weights: str,
    direction: str,
    dtype: str,
    exact: bool,
    fresh: bool,
    threads: int | None,
    isa: str | None,
    names: tuple[str, ...] | None,
    without: tuple[str, ...] | None,
    chart: Path | None,
    device_name: str,
    budget: float | None,
    folder: Path | None,
    phases: tuple[str, ...] | None,
    exporting: bool,
    dry_run: bool,
    archive: Path | None,
    part_mib: int,
    as_json: bool,
) -> int:
    """Measure autoconv's own kernels against PyTorch, ONNX Runtime, OpenVINO, ncnn and MNN, layer by layer, in one run.

    A SUITE is a layer list as for tune; without one, mixed27: 27 layers of all kinds. What is not on record
    is tuned first. A run in which a baseline is missing, or not at its default settings, is INCOMPLETE: it
    says so, and the exit code is 1.

    On a GPU (--device cuda) the baseline is cuDNN, autotuned by PyTorch. Kernels are checked against float64,
    then SUITE (AlexNet, VGG-16, ResNet-50 and GoogLeNet, unless given) is tuned and compared. The results are
    lines of JSON in the folder that -o names; the same command goes on where they end, on another machine of the
    kind too, with --archive. table.md sums them up.
    """
    check_device(device_name)
    if device_name != "cpu":
        _refuse(OF_CPU, "--device cpu")
        if folder is None:
            raise click.UsageError(f"--device {device_name}: expected -o DIRECTORY as well, where the results are kept")
        if batch is not None and len(batch) > 1:
            raise click.UsageError(f"--batch: expected one number with --device {device_name}, got {len(batch)}")
        if archive is not None and archive.absolute().is_relative_to(folder.absolute()):
            raise click.UsageError(f"--archive {archive}: expected a place outside of {folder}, which goes into it")
        from autoconv.bench.gpu import preview
        from autoconv.bench.gpu.agenda import BATCH, NETWORKS, targets
        from autoconv.bench.gpu.archive import carried

        phases = phases or PHASES
        wanted = targets(suites or NETWORKS, batch[0] if batch else BATCH)
        budget = GPU_BUDGET if budget is None else budget
        if dry_run:
            for line in preview(folder, phases, budget, wanted):
                click.echo(line)
            return OK
        with nullcontext() if archive is None else carried(archive, folder, part_mib << 20):
            return _on_gpu(device_name, folder, phases, budget, wanted, exporting)
    _refuse(OF_GPU, "--device cuda as well")
    from autoconv.bench.display import PICTURES, print_suite
    from autoconv.bench.display import chart as draw
    from autoconv.bench.race import check_types, run_suite
    from autoconv.bench.results import title, to_json
    from autoconv.bench.suites import Setting
    from autoconv.records.cache import TuningCache

    if chart is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--chart needs matplotlib, which is not installed: pip install 'autoconv[report]'")
    if chart is not None and chart.suffix.lower() not in PICTURES:
        raise click.UsageError(f"--chart {chart}: expected a name that ends in {', '.join(filter(None, PICTURES))}")
    check_place("--chart", chart)
    asked = [(what, *each) for what in suites or (DEFAULT_SUITE,) for each in networks_of(what, batch)]
    chosen = [_chosen(net, names, without) for _, net, _ in asked]
    for (_, net, _), layers in zip(asked, chosen, strict=True):  # or the first would be measured for nothing
        check_types(net, net.layers if layers is None else map(net.find, layers))
    device, restrictions = _held(threads, isa)
    setting = Setting(
        device=device,
        exact=exact,
        baselines=_baselines(against, direction, weights, dtype),
        direction=direction,
        dtype=dtype,
        constant=weights == "constant",
        fresh=fresh,
        rounds=rounds,
        restrictions=restrictions,
    )
    if folder is not None:
        owners: dict[str, str] = {}
        for what, net, _ in asked:
            if (other := owners.setdefault(title(net.name), what)) != what:
                raise click.UsageError(f"-o {folder}: the results of {other} and {what} would have one name there")
        folder.mkdir(parents=True, exist_ok=True)  # or an error, before anything is timed
    with TuningCache().timing_lock(device.key):
        end = math.inf if budget is None else time.monotonic() + budget  # from here: another process may have held it
        device.survey()
    done: list[Suite] = []
    timing: dict[str, Any] = {"folder": folder, "over": lambda: time.monotonic() > end, "say": status}
    for (what, net, sizes), layers in zip(asked, chosen, strict=True):
        for size in sizes or net.batches:
            if not (done and done[-1].interrupted):
                done.append(run_suite(net, size, setting, names=layers, network=what != DEFAULT_SUITE, **timing))
                if not as_json:
                    print_suite(done[-1])
    if as_json:
        print_json([to_json(suite) for suite in done])
    failed = any(suite.incomplete or suite.unkept for suite in done) or not all_kept()
    if chart is not None:
        try:
            draw(done, chart)
        except OSError as error:
            say("error", failure_line(error))
            failed = True
    if any(suite.interrupted for suite in done):
        return INTERRUPTED
    return FAILED if failed else OK


def _refuse(names: Sequence[str], expected: str) -> None:
    """Refuse options of the other kind of device where any is given."""
    context = click.get_current_context()
    options = {option.name: option.opts[-1] for option in context.command.params}
    if given := [options[name] for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]:
        raise click.UsageError(f"{', '.join(given)}: expected {expected}")


def _on_gpu(
    device_name: str, folder: Path, phases: tuple[str, ...], budget: float, wanted: Sequence[Target], exporting: bool
) -> int:
    from autoconv.bench import gpu
    from autoconv.bench.gpu.helper import TUNING
    from autoconv.bench.gpu.report import markdown, missing
    from autoconv.records.cache import TuningCache

    device = device_named(device_name)
    folder.mkdir(parents=True, exist_ok=True)  # or an error, before anything is timed
    try:
        results, left = gpu.run(device, folder, phases, budget, wanted, say=status)
    except OSError as error:  # as of a full disk, which ends no more than this run
        say("error", f"the results in {folder} are kept up to here: {failure_line(error)}")
        return FAILED
    results = gpu.standing(device, results)
    text = markdown(results, wanted, left)
    click.echo(text, nl=False)
    try:
        write_whole(folder / "table.md", text)
        if exporting:
            (folder / "cache").mkdir(exist_ok=True)
            TuningCache(folder / TUNING, system=None).export(folder / "cache")
    except OSError as error:
        say("error", failure_line(error))
        return FAILED
    return FAILED if missing(results, wanted, left) or any("failure" in result for result in results) else OK


def _chosen(
    net: networks.Network, names: tuple[str, ...] | None, without: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """The layers to take; None for all."""
    for name in (*(names or ()), *(without or ())):
        net.find(name)
    if without is None:
        return names
    left = tuple(n.name for n in net.layers if n.name not in without and (names is None or n.name in names))
    if not left:
        raise click.UsageError(f"--without {','.join(without)}: no layer of {net.name} is left")
    return left


def _held(threads: int | None, isa: str | None) -> tuple[CPU, dict[str, str]]:
    """The processor, restricted to some threads and vectors, and the environment variables that do it for PyTorch."""
    try:
        split_products.allowed()  # or it is refused here, once, and not for every layer
        device = CPU.current(threads, isa)
        return device, restrict(isa) if isa and isa != host_level() else {}
    except PlanError as error:
        raise click.UsageError(str(error)) from None


def _baselines(against: tuple[str, ...] | None, direction: str, weights: str, dtype: str) -> tuple[str, ...]:
    """Those asked for, or all, that are installed."""
    able = [name for name, baseline in ALL_BASELINES.items() if baseline.takes(direction, weights == "constant", dtype)]
    if against and (unable := [name for name in against if name not in able]):
        narrow = "" if dtype == "float32" else f" in {dtype}"
        raise click.UsageError(
            f"--against {','.join(unable)}: expected some of {','.join(able)} "
            f"with {direction} and {weights} filters{narrow}"
        )
    return tuple(name for name in against or able if not ALL_BASELINES[name].missing())
