"""The convolutions of a graph as a list of layers, to tune and to compare."""

from __future__ import annotations

from pathlib import Path

from autoconv.layer import ConvLayer
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layers import NamedLayer, Network
from autoconv.networks.operators import Conv, ConvTranspose, MatMul, QuantizedMatMul, QuantizedProduct


def layer_of(graph: Graph, node: Node) -> ConvLayer | None:
    """The layer that computes a node; None where none does."""
    types = [graph.types[name] for name in node.inputs]
    if isinstance(node.operator, MatMul):
        constant = node.inputs[1] in graph.constants
        return node.operator.layer(types) if constant else None
    return node.operator.layer(types) if isinstance(node.operator, Conv | ConvTranspose | QuantizedProduct) else None


def layer_list(graph: Graph, batch: int) -> Network:
    """The layers of an optimised graph for one image, under the names of the first nodes that each computes.

    A fully connected layer is a 1x1 convolution of a pixel for each row; a transposed convolution is the one whose
    transpose it is, in the direction "dgrad".

    Parameters
    ----------
    graph : Graph
    batch : int
        The images for which it was read, where the file leaves that open.

    Returns
    -------
    Network
    """
    images = _images(graph, batch)
    first: dict[tuple[ConvLayer, bool], tuple[str, int]] = {}
    count: dict[tuple[ConvLayer, bool], int] = {}
    for place, node in enumerate(graph.nodes.values(), 1):
        layer = layer_of(graph, node)
        if layer is None:
            continue
        rows = isinstance(node.operator, MatMul | QuantizedMatMul)
        extent = "W" if rows else "N"
        one = layer.replace(**{extent: getattr(layer, extent) // images or 1}), rows
        first.setdefault(one, (node.name, place))
        count[one] = count.get(one, 0) + 1
    layers = tuple(
        NamedLayer(name, layer.replace(direction="fwd"), count[layer, rows], place, (), _own(layer), rows)
        for (layer, rows), (name, place) in first.items()
    )
    file = Path(graph.name)
    return Network(file.stem, file.name, layers, (images,))


def _images(graph: Graph, batch: int) -> int:
    """How many images the inputs of a graph hold: as many as were asked for, unless the file says otherwise."""
    found = [wanted.shape[0] for wanted in graph.inputs.values() if wanted.shape]
    return batch if batch in found or not found else found[0]


def _own(layer: ConvLayer) -> tuple[str, ...]:
    """The directions that a layer has to itself."""
    return () if layer.direction == "fwd" else (layer.direction,)
