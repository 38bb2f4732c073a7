"""What layers that store past the caches cost whoever reads their output next."""

from __future__ import annotations

import math

from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.plans import Plan


def best_before_reading(made: Plan, device: CPU) -> str:
    """The best candidate of a layer whose output is read next.

    A layer alone is timed without anybody reading its output. What it stored past the caches has to be fetched from
    memory, where it would else lie in the caches as far as it fits: that difference is added to what was measured.

    Parameters
    ----------
    made : Plan
        The layer's, alone.
    device : CPU

    Returns
    -------
    str
        The plan's own candidate where nothing was measured.
    """

    def seconds(name: str) -> float:
        return made.timings[name] + fetching(made.layer, device, name)

    timed = [name for name in made.ranking if name in made.timings]
    return min(timed, key=seconds, default=str(made.candidate))


def fetching(layer: ConvLayer, device: CPU, candidate: str) -> float:
    """Seconds that a layer's output takes longer to be read because a candidate stored it past the caches."""
    if not Candidate.parse(candidate).params.get("nt"):
        return 0.0
    machine, size = device.machine, math.prod(layer.output_shape) * layer.itemsize
    return machine.reading(size, machine.beyond) - machine.reading(size, size / machine.threads)
