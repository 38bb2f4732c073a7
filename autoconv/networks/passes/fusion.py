"""Chains of functions of single elements as one node."""

from __future__ import annotations

from dataclasses import replace

from autoconv.common.epilogue.expressions import functions, substituted
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import Elementwise

MOST_INPUTS = 5  # of one kernel, besides its output
MOST_FUNCTIONS = 40


def inline_scalars(graph: Graph) -> None:
    """Constants of a single element stand in the expression itself."""
    for node in list(graph.nodes.values()):
        if not isinstance(node.operator, Elementwise):
            continue
        kept = [name for name in node.inputs if not _scalar(graph, name)]
        if not kept or graph.types[node.name].shape != Elementwise(0).infer([graph.types[v] for v in kept[:1]]).shape:
            continue
        if len(kept) == len(node.inputs):
            continue
        places = {name: n for n, name in enumerate(dict.fromkeys(kept))}
        meaning = {
            n: float(graph.constants[name].reshape(-1)[0]) if _scalar(graph, name) else places[name]
            for n, name in enumerate(node.inputs)
        }
        operator = replace(node.operator, expression=substituted(node.operator.expression, meaning))
        graph.change(node.name, operator, *places)


def _scalar(graph: Graph, name: str) -> bool:
    return name in graph.constants and graph.constants[name].size == 1 and graph.constants[name].dtype.kind == "f"


def fuse_elementwise(graph: Graph) -> None:
    """A node whose input one other node computes, for it alone and in its shape, does both."""
    for name in list(graph.nodes):
        while (fused := _with_an_input(graph, name)) is not None:
            graph.change(name, *fused[:1], *fused[1])


def _with_an_input(graph: Graph, name: str) -> tuple[Elementwise, list[str]] | None:
    node = graph.nodes[name]
    if not isinstance(node.operator, Elementwise):
        return None
    for value in node.inputs:
        maker = graph.nodes.get(value)
        if maker is None or not isinstance(maker.operator, Elementwise) or not _passes_on(graph, maker, node):
            continue
        if {user.name for user in graph.nodes.values() if value in user.inputs} != {name}:
            continue
        if value in graph.outputs.values():
            continue
        inputs = list(dict.fromkeys([v for v in node.inputs if v != value] + list(maker.inputs)))
        within = substituted(maker.operator.expression, {n: inputs.index(v) for n, v in enumerate(maker.inputs)})
        meaning = {n: inputs.index(v) if v != value else within for n, v in enumerate(node.inputs)}
        expression = substituted(node.operator.expression, meaning)
        if len(inputs) <= MOST_INPUTS and sum(1 for _ in functions(expression)) <= MOST_FUNCTIONS:
            mixed = node.operator.dtype is not None or maker.operator.dtype is not None
            return Elementwise(expression, graph.types[name].dtype if mixed else None), inputs
    return None


def _passes_on(graph: Graph, maker: Node, node: Node) -> bool:
    """Whether an array is but a step on the way to another of its shape, and what is computed stays the same."""
    before, after = graph.types[maker.name], graph.types[node.name]
    plain = all(isinstance(n.operator, Elementwise) and n.operator.dtype is None for n in (maker, node))
    return before.shape == after.shape and (before.dtype == "float32" or (plain and before == after))
