"""What nearby layers on record teach: where estimates of candidates like a layer's own were wrong, and who won."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from autoconv.algorithm import Candidate
from autoconv.errors import AutoconvError
from autoconv.layer import ConvLayer
from autoconv.records.limits import ranking
from autoconv.records.schema import Facts
from autoconv.tuning.candidates import expected
from autoconv.tuning.lookup import Request, credible
from autoconv.tuning.search.surrogate import Costs, Surrogate

MOST_LAYERS = 3
FARTHEST = 8.0  # squared distance of extents, each by its logarithm to the base of 2
WEIGHT = 0.5  # of a measurement on a layer of the same extents, against 1 on the layer itself
EXTENTS = {"N": 0.5, "C": 1.0, "H": 1.0, "W": 1.0, "K": 1.0}  # how much each counts: of more images all are alike
FITTING = 0.3  # nearness to a winner elsewhere from which on a candidate is its like


class Lesson(NamedTuple):
    """What a candidate took on a nearby layer, what was expected of it there, and how much that counts here."""

    candidate: Candidate
    expected: Facts
    found: Facts
    weight: float


def lessons(request: Request) -> Iterator[Lesson]:
    """What the nearest layers on record took, which counts less the farther they are."""
    for distance, layer in _nearest(request):
        what, weight = f"lessons of {_last_race(request, layer)}", WEIGHT * math.exp(-distance / 4)
        for lesson in request.shared(what, layer, functools.partial(_lessons, request, layer)):
            yield lesson._replace(weight=weight)


def _lessons(request: Request, layer: ConvLayer) -> list[Lesson]:
    """What another layer on record took."""
    there, found = replace(request, layer=layer), []
    for candidate, facts in _recorded(request, layer).items():
        algorithm = request.algorithms[candidate.algorithm]
        if algorithm.vendor is None and facts.timed and credible(there, candidate, facts):
            predicted = expected(algorithm, layer, request.device, candidate)
            found.append(Lesson(candidate, predicted, facts, 1.0))
    return found


def foreseen(request: Request) -> dict[Candidate, float]:
    """What a request's candidates are expected to cost, corrected by what the nearest layers on record took.

    Parameters
    ----------
    request : Request

    Returns
    -------
    dict of Candidate to float
        Seconds, of those that can run; as their algorithms expect where nothing is on record nearby.
    """
    costs = Costs(request.candidate_set.expected)
    for lesson in lessons(request):
        costs.learn(*lesson)
    return costs.of(request.limits)


def sources(request: Request) -> list[str]:
    """What `foreseen` learns from: the nearest layers on record, each with its last race."""
    races = ((layer, _last_race(request, layer)) for _, layer in _nearest(request))
    return [f"{layer.key()} {race}" for layer, race in races if race]


def _last_race(request: Request, layer: ConvLayer) -> str:
    """Which one a layer was in last; nothing where there is none on record."""
    record = request.cache.load(layer.key(), request.device.key)
    return record.races[-1].id if record is not None and record.races else ""


def winners(request: Request) -> list[Candidate]:
    """The candidates of a request most like those that the nearest layers on record run quickest by, the nearest first.

    Fewer where there is nothing like them. Who won when its algorithm was another is still worth a try.
    """
    if not (nearest := _nearest(request)):
        return []
    offered, found = request.candidate_set, dict[Candidate, None]()
    times = {candidate: offered.expected[candidate].time for candidate in offered.worth_timing(request.limits)}
    places = Surrogate(times)
    for _, layer in nearest:
        for best in ranking(_usable(request, layer), request.limits, layer.bytes)[:1]:
            near = places.nearness(best)
            fitting = [candidate for candidate in near if near[candidate] >= FITTING]
            found |= dict.fromkeys(sorted(fitting, key=lambda c: (-near[c], times[c]))[:1])
    return list(found)


def _recorded(request: Request, layer: ConvLayer) -> dict[Candidate, Facts]:
    """The facts of another layer on record that still count."""
    facts = _usable(request, layer)
    return {candidate: found for candidate, found in facts.items() if request.unchanged(candidate, found)}


def _usable(request: Request, layer: ConvLayer) -> dict[Candidate, Facts]:
    """The facts of another layer on record, be they of other versions of algorithms that there are today."""
    record = request.cache.load(layer.key(), request.device.key)
    return request.usable(record.facts(request.unchanged)) if record is not None else {}


@functools.lru_cache(1 << 16)
def _parsed(key: str) -> ConvLayer | None:
    """The layer of a key, once for all requests; None where there is none."""
    try:
        return ConvLayer.parse(key)
    except AutoconvError:
        return None


def _nearest(request: Request) -> list[tuple[float, ConvLayer]]:
    """The nearest layers that differ in extents alone, with their distances."""
    found = []
    for key in request.cache.layers(request.device.key):
        layer = _parsed(key)
        if layer not in (None, request.layer) and _kind(layer) == _kind(request.layer):
            distance = sum(
                (weight * math.log2(getattr(layer, name) / getattr(request.layer, name))) ** 2
                for name, weight in EXTENTS.items()
            )
            if distance <= FARTHEST:
                found.append((distance, layer))
    return sorted(found, key=lambda pair: (pair[0], pair[1].key()))[:MOST_LAYERS]


def _kind(layer: ConvLayer) -> tuple[object, ...]:
    geometry = layer.R, layer.S, layer.stride, layer.dilation, layer.grouping
    return layer.direction, layer.dtype, layer.layout, *geometry
