"""Depthwise layers and their neighbours as one node, so that what lies between them is no array of the graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autoconv.cpu.fused.geometry import FusedLayers, is_dense, is_depthwise, is_pointwise
from autoconv.layer import ConvLayer
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import Conv, FusedConv


@dataclass(frozen=True)
class Chain:
    """Nodes of a graph that one kernel can compute, in order, and their layers."""

    nodes: tuple[Node, ...]
    layers: FusedLayers

    @property
    def name(self) -> str:
        """That of the array it computes."""
        return self.nodes[-1].name


def chains(graph: Graph) -> list[Chain]:
    """All that there are, as long as they can be; no node is in two.

    Parameters
    ----------
    graph : Graph
        After all passes, in the layouts that were chosen.

    Returns
    -------
    list of Chain
    """
    found: list[Chain] = []
    taken: set[str] = set()
    for node in graph.nodes.values():
        layer = _layer(graph, node)
        if layer is None or not is_depthwise(layer):
            continue
        before, after = graph.nodes.get(node.inputs[0]), graph.only_user(node.name)
        if before is None or before.name in taken or graph.only_user(before.name) is not node:
            before = None
        if after is not None and after.inputs[0] != node.name:
            after = None  # it is what that one adds
        wide, narrow = (
            None if n is None or (one := _layer(graph, n)) is None or not fits(one) else one
            for n, fits in ((before, is_dense), (after, is_pointwise))
        )
        nodes = [n for n, one in ((before, wide), (node, layer), (after, narrow)) if n is not None and one is not None]
        chain = Chain(tuple(nodes), FusedLayers(wide, layer, narrow))
        if not chain.layers.refusals():
            found.append(chain)
            taken.update(n.name for n in nodes)
    return found


def _layer(graph: Graph, node: Node) -> ConvLayer | None:
    """A convolution's layer, whose filters and bias are known."""
    if not isinstance(node.operator, Conv):
        return None
    known = node.inputs[1 : len(node.inputs) - node.operator.residual]
    return layer_of(graph, node) if all(name in graph.constants for name in known) else None


def fused(graph: Graph, which: Collection[Chain]) -> Graph:
    """The same graph, in which these chains are one node each, named as their last.

    Parameters
    ----------
    graph : Graph
    which : collection of Chain
        Of `chains(graph)`.

    Returns
    -------
    Graph
    """
    found = graph.copy()
    for chain in which:
        operator = FusedConv(tuple(n.operator for n in chain.nodes if isinstance(n.operator, Conv)))
        others = (name for node in chain.nodes for name in node.inputs[1:])
        found.change(chain.name, operator, chain.nodes[0].inputs[0], *others)
    found.clean()
    return found


def layers_of(graph: Graph, node: Node) -> FusedLayers:
    """The layers of a fused node."""
    assert isinstance(node.operator, FusedConv)
    found = node.operator.layers([graph.types[name] for name in node.inputs])
    place = next(n for n, layer in enumerate(found) if is_depthwise(layer))
    before, after = found[:place], found[place + 1 :]
    return FusedLayers(before[0] if before else None, found[place], after[0] if after else None)
