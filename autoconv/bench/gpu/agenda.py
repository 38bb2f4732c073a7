"""What there is to do on a GPU, in the order of its value, and how long it is expected to take."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoconv import networks
from autoconv.algorithm import Algorithm
from autoconv.bench.gpu.cases import cases
from autoconv.bench.gpu.networks import BUILDERS, OPERATORS, networks_version
from autoconv.bench.race import check_types
from autoconv.layer import ConvLayer

NETWORKS = ("alexnet", "vgg16", "resnet50", "googlenet")
BATCH = 32
FIRST = 4  # layers of each target that come before everything else of any
RACE = 0.5  # seconds for timing the candidates of a layer: a sample takes some milliseconds
# Whose first case a sanitizer watches before anything else: copies whose unwanted source may have any address, what the
# tensor copy engine brings, and arrays in a workspace.
SANITIZED = ("gemm", "gemm.hopper.bf16x6", "winograd.tensor.tf32x3")
CEILINGS = ("copy", "float32", "tf32", "float16", "float64")
NOMINAL = {"float32": 5e13, "float16": 5e14, "bfloat16": 5e14}, 3e12  # FLOP/s and bytes/s that order the layers
UNUSUAL = (  # what the networks lack: grouped, one-dimensional, dilated, odd channel counts
    "fwd-float32-NCHW-N32-C128-H56-W56-K128-R3-S3-padding1x1-groups32",
    "fwd-float32-NCHW-N32-C64-H1-W4096-K64-R1-S31-padding0x15",
    "fwd-float32-NCHW-N32-C256-H1-W2048-K256-R1-S31-padding0x15-groups256",
    "fwd-float32-NCHW-N32-C128-H28-W28-K128-R3-S3-padding2x2-dilation2x2",
    "fwd-float32-NCHW-N32-C37-H56-W56-K53-R3-S3-padding1x1",
    "fwd-float32-NCHW-N8-C128-H56-W56-K128-R31-S31-padding15x15-groups128",
)

# Seconds, until a folder holds results of its own: these then say by what factor a kind of item differs. They are those
# of an H100 beside 16 processors; "warm" and "launch" are guesses.
SECONDS = {"machine": 6.5, "warm": 40.0, "ceiling": 0.2, "launch": 0.5, "sanitize": 10.0, "host": 0.2, "check": 0.05}
SECONDS |= {"network": 10.0, "operator": 0.2}
SECONDS |= {"tune": 0.2, "table": 0.4}  # and what depends on the layer
COMPILE = 0.06  # of one kernel, when all cores compile
REFERENCE = 5e11  # FLOP/s of the float64 reference of a layer
RUNS = 1500  # of a layer while its candidates are verified and timed, and compared: samples, replays, launches


@dataclass(frozen=True)
class Target:
    """Layers whose mean is stated, each counted once, however often a network has it."""

    name: str
    layers: tuple[ConvLayer, ...]


def _plain(layer: ConvLayer, **changes: Any) -> ConvLayer:
    """The convolution alone: what the other library fuses or not is another question."""
    return layer.replace(**({"N": BATCH, "bias": False, "residual": False, "activation": None} | changes))


def _seconds(layer: ConvLayer) -> float:
    """Of a layer at nominal speed."""
    peaks, bandwidth = NOMINAL
    return max(layer.flops / peaks[layer.dtype], layer.bytes / bandwidth)


def _networks(names: Sequence[str], **changes: Any) -> tuple[ConvLayer, ...]:
    """Every different layer of some networks, the longest first by its operations and traffic."""
    nets = [networks.load(name) for name in names]
    for net in nets:
        check_types(net, net.layers)
    layers = dict.fromkeys(_plain(named.layer, **changes) for net in nets for named in net.layers)
    return tuple(sorted(layers, key=_seconds, reverse=True))


def targets(names: Sequence[str] = NETWORKS, batch: int = BATCH) -> list[Target]:
    """What is tuned and compared, what there is most to gain from first.

    Raises
    ------
    ConfigError
        When there is no such network, or one of its layers is not of float32: those of other types are made of these.
    """
    single = _networks(names, N=batch)
    found = [
        Target("float32, 3x3 and 5x5", tuple(x for x in single if x.R == x.S and x.R in (3, 5) and x.stride == (1, 1))),
        Target("float32", single),
        Target("float16, NHWC", _networks(names, N=batch, dtype="float16", layout="NHWC")),
        Target("bfloat16, NHWC", _networks(names, N=batch, dtype="bfloat16", layout="NHWC")),
        Target("unusual, float32", tuple(map(ConvLayer.parse, UNUSUAL)) if tuple(names) == NETWORKS else ()),
        Target("float16, NCHW", _networks(names, N=batch, dtype="float16", layout="NCHW")),
        Target("float32, dgrad", _networks(names, N=batch, direction="dgrad")),
        Target("float32, wgrad", _networks(names, N=batch, direction="wgrad")),
    ]
    return [target for target in found if target.layers]


def items(phases: Sequence[str], algorithms: Sequence[Algorithm[Any]], wanted: Sequence[Target]) -> Iterator[str]:
    """The work in the order of its value; an item is `kind/arguments`.

    A few kernels are watched by a sanitizer first, as what is read outside of an array spoils everything after it.
    Whether anything runs at all comes next, whole networks included; then the longest layers of every target, for
    each has to be stated, and long layers weigh most in a network; then every kernel's checks, those between layers
    first; then all layers, of each target in turn, with a few candidates, and at last with all.
    """
    own = [algorithm for algorithm in algorithms if algorithm.vendor is None]
    first, rest = _in_turn(wanted)
    if "check" in phases:
        yield from (f"sanitize/{one.name}/{one.version}" for name in SANITIZED for one in own if one.name == name)
    yield "warm"
    if "check" in phases:
        yield from (f"ceiling/{what}" for what in CEILINGS)
        yield from (f"launch/{algorithm.name}/{algorithm.version}" for algorithm in own)
        yield "host"
        yield from (f"network/{networks_version()}/{name}/{n}" for name in BUILDERS for n in (1, 2))
    yield from _of_layers(phases, "hybrid", first)
    if "check" in phases:
        yield from (f"operator/{networks_version()}/{name}" for name in OPERATORS)
        for algorithm in own:
            yield f"compile/{algorithm.name}/{algorithm.version}"
            yield from (f"check/{algorithm.name}/{algorithm.version}/{n}" for n in range(len(cases(algorithm))))
    yield from _of_layers(phases, "hybrid", rest)
    yield from _of_layers(phases, "profile", first + rest)


def _in_turn(wanted: Sequence[Target]) -> tuple[list[str], list[str]]:
    """The keys of all layers, of each target in turn, each once: the first of every target, and the rest."""
    turns = list(itertools.zip_longest(*([layer.key() for layer in target.layers] for target in wanted)))
    first = dict.fromkeys(key for turn in turns[:FIRST] for key in turn if key is not None)
    every = dict.fromkeys(key for turn in turns for key in turn if key is not None)
    return list(first), [key for key in every if key not in first]


def _of_layers(phases: Sequence[str], mode: str, keys: Iterable[str]) -> Iterator[str]:
    return (f"{phase}/{mode}/{key}" for key in keys for phase in ("tune", "table") if phase in phases)


def expected(item: str, algorithms: Mapping[str, Algorithm[Any]]) -> float:
    """Seconds that an item may take, by a guess of what there is to do in it."""
    kind, *arguments = item.split("/")
    if kind == "compile":
        return 1.0 + 2 * COMPILE * len(cases(algorithms[arguments[0]]))
    seconds = SECONDS[kind]
    if kind in ("tune", "table"):
        layer = ConvLayer.parse(arguments[1])
        seconds += RUNS * _seconds(layer)
        if kind == "tune":
            seconds += RACE + 2 * layer.flops / REFERENCE
    return seconds


def timetable(
    work: Sequence[str], algorithms: Sequence[Algorithm[Any]], results: Sequence[Mapping[str, Any]]
) -> list[tuple[float, str]]:
    """When each item of the work should be done, in seconds from the start.

    Parameters
    ----------
    work : sequence of str
        Items in their order.
    algorithms : sequence of Algorithm
    results : sequence of dict
        Of items that were done before: their seconds, against those expected, correct the guess for their kind.
    """
    named = {algorithm.name: algorithm for algorithm in algorithms}
    took: dict[str, float] = defaultdict(float)
    guessed: dict[str, float] = defaultdict(float)
    for result in results:
        kind = result["item"].partition("/")[0]
        with contextlib.suppress(LookupError):  # of an algorithm that is no more
            guessed[kind] += expected(result["item"], named)
            took[kind] += result["seconds"]
    factor = {kind: took[kind] / guessed[kind] for kind in took}
    seconds = (expected(item, named) * factor.get(item.partition("/")[0], 1.0) for item in work)
    return list(zip(itertools.accumulate(seconds), work, strict=True))


def announced(
    when: Sequence[tuple[float, str]], wanted: Sequence[Target], results: Sequence[Mapping[str, Any]], budget: float
) -> list[str]:
    """The timetable as lines, and what of it the budget reaches: what a run says that only says what it would do."""
    lines = [f"{_clock(seconds)}  {item}" for seconds, item in when]
    compared = compared_after(when, results)
    for target in wanted:
        times = sorted(compared[layer.key()] for layer in target.layers if layer.key() in compared)
        few = min(FIRST, len(target.layers))
        after = f"after {_clock(times[few - 1])}" if len(times) >= few else "never"
        reached = sum(seconds <= budget for seconds in times)
        lines.append(f"{target.name}: figures {after}; {reached} of {len(target.layers)} layers within the budget")
    total = when[-1][0] if when else 0.0
    return [*lines, f"{len(when)} items, expected to take {_clock(total)}; the budget is {_clock(budget)}"]


def compared_after(when: Sequence[tuple[float, str]], results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By layer, when it is first compared; at once where results hold a comparison."""
    tables = [(0.0, str(result["item"])) for result in results] + list(when)
    found: dict[str, float] = {}
    for seconds, item in tables:
        if item.startswith("table/"):
            found.setdefault(item.split("/")[-1], seconds)
    return found


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"
