"""autoconv's own kernels against other libraries, layer by layer, interleaved in one run.

In every round each contestant runs for a moment, in an order shuffled anew, once the spinning threads of the one before
are asleep and the machine is at its full speed. What is stated is the median over the rounds of the ratio of two times
of one round, with a 95 % interval.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoconv.bench.agreement import disagreement, refused
from autoconv.bench.baselines import ALL_BASELINES, Baseline, Prepared, Problem
from autoconv.bench.baselines.base import given
from autoconv.bench.baselines.onnxruntime import onnxruntime_network
from autoconv.bench.bound import least_seconds
from autoconv.bench.exported import NETWORKS, exported_networks
from autoconv.bench.results import keep, restore
from autoconv.bench.suites import OURS, Row, Samples, Setting, Suite, as_exported
from autoconv.common.candidate import Candidate
from autoconv.common.text import one_line, size
from autoconv.errors import FAILURES, ConfigError, PlanError
from autoconv.registry import by_name
from autoconv.tuning.planner import plan
from autoconv.tuning.timing.full_speed import FullSpeed, Sampler, slowness
from autoconv.tuning.timing.race import wait_until_idle

if TYPE_CHECKING:
    from autoconv.layer import ConvLayer
    from autoconv.networks.layers import NamedLayer, Network
    from autoconv.plans import Plan

SLOT = 0.075  # seconds of one contestant in one round
LONG = 0.3  # seconds of a run of which one is enough in a round


def sample(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Median seconds of as many runs as fill the slot, after one that wakes the threads and fills the caches."""
    run()
    taken: list[float] = []
    begin = clock()
    while not taken or clock() - begin < SLOT or (len(taken) < 2 and taken[0] < LONG):
        start = clock()
        run()
        taken.append(clock() - start)
    return statistics.median(taken)


def race(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    take: Callable[[Sampler], float] = lambda sampler: sampler(),
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    busy: Callable[[], float] = time.process_time,
) -> dict[str, Samples]:
    """Every contestant's seconds in every round; see `interleaved`."""

    def one(name: str) -> float:
        wait_until_idle(sleep, busy)
        return sample(runs[name], clock)

    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return interleaved({name: partial(one, name) for name in runs}, rounds, take)
    finally:
        if collecting:
            gc.enable()


def interleaved(
    samplers: Mapping[str, Sampler], rounds: int, take: Callable[[Sampler], float] = lambda sampler: sampler()
) -> dict[str, Samples]:
    """A sample of every contestant in every round, in an order shuffled anew.

    Parameters
    ----------
    samplers : mapping of str to callable
        What takes a sample of each, and gives its seconds.
    rounds : int
    take : callable
        What calls such a sampler, when it is time.

    Returns
    -------
    dict of str to list of float
        Seconds.
    """
    times: dict[str, Samples] = {name: [] for name in samplers}
    order, shuffle = list(samplers), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(take(samplers[name]))
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


def ours(made: Plan, problem: Problem, out: Any, constant: bool = True) -> Callable[[], Any]:
    """One run of our plan: arrays in the layer's layout in, such an array out, a new one where `out` is None."""
    weights = made.pack(problem.b) if constant and problem.layer.direction != "wgrad" else problem.b
    return lambda: made.run(problem.a, weights, problem.bias, problem.residual, out, problem.slope)


def guarded(name: str, run: Callable[[], Any], failures: dict[str, str]) -> Callable[[], Any]:
    """A run that is the contestant's own failure where it raises what its first did not."""

    def once() -> Any:
        try:
            return run()
        except Exception as failure:
            failures[name] = one_line(failure, 200)
            return None

    return once


def measured(row: Row, made: Plan, setting: Setting, baselines: Mapping[str, Baseline]) -> None:
    """Race our plan with the baselines on one layer; what a contestant raises is its own failure."""
    problem, constant, fresh = Problem.draw(row.layer, setting.device), setting.constant, setting.fresh
    runs: dict[str, Callable[[], Any]] = {}
    answer = found = None
    first = ""  # who gave the answer that the others are compared with
    for name in (OURS, *setting.baselines):
        try:
            if name == OURS:
                out = None if fresh else setting.device.empty(row.layer.output_shape, row.layer.numpy_dtype)
                prepared = Prepared(ours(made, problem, out, constant))
            else:
                prepared = baselines[name].prepare(problem, setting.device, constant, fresh)
            found = prepared.read(prepared.run())
        except Exception as failure:  # whatever one of them does, the others go on
            unable = isinstance(failure, PlanError) and name != OURS
            (row.unable if unable else row.failures)[name] = one_line(failure, 200)
            continue
        if answer is None:
            answer, first = np.array(found), name
        elif why := refused(error := disagreement(found, answer), whose=first):
            row.failures[name] = why
            continue
        else:
            row.errors[name] = error
        runs[name] = guarded(name, prepared.run, row.failures)
    del answer, found
    full_speed = FullSpeed.of(setting.device)
    times = race(runs, setting.rounds, full_speed.take)
    row.times, row.slow = {name: times[name] for name in times if name not in row.failures}, full_speed.slow


