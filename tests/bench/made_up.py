"""Records with times that nobody measured, to draw: of real candidates, each credible, in no time."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import replace

import vectors

from autoconv import TuningCache
from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.records.schema import Facts, Race
from autoconv.registry import algorithms
from autoconv.tuning.candidates import expected

EACH = 3  # candidates of an algorithm
WINNER = "numpy.direct"  # of every layer: it needs no compiler
TORCH = Candidate("torch")


def modelled() -> CPU:
    """This machine's processor as a model has it: nothing is measured, not even outside of a test."""
    here = CPU.current()
    return replace(here, model=vectors.modelled(here.instruction_set, here.threads).text)


def invented(candidate: Candidate, layer: ConvLayer) -> float:
    """Seconds, up to ten times what the winner takes, always the same."""
    draw = zlib.crc32(f"{candidate}{layer}".encode()) / 2**32
    return (1e-5 + layer.flops / 1e11) * (1 if candidate.algorithm == WINNER else 1.2 + 9 * draw**2)


def facts_of(layer: ConvLayer, device: CPU) -> dict[Candidate, Facts]:
    """Some candidates of every algorithm that can run the layer; PyTorch, as if it had been timed."""
    found = {}
    for algorithm in algorithms(device):
        if algorithm.vendor is not None:
            continue
        able = (c for c in algorithm.all(layer, device) if not algorithm.why_not(layer, device, c.params))
        for candidate in [c for c, _ in zip(able, range(EACH), strict=False)]:
            predicted = expected(algorithm, layer, device, candidate)
            error = 1e-8 + algorithm.bound(layer, candidate.params) * 0.3
            found[candidate] = replace(
                predicted, time=invented(candidate, layer), pack=1e-6, spread=0.01, samples=9, error=error
            )
    return found | {TORCH: Facts("2.0", time=invented(TORCH, layer), samples=9, error=3e-7, vendor="torch")}


def remember(cache: TuningCache, layers: Iterable[ConvLayer], device: CPU) -> None:
    """Put such facts on record."""
    for layer in layers:
        name = f"{zlib.crc32(layer.key().encode()):032x}"
        race = Race(name, "2026-11-20T12:00:00+00:00", device.versions, False, None, facts_of(layer, device))
        assert all(math.isfinite(facts.time) for facts in race.facts.values())
        cache.add(layer.key(), device.key, race)
