"""More threads than this computer has: how many take part, what is predicted, and that the answers are right."""

import dataclasses
import itertools

import pytest
from guards import check_guarded
from layers import operands
from vectors import machine_named

from autoconv import ConvLayer, networks
from autoconv.cpu import pool
from autoconv.cpu.common import algorithm
from autoconv.cpu.common.algorithm import party
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.model import Curve
from autoconv.registry import algorithms
from autoconv.tuning.candidates import CandidateSet

LAYERS = {named.name: named.at(1, "fwd") for named in networks.load("mixed27").layers}
SMALL = ConvLayer(N=1, C=1, H=3, W=3, K=1, R=1, S=1)


def device_of(threads):
    """A processor of so many cores, each like the first of one that was measured; to meet takes longer with each."""
    machine = machine_named("epyc-zen3")
    factor = threads / machine.threads

    def grown(curve):
        return Curve(tuple((int(size * factor), rate * factor) for size, rate in curve.points))

    changes = {
        "threads": threads,
        "peaks": {unit: {name: rate * factor for name, rate in of.items()} for unit, of in machine.peaks.items()},
        "barrier": machine.barrier / (machine.threads - 1) * max(threads - 1, 1),
        **{name: grown(getattr(machine, name)) for name in ("read", "write", "stream")},
    }
    return CPU(threads, "avx2", model=dataclasses.replace(machine, **changes).text)


@pytest.mark.parametrize("threads", [1, 2, 4, 16, 64])
def test_a_small_layer_takes_one_thread_and_a_large_one_all(threads):
    device = device_of(threads)
    assert party(SMALL, device) == 1
    assert party(LAYERS["vgg_conv2_2"], device) == threads


@pytest.mark.parametrize("name", LAYERS)
def test_a_thread_more_is_worth_its_coming(name):
    """The party grows with the work, never beyond the threads; what it takes falls with the threads there are."""
    layer, seconds = LAYERS[name], []
    for threads in (2, 4, 8, 16, 32, 64):
        device = device_of(threads)
        taking = party(layer, device)
        alone = layer.flops / device.peak_flops("float32") * threads
        meeting = device.machine.barrier / (threads - 1)
        assert 1 <= taking <= threads
        assert taking <= party(layer.replace(N=4), device)
        seconds.append(max(alone, layer.bytes / device.machine.memory * threads) / taking + meeting * (taking - 1))
    assert all(later <= sooner * (1 + 1e-9) for sooner, later in itertools.pairwise(seconds))


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
@pytest.mark.parametrize("name", LAYERS)
def test_no_prediction_grows_with_the_threads(name):
    """Of the candidate with the least estimate. Up to 16: with more, meeting costs the smallest layers more."""
    least = []
    for threads in (2, 4, 8, 16):
        device = device_of(threads)
        offered = tuple(a for a in algorithms(device) if a.vendor is None and not a.name.startswith("numpy."))
        found = CandidateSet(LAYERS[name], device, offered, frozenset())
        least.append(min(facts.time for facts in found.expected.values()))
    assert all(later <= sooner for sooner, later in itertools.pairwise(least))


GEOMETRIES = {
    "3x3": {"N": 1, "C": 9, "H": 12, "W": 13, "K": 17, "R": 3, "S": 3, "padding": 1},
    "1x1": {"N": 2, "C": 16, "H": 9, "W": 8, "K": 24, "R": 1, "S": 1},
    "depthwise": {"N": 2, "C": 6, "H": 12, "W": 13, "K": 6, "R": 3, "S": 3, "padding": 1, "groups": 6},
    "strided": {"N": 1, "C": 8, "H": 12, "W": 13, "K": 8, "R": 3, "S": 3, "padding": 1, "stride": 2},
}
FAMILIES = [a for a in algorithms(device_of(64)) if a.vendor is None and not a.name.startswith("numpy.")]


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_sixty_four_threads_on_a_few_processors(geometry, direction, family, monkeypatch):
    """All take part in the first and the last candidate of each family, with buffers as long as they have to be."""
    monkeypatch.setattr(algorithm, "party", lambda layer, device: device.threads)
    device = device_of(64)
    layer = ConvLayer(**GEOMETRIES[geometry], direction=direction)
    able = [c for c in family.all(layer, device) if not family.why_not(layer, device, c.params)]
    if able:
        check_guarded(family, layer, device, operands(layer), {str(able[0]), str(able[-1])})