def check_types(net: Network, chosen: Iterable[NamedLayer]) -> None:
    """Refuse layers that are stated in another type than float32, from which layers of other types are derived.

    Raises
    ------
    ConfigError
        When one of them is not of float32.
    """
    for named in chosen:
        if (dtype := named.layer.dtype) != "float32":
            expected = "expected 'float32', from which layers of other types are derived"
            raise ConfigError(f"{net.name}: layer {named.name!r}: dtype={dtype!r}: {expected}")


def planned(layer: ConvLayer, setting: Setting) -> Plan:
    """Our plan, tuned and recorded, vendors off."""
    return plan(
        layer,
        "profile",
        device=setting.device,
        weights="constant" if setting.constant else "varying",
        vendors=False,
        exact=setting.exact,
        isolate=setting.isolate,
    )


def run_suite(
    net: Network,
    batch: int,
    setting: Setting,
    *,
    names: Iterable[str] | None = None,
    network: bool = True,
    baselines: Mapping[str, Baseline] = ALL_BASELINES,
    folder: Path | None = None,
    over: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
) -> Suite:
    """Tune all layers, then measure one after the other; an interruption keeps what is done.

    Parameters
    ----------
    net : Network
    batch : int
        Of the layers that state none of their own; so, too, for the direction of the setting.
    setting : Setting
    names : iterable of str, optional
        The layers to take; all, unless given.
    network : bool
        Whether the layers are one network's, so that their sum means something.
    baselines : mapping of str to Baseline
        By name, at least those of `setting.baselines`.
    folder : Path, optional
        Where the result is kept after every layer. What an earlier run has left there is not measured again.
    over : callable
        Whether the time is spent, asked before every layer.
    say : callable
        Called with what is done next.

    Returns
    -------
    Suite
        With a row for every layer that was reached.

    Raises
    ------
    ConfigError
        When the network has no layer of one of `names`, one of the layers is not of float32, or the folder has the
        result of another setting.
    """
    chosen = net.layers if names is None else tuple(map(net.find, names))
    check_types(net, chosen)
    some = () if names is None else tuple(named.name for named in chosen)
    suite = Suite(net.name, batch, setting, len(chosen), network and names is None, names=some)
    jobs = _jobs(suite, net, chosen)
    if folder is not None:
        restore(suite, jobs, folder)
    if any(not row.times for row in jobs) or (net.name in NETWORKS and as_exported(OURS) not in suite.whole):
        suite.whole, suite.shares = {}, {}  # those of other rows, or of a part of the contestants
    sequence = _run_in_sequence(suite, jobs)
    try:
        plans = _tuned(suite, [row for row in jobs if sequence or not row.times], over, say)
        for row in jobs:
            if not row.times:
                if over():
                    continue
                say(f"timing {net.name} {row.name}")
                _timed(row, plans.get(row.name), setting, baselines)
            if row.candidate and row.layer.direction == "fwd":
                row.bound = least_seconds(row.layer, setting.device, Candidate.parse(row.candidate))
            suite.rows.append(row)
            if folder is not None:
                keep(suite, folder, jobs)
        if sequence and len(plans) == len(suite.rows) == suite.layers and not over():
            say(f"timing {net.name} as a whole")
            try:
                in_sequence(suite, plans)
            except Exception as failure:  # of whichever library: the layers have their times
                suite.notes.append(f"the layers were not timed in sequence: {one_line(failure, 200)}")
    except KeyboardInterrupt:
        suite.interrupted = True
    if folder is not None:
        keep(suite, folder, jobs)
    return suite


def _jobs(suite: Suite, net: Network, chosen: Iterable[NamedLayer]) -> list[Row]:
    """A row for each of some layers, nothing of which is measured yet."""
    setting, meant = suite.setting, (suite.batch, suite.setting.direction)
    jobs = [
        Row(named.name, named.at(*net.stated(named, *meant)).replace(dtype=setting.dtype), named.repeat)
        for named in chosen
    ]
    if own := sum((row.layer.N, row.layer.direction) != meant for row in jobs):
        suite.notes.append(f"{own} of {len(jobs)} layers are at a batch size or in a direction of their own")
    return jobs


