"""The layout of every array of a network, chosen together with the candidates of its layers, from recorded facts.

A layer costs what its best candidate in a layout takes under the caller's limits, in NHWC with the noise of both times
on top, as they are of two races; and the square of its error what a price says. What lies between layers, and the
conversions from layout to layout, cost what they were measured to take. Where one array is taken in both layouts, one
conversion serves all who take it. Everything in NCHW is one of the choices; so no other is made that the records do not
call faster.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np

from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer, Layout
from autoconv.networks.choice.candidate import best_in_network, cost
from autoconv.networks.choice.errors import FREE, Price
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.choice.solver import least
from autoconv.networks.choice.times import OperatorTimes
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import Elementwise, Operator
from autoconv.networks.operators.base import TensorType, in_layout
from autoconv.networks.passes.layouts import IMAGES, channels_last, conversion
from autoconv.networks.run.memory import Views
from autoconv.plans import Plan
from autoconv.records.limits import noise
from autoconv.tuning.candidates import least_estimate
from autoconv.tuning.choice import MODES, TIMING
from autoconv.tuning.planner import plan

# A layer in NHWC may take this part of what the estimates of both layouts and its time in NCHW make one expect; the
# best estimate of a layer is within a tenth of the truth or so, and what two have in common cancels.
HOPE = 0.9

# What an array is computed in, and whether in the other layout as well, after a conversion.
FIRST, FIRST_AND_LAST, LAST, LAST_AND_FIRST = range(4)
NO = math.inf
TAKES = np.array([[0, 0, NO, NO], [0, 0, 0, 0], [NO, NO, 0, 0], [0, 0, 0, 0]])  # maker by taker


def arrays_in_nhwc(
    graph: Graph,
    device: Device,
    options: NetworkOptions,
    mode: str,
    prices: Mapping[str, Price] = MappingProxyType({}),
) -> frozenset[str]:
    """The nodes of a graph that are computed in NHWC where the least time in all is wanted.

    Layers of which nothing is on record in either layout stay in NCHW: an estimate of one says nothing against a time
    of the other. A mode that times has those layers timed in NHWC, too, for which that may pay: they are found by the
    same choice with a hope in place of the missing time, which estimates make of the time in NCHW; and the choice is
    made again after each.

    Parameters
    ----------
    graph : Graph
        After all passes, in NCHW.
    device : Device
    options : NetworkOptions
    mode : str
        As for `plan`.
    prices : mapping of str to Price
        What a layer's error costs, by the name of its node.

    Returns
    -------
    frozenset of str
        The names of nodes.
    """
    if mode not in MODES:
        return frozenset()
    if mode in TIMING:  # what is timed follows from estimates, which a first look at the machine serves badly
        with options.cache.timing_lock(device.key):
            device.survey()
    layers = {
        node.name: layer
        for node in graph.nodes.values()
        if (layer := layer_of(graph, node)) is not None and channels_last(graph, node) is not None
    }
    times = _LayerTimes(device, options, mode)
    if not any(times.promising(layer, prices.get(name, FREE)) for name, layer in layers.items()):
        return frozenset()
    between = OperatorTimes(device, options.cache, measure=mode in TIMING)
    free = Views(graph, device.alignment, device.pitched).free
    while True:
        found = _chosen(graph, layers, times, between, prices, free)
        hoped = Counter(layers[name] for name in found if name in layers and times.hoped(layers[name]))
        if not hoped:
            return found
        times.learn(max(hoped, key=lambda layer: hoped[layer] * (times.first(layer) - times.last(layer))))


class _LayerTimes:
    """Seconds of layers in both layouts, on record; in NHWC hoped for where that may still be timed.

    To them comes what a layer's error costs, at a price of its square.
    """

    def __init__(self, device: Device, options: NetworkOptions, mode: str) -> None:
        self._device, self._mode = device, mode
        self._options = {"weights": "constant", **options.of_layers(device)}
        self._first: dict[ConvLayer, Plan | None] = {}
        self._last: dict[ConvLayer, Plan | None] = {}
        self._hopes: dict[ConvLayer, float] = {}  # of those that have not been timed in NHWC

    def first(self, layer: ConvLayer, price: Price = FREE) -> float:
        """In NCHW; 0 where nothing is on record, so that nothing is quicker."""
        if layer not in self._first:
            self._first[layer] = self._recorded(layer, self._mode)
        found = self._first[layer]
        return cost(found, self._device, self._best(found, price), price) if found is not None else 0.0

    def last(self, layer: ConvLayer, price: Price = FREE) -> float:
        """In NHWC, or the least that one may expect of timing it; infinite where it is not to be."""
        if layer not in self._last:
            self._last[layer] = self._recorded(layer.replace(layout="NHWC"), "cached")
            if self._last[layer] is None and self._mode in TIMING and self.first(layer):
                self._hopes[layer] = HOPE * self._expected(layer)
        if layer in self._hopes:
            return self._hopes[layer]
        found = self._last[layer]
        if found is None or not self.first(layer) or (other := self._first[layer]) is None:
            return NO
        best = self._best(found, price)
        between = noise(found.facts[best], other.facts[self._best(other, price)])
        return cost(found, self._device, best, price) + between * cost(found, self._device, best)

    def hoped(self, layer: ConvLayer) -> bool:
        """Whether the time in NHWC is one that nobody took."""
        return layer in self._hopes

    def promising(self, layer: ConvLayer, price: Price = FREE) -> bool:
        """Whether it may be quicker in NHWC."""
        last = self.last(layer, price)
        return last < NO and last < self.first(layer, price)

    def learn(self, layer: ConvLayer) -> None:
        """Time a layer in NHWC."""
        del self._hopes[layer]
        self._last[layer] = self._recorded(layer.replace(layout="NHWC"), self._mode)

    def _best(self, made: Plan, price: Price) -> str:
        return best_in_network(made, self._device, price)

    def _recorded(self, layer: ConvLayer, mode: str) -> Plan | None:
        with contextlib.suppress(PlanError):
            made = plan(layer, mode, **self._options, build=False)
            if self._best(made, FREE) in made.timings:
                return made
        return None

    def _expected(self, layer: ConvLayer) -> float:
        """What estimates make of the time in NCHW: by how much they differ from layout to layout."""
        first, last = (least_estimate(layer.replace(layout=layout), self._device) for layout in ("NCHW", "NHWC"))
        return self.first(layer) * last / first


def _chosen(
    graph: Graph,
    layers: Mapping[str, ConvLayer],
    times: _LayerTimes,
    between: OperatorTimes,
    prices: Mapping[str, Price],
    free: Collection[str],
) -> frozenset[str]:
    """The arrays that are in NHWC when the sum of all times is least; in NCHW, some nodes are free."""
    names = [name for name in (*graph.inputs, *graph.nodes) if len(graph.types[name].shape) == IMAGES]
    place = {name: n for n, name in enumerate(names)}
    wanted = set(graph.outputs.values())  # in NCHW, whatever they are computed in
    wanted |= {name for node in graph.nodes.values() if node.name not in place for name in node.inputs}
    costs, edges = [], {}
    for name in names:
        node = graph.nodes.get(name)
        moved = channels_last(graph, node) if node is not None else None
        first, last = 0.0, NO
        if name in layers:
            layer, price = layers[name], prices.get(name, FREE)
            first, last = times.first(layer, price), times.last(layer, price)
        elif node is not None and moved is not None:
            first, last = _between(graph, node, moved, between, free)
        to_last, to_first = (_conversion(graph.types[name], layout, between) for layout in ("NHWC", "NCHW"))
        cost = np.array([first, first + to_last, last, last + to_first])
        if name in wanted:
            cost[LAST] = NO
        costs.append(cost)
        for value in node.inputs if node is not None else ():
            if value in place:
                edges[place[value], place[name]] = TAKES
    return frozenset(name for name, option in zip(names, least(costs, edges), strict=True) if option >= LAST)


def _between(
    graph: Graph, node: Node, moved: Operator, times: OperatorTimes, free: Collection[str]
) -> tuple[float, float]:
    """Seconds of what is no layer, in either layout."""
    types = [graph.types[name] for name in node.inputs]
    if isinstance(moved, Elementwise) and set(types) == {graph.types[node.name]}:
        return 0.0, 0.0  # the same kernel
    images = [TensorType((*[1] * (IMAGES - len(t.shape)), *t.shape), t.dtype) for t in types]
    last = times.seconds(moved, [TensorType(in_layout("NHWC", t.shape), t.dtype) for t in images])
    return 0.0 if node.name in free else times.seconds(node.operator, types), last


def _conversion(found: TensorType, to: Layout, times: OperatorTimes) -> float:
    """Seconds of bringing an array whose type in NCHW is given from the other layout into one."""
    _, C, H, W = found.shape
    if 1 in (C, H * W):
        return 0.0  # the elements stay in their order
    if found.dtype != "float32":
        return NO
    before = found if to == "NHWC" else TensorType(in_layout("NHWC", found.shape), found.dtype)
    return times.seconds(conversion(to), [before])
