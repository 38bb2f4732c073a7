"""Means, variances and what is divided by their roots as one node, whether a file or a reader of ours wrote them so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from autoconv.common.epilogue.expressions import Expression, constant_of, substituted
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import Elementwise, Normalization, Reduce
from autoconv.networks.operators.pooling import Affine

Array = np.ndarray[Any, Any]

AFFINE: tuple[Affine, ...] = get_args(Affine)
LEAST_ROWS = 32  # a row is one thread's: of fewer some would have none
DEEPEST = 5  # functions within each other, of what is looked for: a product, 1 over, a root, a sum, one over a count


def fuse_normalization(graph: Graph) -> None:
    """Rows over the root of their mean square, less their mean or not; and a constant scale and shift that follow."""
    for node in list(graph.nodes.values()):
        if (found := _normalized(graph, node)) is not None:
            graph.change(node.name, *found)
            _fuse_affine(graph, node.name)


def _normalized(graph: Graph, node: Node) -> tuple[Normalization, str] | None:
    """What a node computes, if that is an array of normalised rows, and of which array."""
    if not _elementwise(node) or graph.types[node.name].dtype != "float32":
        return None
    expression, arrays = _with_small_arrays(graph, node)
    if (parts := _over_a_root(expression)) is None:
        return None
    divided, square, epsilon = parts
    found = _mean_square(graph, square, arrays)
    if not isinstance(divided, int) or found is None or graph.types[arrays[divided]] != graph.types[node.name]:
        return None
    y, (squared, axes), shape = arrays[divided], found, graph.types[node.name].shape
    axis = _first_axis(shape, axes)
    if axis is None or math.prod(shape[:axis]) < LEAST_ROWS:
        return None
    centred = _centred(graph, y)
    if centred is not None and centred == _centred(graph, squared) and _first_axis(shape, centred[1]) == axis:
        return Normalization(axis=axis, epsilon=epsilon), centred[0]
    return (Normalization(axis=axis, epsilon=epsilon, centred=False), y) if squared == y else None


def _elementwise(node: Node | None) -> bool:
    return node is not None and isinstance(node.operator, Elementwise) and node.operator.dtype is None


def _with_small_arrays(graph: Graph, node: Node) -> tuple[Expression, list[str]]:
    """A node's expression with those in it that compute arrays of fewer elements than its own; and of which arrays.

    As far as anybody looks: a graph may have chains of any length, and arrays that are taken twice at each step.
    """
    assert isinstance(node.operator, Elementwise)
    arrays: list[str] = []

    def expanded(name: str, depth: int) -> Expression:
        maker = graph.nodes.get(name) if depth < DEEPEST else None
        if maker is None or not _elementwise(maker) or graph.types[name].shape == graph.types[node.name].shape:
            if name not in arrays:
                arrays.append(name)
            return arrays.index(name)
        assert isinstance(maker.operator, Elementwise)
        within = {n: expanded(value, depth + 1) for n, value in enumerate(maker.inputs)}
        return substituted(maker.operator.expression, within)

    within = {n: expanded(value, 1) for n, value in enumerate(node.inputs)}
    return substituted(node.operator.expression, within), arrays


def _over_a_root(expression: Expression) -> tuple[Expression, Expression, float] | None:
    """For an expression over the root of the sum of another and a number: those three."""
    match expression:
        case ("div", divided, ("sqrt", ("add", left, right))):
            one: Expression = ("constant", 1.0)
        case ("mul", ("div", one, ("sqrt", ("add", left, right))), divided):
            pass
        case ("mul", divided, ("div", one, ("sqrt", ("add", left, right)))):
            pass
        case _:
            return None
    for square, number in ((left, right), (right, left)):
        if constant_of(one) == 1 and (epsilon := constant_of(number)) is not None and epsilon >= 0:
            return divided, square, epsilon
    return None


def _mean_square(graph: Graph, expression: Expression, arrays: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
    """The array of whose squares an expression is the mean, and along which axes."""
    count, kind = 1.0, "mean"
    match expression:
        case ("div", int(sums), number) if constant_of(number) is not None:
            expression, count, kind = sums, number[1], "sum"
    maker = graph.nodes.get(arrays[expression]) if isinstance(expression, int) else None
    if maker is None or not isinstance(maker.operator, Reduce) or maker.operator.reduction != kind:
        return None
    axes, squares = maker.operator.axes, graph.nodes.get(maker.inputs[0])
    shape = graph.types[maker.inputs[0]].shape
    if kind == "sum" and count != math.prod(shape[axis] for axis in axes):
        return None
    if squares is None or not isinstance(squares.operator, Elementwise) or not _elementwise(squares):
        return None
    return (squares.inputs[0], axes) if squares.operator.expression == ("mul", 0, 0) else None


def _centred(graph: Graph, name: str) -> tuple[str, tuple[int, ...]] | None:
    """The array that another one is less its mean, and along which axes that is."""
    node = graph.nodes.get(name)
    if node is None or not isinstance(node.operator, Elementwise) or node.operator != Elementwise(("sub", 0, 1)):
        return None
    mean = graph.nodes.get(node.inputs[1])
    if mean is None or mean.inputs != node.inputs[:1]:
        return None
    reduced = mean.operator
    return (node.inputs[0], reduced.axes) if isinstance(reduced, Reduce) and reduced.reduction == "mean" else None


def _first_axis(shape: Sequence[int], axes: Sequence[int]) -> int | None:
    """Where those axes begin that are longer than 1, if they are the last ones."""
    gone = [axis for axis in axes if shape[axis] != 1]
    kept = [axis for axis, extent in enumerate(shape) if extent != 1 and axis not in axes]
    return min(gone) if gone and (not kept or max(kept) < min(gone)) else None


def _fuse_affine(graph: Graph, name: str) -> None:
    """A constant scale and a constant shift of a normalised array, or one of them, which nobody takes without."""
    operator, x = graph.nodes[name].operator, graph.nodes[name].inputs[0]
    assert isinstance(operator, Normalization)
    last, kind = name, operator.affine
    numbers_of: dict[str, Array] = {}
    for function in ("mul", "add"):
        user = graph.only_user(last)
        if user is None or user.operator not in (Elementwise((function, 0, 1)), Elementwise((function, 1, 0))):
            continue
        (other,) = (value for value in user.inputs if value != last)
        if other not in graph.constants or graph.types[user.name] != graph.types[name]:
            continue
        for along in AFFINE if kind is None else (kind,):
            numbers = _numbers(graph.constants[other], graph.types[name].shape, operator.axis, along)
            if numbers is not None:
                last, kind, numbers_of[function] = user.name, along, numbers
                break
    if not numbers_of:
        return
    most = max(numbers.size for numbers in numbers_of.values())
    names = []
    for function, what, neutral in (("mul", "scale", 1), ("add", "shift", 0)):
        numbers = numbers_of.get(function, np.full(most, neutral, graph.types[name].dtype))
        names.append(graph.add_constant(f"{last}.{what}", np.tile(numbers, most // numbers.size)))
    graph.change(last, replace(operator, affine=kind), x, *names)


def _numbers(values: Array, shape: Sequence[int], axis: int, along: Affine) -> Array | None:
    """Those of an array for each of the elements of a row, or for each of some rows; None where it has others."""
    extents = (1,) * (len(shape) - values.ndim) + values.shape
    rows, elements = extents[:axis], extents[axis:]
    if any(extent != 1 for extent in (rows if along == "elements" else elements)):
        return None
    if along == "elements":
        return np.broadcast_to(values.reshape(elements), shape[axis:]).reshape(-1)
    first = next((n for n, extent in enumerate(rows) if extent != 1), axis)
    return np.broadcast_to(values.reshape(rows[first:]), shape[first:axis]).reshape(-1)
