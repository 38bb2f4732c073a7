"""Layouts in a graph: which arrays may be in NHWC, and the graph in which some are, with conversions in between."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.layer import Layout
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import Conv, Operator, Transpose
from autoconv.networks.passes.identities import drop_identities

IMAGES = 4  # dimensions of what has a layout
FIRST: Layout = "NCHW"
LAST: Layout = "NHWC"


def channels_last(graph: Graph, node: Node) -> Operator | None:
    """What computes the array of a node in NHWC, from images in NHWC; None where nothing does."""
    types = [graph.types[name] for name in (*node.inputs, node.name)]
    if len(types[-1].shape) != IMAGES or any(t.dtype != "float32" for t in types):
        return None
    if (found := node.operator.channels_last()) is None:
        return None
    if isinstance(found, Conv) and node.inputs[1] not in graph.constants:
        return None
    for place in node.operator.images(len(node.inputs)):
        if len(types[place].shape) != IMAGES and node.inputs[place] not in graph.constants:
            return None
    return found


def conversion(to: Layout) -> Transpose:
    """What brings an array from the other layout into one."""
    return Transpose(CHANNELS_LAST if to == LAST else CHANNELS_FIRST)


def laid_out(graph: Graph, in_nhwc: Collection[str]) -> Graph:
    """The same graph with some arrays computed in NHWC; inputs and outputs stay as they are.

    Nodes keep their names. Where somebody takes an array in the layout in which it is not computed, one conversion
    serves all who do; constants are converted now.

    Parameters
    ----------
    graph : Graph
        After all passes, in NCHW.
    in_nhwc : collection of str
        Nodes for which `channels_last` finds something.

    Returns
    -------
    Graph
    """
    if not in_nhwc:
        return graph
    found = graph.copy()
    found.nodes = {}
    converted: dict[tuple[str, Layout], str] = {}

    def array(name: str, layout: Layout) -> str:
        if layout == (LAST if name in in_nhwc else FIRST):
            return name
        if (name, layout) not in converted:
            if (value := graph.constants.get(name)) is not None:
                images = value.reshape((*[1] * (IMAGES - value.ndim), *value.shape)).transpose(CHANNELS_LAST)
                converted[name, layout] = found.add_constant(f"{name}.{layout}", np.ascontiguousarray(images))
            else:
                converted[name, layout] = found.add(f"{name}.{layout}", conversion(layout), name)
        return converted[name, layout]

    for node in graph.nodes.values():
        count = len(node.inputs)
        operator, layout, moved = node.operator, FIRST, tuple(range(count))
        if node.name in in_nhwc and (other := channels_last(graph, node)) is not None:
            operator, layout, moved = other, LAST, other.images(count)
            moved += (1,) if isinstance(other, Conv) else ()  # the filters
        inputs = tuple(array(name, layout) if n in moved else name for n, name in enumerate(node.inputs))
        found.types[node.name] = operator.infer([found.types[name] for name in inputs])
        found.nodes[node.name] = Node(node.name, operator, inputs)
    found.outputs = {name: array(value, FIRST) for name, value in graph.outputs.items()}
    drop_identities(found)
    found.clean()
    return found
