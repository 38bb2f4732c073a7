"""The candidate that a layer takes in a network, where it costs others what it does not cost the layer alone.

One that stores its output past the caches has whoever reads it next wait, and so has one whose threads do not go by
pixels where others do; one that errs takes of the error that the whole may have; NumPy leaves its threads spinning
beside whatever follows.
"""

from __future__ import annotations

import functools
import math

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.cpu.common.correlation import flat_correlations
from autoconv.cpu.device import CPU
from autoconv.cpu.direct import geometry
from autoconv.cpu.numpy.common import NumpyAlgorithm
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.networks.choice.errors import FREE, Price, error_by
from autoconv.plans import Plan
from autoconv.records.limits import cooperates, noise
from autoconv.tuning.candidates import finer_form


def best_in_network(made: Plan, device: Device, price: Price = FREE, read: bool = True) -> str:
    """The best candidate of a layer in a network.

    A layer alone is timed without anybody reading its output. What it stored past the caches has to be fetched from
    memory, where it would else lie in the caches as far as it fits; and what another thread stored, out of that one's
    caches. Both differences are added to what was measured.

    Parameters
    ----------
    made : Plan
        The layer's, alone.
    device : Device
    price : Price
        Of its error.
    read : bool
        Whether somebody in the network reads its output.

    Returns
    -------
    str
        The plan's own candidate where nothing was measured, unless that is NumPy's, and not by the user's choice.
    """
    timed = timed_in_network(made, device)
    if not timed:
        return _expected_in_network(made, device)
    if not (read or price.seconds):
        return str(made.candidate) if str(made.candidate) in timed else timed[0]
    return min(timed, key=lambda name: cost(made, device, name, price, read))


def timed_in_network(made: Plan, device: Device) -> list[str]:
    """Those of a layer's candidates that were timed and may run in a network, in the order of its plan.

    The threads of NumPy's BLAS spin for a tenth of a second after its work, and take a processor from all that follows:
    NumPy is for layers that nothing else computes.
    """
    if not made.timings:  # to rank candidates of which none was timed would take long
        return []
    timed = [name for name in made.ranking if name in made.timings]
    return [name for name in timed if not _by_numpy(name, device)] or timed


def _expected_in_network(made: Plan, device: Device) -> str:
    """The best by estimates of those that may run in a network, likewise."""
    own = str(made.candidate)
    if not _by_numpy(own, device) or made.source != "heuristic":
        return own
    return next((name for name in made.ranking if not _by_numpy(name, device)), own)


def _by_numpy(candidate: str, device: Device) -> bool:
    """Whether a candidate is one of NumPy's, on a CPU."""
    return Candidate.parse(candidate).algorithm in _of_numpy(device)


@functools.lru_cache(16)
def _of_numpy(device: Device) -> frozenset[str]:
    return frozenset(one.name for one in registry.own(device) if isinstance(one, NumpyAlgorithm))


def cost(made: Plan, device: Device, candidate: str, price: Price = FREE, read: bool = True) -> float:
    """Seconds of a candidate that was timed, what others wait for it and what its error costs among them.

    Of two that are equally fast, as far as times can tell, the one whose threads work on their own costs less.
    """
    waiting = fetching(made.layer, device, candidate) + passing(made.layer, device, candidate) if read else 0.0
    erring = price.of(error_by(made, candidate, device, price.mixed)) if price.seconds else 0.0
    doubt = noise(*[made.facts[candidate]] * 2) if cooperates(Candidate.parse(candidate)) else 0.0
    return made.timings[candidate] * (1 + doubt) + waiting + erring


def finer_error(made: Plan, device: Device, price: Price, read: bool = True) -> float | None:
    """What a finer form of a candidate is expected to err at worst that would be chosen if it took no longer, or None.

    Parameters as for `best_in_network`.
    """
    algorithms, best = registry.by_name(device), best_in_network(made, device, price, read)
    least, error = cost(made, device, best, price, read) if best in made.timings else 0.0, None
    for candidate in timed_in_network(made, device):
        parsed = Candidate.parse(candidate)
        form = finer_form(algorithms[parsed.algorithm], made.layer, parsed)
        if form is not None and str(form.candidate) not in made.timings:
            erring = price.of(form.share * error_by(made, candidate, device, price.mixed))
            seconds = cost(made, device, candidate, read=read) + erring
            if seconds < least:
                least, error = seconds, form.share * error_by(made, candidate, device, mixed=False)
    return error


def fetching(layer: ConvLayer, device: Device, candidate: str) -> float:
    """Seconds that a layer's output takes longer to be read because a candidate stored it past the caches."""
    if not Candidate.parse(candidate).params.get("nt"):
        return 0.0
    assert isinstance(device, CPU)  # others have no such candidates
    machine, size = device.machine, math.prod(layer.output_shape) * layer.itemsize
    return machine.reading(size, machine.beyond) - machine.reading(size, size / machine.threads)


@functools.lru_cache(4096)  # asked at every price of error
def passing(layer: ConvLayer, device: Device, candidate: str) -> float:
    """Seconds in which threads read what others have written, for a candidate whose threads do not go by pixels.

    Its neighbours do, where channels are neighbours. A thread of some filters reads all of the input, and then reads
    some of the output's channels from each of the others; the caches that threads share are where they meet.
    """
    if not isinstance(device, CPU) or layer.layout != "NHWC" or layer.direction == "wgrad":
        return 0.0
    threads, machine, parsed = device.threads, device.machine, Candidate.parse(candidate)
    apart = parsed.algorithm == "direct" and geometry.blockings(layer, device, parsed.params)[0].parts > 1
    if apart or not all(geometry.passes_pixels(c, threads) for c in flat_correlations(layer)):
        return 0.0
    read, written = layer.input_shapes[0], layer.output_shape
    passed = layer.itemsize * (math.prod(read) * (threads - 1) + math.prod(written) * (threads - 1) / threads)
    shared, own = machine.caches[2] / threads, machine.caches[1]
    return max(machine.reading(passed, shared / 2) - machine.reading(passed, own / 2), 0.0)
