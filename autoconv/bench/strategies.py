"""What fixed strategies cost on the layers of a network: one family of algorithms for all, or a choice for each."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoconv import registry
from autoconv.bench.agreement import disagreement, refused
from autoconv.bench.baselines import BASELINES, Prepared, Problem
from autoconv.bench.race import check_types, guarded, ours, race
from autoconv.common.text import one_line
from autoconv.cpu.device import CPU
from autoconv.errors import FAILURES, PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.layers import Network
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import plan
from autoconv.tuning.timing.full_speed import FullSpeed

# Families of algorithms by the first part of their names. Those of NumPy count where a family has none of ours.
FAMILIES = {
    "direct": ("direct", "depthwise"),
    "gemm": ("gemm", "matrix"),
    "fft": ("fft",),
    "winograd": ("winograd",),
}
# Strategies of one family, and where those turn to that cannot compute a layer.
FIXED = {
    "direct": ("direct",),
    "gemm": ("gemm", "direct"),
    "fft": ("fft", "gemm", "direct"),
    "winograd": ("winograd", "gemm", "direct"),
}
# Strategies that choose for every layer: by estimates alone, by timing the few best of those, by timing all.
CHOOSING = ("heuristic", "hybrid", "profile")
INFERENCE, TRAINING = ("fwd",), ("fwd", "dgrad", "wgrad")


@dataclass
class Cost:
    """What a strategy costs over all layers of a network, repeats counted.

    Attributes
    ----------
    seconds : float
        The sum of the layers' times; not a number where it cannot compute one of them.
    workspace : int or None
        Bytes of the scratch memory of the layer that needs most; None of other libraries, which do not tell.
    packed : int or None
        Bytes of all filters as kernels read them, where they are not read as they are.
    elsewhere : list of str
        The layers that its own family cannot compute.
    """

    seconds: float = 0.0
    workspace: int | None = 0
    packed: int | None = 0
    elsewhere: list[str] = field(default_factory=list)


@dataclass
class Comparison:
    """Costs by strategy; and why a contestant has none on a layer.

    Attributes
    ----------
    left_out : dict of str to str
        The layers that no cost counts, as one of our strategies has no answer, and why.
    slow : int
        Samples that were taken although the threads were not at their full speed.
    """

    network: str
    batch: int
    training: bool
    device: CPU
    costs: dict[str, Cost] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    slow: int = 0

    def to_json(self) -> dict[str, Any]:
        """In plain JSON types; seconds that are not a number are None."""
        return {
            "network": self.network,
            "batch": self.batch,
            "training": self.training,
            "device": self.device.key,
            "strategies": {
                name: vars(cost) | {"seconds": None if math.isnan(cost.seconds) else cost.seconds}
                for name, cost in self.costs.items()
            },
            "failures": self.failures,
            "left_out": self.left_out,
            "slow": self.slow,
        }


def compare(
    net: Network,
    batch: int,
    device: CPU,
    *,
    training: bool = False,
    baselines: Sequence[str] = (),
    rounds: int = 9,
    budget: float | None = None,
    isolate: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Time the layers of a network under every strategy, interleaved layer by layer, vendors off.

    Parameters
    ----------
    net : Network
    batch : int
        Of the layers that state none of their own.
    device : CPU
    training : bool
        Whether both gradients of every layer count, too, but for that of the first layer's input, which nobody needs;
        filters then vary from run to run.
    baselines : sequence of str
        Of `BASELINES`: other libraries to take part as strategies, where they compute all directions.
    rounds : int
    budget : float, optional
        Seconds for tuning a layer.
    isolate : bool
        Whether a worker process does the tuning.
    say : callable
        Called with what is done next.

    Returns
    -------
    Comparison

    Raises
    ------
    ConfigError
        When one of the layers is not of float32.
    PlanError
        When no layer has an answer.
    """
    check_types(net, net.layers)
    found = Comparison(net.name, batch, training, device)
    able = [name for name in baselines if all(BASELINES[name].takes(way, not training) for way in _ways(training))]
    found.failures |= {name: "it does not compute gradients here" for name in baselines if name not in able}
    found.costs = {name: Cost() for name in (*FIXED, *CHOOSING)}
    found.costs |= {name: Cost(workspace=None, packed=None) for name in able}
    options: dict[str, Any] = {"device": device, "vendors": False, "weights": "varying" if training else "constant"}
    timing: dict[str, Any] = {"budget": budget, "isolate": isolate}
    jobs: list[tuple[str, ConvLayer, int]] = []
    for place, named in enumerate(net.layers):
        size, own = net.stated(named, batch)
        for way in _ways(training) if training else (own,):
            if training and place == 0 and way == ("fwd" if named.transposed else "dgrad"):
                continue
            jobs.append((f"{named.name}, {way}" if training else named.name, named.at(size, way), named.repeat))
    for label, layer, repeat in jobs:
        try:
            say(f"tuning {net.name} {label}")
            chosen, elsewhere = _chosen(layer, options, timing)
            say(f"timing {net.name} {label}")
            seconds = _timed(found, layer, label, chosen, able, rounds, not training)
        except FAILURES as failure:
            found.left_out[label] = one_line(failure, 200)
            continue
        for name, cost in found.costs.items():
            cost.seconds += repeat * seconds.get(name, math.nan)
            if name in chosen:
                _remember(cost, chosen[name], repeat)
            if name in elsewhere:
                cost.elsewhere.append(label)
    if len(found.left_out) == len(jobs):
        label, why = next(iter(found.left_out.items()), (net.name, "it has no layers"))
        raise PlanError(f"{label}: {why}")
    return found


