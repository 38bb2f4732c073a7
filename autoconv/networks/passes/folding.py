"""What constants of a convolution can take over: scaling, bias, padding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from autoconv.common.epilogue.expressions import constant_of
from autoconv.common.types import DTYPES, ROUNDING
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import Conv, ConvTranspose, Elementwise, MatMul, Pad, Product


def fold_padding(graph: Graph) -> None:
    """A convolution of zeros around an image pads by itself."""
    for node in list(graph.nodes.values()):
        pad = graph.nodes.get(node.inputs[0])
        if not isinstance(node.operator, Conv) or pad is None or not isinstance(pad.operator, Pad):
            continue
        before, after = pad.operator.before, pad.operator.after
        if pad.operator.value != 0 or any((*before[:2], *after[:2])):
            continue
        (top, bottom), (left, right) = node.operator.padding
        sides = (top + before[2], bottom + after[2]), (left + before[3], right + after[3])
        graph.change(node.name, replace(node.operator, padding=sides), pad.inputs[0], *node.inputs[1:])


def fold_scaling(graph: Graph) -> None:
    """A constant factor or summand for each channel goes into the filters and the bias of what comes before."""
    for name in list(graph.nodes):
        node = graph.nodes[name]
        parsed = _constant_operand(graph, node)
        if parsed is None:
            continue
        function, computed, constant = parsed
        maker = graph.nodes.get(computed)
        if maker is None or not isinstance(maker.operator, Product):
            continue
        if graph.only_user(computed) is None or graph.types[name] != graph.types[computed]:
            continue
        if graph.types[name].dtype not in DTYPES:
            continue  # filters that are whole numbers are none any more when they are divided
        values = per_channel(graph, maker, constant)
        if values is not None:
            _absorb(graph, maker, node, function, values)


def _constant_operand(graph: Graph, node: Node) -> tuple[str, str, np.ndarray] | None:
    """Of `computed * constant` or `computed + constant`: "mul" or "add", the name of one and the value of the other."""
    if not isinstance(node.operator, Elementwise) or not isinstance(node.operator.expression, tuple):
        return None
    function, *arguments = node.operator.expression
    if function not in ("mul", "add", "sub", "div"):
        return None
    if any(isinstance(part, tuple) and constant_of(part) is None for part in arguments):
        return None
    values = [
        graph.constants.get(node.inputs[part]) if isinstance(part, int) else np.asarray(part[1]) for part in arguments
    ]
    if values[0] is None and values[1] is not None:
        computed, constant = node.inputs[arguments[0]], values[1].astype(np.float64)
    elif values[1] is None and values[0] is not None and function in ("mul", "add"):
        computed, constant = node.inputs[arguments[1]], values[0].astype(np.float64)
    else:
        return None
    if function == "div":
        return ("mul", computed, 1 / constant) if np.all(constant != 0) else None
    return ("add", computed, -constant) if function == "sub" else (function, computed, constant)


def per_channel(graph: Graph, maker: Node, constant: np.ndarray) -> np.ndarray | None:
    """The constant as a vector of a value for each channel; None where it is none."""
    shape = graph.types[maker.name].shape
    axis = len(shape) - 1 if isinstance(maker.operator, MatMul) else 1
    if constant.ndim > len(shape):
        return None
    full = constant.reshape((*[1] * (len(shape) - constant.ndim), *constant.shape))
    if any(extent != 1 for n, extent in enumerate(full.shape) if n != axis):
        return None
    return np.broadcast_to(full.reshape(-1), (shape[axis],))


def _absorb(graph: Graph, maker: Node, node: Node, function: str, values: np.ndarray) -> None:
    """Let the node be what it was applied to, with other filters or another bias."""
    operator, (x, w, *rest) = maker.operator, maker.inputs
    assert isinstance(operator, Product)
    dtype = graph.types[node.name].dtype
    if operator.residual or operator.activation is not None:
        return
    bias = graph.constants.get(rest[0]) if operator.bias else np.zeros(len(values))
    if bias is None:
        return
    bias = bias.astype(np.float64)
    if function == "add":
        named = graph.add_constant(f"{node.name}.bias", (bias + values).astype(dtype))
        graph.change(node.name, replace(operator, bias=True), x, w, named)
    elif w in graph.constants and (not isinstance(operator, MatMul) or operator.transposed):
        filters = _scaled(operator, graph.constants[w], values, DTYPES[dtype])
        if filters is not None:
            rest = [graph.add_constant(f"{node.name}.bias", (bias * values).astype(dtype))] if operator.bias else []
            graph.change(node.name, operator, x, graph.add_constant(w, filters), *rest)


def _scaled(operator: Product, filters: np.ndarray, values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Filters with those of every channel of the output times its value, in float64 and then rounded.

    None where the type does not hold them: those of float16 are soon too small, or infinite.
    """
    parts, factors = filters, values.reshape(-1, *[1] * (filters.ndim - 1))
    if isinstance(operator, ConvTranspose):
        parts = filters.reshape(operator.groups, -1, *filters.shape[1:])
        factors = values.reshape(operator.groups, 1, -1, 1, 1)
    found = np.empty(parts.shape, dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.multiply(parts, factors, out=found, dtype=np.float64, casting="unsafe")  # no array of float64 is made
        largest = float(np.abs(found).max(initial=0))
        if not ml_dtypes.finfo(dtype).tiny <= largest < math.inf:  # else all err by half a unit of the largest at most
            exact = parts.astype(np.float64) * factors
            error = np.abs(found.astype(np.float64) - exact).max(initial=0)
            if not error <= ROUNDING["bfloat16"] * np.abs(exact).max(initial=0):
                return None
    return found.reshape(filters.shape)
