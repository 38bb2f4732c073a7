"""The convolutions of a graph as a list of layers, to tune and to compare."""

from __future__ import annotations

import collections
from pathlib import Path

from autoconv.layer import ConvLayer
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layers import NamedLayer, Network
from autoconv.networks.operators import Conv, ConvTranspose, MatMul, QuantizedMatMul, QuantizedProduct
from autoconv.networks.yaml_writer import writable

_Equal = tuple[ConvLayer, tuple[int, ...], bool]  # what is listed once: a layer, its own batch, whether it is rows


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
    transpose it is, in the direction "dgrad". A layer whose images or rows are not a multiple of the network's, as of
    another input, stays whole: its own batch says how many it has.

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
    first: dict[_Equal, tuple[str, int]] = {}
    count: collections.Counter[_Equal] = collections.Counter()
    for place, node in enumerate(graph.nodes.values(), 1):
        layer = layer_of(graph, node)
        if layer is None:
            continue
        rows = isinstance(node.operator, MatMul | QuantizedMatMul)
        extent = "W" if rows else "N"
        each, rest = divmod(getattr(layer, extent), images)
        whole: _Equal = layer.replace(N=1), (layer.N,), False
        one = whole if rest else (layer.replace(**{extent: each}), (), rows)
        first.setdefault(one, (node.name, place))
        count[one] += 1
    layers: dict[str, NamedLayer] = {}
    for equal, (wanted, place) in first.items():
        layer, batches, rows = equal
        name = writable(wanted, layers)
        directions = () if layer.direction == "fwd" else (layer.direction,)
        layers[name] = NamedLayer(name, layer.replace(direction="fwd"), count[equal], place, batches, directions, rows)
    file = Path(graph.name)
    return Network(writable(file.stem), writable(file.name), tuple(layers.values()), (images,))


def _images(graph: Graph, batch: int) -> int:
    """How many images the inputs of a graph hold: as many as were asked for, unless the file says otherwise."""
    found = [wanted.shape[0] for wanted in graph.inputs.values() if wanted.shape]
    return batch if batch in found or not found else found[0]