def _chosen(
    layer: ConvLayer, options: Mapping[str, Any], timing: Mapping[str, Any]
) -> tuple[dict[str, Plan], list[str]]:
    """The plan of every strategy; and the strategies whose own family cannot compute the layer."""
    chosen = {"profile": plan(layer, "profile", **options, **timing)}
    with tempfile.TemporaryDirectory() as nothing:  # where nothing is on record yet
        cache = TuningCache(nothing, system=None)
        chosen["heuristic"] = plan(layer, "heuristic", cache=cache, **options)
        chosen["hybrid"] = plan(layer, "hybrid", cache=cache, **options, **timing)
    elsewhere = []
    for strategy, families in FIXED.items():
        family, chosen[strategy] = _of_families(layer, families, options)
        if family != strategy:
            elsewhere.append(strategy)
    return chosen, elsewhere


def _ways(training: bool) -> tuple[str, ...]:
    return TRAINING if training else INFERENCE


def _remember(cost: Cost, made: Plan, repeat: int) -> None:
    """Add a layer's memory."""
    assert cost.workspace is not None
    assert cost.packed is not None
    cost.workspace = max(cost.workspace, made.workspace_bytes)
    if made.limits.weights == "constant":
        cost.packed += repeat * made.kernel.packed_bytes


def _of_families(layer: ConvLayer, families: Sequence[str], options: Mapping[str, Any]) -> tuple[str, Plan]:
    """The best plan of the first family that can compute a layer, by what is on record or else by estimates."""
    names = [algorithm.name for algorithm in registry.own(options["device"])]
    for family in families:
        own = [name for name in names if name.split(".")[0] in FAMILIES[family]]
        for members in (own, [f"numpy.{family}"]):
            made = []
            for name in members:
                with suppress(PlanError):
                    made.append(plan(layer, name, **options))
            if made:
                return family, min(made, key=_promise)
    raise PlanError(f"no candidate of {', '.join(families)} can run {layer}")


def _promise(made: Plan) -> tuple[float, float]:
    """The time on record, before all that have none; then the estimate."""
    algorithm = registry.by_name(made.device)[made.candidate.algorithm]
    estimated = algorithm.estimate(made.layer, made.device, made.candidate.params)
    return made.timings.get(str(made.candidate), math.inf), estimated


def _timed(
    found: Comparison,
    layer: ConvLayer,
    label: str,
    chosen: Mapping[str, Plan],
    baselines: Sequence[str],
    rounds: int,
    constant: bool,
) -> dict[str, float]:
    """Median seconds of every strategy on a layer; those that chose the same candidate are timed once."""
    device, problem = found.device, Problem.draw(layer, found.device)
    runs: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {}  # of baselines, on this layer
    answer = None
    for name, made in {str(made.candidate): made for made in chosen.values()}.items():
        runs[name] = ours(made, problem, device.empty(layer.output_shape, np.float32), constant)
        answer = np.array(runs[name]()) if answer is None else answer
    assert answer is not None
    for name in baselines:
        try:
            prepared: Prepared = BASELINES[name].prepare(problem, device, constant, False)
            error = disagreement(prepared.read(prepared.run()), answer)
        except Exception as failure:  # whatever one of them does, the others go on
            failures[name] = one_line(failure, 200)
            continue
        if why := refused(error):
            failures[name] = why
        else:
            runs[name] = guarded(name, prepared.run, failures)
    full_speed = FullSpeed.of(device)
    medians = {name: float(np.median(samples)) for name, samples in race(runs, rounds, full_speed.take).items()}
    found.slow += full_speed.slow
    found.failures |= {name: f"{label}: {why}" for name, why in failures.items()}
    return {name: medians[str(made.candidate)] for name, made in chosen.items()} | {
        name: medians[name] for name in baselines if name in medians and name not in failures
    }
