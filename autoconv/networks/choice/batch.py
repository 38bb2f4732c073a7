"""For how many images at a time each node of a network is computed, from recorded facts.

A layer of a whole batch reads its filters once, but leaves more behind than the caches hold; a layer of a few images
has the next one find them there. So nodes that follow each other may be computed for some images at a time (a segment
of `passes.batch_split`), and the segments with the least time in all are found by dynamic programming along the order
in which nodes run (Viterbi, 1967). A node of b images costs what it is on record to take, once for every part. Records
are of inputs and outputs that lie in the caches as far as they fit, which those of a few images do and the whole batch
need not: where a segment meets another, the difference is added, by what the machine was measured to do.

As such sums err, that is not the choice: it is run against the whole batch, and so are the smallest parts
(`run.contest`); what won is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice.candidate import best_in_network, cost
from autoconv.networks.choice.code import code_of_networks
from autoconv.networks.choice.errors import FREE, Price
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.choice.times import OperatorTimes
from autoconv.networks.graph import Graph
from autoconv.networks.layer_list import layer_of
from autoconv.networks.passes.batch_split import Images, at_a_time, batch_of, divisors, for_images, split
from autoconv.networks.passes.layouts import laid_out
from autoconv.networks.run.memory import Views, arena_bytes
from autoconv.records.kept import Kept, told
from autoconv.tuning.candidates import least_estimate
from autoconv.tuning.choice import TIMING
from autoconv.tuning.planner import plan

WORTH = 0.99  # of the whole batch's time: what is not expected to take less is not run
MOST_PARTS = 16


def ways_to_split(
    graph: Graph,
    in_nhwc: Collection[str],
    device: Device,
    options: NetworkOptions,
    mode: str,
    prices: Mapping[str, Price] = MappingProxyType({}),
) -> list[dict[str, int]]:
    """In which parts of the batch a network may run: what won a race before, or else what is to be raced now.

    Parameters
    ----------
    graph : Graph
        After all passes, in NCHW.
    in_nhwc : collection of str
        The nodes whose arrays are in NHWC.
    device : Device
        Of the CPU's caches; on others all is for the whole batch.
    options : NetworkOptions
    mode : str
        As for `plan`. One that times has layers of fewer images timed, where the sum of all may be less by them.
    prices : mapping of str to Price
        What a layer's error costs, by the name of its node.

    Returns
    -------
    list of dict of str to int
        As `split` takes them: the whole batch first, or one alone where there is nothing to race.
    """
    found = laid_out(graph, in_nhwc)
    if batch_of(found) < 2 or not isinstance(device, CPU):
        return [{}]
    known = _recalled(found, device, options)
    if known is not None:
        return [known]
    if mode not in TIMING or arena_bytes(Views(found)) <= device.machine.caches[1] * device.machine.threads:
        return [{}]  # or nothing is to be gained
    between = OperatorTimes(device, options.cache, measure=True)
    images = _Segments(found, device, options, mode, between, prices).least()
    alone = at_a_time(found, _counts(batch_of(found))[0])
    return [{}, *([images] if images not in ({}, alone) else []), *([alone] if alone else [])]


def remember(graph: Graph, images: Images, seconds: list[float], device: Device, options: NetworkOptions) -> None:
    """Keep in which parts a network in its layouts was quickest, and the times of all that were raced."""
    _kept(device, options).keep(_what(graph, options), images=dict(images), seconds=seconds, graph=graph.name)


def _recalled(graph: Graph, device: CPU, options: NetworkOptions) -> dict[str, int] | None:
    """The parts in which a network won, under today's kernels; what cannot be is not known."""

    def parts(facts: dict[str, Any]) -> dict[str, int] | None:
        images: dict[str, int] = facts["images"]
        if not all(type(count) is int for count in images.values()):
            return None
        split(graph, images)
        return images

    return _kept(device, options).read(_what(graph, options), parts)


def _kept(device: Device, options: NetworkOptions) -> Kept:
    return Kept(options.cache, device, "parts", code_of_networks(device))


