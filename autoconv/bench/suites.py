"""autoconv's own kernels against other libraries, layer by layer, interleaved in one run.

In every round each contestant runs for a moment, in an order shuffled anew, once the spinning threads of the
one before are asleep. What is stated is the median over the rounds of the ratio of two times of one round, with
a 95 % interval.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoconv.bench.baselines import PEERS, Peer, Problem, Run, onnxruntime_network
from autoconv.cpu.device import CPU
from autoconv.errors import AutoconvError
from autoconv.layer import ConvLayer
from autoconv.networks.layers import Network
from autoconv.plans import Plan
from autoconv.tuning.measurement import Progress
from autoconv.tuning.planner import plan
from autoconv.tuning.race import wait_until_idle

OURS = "autoconv"
SLOT = 0.075  # seconds of one contestant in one round
LONG = 0.3  # seconds of a run that need no warm-up: what it warms takes far less
FEWEST_ROUNDS = 6  # fewer have no 95 % interval of the median
RESAMPLES = 2000
BEHIND = 0.97  # a ratio that is surely below this is a loss
BUSY = 0.1  # of one core, used by other processes, is too much for a quiet measurement
AGREEMENT = 1e-3  # of the largest output: far above any rounding, far below any mistake

Samples = list[float]  # seconds, one per round


# The arithmetic


@dataclass(frozen=True)
class Ratio:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def behind(self) -> bool:
        """Whether all of the interval is a loss."""
        return self.high < BEHIND


def interval(samples: Sequence[float]) -> Ratio:
    """The median, between the closest order statistics that hold the true one in 95 of 100 cases.

    That the k-th least of n lies above the true median, or the k-th largest below, has the probability
    2 P(fewer than k heads in n throws). Fewer than 6 samples are too few: their extremes are given.

    >>> interval([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0, 7.0, 6.0])
    Ratio(median=5.0, low=2.0, high=8.0)
    """
    n, ordered = len(samples), sorted(samples)
    outside, rank = 2.0 * 0.5**n, 0
    while outside <= 0.05:
        rank += 1
        outside += 2.0 * math.comb(n, rank) * 0.5**n
    rank = max(rank, 1)
    return Ratio(statistics.median(ordered), ordered[rank - 1], ordered[n - rank])


def ratios(theirs: Samples, ours: Samples) -> list[float]:
    """Round by round, how many times as fast ours is."""
    return [their / our for their, our in zip(theirs, ours, strict=True)]


def geometric_mean(layers: Sequence[Sequence[float]]) -> Ratio:
    """Of the layers' median ratios; the interval by bootstrap, drawing every layer's rounds anew.

    It covers the noise of the clock, not the choice of layers.
    """
    generator = np.random.default_rng(0)
    logs = np.zeros(RESAMPLES)
    for rounds in layers:
        drawn = generator.choice(np.asarray(rounds), (RESAMPLES, len(rounds)))
        logs += np.log(np.median(drawn, axis=1))
    low, high = np.exp(np.quantile(logs / len(layers), (0.025, 0.975)))
    middle = statistics.geometric_mean([statistics.median(rounds) for rounds in layers])
    return Ratio(middle, min(float(low), middle), max(float(high), middle))


def kind(layer: ConvLayer) -> str:
    """The class a layer is counted in."""
    if layer.depthwise:
        return "depthwise 3x3" if (layer.R, layer.S) == (3, 3) else "others"
    if (layer.R, layer.S) == (1, 1):
        return "1x1"
    stem = layer.C <= 4 and (max(layer.stride) > 1 or max(layer.R, layer.S) > 3)
    if stem or layer.dilation != (1, 1) or (layer.R, layer.S) == (5, 5):
        return "5x5, stems, dilated"
    plain = (layer.R, layer.S) == (3, 3) and layer.stride == (1, 1) and layer.C > 4
    return "3x3 stride 1" if plain else "others"


KINDS = ("3x3 stride 1", "5x5, stems, dilated", "1x1", "depthwise 3x3", "others")


# What was measured


@dataclass
class Row:
    """One layer: every contestant's seconds in every round, or why it has none."""

    name: str
    layer: ConvLayer
    repeat: int
    algorithm: str | None = None
    times: dict[str, Samples] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Median time of every contestant."""
        return {name: statistics.median(samples) for name, samples in self.times.items()}

    @property
    def best(self) -> str | None:
        """The fastest peer, where ours has a time to compare."""
        peers = {name: seconds for name, seconds in self.seconds.items() if name != OURS}
        return min(peers, key=peers.__getitem__) if peers and OURS in self.times else None

    def against(self, peer: str) -> list[float] | None:
        """The rounds' ratios to one peer, or to the "best"."""
        name = self.best if peer == "best" else peer
        if name is None or name not in self.times or OURS not in self.times:
            return None
        return ratios(self.times[name], self.times[OURS])


