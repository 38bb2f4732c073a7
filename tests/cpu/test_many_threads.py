"""More threads than this computer has: who takes part, what is predicted, how tasks fall, that answers are right."""

import ctypes
import dataclasses
import functools
import heapq
import itertools

import pytest
from guards import check_guarded
from layers import operands
from vectors import machine_named

from autoconv import ConvLayer, networks
from autoconv.cpu import pool
from autoconv.cpu.codegen import launch
from autoconv.cpu.common.algorithm import GeneratedAlgorithm, party
from autoconv.cpu.device import CPU
from autoconv.cpu.fft import algorithm as fft
from autoconv.cpu.machine.curve import Curve
from autoconv.cpu.transform.estimate import sides
from autoconv.cpu.winograd import algorithm as winograd
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
        **{name: grown(getattr(machine, name)) for name in ("read", "write", "stream", "jumps", "handed")},
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


FAMILIES = [a for a in algorithms(device_of(64)) if a.vendor is None and not a.name.startswith("numpy.")]
THREADS = (4, 8, 16, 32, 64)


@functools.cache
def forecast_winner(name, threads):
    """The candidate of the least estimate, and that."""
    found = CandidateSet(LAYERS[name], device_of(threads), tuple(FAMILIES), frozenset()).expected
    least = min(found, key=lambda candidate: found[candidate].time)
    return least, found[least].time


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
@pytest.mark.parametrize("name", LAYERS)
def test_no_prediction_grows_with_the_threads(name):
    least = [forecast_winner(name, threads)[1] for threads in THREADS]
    assert all(later <= sooner for sooner, later in itertools.pairwise(least))


def launched(program, workspace_bytes):
    """How many tasks each region of a run has, none of which is done here."""
    found = []
    record = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64)(lambda *region: found.append(region[-1]))
    memory = ctypes.create_string_buffer(workspace_bytes + 64)
    context = (ctypes.c_int64 * launch.SLOTS)(*[ctypes.addressof(memory)] * launch.OPERANDS)
    context[launch.LAUNCH] = ctypes.cast(record, ctypes.c_void_p).value
    program.function("run", ctypes.c_void_p)(ctypes.addressof(context))
    return found


def dealt(tasks, seconds, threads):
    """When the last of the threads has done its last task, if each takes the next one as soon as it is free."""
    free = [0.0] * threads
    for _ in range(tasks):
        heapq.heapreplace(free, free[0] + seconds / tasks)
    return max(free)


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_longest_thread_has_little_more_than_its_share(name, threads):
    """Tasks of the winner are dealt to its party as the pool does it; those of a region are alike, being cut evenly.

    The seconds of a region are its side's of a pipeline of transforms, or the whole estimate. Where the longest thread
    has more, the estimate has counted that, and expects none quicker of those that are dealt more evenly.
    """
    device, layer = device_of(threads), LAYERS[name]
    candidate, seconds = forecast_winner(name, threads)
    family = next(family for family in FAMILIES if family.name == candidate.algorithm)
    used = family.workspace_bytes(layer, device, candidate.params)
    regions = launched(family.program(layer, device, candidate.params), used)
    party = family.party(layer, device, candidate.params)
    of_regions = [seconds * party]
    if len(regions) > 1:
        (tiling,) = family.tilings(layer, device, candidate.params)
        of_sides = sides(tiling, device.machine, family.counts(tiling, device.machine)).regions(party)
        of_regions = [of_sides[n % 2] * threads * tasks / sum(regions[n % 2 :: 2]) for n, tasks in enumerate(regions)]
    share = sum(of_regions) / party
    longest = sum(dealt(*region, party) for region in zip(regions, of_regions, strict=True))
    assert longest <= max(1.15 * share, seconds) or share < 50e-6


GEOMETRIES = {
    "3x3": {"N": 1, "C": 9, "H": 12, "W": 13, "K": 17, "R": 3, "S": 3, "padding": 1},
    "1x1": {"N": 2, "C": 16, "H": 9, "W": 8, "K": 24, "R": 1, "S": 1},
    "depthwise": {"N": 2, "C": 6, "H": 12, "W": 13, "K": 6, "R": 3, "S": 3, "padding": 1, "groups": 6},
    "strided": {"N": 1, "C": 8, "H": 12, "W": 13, "K": 8, "R": 3, "S": 3, "padding": 1, "stride": 2},
}


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_sixty_four_threads_on_a_few_processors(geometry, direction, family, monkeypatch):
    """All take part in the first and the last candidate of each family, with buffers as long as they have to be."""
    for kind in (GeneratedAlgorithm, winograd.Winograd, fft.TiledFFT):  # whoever decides
        monkeypatch.setattr(kind, "party", lambda self, layer, device, params: device.threads)
    device = device_of(64)
    layer = ConvLayer(**GEOMETRIES[geometry], direction=direction)
    able = [c for c in family.all(layer, device) if not family.why_not(layer, device, c.params)]
    if able:
        check_guarded(family, layer, device, operands(layer), {str(able[0]), str(able[-1])})
