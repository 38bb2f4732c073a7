"""Nodes that give what they take."""

from __future__ import annotations

from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import Elementwise, Pad, Reduce, Reshape, Slice, Transpose


def drop_identities(graph: Graph) -> None:
    """Have everybody take the input of a node that does nothing; what only renames dimensions becomes a reshape."""
    for node in list(graph.nodes.values()):
        node = graph.nodes[node.name]
        source = node.inputs[0]
        before, after = graph.types[source], graph.types[node.name]
        if _renames(node, before.shape) and not isinstance(node.operator, Reshape):
            graph.change(node.name, Reshape(after.shape), source)
        maker = graph.nodes.get(source)
        if isinstance(graph.nodes[node.name].operator, Reshape):
            while maker is not None and isinstance(maker.operator, Reshape):
                source = maker.inputs[0]
                maker = graph.nodes.get(source)
            graph.change(node.name, Reshape(after.shape), source)
            before = graph.types[source]
        if before == after and (_renames(node, before.shape) or _copies(node)):
            graph.replace(node.name, source)


def _renames(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether the elements stay in their order."""
    operator = node.operator
    if isinstance(operator, Transpose):
        moved = [axis for axis in operator.order if shape[axis] != 1]
        return moved == sorted(moved)
    if isinstance(operator, Reduce):
        return all(shape[axis] == 1 for axis in operator.axes)
    return isinstance(operator, Reshape)


def _copies(node: Node) -> bool:
    """Whether the output is the first input, where the shapes are the same."""
    operator = node.operator
    if isinstance(operator, Slice):
        return all(step == 1 for step in operator.steps)
    return isinstance(operator, Pad) or operator in (Elementwise(0), Elementwise(("mul", 0, 1.0)))
