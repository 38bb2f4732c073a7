"""Whole networks against each other: the same graph in different parts, run in turn."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from autoconv.networks.run.instance import Instance, Schedule

FEWEST, MOST = 5, 40  # rounds
SECONDS = 1.5  # of all rounds, past the fewest
RESAMPLES = 200
SURE = 0.9  # the part of resampled medians that has to agree


def quickest(schedules: Sequence[Schedule]) -> tuple[int, list[float]]:
    """Which of several ways to compute one network is the quickest: the first, unless another surely is.

    They run in rounds of random order, so that what disturbs the machine meets all; and their times are compared round
    by round. Another is quicker when the median of its time over the first one's is below 1 in nearly all samples drawn
    anew from the rounds (the bootstrap: Efron, 1979).

    Parameters
    ----------
    schedules : sequence of Schedule
        Of graphs with the same inputs.

    Returns
    -------
    int, and list of float
        Its place, and the median seconds of each.
    """
    graph, draws = schedules[0].graph, random.Random(0)
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(t.shape).astype(t.dtype) for name, t in graph.inputs.items()}
    instances = [Instance(schedule) for schedule in schedules]
    for instance in instances:
        instance.run(inputs)
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < FEWEST or (len(rounds) < MOST and time.perf_counter() - began < SECONDS):
        took = [0.0] * len(instances)
        for n in draws.sample(range(len(instances)), len(instances)):
            start = time.perf_counter()
            instances[n].run(inputs)
            took[n] = time.perf_counter() - start
        rounds.append(took)
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    best = 0
    for n in sorted(range(1, len(medians)), key=medians.__getitem__):
        ratios = [took[n] / took[0] for took in rounds]
        again = [statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
        if sum(ratio < 1 for ratio in again) >= SURE * RESAMPLES:
            best = n
            break
    return best, medians
