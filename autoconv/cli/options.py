"""What the verbs of the command share: options and what they mean, quantities with units, exit codes."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from autoconv import networks
from autoconv.bench.statistics import FEWEST_ROUNDS
from autoconv.common import split_products
from autoconv.cpu.device import CPU
from autoconv.errors import ConfigError, PlanError
from autoconv.layer import DIRECTIONS, ConvLayer
from autoconv.registry import algorithms, fused_activations, resolve
from autoconv.tuning.choice import MODES

if TYPE_CHECKING:
    from autoconv.device import Device
    from autoconv.networks import NamedLayer, Network

    Asked = list[tuple[Network, tuple[int, ...] | None]]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
LEAST_BUDGET = 0.05  # seconds of timing for a layer whose turn comes when the budget is spent

SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
BYTES = {"": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def _quantity(text: str, units: dict[str, float], example: str) -> float:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in units:
        known = ", ".join(filter(None, units))
        raise click.BadParameter(f"{text!r}: expected a number and one of {known}, such as {example}")
    return float(match[1]) * units[match[2]]


def seconds(text: str) -> float:
    """Such as 60s."""
    return _quantity(text, SECONDS, "60s")


def _bytes(text: str) -> int:
    return int(_quantity(text, BYTES, "64MB"))


def numbers(text: str) -> tuple[int, ...]:
    """Integers separated by commas, each once."""
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*", text):
        raise click.BadParameter(f"{text!r}: expected integers from 1 to 9999999, separated by commas, such as 1,8")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def words(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    return tuple(dict.fromkeys(text.split(",")))


def some_of(allowed: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """How to read names separated by commas, all of them among those allowed."""

    def given(text: str) -> tuple[str, ...]:
        found = words(text)
        if not set(found) <= set(allowed):
            raise click.BadParameter(f"{text!r}: expected some of {','.join(allowed)}")
        return found

    return given


def _directions(text: str) -> tuple[str, ...]:
    given = DIRECTIONS if text == "all" else words(text)
    if not set(given) <= set(DIRECTIONS):
        raise click.BadParameter(f"{text!r}: expected all, or some of {','.join(DIRECTIONS)}")
    return given


def tolerance(text: str) -> float:
    """How to read an error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise click.BadParameter(f"{text!r}: expected a number of at least 0, such as 1e-6")
    return value


as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
on_device = click.option(
    "--device", "device_name", metavar="NAME", default="cpu", help="Where: cpu, cuda, or cuda:N. [default: cpu]"
)
batches = click.option("--batch", type=numbers, metavar="N,...", help="Batch sizes. [default: the file's]")
directions = click.option(
    "--direction", type=_directions, metavar="D,...", help="fwd,dgrad,wgrad or all. [default: the file's, or fwd]"
)
rounds = click.option(
    "--rounds",
    type=click.IntRange(FEWEST_ROUNDS, 1000),
    metavar="N",
    default=9,
    help="How often each contestant runs. [default: 9]",
)
threads = click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Threads of a CPU, for everybody alike. [default: all]"
)
isolated = click.option(
    "--isolate/--no-isolate", default=True, help="Whether a worker process does the timing. [default: yes]"
)
LIMITS = (
    click.option(
        "--weights",
        type=click.Choice(["varying", "constant"]),
        default="varying",
        help="constant: filters are transformed once, so that this is not counted. [default: varying]",
    ),
    click.option("--workspace-limit", type=_bytes, metavar="SIZE", help="Most scratch memory, such as 64MB."),
    click.option("--exact", is_flag=True, help="Only algorithms that do no more to a sum than reorder it."),
    click.option("--deterministic", is_flag=True, help="Only what gives the same bits every time."),
    click.option(
        "--denormals",
        type=click.Choice(["flush", "keep"]),
        default="flush",
        help="keep: only what can compute with denormals. [default: flush]",
    ),
    click.option("--tolerance", type=tolerance, metavar="ERROR", help="Largest error measured of a layer, as 1e-6."),
    click.option(
        "--vendors",
        type=click.Choice(["none", "all"]),
        default="none",
        help="Other libraries as candidates: none, or all that are installed. [default: none]",
    ),
)


def with_limits(command: Callable[..., int]) -> Callable[..., int]:
    """The options that say which candidates will do."""
    for option in reversed(LIMITS):
        command = option(command)
    return command


def check_place(option: str, place: Path | None) -> None:
    """A usage error where a file or a folder could not be made, before there is anything to write to it."""
    if place is None:
        return
    parent = place.absolute().parent
    if not parent.is_dir():
        raise click.UsageError(f"{option} {place}: there is no folder {place.parent}")
    if not os.access(place if place.exists() else parent, os.W_OK):
        raise click.UsageError(f"{option} {place}: no permission to write there")


