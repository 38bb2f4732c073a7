"""Floats that only stand for integers: what is computed between them is computed of the integers.

Exporters write a quantised layer in float32, between a DequantizeLinear of each of its arrays and a QuantizeLinear of
what comes out (QDQ form).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoconv.common.epilogue.quantization import Quantization
from autoconv.common.types import INTEGERS
from autoconv.errors import ArrayError, ConfigError, LayerError
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import (
    Concat,
    Conv,
    Elementwise,
    Foreign,
    MatMul,
    Pool,
    QuantizedConv,
    QuantizedMatMul,
    Reshape,
    Slice,
    Transpose,
)
from autoconv.networks.operators.quantized import DEQUANTIZE, quantize
from autoconv.networks.passes.epilogue import activation_of
from autoconv.networks.quantization import add_operands
from autoconv.networks.reference import constant_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Integers:
    """What an array of integers stands for: names in a graph, of the array, its scales and its zero points."""

    array: str
    scale: str
    zero: str


def fold_quantization(graph: Graph) -> None:
    """Layers and copies of integers that were floats in between."""
    for name in list(graph.nodes):
        _move(graph, graph.nodes[name])
        _cancel(graph, graph.nodes[name])
    for name in list(graph.nodes):
        if isinstance(graph.nodes[name].operator, Conv | MatMul):
            _fold(graph, graph.nodes[name])
    graph.clean()
    _fold_constants(graph)


def _dequantized(graph: Graph, name: str) -> Integers | None:
    """The integers behind an array of floats."""
    node = graph.nodes.get(name)
    if node is None or node.operator != DEQUANTIZE or not all(v in graph.constants for v in node.inputs[1:]):
        return None
    return Integers(*node.inputs)


def _quantized(graph: Graph, node: Node) -> Integers | None:
    """The floats that a node makes integers of, with their one scale and zero point."""
    dtype = graph.types[node.name].dtype
    if dtype not in INTEGERS or node.operator != quantize(dtype):
        return None
    found = Integers(*node.inputs)
    return found if found.scale in graph.constants and graph.types[found.scale].shape == () else None


def _alike(graph: Graph, a: Integers, b: Integers) -> bool:
    """Whether both have the same one scale and zero point."""
    pairs = [(graph.constants[x], graph.constants[y]) for x, y in ((a.scale, b.scale), (a.zero, b.zero))]
    return all(x.shape == y.shape == () and x == y for x, y in pairs)


def _move(graph: Graph, node: Node) -> None:
    """What only moves elements, or takes the largest, does so with the integers."""
    operator = node.operator
    largest = isinstance(operator, Pool) and operator.reduction == "max"
    if not largest and not isinstance(operator, Concat | Reshape | Slice | Transpose):
        return
    found = [_dequantized(graph, name) for name in node.inputs]
    first = found[0]
    if first is None or not all(f is not None and _alike(graph, first, f) for f in found):
        return
    arrays = [f.array for f in found if f is not None]
    if len({graph.types[array].dtype for array in arrays}) == 1:
        name = f"{node.name}.integers"
        if all(array in graph.constants for array in arrays):
            found_type = operator.infer([graph.types[array] for array in arrays])
            values = [graph.constants[array] for array in arrays]
            moved = graph.add_constant(name, constant_of(operator, values, found_type))
        else:
            moved = graph.add(name, operator, *arrays)
        graph.change(node.name, DEQUANTIZE, moved, first.scale, first.zero)


def _cancel(graph: Graph, node: Node) -> None:
    """Integers made of floats that stand for the same integers are those."""
    to = _quantized(graph, node)
    found = None if to is None else _dequantized(graph, to.array)
    if to is None or found is None or not _alike(graph, to, found):
        return
    if graph.types[found.array].dtype == graph.types[node.name].dtype:
        graph.replace(node.name, found.array)


def _fold(graph: Graph, node: Node) -> None:
    """A convolution, or a product with a matrix, of integers, with the bias, ReLU and rounding that follow."""
    if len(node.inputs) != 2:
        return
    x, w = (_dequantized(graph, name) for name in node.inputs)
    if x is None or w is None or graph.types[x.scale].shape != () or graph.types[x.array].dtype not in INTEGERS:
        return
    if w.array not in graph.constants or graph.types[w.array].dtype not in INTEGERS:
        return
    oriented = _filters(graph, node, w)
    if oriented is None:
        return
    filters, w_scale = oriented
    unit = graph.constants[x.scale] * w_scale
    last, bias = _bias(graph, node, unit, len(filters))
    last, activation, to = _rounding(graph, last)
    meaning = Quantization(
        unit if to is None else unit / graph.constants[to.scale],
        int(graph.constants[x.zero]),
        0 if to is None else int(graph.constants[to.zero]),
        bias,
    )
    dtype = graph.types[last.name].dtype
    operator: QuantizedConv | QuantizedMatMul = QuantizedMatMul(activation=activation, output_dtype=dtype)
    if isinstance(conv := node.operator, Conv):
        operator = QuantizedConv(
            stride=conv.stride, padding=conv.padding, dilation=conv.dilation, groups=conv.groups,
            activation=activation, output_dtype=dtype,
        )  # fmt: skip
    try:
        inputs = add_operands(graph, last.name, operator, x.array, filters, meaning)
    except (ArrayError, ConfigError, LayerError):  # sums could overflow, say: then it stays in float32
        return
    graph.change(last.name, operator, *inputs)


def _filters(graph: Graph, node: Node, w: Integers) -> tuple[Array, Array] | None:
    """Filters less their zero points, and their scales, where there is one of either for all or for each."""
    numbers, scale, zero = (graph.constants[name] for name in (w.array, w.scale, w.zero))
    per_filter = [len(numbers), *[1] * (numbers.ndim - 1)]
    if isinstance(node.operator, MatMul):
        if numbers.ndim != 2:
            return None
        if not node.operator.transposed:
            numbers, scale, zero = (
                a.T if a.ndim == 2 else a.reshape(-1, 1) if a.ndim else a for a in (numbers, scale, zero)
            )
            per_filter = [len(numbers), 1]
    if any(list(a.shape) != per_filter for a in (scale, zero) if a.ndim):
        return None
    return numbers.astype(np.int32) - zero.astype(np.int32), np.broadcast_to(scale.reshape(-1), (len(numbers),))


def _bias(graph: Graph, node: Node, unit: Array, count: int) -> tuple[Node, Array | None]:
    """The node that adds a constant to each channel, and that in units of the sums; the node itself if none does."""
    user = graph.only_user(node.name)
    if user is None or user.operator != Elementwise(("add", 0, 1)) or len(user.inputs) != 2:
        return node, None
    (other,) = (name for name in user.inputs if name != node.name)
    channels = (count,) if isinstance(node.operator, MatMul) else (count, 1, 1)
    if graph.types[user.name] != graph.types[node.name]:
        return node, None
    if _trimmed(graph.types[other].shape) != _trimmed(channels):
        return node, None
    while (maker := graph.nodes.get(other)) is not None and isinstance(maker.operator, Reshape):
        other = maker.inputs[0]
    values = graph.constants.get(other)
    if values is None:
        found = _dequantized(graph, other)
        if found is None or found.array not in graph.constants:
            return node, None
        numbers, scale, zero = (
            graph.constants[name].astype(np.float64) for name in (found.array, found.scale, found.zero)
        )
        values = (numbers - zero) * scale
    return user, np.rint(values.astype(np.float64).reshape(-1) / unit).astype(np.int64)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without extents of 1 in front."""
    return _trimmed(shape[1:]) if shape[:1] == (1,) else shape


