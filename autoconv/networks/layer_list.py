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


def layer_list(graph: Graph) -> Network:
    """The layers of an optimised graph for one image, under the names of the first nodes that each computes.

    A fully connected layer is a 1x1 convolution of a pixel for each row; a transposed convolution is the one whose
    transpose it is, in the direction "dgrad".
    """
    first: dict[ConvLayer, tuple[str, int]] = {}
    count: dict[ConvLayer, int] = {}
    batches: dict[int, None] = {}
    for place, node in enumerate(graph.nodes.values(), 1):
        layer = layer_of(graph, node)
        if layer is None:
            continue
        if not isinstance(node.operator, MatMul | QuantizedMatMul):
            batches[layer.N] = None
        layer = layer.replace(N=1)
        first.setdefault(layer, (node.name, place))
        count[layer] = count.get(layer, 0) + 1
    layers = tuple(
        NamedLayer(name, layer.replace(direction="fwd"), count[layer], place, (), _own(layer))
        for layer, (name, place) in first.items()
    )
    file = Path(graph.name)
    return Network(file.stem, file.name, layers, tuple(batches) or (1,))


def _own(layer: ConvLayer) -> tuple[str, ...]:
    """The directions that a layer has to itself."""
    return () if layer.direction == "fwd" else (layer.direction,)