def check_device(name: str) -> None:
    """A usage error where no device could have such a name, be it there or not."""
    if re.fullmatch(r"cpu|cuda(:\d{1,4})?", name) is None:
        raise click.UsageError(f"--device {name}: expected cpu, cuda or cuda:N")


def device_named(name: str, threads: int | None = None) -> Device:
    """The device that `--device` and `--threads` mean; a usage error where there is none such."""
    check_device(name)
    if threads is not None and name != "cpu":
        raise click.UsageError(f"--threads: expected with --device cpu alone, got --device {name}")
    try:
        split_products.allowed()  # or it is refused here, once, and not for every layer
        return resolve(name) if threads is None else CPU.current(threads)
    except PlanError as error:  # no such GPU; or what the environment says, which speaks for itself
        raise click.UsageError(str(error) if name == "cpu" else f"--device {name}: {error}") from None


def check_mode(mode: str, device: Device) -> None:
    """A usage error for a mode that is none, and names no algorithm of the device and none of its candidates."""
    known = [algorithm.name for algorithm in algorithms(device)]
    if mode not in MODES and mode.partition("[")[0] not in known:
        raise click.UsageError(
            f"--mode {mode!r}: expected one of {', '.join(MODES)}, an algorithm ({', '.join(known)}) or one of its "
            "candidates, as explain lists them"
        )


def share(end: float | None, jobs: float) -> float | None:
    """Seconds for one of as much as so many jobs, all to be done at a time of the clock; None for no limit."""
    return None if end is None else max((end - time.monotonic()) / jobs, LEAST_BUDGET)


def options_of_plan(limits: dict[str, Any]) -> dict[str, Any]:
    """The limits as `autoconv.plan` takes them."""
    return limits | {"vendors": limits["vendors"] == "all"}


class Job(NamedTuple):
    """A layer of a network, and what is computed where the network runs at a batch size, in a direction."""

    net: Network
    named: NamedLayer
    batch: int
    layer: ConvLayer


def networks_of(what: str, batch: tuple[int, ...] | None) -> Asked:
    """The network of a file or a name, with the batch sizes that are asked of it, None where those are its own.

    An ONNX file is read for each of them: what is fused into a layer may be another thing then.
    """
    if batch is None or not what.endswith(".onnx"):
        return [(networks.load(what), batch)]
    return [(networks.load(what, size), (size,)) for size in batch]


def jobs_of(
    nets: Sequence[Network],
    batch: tuple[int, ...] | None,
    direction: tuple[str, ...] | None,
    device: Device | None = None,
) -> list[Job]:
    """Every layer of the networks, at every batch size and in every direction: the file's, where none are given.

    Where a device is given, they are as it computes them when networks run: without activations that are kernels of
    their own there.
    """
    fused = None if device is None else fused_activations(device)
    jobs: list[Job] = []
    for net in nets:
        found = [
            Job(net, named, size, _computed(named.at(size, way), fused))
            for named in net.layers
            for size in batch or named.batches or net.batches
            for way in direction or named.directions or ("fwd",)
        ]
        together = list(dict.fromkeys((job.batch, job.layer.direction) for job in found))
        jobs += sorted(found, key=lambda job: together.index((job.batch, job.layer.direction)))
    return jobs


def _computed(layer: ConvLayer, fused: frozenset[str] | None) -> ConvLayer:
    """The layer, or without its activation where that is none of those."""
    name = (layer.activation or "").partition(":")[0]
    return layer if fused is None or not name or name in fused else layer.replace(activation=None)


def layers_meant(
    what: str, batch: tuple[int, ...] | None, direction: tuple[str, ...] | None, device: Device | None = None
) -> list[ConvLayer]:
    """The layers that a LAYER, NET or NET:NAME means; those of a NET as `jobs_of` has them for the device."""
    if re.match(rf"({'|'.join(DIRECTIONS)})-", what) and not Path(what).exists():
        if given := [name for name, value in (("--batch", batch), ("--direction", direction)) if value is not None]:
            raise click.UsageError(f"{', '.join(given)}: expected with NET or NET:NAME, and not with a layer's key")
        return [ConvLayer.parse(what)]
    asked, name = _named(what, batch)
    chosen = {net.find(name).name for net, _ in asked} if name else None
    jobs = [job for net, sizes in asked for job in jobs_of([net], sizes, direction, device)]
    return [job.layer for job in jobs if chosen is None or job.named.name in chosen]


def _named(what: str, batch: tuple[int, ...] | None) -> tuple[Asked, str]:
    """The network that a NET or NET:NAME means, as `networks_of` has it, and the name; either may have colons."""
    try:
        return networks_of(what, batch), ""
    except ConfigError:
        if ":" not in what or Path(what).exists():
            raise
    heads = [what[: colon.start()] for colon in re.finditer(":", what)]
    head = next((head for head in heads if head in networks.names() or Path(head).is_file()), heads[-1])
    return networks_of(head, batch), what[len(head) + 1 :]