def _counts(batch: int) -> list[int]:
    """How many images at a time there may be: parts are arranged one by one."""
    return [count for count in divisors(batch) if batch // count <= MOST_PARTS]


def _what(graph: Graph, options: NetworkOptions) -> str:
    """What the parts of a network depend on: its nodes, and the limits under which their candidates are chosen."""
    nodes = [f"{node} of {[*map(str, map(graph.types.get, node.inputs))]}" for node in graph.nodes.values()]
    return "\n".join([*nodes, *told(options.limits, "memory_limit")])


class _Asked(NamedTuple):
    """A layer, whether its filters are constant, and what its error costs."""

    layer: ConvLayer
    constant: bool
    price: Price


class _Segments:
    """Finds the segments of the least time in all.

    A time that is not on record is first hoped for: as the whole batch's, but for the difference that estimates make.
    What the choice then rests on is timed, and the choice made again, until it rests on times alone.
    """

    def __init__(
        self,
        graph: Graph,
        device: CPU,
        options: NetworkOptions,
        mode: str,
        between: OperatorTimes,
        prices: Mapping[str, Price],
    ) -> None:
        self._graph, self._device, self._mode, self._between, self._prices = graph, device, mode, between, prices
        self._options = options.of_layers(device)
        self._batch = batch_of(graph)
        self._parts = {count: for_images(graph, count) for count in _counts(self._batch)}
        self._parts[self._batch] = graph
        self._free = {count: Views(part).free for count, part in self._parts.items()}
        self._times: dict[_Asked, float | None] = {}
        self._estimates: dict[ConvLayer, float] = {}
        self._borders = self._crossing()

    def least(self) -> dict[str, int]:
        """How many images at a time, by node; nothing where the whole batch is as quick."""
        while True:
            found, total, whole = self._chosen()
            if total > WORTH * whole:
                return {}
            hoped: Counter[_Asked] = Counter()
            for name, count in found.items():
                layer = self._layer(name, count)
                if layer is not None and count < self._batch and self._recorded(layer, "cached") is None:
                    hoped[layer] += 1
            if not hoped:
                return {name: count for name, count in found.items() if count < self._batch}
            for layer in hoped:
                del self._times[layer]
                if self._recorded(layer, self._mode) is None:
                    self._times[layer] = math.inf  # there is none to be had

    def _chosen(self) -> tuple[dict[str, int], float, float]:
        """The best path through the nodes, its seconds, and those of the whole batch."""
        names = list(self._graph.nodes)
        costs = [{count: cost for count in self._parts if (cost := self._seconds(n, count)) < math.inf} for n in names]
        if any(self._batch not in found for found in costs):
            return {}, math.inf, 0.0  # a layer that has no time
        whole = sum(found[self._batch] for found in costs)
        best: dict[int, float] = dict(costs[0])
        before: list[dict[int, int]] = [{}]
        for place in range(1, len(names)):
            moves = {
                count: min(best, key=lambda other: best[other] + self._border(place, other, count))
                for count in costs[place]
            }
            best = {
                count: cost + best[moves[count]] + self._border(place, moves[count], count)
                for count, cost in costs[place].items()
            }
            before.append(moves)
        count = min(best, key=best.__getitem__)
        total, found = best[count], {}
        for place in reversed(range(len(names))):
            found[names[place]] = count
            count = before[place].get(count, count)
        return found, total, whole

    def _seconds(self, name: str, count: int) -> float:
        """Of a node for the whole batch, so many images at a time: on record, or hoped for."""
        node = self._parts[count].nodes.get(name)
        if node is None:
            return math.inf
        times = self._batch // count
        smaller = (part for part in self._parts.values() if part is not self._graph)
        if name in self._free[count] or not any(name in part.nodes for part in smaller):
            return 0.0  # or there is no choice
        if (layer := self._layer(name, count)) is None:
            return times * self._between.seconds(node.operator, [self._parts[count].types[n] for n in node.inputs])
        mode = self._mode if count == self._batch else "cached"
        found = self._recorded(layer, mode)
        return times * (self._hope(name, count) if found is None else found)

    def _layer(self, name: str, count: int) -> _Asked | None:
        """The layer that computes a node."""
        part = self._parts[count]
        layer, price = layer_of(part, part.nodes[name]), self._prices.get(name, FREE)
        if layer is None:
            return None
        return _Asked(layer, part.nodes[name].inputs[1] in part.constants, price.share(self._batch / count))

    def _recorded(self, asked: _Asked, mode: str) -> float | None:
        """Seconds of a layer's best candidate, whose output is read next; None where there is no time of any."""
        if asked not in self._times:
            self._times[asked] = None
            with contextlib.suppress(PlanError):
                made = plan(asked.layer, mode, weights="constant" if asked.constant else "varying", **self._options)
                name = best_in_network(made, self._device, asked.price)
                if name in made.timings:
                    self._times[asked] = cost(made, self._device, name)
        return self._times[asked]

    def _hope(self, name: str, count: int) -> float:
        """Seconds of a layer of so many images that has not been timed."""
        layer, whole = self._layer(name, count), self._layer(name, self._batch)
        assert layer is not None
        assert whole is not None
        known = self._recorded(whole, self._mode)
        return math.inf if known is None else known * self._estimate(layer.layer) / self._estimate(whole.layer)

    def _estimate(self, layer: ConvLayer) -> float:
        if layer not in self._estimates:
            self._estimates[layer] = least_estimate(layer, self._device)
        return self._estimates[layer]

    def _crossing(self) -> list[list[int]]:
        """Bytes of each array that is made before a node and taken by it or later, by the place of the node."""
        place = {name: n for n, name in enumerate(self._graph.nodes)}
        end: dict[str, int] = {}
        for n, node in enumerate(self._graph.nodes.values()):
            end.update({name: n for name in node.inputs if name in place})
        found: list[list[int]] = [[] for _ in place]
        for name, last in end.items():
            for n in range(place[name] + 1, last + 1):
                found[n].append(self._graph.types[name].nbytes)
        return found

    def _border(self, place: int, before: int, after: int) -> float:
        """Seconds that arrays of the whole batch cost where nodes before and after are of other numbers of images."""
        if before == after:
            return 0.0
        machine = self._device.machine
        total = 0.0
        for size in self._borders[place]:
            whole, made, taken = (
                size * count / self._batch / machine.threads for count in (self._batch, before, after)
            )
            total += machine.writing(size, whole) - machine.writing(size, made)
            total += machine.reading(size, whole) - machine.reading(size, taken)
        return total