@dataclass
class Suite:
    """The rows of one list of layers at one batch size; `whole` has the runs of all layers in sequence."""

    name: str
    batch: int
    setting: Setting
    layers: int
    network: bool
    rows: list[Row] = field(default_factory=list)
    whole: dict[str, Samples] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def mean(self, peer: str, of: str | None = None) -> Ratio | None:
        """Geometric mean of the ratios to a peer, over all layers or one class; None where a layer has none."""
        rows = [row for row in self.rows if of is None or kind(row.layer) == of]
        found = [row.against(peer) for row in rows]
        known = [rounds for rounds in found if rounds is not None]
        return geometric_mean(known) if known and len(known) == len(rows) else None

    def total(self, contestant: str) -> Samples | None:
        """Round by round the sum over the layers, repeats weighted."""
        if not self.rows or any(contestant not in row.times for row in self.rows):
            return None
        return [
            sum(row.repeat * seconds for row, seconds in zip(self.rows, column, strict=True))
            for column in zip(*(row.times[contestant] for row in self.rows), strict=True)
        ]

    @property
    def incomplete(self) -> list[str]:
        """Why this counts for nothing; empty when every peer took part in every layer, as it comes."""
        setting = self.setting
        reasons = [
            f"{peer.label} did not take part" + (f": {', '.join(missing)} not installed" if missing else "")
            for peer in PEERS.values()
            if setting.direction in peer.directions and peer.name not in setting.peers
            for missing in [peer.missing()]
        ]
        reasons += [f"{row.name}: {name}: {why}" for row in self.rows for name, why in row.failures.items()]
        if setting.restrictions:
            held = " ".join(f"{name}={value}" for name, value in setting.restrictions.items())
            reasons.append(f"torch is not at its default settings ({held}), and ONNX Runtime cannot be held likewise")
        if self.interrupted or len(self.rows) < self.layers:
            reasons.append(f"interrupted after {len(self.rows)} of {self.layers} layers")
        return reasons


# Measuring


@dataclass(frozen=True)
class Setting:
    """What is the same for all layers of a run; `peers` are those that take part."""

    device: CPU
    peers: tuple[str, ...]
    direction: str = "fwd"
    exact: bool = False
    constant: bool = True
    fresh: bool = False
    rounds: int = 9
    restrictions: Mapping[str, str] = field(default_factory=dict)
    isolate: bool = True


