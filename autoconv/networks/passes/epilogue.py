"""What the epilogue of a convolution or a product can do while it stores."""

from __future__ import annotations

from dataclasses import replace

from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import Conv, Elementwise, MatMul


def _open_product(graph: Graph, name: str) -> Node | None:
    """What computes an array for one taker alone, and could do more to it."""
    maker = graph.nodes.get(name)
    if maker is None or not isinstance(maker.operator, Conv | MatMul) or graph.only_user(name) is None:
        return None
    return maker if maker.operator.activation is None else None


def fuse_residual(graph: Graph) -> None:
    """The sum of a convolution and an array of its shape; of two convolutions, the later takes the other's output."""
    for node in list(graph.nodes.values()):
        if not isinstance(node.operator, Elementwise) or node.operator.expression != ("add", 0, 1):
            continue
        shape = graph.types[node.name]
        if any(graph.types[name] != shape for name in node.inputs):
            continue
        place = {name: n for n, name in enumerate(graph.nodes)}
        for name in sorted(node.inputs, key=lambda name: -place.get(name, -1)):
            maker = _open_product(graph, name)
            if maker is not None and isinstance(maker.operator, Conv | MatMul) and not maker.operator.residual:
                (other,) = (v for v in node.inputs if v != name)
                graph.change(node.name, replace(maker.operator, residual=True), *maker.inputs, other)
                graph.clean()
                break


def fuse_activation(graph: Graph) -> None:
    """A convolution that is made positive."""
    for node in list(graph.nodes.values()):
        if isinstance(node.operator, Elementwise) and node.operator.expression == ("relu", 0):
            maker = _open_product(graph, node.inputs[0])
            if maker is not None and isinstance(maker.operator, Conv | MatMul):
                graph.change(node.name, replace(maker.operator, activation="relu"), *maker.inputs)
