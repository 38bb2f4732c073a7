"""A plan for every layer of a graph, so that all of them fit into the memory that the whole may take."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

from autoconv.accuracy import exact_error
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice.candidate import best_in_network
from autoconv.networks.choice.errors import EXACT, FREE, Price
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.passes.batch_split import Split, at_a_time, batch_of, divisors, split
from autoconv.networks.passes.layouts import laid_out
from autoconv.networks.run.memory import ALIGNMENT, Views, arena_bytes, blocks, rounded
from autoconv.networks.run.planned import Choices, Planned
from autoconv.networks.run.runtime import step_maker
from autoconv.plans import Plan
from autoconv.tuning.candidates import UNUSUAL
from autoconv.tuning.planner import plan

PricesOf: TypeAlias = Callable[[Choices], Mapping[str, Price]]  # of error, in some layouts and parts of the batch


def no_prices(way: Choices) -> Mapping[str, Price]:
    """Error costs nothing, whatever the way."""
    return {}


def planned(
    graph: Graph,
    choices: Choices,
    device: Device,
    options: NetworkOptions,
    mode: str,
    prices_of: PricesOf = no_prices,
) -> Planned:
    """The graph in the layouts and in the parts of the batch that were chosen, and a plan for every layer.

    Where that does not fit into the memory limit as it is, all is in NCHW, for as many images at a time as do fit;
    where one image does not, its layers give way.

    Parameters
    ----------
    graph : Graph
        After all passes, in NCHW.
    choices : Choices
        But for what is fused.
    device, options, mode
        As for `plans_for`.
    prices_of : callable
        What a layer's error costs, by the name of its node, in these layouts and parts of the batch.

    Returns
    -------
    Planned

    Raises
    ------
    PlanError
        As `plans_for` does.
    """
    limit = options.memory_limit
    ways = [choices]
    if limit is not None:  # candidates were chosen for other layers
        ways += [Choices()] if choices.in_nhwc or choices.images else []
        ways += [Choices(images=at_a_time(graph, count)) for count in reversed(divisors(batch_of(graph))[:-1])]
    for way in ways:
        found = split(laid_out(graph, way.in_nhwc), way.images)
        views = Views(found.graph, device.alignment, device.pitched)
        # Where not even the arrays fit, no plans would, which may have to be timed.
        if limit is None or _needed(found, views, {}, device) <= limit:
            whole, prices = replace(options, memory_limit=None), prices_of(way)
            plans = plans_for(found, views, device, whole, way.candidates, mode, prices)
            if limit is None or _needed(found, views, plans, device) <= limit:
                return Planned(found, views, plans, way.in_nhwc)
    return Planned(found, views, plans_for(found, views, device, options, {}, mode, prices_of(way)), way.in_nhwc)


def plans_for(
    parts: Split,
    views: Views,
    device: Device,
    options: NetworkOptions,
    candidates: Mapping[str, str],
    mode: str,
    prices: Mapping[str, Price] = MappingProxyType({}),
) -> dict[str, Plan]:
    """A plan for every layer, a known candidate where there is one; all parts of the batch have one plan.

    With a `memory_limit`, layers are first chosen alone. Where arrays and scratch memory together do not fit into that
    many bytes, every layer may take what the arrays that are needed beside it leave; and where they cannot be laid out
    without gaps, less by as much as is missing.

    Parameters
    ----------
    parts : Split
        The graph in the parts in which it runs.
    views : Views
        Of its graph.
    device : Device
    options : NetworkOptions
        Of which prices keep the `tolerance`.
    candidates : mapping of str to str
        Of layers, by the names of their nodes.
    mode : str
        As for `plan`.
    prices : mapping of str to Price
        What a layer's error costs, by the name of its node.

    Returns
    -------
    dict of str to Plan
        By the names of nodes in the graph that was split.

    Raises
    ------
    PlanError
        As `plan` does, and for a limit that the arrays alone exceed.
    """
    limit, wanted = options.memory_limit, options.of_layers(device)
    graph, nodes = parts.graph, views.computed
    first = {parts.origin(node.name): node for node in reversed(nodes)}
    layers = {name: layer for name, node in reversed(first.items()) if (layer := layer_of(graph, node)) is not None}
    times = Counter(parts.origin(node.name) for node in nodes)

    def choose(name: str, candidates: Mapping[str, str], wanted: Mapping[str, Any]) -> Plan:
        ends, price = name in graph.outputs.values(), prices.get(name, FREE).share(times[name])  # its error counts once
        return _plan(graph, first[name], ends, layers[name], candidates.get(name), mode, wanted, price)

    plans = {name: choose(name, candidates, wanted) for name in layers}
    if limit is None:
        return plans

    beside = _beside(parts, views)
    if (least := _needed(parts, views, {}, device)) > limit:
        takes = "the arrays and the scratch memory of what is no layer take"
        raise PlanError(f"{graph.name}: memory_limit={limit}: expected at least {least} bytes, which {takes}")
    missing = 0  # in the gaps between blocks
    while (total := _needed(parts, views, plans, device)) > limit:
        rooms = {name: max(limit - beside[name] - missing, 0) // ALIGNMENT * ALIGNMENT for name in layers}
        over = [name for name in layers if plans[name].workspace_bytes > rooms[name]]
        for name in over:
            fitting = wanted | {"workspace_limit": rooms[name]}  # less than it takes, so less than any limit it has
            plans[name] = choose(name, {}, fitting)
            if plans[name].workspace_bytes > rooms[name]:  # a candidate that the caller named
                raise PlanError(
                    f"{graph.name}: memory_limit={limit}: node {name!r} by {plans[name].candidate}: expected at most "
                    f"{rooms[name]} bytes of scratch memory, got {plans[name].workspace_bytes}"
                )
        missing += 0 if over else total - limit
    return plans


def _needed(parts: Split, views: Views, plans: Mapping[str, Plan], device: Device) -> int:
    """Bytes of all arrays, and of the scratch memory of nodes: of layers as far as they have plans."""
    maker = step_maker(parts.graph, views, device)

    def scratch(node: Node) -> int:
        made = plans.get(parts.origin(node.name))
        return maker.scratch_bytes(node) if made is None else scratch_bytes(made)

    return arena_bytes(views, [scratch(node) for node in views.computed])


def scratch_bytes(made: Plan) -> int:
    """Scratch memory of a layer, and behind it the packed filters where these are computed in every run."""
    alone = made.kernel.workspace_bytes
    packed = made.workspace_bytes - alone
    return rounded(alone) + packed if packed else alone


def plan_alone(graph: Graph, node: Node, layer: ConvLayer, mode: str, options: Mapping[str, Any], price: Price) -> Plan:
    """What is known of a layer; by estimates where nothing is.

    Where error has a price, of those that usually err no more than a whole network may unless told otherwise; of exact
    ones, where the price is infinite or no other is left.
    """
    wanted = {**_with_weights(graph, node, options), "build": False}  # it may not be the one
    made = plan(layer, mode, **wanted)
    if made.timings or not price.seconds or mode != "heuristic":
        return made
    if math.isfinite(price.seconds):
        with contextlib.suppress(PlanError):
            return plan(layer, mode, **{**wanted, "tolerance": UNUSUAL * EXACT * exact_error(layer)})
    return plan(layer, mode, **{**wanted, "exact": True})


def _with_weights(graph: Graph, node: Node, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for `plan` of a node's layer, with whether its filters are constant."""
    return {"weights": "constant" if node.inputs[1] in graph.constants else "varying", **options}


def _plan(
    graph: Graph,
    node: Node,
    ends: bool,
    layer: ConvLayer,
    candidate: str | None,
    mode: str,
    options: Mapping[str, Any],
    price: Price,
) -> Plan:
    """A plan for a node; for one whose array is an output, by what was measured, as nobody reads it then."""
    wanted = _with_weights(graph, node, options)
    if candidate is not None:
        with contextlib.suppress(PlanError):  # of another version, say: then as if nothing were known
            return plan(layer, candidate, **wanted)
    made = plan_alone(graph, node, layer, mode, options, price)
    best = best_in_network(made, wanted["device"], price, read=not ends)
    if best != str(made.candidate):
        with contextlib.suppress(PlanError):  # one that cannot run today, as with another model of the machine
            return plan(layer, best, **wanted)
    return made


def _beside(parts: Split, views: Views) -> dict[str, int]:
    """Bytes of the arrays that are needed while each node is computed, for whichever part of the batch that is most."""
    arrays = blocks(views).values()
    found: dict[str, int] = {}
    for n, node in enumerate(views.computed):
        name = parts.origin(node.name)
        needed = sum(rounded(block.nbytes) for block in arrays if block.first <= n <= block.last)
        found[name] = max(found.get(name, 0), needed)
    return found
