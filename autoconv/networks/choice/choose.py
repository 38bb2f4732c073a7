"""A plan for every layer of a graph, so that all of them fit into the memory that the whole may take."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice.layouts import laid_out
from autoconv.networks.choice.streaming import best_before_reading
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.run.memory import ALIGNMENT, Views, arranged, blocks, rounded
from autoconv.plans import Plan
from autoconv.tuning.planner import plan


def planned(
    graph: Graph,
    last: Collection[str],
    device: CPU,
    options: Mapping[str, Any],
    candidates: Mapping[str, str],
    mode: str,
) -> tuple[Graph, Views, dict[str, Plan]]:
    """The graph with these arrays in NHWC, and a plan for every layer; all in NCHW where that does not fit as it is.

    Parameters
    ----------
    graph : Graph
        After all passes, in NCHW.
    last : collection of str
        As for `laid_out`.
    device, options, candidates, mode
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
        plans = plans_for(found, views, device, {**options, "memory_limit": None}, candidates, mode)
        if _needed(found, views, {name: made.kernel.workspace_bytes for name, made in plans.items()}) > limit:
            return planned(graph, (), device, options, candidates, mode)
    return found, views, plans_for(found, views, device, options, candidates, mode)


def plans_for(
    graph: Graph,
    views: Views,
    device: CPU,
    options: Mapping[str, Any],
    candidates: Mapping[str, str],
    mode: str,
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
        As for `plan`, and `memory_limit`.
    candidates : mapping of str to str
        Of layers, by the names of their nodes.
    mode : str
        As for `plan`.

    Returns
    -------
    dict of str to Plan
        By the names of nodes.

    Raises
    ------
    PlanError
        As `plan` does, and for a limit that the arrays alone exceed.
    """
    wanted = {"device": device, **options}
    wanted.pop("memory_limit", None)
    limit = _limit(options)
    nodes = [node for node in graph.nodes.values() if node.name not in views.free]
    layers = {node.name: layer for node in nodes if (layer := layer_of(graph, node)) is not None}
    plans = {name: _plan(graph, graph.nodes[name], layer, candidates, mode, wanted) for name, layer in layers.items()}
    if limit is None:
        return plans

    beside = _beside(graph, views, nodes)
    if (least := _needed(graph, views, {})) > limit:
        raise PlanError(f"{graph.name}: memory_limit={limit}: expected at least {least} bytes, which the arrays take")
    missing = 0  # in the gaps between blocks
    while True:
        scratch = {name: made.kernel.workspace_bytes for name, made in plans.items()}
        if (total := _needed(graph, views, scratch)) <= limit:
            return plans
        rooms = {name: max(limit - beside[name] - missing, 0) // ALIGNMENT * ALIGNMENT for name in layers}
        over = [name for name in layers if scratch[name] > rooms[name]]
        for name in over:
            fitting = wanted | {"workspace_limit": rooms[name]}  # less than it takes, so less than any limit it has
            plans[name] = _plan(graph, graph.nodes[name], layers[name], {}, mode, fitting)
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


def _plan(
    graph: Graph, node: Node, layer: ConvLayer, candidates: Mapping[str, str], mode: str, options: Mapping[str, Any]
) -> Plan:
    wanted = {"weights": "constant" if node.inputs[1] in graph.constants else "varying", **options}
    if (candidate := candidates.get(node.name)) is not None:
        with contextlib.suppress(PlanError):  # of another version, say: then as if nothing were known
            return plan(layer, candidate, **wanted)
    made = plan(layer, mode, **wanted, build=False)  # it may not be the one
    best = best_before_reading(made, wanted["device"]) if node.name not in graph.outputs.values() else None
    return made if best in (None, str(made.candidate)) else plan(layer, best, **wanted)


def _beside(graph: Graph, views: Views, nodes: list[Node]) -> dict[str, int]:
    """Bytes of the arrays that are needed while each node is computed."""
    arrays = blocks(graph, views, nodes, [0] * len(nodes)).values()
    return {
        node.name: sum(rounded(block.nbytes) for block in arrays if block.first <= n <= block.last)
        for n, node in enumerate(nodes)
    }
