"""What the epilogue of a convolution or a product can do while it stores."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from autoconv.common.epilogue import activations
from autoconv.common.epilogue.expressions import Expression, constant_of, constants, value_of
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import Elementwise, Product
from autoconv.networks.passes.folding import per_channel

Array = np.ndarray[Any, Any]

LARGEST = float(np.finfo(np.float32).max)
SMOOTH = tuple(text for text in activations.PLAIN if text != "relu" and not activations.has_slopes(text))
ENDS, FAR = 1e3, 1e30  # from the first on smooth activations are 0, 1 or their argument
HUGE = 8e307  # which no bound of float32 lets through
_FAR = np.append(np.geomspace(1e-6, FAR, 400), HUGE)
POINTS = np.concatenate([np.linspace(-12, 12, 4801), _FAR, -_FAR])


def _open_product(graph: Graph, name: str) -> Node | None:
    """What computes an array for one taker alone, and could do more to it."""
    maker = graph.nodes.get(name)
    if maker is None or not isinstance(maker.operator, Product) or graph.only_user(name) is None:
        return None
    return maker if maker.operator.activation is None else None


def fuse_residual(graph: Graph) -> None:
    """The sum of a convolution and an array of its shape; of two convolutions, the later takes the other's output."""
    place = {name: n for n, name in enumerate(graph.nodes)}
    for node in list(graph.nodes.values()):
        if not isinstance(node.operator, Elementwise) or node.operator.expression != ("add", 0, 1):
            continue
        shape = graph.types[node.name]
        if any(graph.types[name] != shape for name in node.inputs):
            continue
        for name in sorted(node.inputs, key=lambda name: -place.get(name, -1)):
            maker = _open_product(graph, name)
            if maker is not None and isinstance(maker.operator, Product) and not maker.operator.residual:
                (other,) = (v for v in node.inputs if v != name)
                graph.change(node.name, replace(maker.operator, residual=True), *maker.inputs, other)
                del graph.nodes[name]  # which would else be one more to take its inputs
                break


def fuse_activation(graph: Graph) -> None:
    """A function of a convolution's elements that is one of the activations, however it is written."""
    for node in list(graph.nodes.values()):
        if not isinstance(node.operator, Elementwise) or node.operator.dtype is not None or len(node.inputs) != 1:
            continue
        maker = _open_product(graph, node.inputs[0])
        if maker is not None and isinstance(maker.operator, Product):
            activation = activation_of(node.operator.expression, graph.types[node.name].dtype)
            if activation is not None:
                graph.change(node.name, replace(maker.operator, activation=activation), *maker.inputs)


def fuse_slopes(graph: Graph) -> None:
    """PReLU of a convolution with a constant slope for each channel; slopes stand behind the bias, in one array."""
    for node in list(graph.nodes.values()):
        if not isinstance(node.operator, Elementwise) or node.operator.dtype is not None:
            continue
        if node.operator.expression not in (("prelu", 0, 1), ("prelu", 1, 0)):
            continue
        computed, slopes = (node.inputs[n] for n in node.operator.expression[1:])
        maker, constants = _open_product(graph, computed), graph.constants
        if maker is None or slopes not in constants or graph.types[node.name] != graph.types[computed]:
            continue
        assert isinstance(maker.operator, Product)
        x, w, *rest = maker.inputs
        bias, residual = rest[: maker.operator.bias], rest[maker.operator.bias :]
        values = per_channel(graph, maker, constants[slopes])
        if values is None or layer_of(graph, maker) is None or any(name not in constants for name in bias):
            continue
        joined = np.concatenate([*(constants[name] for name in bias), values.astype(graph.types[node.name].dtype)])
        named = graph.add_constant(f"{node.name}.slopes", joined)
        graph.change(node.name, replace(maker.operator, activation="prelu"), x, w, named, *residual)


def split_activations(graph: Graph, fused: Collection[str]) -> None:
    """Activations that no kernel applies while it stores, all but those of these names, as nodes of their own."""
    for node in list(graph.nodes.values()):
        operator = node.operator
        activation = operator.activation if isinstance(operator, Product) else None
        if isinstance(operator, Product) and activation is not None and activation.partition(":")[0] not in fused:
            before = graph.add(f"{node.name}.sums", replace(operator, activation=None), *node.inputs)
            graph.change(node.name, Elementwise(activations.expression(activation)), before)
    graph.clean()


@functools.lru_cache(256)
def activation_of(expression: Expression, dtype: str = "float32") -> str | None:
    """The activation that an expression of one input of a type is; None where it is none.

    Files write the same function in many ways, with constants rounded to float32. So it is not the texts that are
    compared, but the values at some thousands of points. Activations have their numbers in float32, and so have
    kernels those of expressions, but for arrays of float64.
    """
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    numbers = sorted({number for number in constants(expression) if abs(number) <= LARGEST})
    texts = ["relu", *SMOOTH]
    texts += [f"clip:{low!r}:{high!r}" for low in {0.0, *numbers} for high in numbers if np.float32(low) < high]
    texts += [f"leaky_relu:{number!r}" for number in numbers]
    with np.errstate(all="ignore"):
        values = np.broadcast_to(value_of(_rounded(expression, wide), [POINTS]), POINTS.shape)
    for text in texts:
        activation = activations.canonical(text)
        if _same(text, values, activations.applied(activation, POINTS), wide):
            return activation
    return None


def _rounded(expression: Expression, dtype: np.dtype[Any]) -> Expression:
    """An expression whose numbers are those of a type."""
    if (number := constant_of(expression)) is not None:
        return "constant", float(dtype.type(number))
    return expression if isinstance(expression, int) else (expression[0], *(_rounded(e, dtype) for e in expression[1:]))


def _same(text: str, values: Array, expected: Array, dtype: np.dtype[Any]) -> bool:
    """Whether values at `POINTS` are those of an activation.

    Lines and bounds are the same however they are written; a bound of 1e-7 is there so that what follows can divide by
    it. Sums of smooth functions cancel in the middle; where they end at 0 or 1, nothing may be left of other bounds.
    """
    if text not in SMOOTH:
        return np.array_equal(values, expected)
    sizes, near = np.abs(POINTS), 1e-13 if dtype == np.float64 else 1e-6
    inner, ends = sizes <= FAR, (sizes >= ENDS) & (sizes <= FAR) & (np.abs(expected) <= 1)
    with np.errstate(all="ignore"):
        ended = np.array_equal(values[ends].astype(dtype), expected[ends].astype(dtype))
    return ended and np.allclose(values[inner], expected[inner], rtol=near, atol=near)
