"""Which layers that follow each other are computed by one kernel: those for which that was measured to be quicker.

A depthwise layer and its 1x1 neighbours move more than they compute, and most of it is what one leaves for the next.
One kernel keeps that in the caches of a thread; but it may have to compute rows twice, and it cannot choose the best
candidate of each layer. So both ways are run, on the network's own arrays, and what was quicker is kept on record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.fused.geometry import Caches, FusedBlocking, blockings, workspace_bytes
from autoconv.device import Device
from autoconv.errors import ConfigError
from autoconv.networks.choice.choose import scratch_bytes
from autoconv.networks.choice.code import code_of_networks
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.choice.tolerance import expected_error
from autoconv.networks.graph import Graph
from autoconv.networks.operators import FusedConv
from autoconv.networks.passes.batch_split import Split
from autoconv.networks.passes.fused_layers import Chain, chains, fused, layers_of
from autoconv.networks.run.contest import quickest
from autoconv.networks.run.memory import Views, arena_bytes
from autoconv.networks.run.planned import Planned
from autoconv.networks.run.schedules import scheduled
from autoconv.plans import Plan
from autoconv.records.kept import Kept, told
from autoconv.tuning.choice import MODES, TIMING

Blockings = Mapping[str, FusedBlocking]  # by the name of the last of the nodes that are fused


def with_fused(
    made: Planned, device: Device, options: NetworkOptions, mode: str, known: Blockings | None = None
) -> Planned:
    """The same, with those layers fused for which that is known to be quicker.

    Parameters
    ----------
    made : Planned
    device : Device
        On a GPU nothing is fused: there is no kernel for it.
    options : NetworkOptions
        With a `memory_limit`, nothing is fused if more were needed; nor is what needs more scratch memory than
        `workspace_limit`. Fused kernels add up what `gemm` and `depthwise` do: where the network would not keep its
        `tolerance` if these layers erred as exact ones usually do, nothing is fused.
    mode : str
        As for `plan`. One that times has both ways run where that is not on record.
    known : mapping of str to FusedBlocking, optional
        What to fuse within the limits, in place of what is on record.

    Returns
    -------
    Planned

    Raises
    ------
    ConfigError
        When what is known cannot be.
    """
    if not (isinstance(device, CPU) and pool.available()):  # or NumPy computes each layer by itself
        return made
    found = {chain.name: chain for chain in chains(made.parts.graph)}
    chosen: dict[str, FusedBlocking] = {}
    if known is not None:
        chosen = {name: blocking for name in found if (blocking := known.get(made.parts.origin(name))) is not None}
        _check(made, known, {made.parts.origin(name): found[name] for name in chosen})
    if known is None and mode in MODES:  # else an algorithm is named, which is to run
        chosen = _chosen(made, list(found.values()), device, options, mode)
    fitting = {found[name]: cut for name, cut in chosen.items() if _fits(found[name], cut, device, options)}
    if not _keeps_error(made, fitting, device, options):
        return made
    together = _fused(made, fitting)
    limit = options.memory_limit
    return together if limit is None or _needed(together, device) <= limit else made


def _keeps_error(made: Planned, chosen: Collection[Chain], device: CPU, options: NetworkOptions) -> bool:
    """Whether a network keeps its tolerance with these layers fused."""
    inside = {made.parts.origin(node.name) for chain in chosen for node in chain.nodes}
    limit = options.tolerance
    return limit is None or expected_error(made.parts.whole, made.plans, device, exact=inside) <= limit


def _check(made: Planned, known: Blockings, found: Mapping[str, Chain]) -> None:
    for name, blocking in known.items():
        where = f"{made.parts.graph.name}: fused node {name!r}"
        if name not in found:
            raise ConfigError(f"{where}: expected a layer that can be fused with those before it")
        if not _cuts(blocking, found[name]):
            middle, got = found[name].layers.depthwise, f"{blocking.rows} and {blocking.channels}"
            raise ConfigError(f"{where}: expected 1 to {middle.P} rows and a part of {middle.C} channels, got {got}")


def _cuts(blocking: FusedBlocking, chain: Chain) -> bool:
    """Whether the work of a chain can be cut so."""
    (rows, channels), middle = blocking, chain.layers.depthwise
    return 1 <= rows <= middle.P and 1 <= channels <= middle.C and middle.C % channels == 0


def _fits(chain: Chain, blocking: FusedBlocking, device: CPU, options: NetworkOptions) -> bool:
    """Whether the scratch memory of one kernel keeps within what a layer may take."""
    limit = options.layers.get("workspace_limit")
    return limit is None or workspace_bytes(device.instruction_set, chain.layers, blocking, Caches.of(device)) <= limit


def _fused(made: Planned, chosen: Mapping[Chain, FusedBlocking]) -> Planned:
    if not chosen:
        return made
    parts = replace(made.parts, graph=fused(made.parts.graph, chosen))
    names = {made.parts.origin(chain.name): blocking for chain, blocking in chosen.items()}
    return replace(made, parts=parts, views=Views(parts.graph), fused=names)


def _needed(made: Planned, device: CPU) -> int:
    """Bytes of all arrays, and of the scratch memory of nodes."""
    caches, scratch = Caches.of(device), []
    for node in made.views.computed:
        name = made.parts.origin(node.name)
        if isinstance(node.operator, FusedConv):
            layers = layers_of(made.parts.graph, node)
            scratch.append(workspace_bytes(device.instruction_set, layers, made.fused[name], caches))
        else:
            scratch.append(scratch_bytes(made.plans[name]) if name in made.plans else 0)
    return arena_bytes(made.views, scratch)


def _chosen(
    made: Planned, found: Sequence[Chain], device: CPU, options: NetworkOptions, mode: str
) -> dict[str, FusedBlocking]:
    """What the records say, and races where they say nothing; chains of the same layers and plans are one.

    Where nothing may be timed, and plans have changed since a race of these layers, what won it then is the best guess.
    """
    decided: dict[str, FusedBlocking | None] = {}
    chosen = {}
    kept = Kept(options.cache, device, "fused", code_of_networks(device))
    for chain in found:
        plans = {node.name: made.plans[made.parts.origin(node.name)] for node in chain.nodes}
        # What the choice depends on: layers, what computes each of them alone, and the limits of each.
        limits = told(options.layers)
        what = "\n".join([*(f"{each.layer} {each.candidate}" for each in plans.values()), *limits])
        alike = "\n".join([*(str(each.layer) for each in plans.values()), *limits])
        if what not in decided:
            known = _recalled(kept, what, chain)
            if not known and mode in TIMING:
                known = _raced(made.parts.graph, chain, plans, device, options)
                for each in (what, alike):
                    kept.keep(each, layers=list(map(str, chain.layers.layers)), **known)
            known = known or _recalled(kept, alike, chain)
            decided[what] = FusedBlocking(*known["blocking"]) if known.get("blocking") else None
        if (blocking := decided[what]) is not None:
            chosen[chain.name] = blocking
    return chosen


def _raced(
    graph: Graph, chain: Chain, plans: Mapping[str, Plan], device: CPU, options: NetworkOptions
) -> dict[str, Any]:
    """The quickest way to compute a chain on record: its blocking, or none where that is by each layer's plan."""
    alone = _alone(graph, chain)
    apart = Planned(Split(alone, alone, {}, {}), Views(alone), dict(plans), frozenset())
    ways = [blocking for blocking in blockings(chain.layers, device) if _fits(chain, blocking, device, options)]
    together = [_fused(apart, {chain: blocking}) for blocking in ways]
    packed: dict[str, Any] = {}
    best, seconds = quickest([scheduled(one, device, packed) for one in (apart, *together)], options.cache, part=True)
    return {"blocking": list(ways[best - 1]) if best else None, "seconds": seconds, "ways": list(map(list, ways))}


def _alone(graph: Graph, chain: Chain) -> Graph:
    """The nodes of a chain as a graph of their own."""
    found, inside = Graph(chain.name), {node.name for node in chain.nodes}
    for node in chain.nodes:
        for name in node.inputs:
            if name in graph.constants:
                found.constants[name] = graph.constants[name]
            elif name not in inside:
                found.inputs[name] = graph.types[name]
            found.types[name] = graph.types[name]
        found.types[node.name], found.nodes[node.name] = graph.types[node.name], node
    found.outputs = {chain.name: chain.name}
    return found


def _recalled(kept: Kept, what: str, chain: Chain) -> dict[str, Any]:
    """What won under today's kernels; nothing where that is not known, or where the chain cannot be cut so."""

    def won(facts: dict[str, Any]) -> dict[str, Any] | None:
        cut = facts["blocking"]
        known = cut is None or (all(type(n) is int for n in cut) and _cuts(FusedBlocking(*cut), chain))
        return facts if known else None

    return kept.read(what, won) or {}
