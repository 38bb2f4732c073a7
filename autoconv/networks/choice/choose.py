"""A plan for every layer of a graph, so that all of them fit into the memory that the whole may take."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice.candidate import best_in_network
from autoconv.networks.choice.layouts import laid_out
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.run.memory import ALIGNMENT, Views, arranged, blocks, rounded
from autoconv.plans import Plan
from autoconv.tuning.planner import plan

WHOLE = ("memory_limit", "tolerance")  # limits of a network, and not of each of its layers


def planned(
    graph: Graph,
    last: Collection[str],
    device: CPU,
    options: Mapping[str, Any],
    candidates: Mapping[str, str],
    mode: str,
    prices: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Graph, Views, dict[str, Plan]]:
    """The graph with these arrays in NHWC, and a plan for every layer; all in NCHW where that does not fit as it is.

    Parameters
    ----------
    graph : Graph
        After all passes, in NCHW.
    last : collection of str
        As for `laid_out`.
    device, options, candidates, mode, prices
        As for `plans_for`.

    Returns
    -------
    Graph, Views, and dict of str to Plan

    Raises
    ------
    PlanError
        As `plans_for` does.
    """
    found = laid_out(graph, last)
    views, limit = Views(found), _limit(options)
    if last and limit is not None:  # layers that have to give way are chosen anew, and so would all layouts have to be
        plans = plans_for(found, views, device, {**options, "memory_limit": None}, candidates, mode, prices)
        if _needed(found, views, {name: made.kernel.workspace_bytes for name, made in plans.items()}) > limit:
            return planned(graph, (), device, options, candidates, mode, prices)
    return found, views, plans_for(found, views, device, options, candidates, mode, prices)


def plans_for(
    graph: Graph,
    views: Views,
    device: CPU,
    options: Mapping[str, Any],
    candidates: Mapping[str, str],
    mode: str,
    prices: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Plan]:
    """A plan for every layer, a known candidate where there is one.

    With `memory_limit` among the options, layers are first chosen alone. Where arrays and scratch memory together do
    not fit into that many bytes, every layer may take what the arrays that are needed beside it leave; and where they
    cannot be laid out without gaps, less by as much as is missing.

    Parameters
    ----------
    graph : Graph
    views : Views
        Of the graph.
    device : CPU
    options : mapping
        As for `plan`, and `memory_limit`; `tolerance` is one of the whole, which prices keep.
    candidates : mapping of str to str
        Of layers, by the names of their nodes.
    mode : str
        As for `plan`.
    prices : mapping of str to float
        Seconds that the square of a layer's error costs, by the name of its node.

    Returns
    -------
    dict of str to Plan
        By the names of nodes.

    Raises
    ------
    PlanError
        As `plan` does, and for a limit that the arrays alone exceed.
    """
    limit, wanted = _limit(options), of_layers(options, device)
    nodes = [node for node in graph.nodes.values() if node.name not in views.free]
    layers = {node.name: layer for node in nodes if (layer := layer_of(graph, node)) is not None}

    def made(name: str, candidates: Mapping[str, str], options: Mapping[str, Any]) -> Plan:
        return _plan(graph, graph.nodes[name], layers[name], candidates, mode, options, prices.get(name, 0.0))

    plans = {name: made(name, candidates, wanted) for name in layers}
    if limit is None:
        return plans

    beside = _beside(graph, views, nodes)
    if (least := _needed(graph, views, {})) > limit:
        raise PlanError(f"{graph.name}: memory_limit={limit}: expected at least {least} bytes, which the arrays take")
    missing = 0  # in the gaps between blocks
    while True:
        scratch = {name: found.kernel.workspace_bytes for name, found in plans.items()}
        if (total := _needed(graph, views, scratch)) <= limit:
            return plans
        rooms = {name: max(limit - beside[name] - missing, 0) // ALIGNMENT * ALIGNMENT for name in layers}
        over = [name for name in layers if scratch[name] > rooms[name]]
        for name in over:
            fitting = wanted | {"workspace_limit": rooms[name]}  # less than it takes, so less than any limit it has
            plans[name] = made(name, {}, fitting)
            if plans[name].kernel.workspace_bytes > rooms[name]:  # a candidate that the caller named
                raise PlanError(
                    f"{graph.name}: memory_limit={limit}: node {name!r} by {plans[name].candidate}: expected at most "
                    f"{rooms[name]} bytes of scratch memory, got {plans[name].kernel.workspace_bytes}"
                )
        missing += 0 if over else total - limit


def _limit(options: Mapping[str, Any]) -> int | None:
    """The memory limit among options."""
    limit = options.get("memory_limit")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise PlanError(f"memory_limit={limit!r}: expected an integer of at least 0, or None")
    return limit


def _needed(graph: Graph, views: Views, scratch: Mapping[str, int]) -> int:
    """Bytes of all arrays, and of the scratch memory of nodes."""
    nodes = [node for node in graph.nodes.values() if node.name not in views.free]
    return arranged(blocks(graph, views, nodes, [scratch.get(node.name, 0) for node in nodes]))[1]


def of_layers(options: Mapping[str, Any], device: CPU) -> dict[str, Any]:
    """The options for `plan` of every layer: without limits of the whole."""
    return {"device": device, **{name: value for name, value in options.items() if name not in WHOLE}}


def plan_alone(graph: Graph, node: Node, layer: ConvLayer, mode: str, options: Mapping[str, Any], price: float) -> Plan:
    """What is known of a layer; by the estimates of exact algorithms where nothing is, and error has its price."""
    wanted = {"weights": "constant" if node.inputs[1] in graph.constants else "varying", **options}
    made = plan(layer, mode, **wanted)
    return made if made.timings or not price or mode != "heuristic" else plan(layer, mode, **{**wanted, "exact": True})


def _plan(
    graph: Graph,
    node: Node,
    layer: ConvLayer,
    candidates: Mapping[str, str],
    mode: str,
    options: Mapping[str, Any],
    price: float,
) -> Plan:
    wanted = {"weights": "constant" if node.inputs[1] in graph.constants else "varying", **options}
    if (candidate := candidates.get(node.name)) is not None:
        with contextlib.suppress(PlanError):  # of another version, say: then as if nothing were known
            return plan(layer, candidate, **wanted)
    made = plan_alone(graph, node, layer, mode, options, price)
    best = best_in_network(made, wanted["device"], price, read=node.name not in graph.outputs.values())
    return made if best == str(made.candidate) else plan(layer, best, **wanted)


def _beside(graph: Graph, views: Views, nodes: list[Node]) -> dict[str, int]:
    """Bytes of the arrays that are needed while each node is computed."""
    arrays = blocks(graph, views, nodes, [0] * len(nodes)).values()
    return {
        node.name: sum(rounded(block.nbytes) for block in arrays if block.first <= n <= block.last)
        for n, node in enumerate(nodes)
    }
