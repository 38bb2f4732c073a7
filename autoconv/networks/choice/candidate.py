"""The candidate that a layer takes in a network, where it costs others what it does not cost the layer alone.

One that stores its output past the caches has whoever reads it next wait; one that errs takes of the error that the
whole may have; NumPy leaves its threads spinning beside whatever follows.
"""

from __future__ import annotations

import math

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.common import NumpyAlgorithm
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.networks.choice.errors import error_by
from autoconv.plans import Plan


def best_in_network(made: Plan, device: Device, price: float = 0.0, read: bool = True) -> str:
    """The best candidate of a layer in a network.

    A layer alone is timed without anybody reading its output. What it stored past the caches has to be fetched from
    memory, where it would else lie in the caches as far as it fits: that difference is added to what was measured.

    Parameters
    ----------
    made : Plan
        The layer's, alone.
    device : Device
    price : float
        Seconds that one more of the square of its error costs.
    read : bool
        Whether somebody in the network reads its output.

    Returns
    -------
    str
        The plan's own candidate where nothing was measured.
    """
    timed = timed_in_network(made, device)
    if not timed:
        return str(made.candidate)
    if not (read or price):
        return str(made.candidate) if str(made.candidate) in timed else timed[0]
    return min(timed, key=lambda name: cost(made, device, name, price, read))


def timed_in_network(made: Plan, device: Device) -> list[str]:
    """Those of a layer's candidates that were timed and may run in a network, in the order of its plan.

    The threads of NumPy's BLAS spin for a tenth of a second after its work, and take a processor from all that follows:
    NumPy is for layers that nothing else computes.
    """
    numpy = {algorithm.name for algorithm in registry.own(device) if isinstance(algorithm, NumpyAlgorithm)}
    timed = [name for name in made.ranking if name in made.timings]
    return [name for name in timed if Candidate.parse(name).algorithm not in numpy] or timed


def cost(made: Plan, device: Device, candidate: str, price: float = 0.0, read: bool = True) -> float:
    """Seconds of a candidate that was timed, what others wait for it and what its error costs among them."""
    waiting = fetching(made.layer, device, candidate) if read else 0.0
    erring = price * error_by(made, candidate, device) ** 2 if price else 0.0
    return made.timings[candidate] + waiting + erring


def fetching(layer: ConvLayer, device: Device, candidate: str) -> float:
    """Seconds that a layer's output takes longer to be read because a candidate stored it past the caches."""
    if not Candidate.parse(candidate).params.get("nt"):
        return 0.0
    assert isinstance(device, CPU)  # others have no such candidates
    machine, size = device.machine, math.prod(layer.output_shape) * layer.itemsize
    return machine.reading(size, machine.beyond) - machine.reading(size, size / machine.threads)