def sample(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Median seconds of as many runs as fill the slot, after one that wakes the threads."""
    start = clock()
    run()
    first = clock() - start
    if first >= LONG:
        return first
    taken: list[float] = []
    begin = clock()
    while len(taken) < 2 or clock() - begin < SLOT:
        start = clock()
        run()
        taken.append(clock() - start)
    return statistics.median(taken)


def race(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    busy: Callable[[], float] = time.process_time,
) -> dict[str, Samples]:
    """Every contestant's seconds in every round."""
    times: dict[str, Samples] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                wait_until_idle(sleep, busy)
                times[name].append(sample(runs[name], clock))
    finally:
        if collecting:
            gc.enable()
    return times


def cpu_seconds_of_others() -> float:
    """Processor time that went to other processes since the machine started; 0 where it is not known."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, *interrupts_and_steal = map(int, fields[:8])
    ticks = user + nice + system + sum(interrupts_and_steal)
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def ours(made: Plan, problem: Problem, out: Any, constant: bool = True) -> Run:
    """One run of our plan: NCHW arrays in, a NCHW array out, a new one where `out` is None."""
    weights = made.pack(problem.b) if constant and problem.layer.direction != "wgrad" else problem.b
    return lambda: made.run(problem.a, weights, problem.bias, problem.residual, out)


def disagreement(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest value."""
    scale = max(float(want.max()), -float(want.min()), float(np.finfo(np.float32).tiny))
    difference = np.subtract(got, want)
    return max(float(difference.max()), -float(difference.min())) / scale


def measured(row: Row, made: Plan, setting: Setting, peers: Mapping[str, Peer]) -> None:
    """Race our plan with the peers on one layer; what a contestant raises is its own failure."""
    problem, constant, fresh = Problem.draw(row.layer, setting.device), setting.constant, setting.fresh
    runs: dict[str, Run] = {}
    answer = found = None
    for name in (OURS, *setting.peers):
        try:
            if name == OURS:
                out = None if fresh else setting.device.empty(row.layer.output_shape, np.float32)
                run = ours(made, problem, out, constant)
            else:
                run = peers[name].prepare(problem, setting.device, constant, fresh)
            found = run()
        except Exception as failure:  # whatever one of them does, the others go on
            row.failures[name] = " ".join(str(failure).split())[:200] or type(failure).__name__
            continue
        if answer is None:
            answer = np.array(found)
        elif not (error := disagreement(found, answer)) <= AGREEMENT:
            row.failures[name] = f"its answer differs by {error:.1e} of the largest value"
        runs[name] = run
    del answer, found
    row.times = race(runs, setting.rounds)


def planned(layer: ConvLayer, setting: Setting, progress: Progress | None = None) -> Plan:
    """Our plan, tuned and recorded, vendors off."""
    return plan(
        layer,
        "profile",
        device=setting.device,
        weights="constant" if setting.constant else "varying",
        vendors=False,
        exact=setting.exact,
        isolate=setting.isolate,
        progress=progress,
    )


def run_suite(
    net: Network,
    batch: int,
    setting: Setting,
    *,
    names: Iterable[str] | None = None,
    network: bool = True,
    peers: Mapping[str, Peer] = PEERS,
    say: Callable[[str], None] = lambda line: None,
) -> Suite:
    """Tune all layers, then measure one after the other; an interruption keeps what is done.

    Parameters
    ----------
    net, batch, setting
    names : iterable of str, optional
        The layers to take; all, unless given.
    network : bool
        Whether the layers are one network's, so that their sum means something.
    peers : mapping
        By name, at least those of `setting.peers`.
    say : callable
        Called with what is done next.
    """
    wanted = net.layers if names is None else tuple(map(net.find, names))
    suite = Suite(net.name, batch, setting, len(wanted), network and names is None)
    plans: dict[str, Plan] = {}
    jobs = [Row(named.name, named.at(batch, setting.direction), named.repeat) for named in wanted]
    try:
        for row in jobs:
            say(f"tuning {net.name} {row.name}")
            try:
                plans[row.name] = planned(row.layer, setting)
            except AutoconvError as failure:
                row.failures[OURS] = " ".join(str(failure).split())[:200]
        begun, others = time.perf_counter(), cpu_seconds_of_others()
        for row in jobs:
            say(f"timing {net.name} {row.name}")
            if row.name in plans:
                row.algorithm = str(plans[row.name].candidate)
                measured(row, plans[row.name].from_records(), setting, peers)  # whose workspace goes with it
            suite.rows.append(row)
        if suite.network and not suite.incomplete and setting.direction == "fwd" and setting.constant:
            say(f"timing {net.name} as a whole")
            in_sequence(suite, plans)
        share = (cpu_seconds_of_others() - others) / (time.perf_counter() - begun)
        if share > BUSY:
            suite.notes.append(f"other processes used {share:.0%} of a core meanwhile: these figures are disturbed")
    except KeyboardInterrupt:
        suite.interrupted = True
    return suite


def in_sequence(suite: Suite, plans: Mapping[str, Plan]) -> None:
    """Race all our plans one after the other with one ONNX Runtime graph of the same convolutions.

    A layer that repeats has filters of its own every time, as in the network; inputs and outputs of one
    shape share their memory.
    """
    setting, device = suite.setting, suite.setting.device
    copies = [(row, f"{row.name}.{i}") for row in suite.rows for i in range(row.repeat)]
    images = {math.prod(shape) for row in suite.rows for shape in (row.layer.x_shape, row.layer.y_shape)}
    filters = sum(math.prod(row.layer.w_shape) for row, _ in copies)
    need = 4 * (sum(images) + 4 * filters)  # packed ones are larger
    if need > device.memory_available() // 2:
        suite.notes.append(f"not measured in sequence: that takes some {need >> 20} MiB")
        return
    arrays: dict[Any, Any] = {}

    def shared(role: str, array: Any) -> Any:
        return None if array is None else arrays.setdefault((role, array.shape), array)

    problems: dict[str, Problem] = {}
    outs: dict[str, Any] = {}
    steps: list[Run] = []
    for seed, (row, name) in enumerate(copies):
        drawn = Problem.draw(row.layer, device, seed)
        problem = replace(drawn, a=shared("x", drawn.a), residual=shared("residual", drawn.residual))
        outs[name] = shared("y", device.empty(row.layer.y_shape, np.float32))
        problems[name] = problem
        steps.append(ours(plans[row.name], problem, out=outs[name]))

    def sequence() -> None:
        for step in steps:
            step()

    whole = onnxruntime_network(problems, outs, device.threads)
    suite.whole = race({OURS: sequence, "onnxruntime": whole}, setting.rounds)
