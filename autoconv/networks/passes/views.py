"""Functions of single elements, and concatenations, before what only names or reorders elements.

A convolution of one dimension, or of three, is computed as one of images. What follows it can only be fused with it
where it takes the convolution's own output, and not what has become of its shape since.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import Concat, Elementwise, Operator, Reshape, Transpose

View = Reshape | Transpose
Shape = tuple[int, ...]


def sink_views(graph: Graph) -> None:
    """Transpose sinking, of reshapes too: what is computed of arrays that were all seen alike is computed before that.

    Nothing is transposed more often than before: of an array that others need transposed, too, nothing is moved.
    """
    for name in list(graph.nodes):
        if isinstance(graph.nodes[name].operator, Transpose):
            _join(graph, graph.nodes[name])
        while (moved := _moved(graph, graph.nodes[name])) is not None:  # before one view, and then before another
            view, operator, inputs = moved
            before = graph.add(name, operator, *inputs)
            graph.change(name, view, before)
            name = before


def _join(graph: Graph, node: Node) -> None:
    """One transposition in place of two."""
    maker = graph.nodes.get(node.inputs[0])
    if maker is not None and isinstance(maker.operator, Transpose):
        order = tuple(maker.operator.order[axis] for axis in node.operator.order)  # type: ignore[attr-defined]
        graph.change(node.name, Transpose(order), *maker.inputs)


def _moved(graph: Graph, node: Node) -> tuple[View, Operator, list[str]] | None:
    """The view, what is computed before it, and of which arrays; None where nothing is to be moved."""
    if not isinstance(node.operator, Elementwise | Concat):
        return None
    if any(0 in graph.types[name].shape for name in (*node.inputs, node.name)):
        return None  # without elements there is no telling which axes became which
    makers = [graph.nodes.get(name) for name in node.inputs if name not in graph.constants]
    views = [maker for maker in makers if maker is not None and isinstance(maker.operator, View)]
    if not views or len(views) < len(makers) or not all(_moved_alone(graph, view, node) for view in views):
        return None
    if isinstance(node.operator, Concat):
        return _concatenated(graph, node, node.operator, views) if len(views) == len(node.inputs) else None
    shape, (operator, source) = graph.types[node.name].shape, _seen(graph, views[0])
    if any(_seen(graph, view) != (operator, source) or graph.types[view.name].shape != shape for view in views):
        return None
    inputs = []
    for name in node.inputs:
        if (value := graph.constants.get(name)) is None:
            inputs.append(graph.nodes[name].inputs[0])
        elif (found := _constant_before(operator, source, shape, value)) is None:
            return None
        else:
            inputs.append(graph.add_constant(name, found))
    return operator, node.operator, inputs


def _seen(graph: Graph, view: Node) -> tuple[View, Shape]:
    """How an array is seen, and the shape that it has."""
    assert isinstance(view.operator, View)
    return view.operator, graph.types[view.inputs[0]].shape


def _moved_alone(graph: Graph, view: Node, node: Node) -> bool:
    """Whether nobody but a node needs an array as it is transposed: others who take it transpose it again."""
    if not isinstance(view.operator, Transpose):
        return True
    others = [other for other in graph.nodes.values() if view.name in other.inputs and other.name != node.name]
    return view.name not in graph.outputs.values() and all(isinstance(one.operator, Transpose) for one in others)


def _concatenated(
    graph: Graph, node: Node, operator: Concat, views: Sequence[Node]
) -> tuple[View, Operator, list[str]] | None:
    """The same for arrays that are put one behind the other: along an axis that a view has as it is."""
    axes = {_axis_before(*_seen(graph, view), graph.types[view.name].shape, operator.axis) for view in views}
    kinds = {view.operator if isinstance(view.operator, Transpose) else Reshape for view in views}
    if len(axes) != 1 or len(kinds) != 1 or (axis := axes.pop()) is None:
        return None
    first = views[0].operator
    sources = [graph.types[view.inputs[0]].shape for view in views]
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in sources}) != 1 or len({*map(len, sources)}) != 1:
        return None
    view = first if isinstance(first, Transpose) else Reshape(graph.types[node.name].shape)
    return view, Concat(axis), [view.inputs[0] for view in views]


def _groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Axes of a shape and of what it is reshaped to, the fewest of each that have as many elements."""
    first = second = 0
    while first < len(source) or second < len(target):
        ours, theirs = list[int](), list[int]()
        while True:
            sizes = math.prod(source[n] for n in ours), math.prod(target[n] for n in theirs)
            if sizes[0] == sizes[1] and (ours or theirs):
                break
            if (sizes[0] <= sizes[1] and first < len(source)) or second == len(target):
                ours.append(first)
                first += 1
            else:
                theirs.append(second)
                second += 1
        yield ours, theirs


def _axis_before(view: View, source: Shape, target: Shape, axis: int) -> int | None:
    """Which axis of an array one of its view is; None where it is a part of one, or several."""
    if isinstance(view, Transpose):
        return view.order[axis]
    for ours, theirs in _groups(source, target):
        if axis in theirs:
            long = [n for n in ours if source[n] != 1]
            return long[0] if len(long) == 1 and [n for n in theirs if target[n] != 1] == [axis] else None
    return None


def _constant_before(view: View, source: Shape, target: Shape, value: np.ndarray) -> np.ndarray | None:
    """A constant that broadcasts to a view as one that broadcasts to the array; None where none does."""
    if value.ndim > len(target):
        return None
    full = value.reshape((*[1] * (len(target) - value.ndim), *value.shape))
    if isinstance(view, Transpose):
        return np.ascontiguousarray(full.transpose(np.argsort(view.order)))
    shape: list[int] = []
    for ours, theirs in _groups(source, target):
        extents = [full.shape[n] for n in theirs]
        if math.prod(extents) == 1:
            shape += [1] * len(ours)
        elif extents == [target[n] for n in theirs]:
            shape += [source[n] for n in ours]
        else:
            return None
    return full.reshape(shape)
