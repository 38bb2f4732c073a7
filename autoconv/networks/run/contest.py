"""Whole networks against each other: the same graph in different parts, run in turn."""

from __future__ import annotations

import math
import random
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from autoconv.algorithm import Array
from autoconv.networks.operators import Foreign, random_inputs
from autoconv.networks.run.instance import Instance, Schedule
from autoconv.records.cache import TuningCache

FEWEST, MOST = 5, 50  # rounds
FEWEST_OF_PARTS = 15  # which are short, so that more disturbs them
SECONDS = 10.0  # of all rounds, past the fewest
RESAMPLES = 200
AGREEMENT = 1e-2  # of the largest value: what differs by more is another answer, however inaccurate the arithmetic
NEAR = 1.02  # of the quickest: then the one that needs least memory
SURE, LIKELY, HOPELESS = 0.95, 0.75, 0.25  # parts of resampled medians: to stop at, to win in the end, to give up


def quickest(schedules: Sequence[Schedule], cache: TuningCache, part: bool = False) -> tuple[int, list[float]]:
    """Which of several ways to compute one network is the quickest: the first, unless another likely is.

    They run in rounds of random order, so that what disturbs the machine meets all; and their times are compared round
    by round. How sure it is that another is quicker tells the part of samples, drawn anew from the rounds, in which the
    median of its time over the first one's is below 1 (the bootstrap: Efron, 1979). Rounds go on until that is sure of
    one, hopeless for all, or has taken long enough. Of those that are about as quick, the one that needs the least
    memory wins.

    Parameters
    ----------
    schedules : sequence of Schedule
        Of graphs with the same inputs.
    cache : TuningCache
        Whose other users measure nothing meanwhile.
    part : bool
        Whether they are ways to compute a part of a network: then there are more rounds, and each runs once before it
        is timed, as the part before would have used its memory.

    Returns
    -------
    int, and list of float
        Its place, and the median seconds of each; infinite of one that does not give the first one's answer.
    """
    inputs, draws = random_inputs(schedules[0].graph.inputs), random.Random(0)
    instances = [Instance(schedule) for schedule in schedules]
    with cache.timing_lock(schedules[0].device.key):
        right = _right(instances, inputs)
        rounds, agreeing = _raced([instances[n] for n in right], inputs, draws, part)
    medians = [math.inf] * len(schedules)
    for n, times in zip(right, zip(*rounds, strict=True), strict=True):
        medians[n] = statistics.median(times)
    likely = [n for n, part in zip(right[1:], agreeing, strict=True) if part >= LIKELY]
    near = [n for n in likely if medians[n] <= NEAR * min(medians[m] for m in likely)]
    return min(near, key=lambda n: schedules[n].arena_bytes, default=0), medians


def repeatable(schedule: Schedule) -> bool:
    """Whether a network has one answer to numbers that are made up.

    What runs elsewhere may refuse such numbers, as places in a table, or draw others in every run.
    """
    if not any(isinstance(step.node.operator, Foreign) for step in schedule.steps):
        return True
    instance, inputs = Instance(schedule), random_inputs(schedule.graph.inputs)
    try:
        first, again = instance.run(inputs), instance.run(inputs)
    except Exception:  # of any kind: other libraries'
        return False
    return all(_close(answer, first[name]) for name, answer in again.items())


def _right(instances: Sequence[Instance], inputs: Mapping[str, Array]) -> list[int]:
    """The places of those that answer as the first does; the others are told of."""
    first, *others = [instance.run(inputs) for instance in instances]
    found = [0]
    for n, answers in enumerate(others, 1):
        wrong = [name for name, answer in answers.items() if not _close(answer, first[name])]
        if wrong:
            warnings.warn(f"{wrong[0]}: way {n} to compute it gave another answer, and is left out", stacklevel=2)
        else:
            found.append(n)
    return found


def _close(answer: Array, other: Array) -> bool:
    """Whether two answers are one but for rounding; what is not finite in both alike is."""
    a, b = (array.astype(np.result_type(array, np.float64)) for array in map(np.asarray, (answer, other)))
    scale = float(np.abs(b, where=np.isfinite(b), out=np.zeros(b.shape)).max(initial=0.0))
    return bool(np.isclose(a, b, rtol=0.0, atol=AGREEMENT * scale, equal_nan=True).all())


def _raced(
    instances: Sequence[Instance], inputs: Mapping[str, Array], draws: random.Random, part: bool
) -> tuple[list[list[float]], list[float]]:
    """Seconds of all in every round; and of each after the first, the part of samples in which it is quicker."""
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while True:
        took = [0.0] * len(instances)
        for n in draws.sample(range(len(instances)), len(instances)):
            if part:
                instances[n].run(inputs)
            start = time.perf_counter()
            instances[n].run(inputs)
            took[n] = time.perf_counter() - start
        rounds.append(took)
        if len(rounds) < (FEWEST_OF_PARTS if part else FEWEST):
            continue
        agreeing = [_agreeing([took[n] / took[0] for took in rounds], draws) for n in range(1, len(instances))]
        late = len(rounds) >= MOST or time.perf_counter() - began > SECONDS
        if late or max(agreeing, default=0) >= SURE or max(agreeing, default=0) <= HOPELESS:
            return rounds, agreeing


def _agreeing(ratios: Sequence[float], draws: random.Random) -> float:
    """The part of resampled medians that are below 1."""
    again = (statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return sum(ratio < 1 for ratio in again) / RESAMPLES
