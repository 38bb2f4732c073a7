"""Products of matrices in the order, and of the shapes, for which there are kernels."""

from __future__ import annotations

import math
from dataclasses import replace

from autoconv.layer import DTYPES
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import Conv, MatMul, Reshape


def transpose_matrices(graph: Graph) -> None:
    """Constant right sides of products have the rows that a 1x1 convolution has as filters."""
    turned: dict[str, str] = {}  # by the matrix, which several products may share
    for node in list(graph.nodes.values()):
        if isinstance(node.operator, MatMul) and not node.operator.transposed:
            a, b = node.inputs[:2]
            if b in graph.constants and graph.constants[b].ndim == 2:
                if b not in turned:
                    turned[b] = graph.add_constant(f"{b}.T", graph.constants[b].T)
                graph.change(node.name, replace(node.operator, transposed=True), a, turned[b], *node.inputs[2:])


def group_products(graph: Graph) -> None:
    """As many products as there are matrices become a 1x1 convolution of as many groups.

    Its filters are the rows of the left matrices, its channels those of the right ones, and their columns its pixels.
    """
    for node in list(graph.nodes.values()):
        if isinstance(node.operator, MatMul) and _has_groups(graph, node, node.operator):
            a, b, *residual = node.inputs
            (*batch, rows, depth), columns = graph.types[a].shape, graph.types[b].shape[-1]
            groups = math.prod(batch)
            y = 1, groups * rows, 1, columns
            w = graph.add(f"{node.name}.left", Reshape((groups * rows, depth, 1, 1)), a)
            x = graph.add(f"{node.name}.right", Reshape((1, groups * depth, 1, columns)), b)
            rest = [graph.add(f"{node.name}.residual", Reshape(y), name) for name in residual]
            conv = Conv(groups=groups, residual=node.operator.residual, activation=node.operator.activation)
            product = graph.add(f"{node.name}.product", conv, x, w, *rest)
            graph.change(node.name, Reshape(graph.types[node.name].shape), product)
    graph.clean()


def _has_groups(graph: Graph, node: Node, operator: MatMul) -> bool:
    """Whether a product is of as many matrices on either side, and no layer already."""
    a, b = (graph.types[name] for name in node.inputs[:2])
    plain = not operator.transposed and not operator.values_per_channel and a.dtype in DTYPES
    return plain and a.shape[:-2] == b.shape[:-2] and math.prod(a.shape) * b.shape[-1] > 0