def _run_in_sequence(suite: Suite, jobs: Sequence[Row]) -> bool:
    """Whether the layers are to be timed one after the other, too, as a network, and that was not done before."""
    return (
        suite.network
        and suite.setting.constant
        and "onnxruntime" in suite.setting.baselines
        and all(row.layer.direction == "fwd" and given(row.layer) for row in jobs)
        and not suite.whole
    )


def _tuned(suite: Suite, rows: Iterable[Row], over: Callable[[], bool], say: Callable[[str], None]) -> dict[str, Plan]:
    """Our plans of some rows' layers by name, as far as the time goes."""
    plans = {}
    for row in rows:
        if over():
            break
        say(f"tuning {suite.name} {row.name}")
        try:
            plans[row.name] = planned(row.layer, suite.setting)
        except FAILURES as failure:
            row.failures[OURS] = one_line(failure, 200)
    return plans


def _timed(row: Row, made: Plan | None, setting: Setting, baselines: Mapping[str, Baseline]) -> None:
    """Measure one layer, if we have a plan for it; and how busy others kept the machine meanwhile."""
    begun, others = time.perf_counter(), cpu_seconds_of_others()
    if made is not None:
        row.candidate, row.version = str(made.candidate), by_name(made.device)[made.candidate.algorithm].version
        facts = made.facts.get(row.candidate)
        row.recorded = facts.time if facts else None
        try:
            measured(row, made.from_records(), setting, baselines)  # whose workspace goes with it
        except FAILURES as failure:  # of what all contestants need
            row.failures[OURS] = one_line(failure, 200)
    row.busy = (cpu_seconds_of_others() - others) / (time.perf_counter() - begun)


def in_sequence(suite: Suite, plans: Mapping[str, Plan]) -> None:
    """Race all our plans, one after the other, with ONNX Runtime.

    Once with a single graph of the same convolutions side by side, each on its own input, as ours are. And where the
    network is one of `NETWORKS`, both run that as its users export it. A layer that repeats has filters of its own
    every time, as in the network; inputs and outputs of one shape share their memory.
    """
    setting, device = suite.setting, suite.setting.device
    copies = [(row, f"{row.name}.{i}") for row in suite.rows for i in range(row.repeat)]
    images = {math.prod(shape) for row in suite.rows for shape in (row.layer.x_shape, row.layer.y_shape)}
    filters = sum(math.prod(row.layer.w_shape) for row, _ in copies)
    need = 4 * (sum(images) + 5 * filters)  # packed ones are larger
    if need > device.memory_available() // 2:
        suite.notes.append(
            f"the layers were not timed in sequence: that takes about {size(need)}, more than half of the free memory"
        )
        return
    arrays: dict[Any, Any] = {}

    def shared(role: str, array: Any) -> Any:
        return None if array is None else arrays.setdefault((role, array.shape), array)

    problems: dict[str, Problem] = {}
    outs: dict[str, Any] = {}
    steps: list[Callable[[], Any]] = []
    for seed, (row, name) in enumerate(copies):
        drawn = Problem.draw(row.layer, device, seed)
        problem = replace(drawn, a=shared("x", drawn.a), residual=shared("residual", drawn.residual))
        out = shared("y", device.empty(row.layer.y_shape, np.float32))
        steps.append(ours(plans[row.name], problem, out=out))
        problems[name] = theirs = problem.channels_first(device)
        outs[name] = out.reshape(theirs.layer.y_shape)  # the same memory

    def sequence() -> None:
        for step in steps:
            step()

    runs, shares = {OURS: sequence, "onnxruntime": onnxruntime_network(problems, outs, device.threads)}, {}
    if suite.name in NETWORKS:
        found = exported_networks(suite.name, problems, setting)
        answer, other = (prepared.read(prepared.run()) for prepared, _ in found.values())
        if why := refused(disagreement(other, answer)):
            raise ValueError(f"onnxruntime, as exported: {why}")
        runs |= {as_exported(name): prepared.run for name, (prepared, _) in found.items()}
        shares = {name: share for name, (_, share) in found.items()}
    full_speed = FullSpeed.of(device)
    suite.whole = race(runs, setting.rounds, full_speed.take)
    suite.shares = shares  # after it, as it may be cut short: both, or none
    if full_speed.slow:
        suite.notes.append(f"{slowness(full_speed.slow)} of the layers in sequence")
