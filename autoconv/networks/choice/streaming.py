"""What layers that store past the caches cost whoever reads their output next."""

from __future__ import annotations

import math

from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
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
    layer, machine = made.layer, device.machine
    size = math.prod(layer.output_shape) * layer.itemsize
    fetched = machine.reading(size, machine.beyond) - machine.reading(size, size / machine.threads)

    def seconds(name: str) -> float:
        return made.timings[name] + fetched * bool(Candidate.parse(name).params.get("nt"))

    timed = [name for name in made.ranking if name in made.timings]
    return min(timed, key=seconds, default=str(made.candidate))
