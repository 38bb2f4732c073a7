"""What nearby layers on record teach: where estimates of candidates like a layer's own were wrong."""

from __future__ import annotations

import math

from autoconv.errors import AutoconvError
from autoconv.layer import ConvLayer
from autoconv.tuning.candidates import expected
from autoconv.tuning.lookup import Request, credible
from autoconv.tuning.search.search import Search

MOST_LAYERS = 3
FARTHEST = 8.0  # squared distance of extents, each by its logarithm to the base of 2
WEIGHT = 0.5  # of a measurement on a layer of the same extents, against 1 on the layer itself
EXTENTS = ("N", "C", "H", "W", "K")


def recall(request: Request, search: Search) -> None:
    """Tell a search what the nearest layers on record took, less the farther they are."""
    for distance, layer in _nearest(request):
        record = request.cache.load(layer.key(), request.device.key)
        recorded = request.usable(record.facts()) if record is not None else {}
        for candidate, facts in recorded.items():
            algorithm = request.algorithms[candidate.algorithm]
            if algorithm.searched and facts.timed and request.unchanged(candidate, facts):
                there = Request(layer, request.device, request.cache, request.limits, None, False, None)
                if credible(there, candidate, facts):
                    predicted = expected(algorithm, layer, request.device, candidate)
                    search.recall(candidate, predicted, facts, WEIGHT * math.exp(-distance / 4))


def _nearest(request: Request) -> list[tuple[float, ConvLayer]]:
    """The nearest layers that differ in extents alone, with their distances."""
    found = []
    for key in request.cache.layers(request.device.key):
        try:
            layer = ConvLayer.parse(key)
        except AutoconvError:
            continue
        if layer != request.layer and _kind(layer) == _kind(request.layer):
            ratios = (getattr(layer, name) / getattr(request.layer, name) for name in EXTENTS)
            distance = sum(math.log2(ratio) ** 2 for ratio in ratios)
            if distance <= FARTHEST:
                found.append((distance, layer))
    return sorted(found, key=lambda pair: (pair[0], pair[1].key()))[:MOST_LAYERS]


def _kind(layer: ConvLayer) -> tuple[object, ...]:
    geometry = layer.R, layer.S, layer.stride, layer.dilation, layer.grouping
    return layer.direction, layer.dtype, layer.layout, *geometry