def _rounding(graph: Graph, node: Node) -> tuple[Node, Any, Integers | None]:
    """The last node of a layer, its activation, and what its output stands for where that is integers."""
    user = graph.only_user(node.name)
    if user is None:
        return node, None, None
    if (to := _quantized(graph, user)) is not None:
        return user, None, to
    if not isinstance(user.operator, Elementwise) or len(user.inputs) != 1 or user.operator.dtype is not None:
        return node, None, None
    activation = activation_of(user.operator.expression) or ""
    after = graph.only_user(user.name)
    to = None if after is None else _quantized(graph, after)
    if after is not None and to is not None:
        low, high = _held(graph, after, to, activation)
        if high and low:
            return after, None, to
        if high and activation.startswith(("relu", "clip:0:")):
            return after, "relu", to
    return (user, "relu", None) if activation == "relu" else (node, None, None)


def _held(graph: Graph, node: Node, to: Integers, activation: str) -> tuple[bool, bool]:
    """Whether integers end where an activation that holds numbers within bounds would hold them, below and above."""
    kind, *bounds = ["clip", "0", "inf"] if activation == "relu" else activation.split(":")
    if kind != "clip":
        return False, False
    limits = np.iinfo(graph.types[node.name].dtype)
    numbers = np.array(bounds, np.float32)
    low, high = node.operator.evaluate(numbers, graph.constants[to.scale], graph.constants[to.zero])
    return bool(low == limits.min), bool(high == limits.max)


def _fold_constants(graph: Graph) -> None:
    """What is computed of constants alone, such as filters that stay floats."""
    for node in list(graph.nodes.values()):
        names = graph.nodes[node.name].inputs
        if isinstance(node.operator, Foreign) or not all(name in graph.constants for name in names):
            continue
        value = constant_of(node.operator, [graph.constants[name] for name in names], graph.types[node.name])
        graph.replace(node.name, graph.add_constant(node.name, value))
