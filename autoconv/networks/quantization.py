"""What a product of integers takes, put into a graph: filters as bytes, and the words of a `Quantization`."""

from __future__ import annotations

import numpy as np

from autoconv.common.epilogue.quantization import Quantization
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Concat, QuantizedConv, QuantizedProduct, Reshape, TensorType


def add_operands(
    graph: Graph, base: str, operator: QuantizedProduct, x: str, numbers: np.ndarray, meaning: Quantization
) -> tuple[str, str, str]:
    """The inputs of a product, by their names in a graph.

    Filters less their zero points may be no bytes (255 - 100 is none). They are then sums of such: the input's channels
    are there once for each term, and each is multiplied by its own.

    Parameters
    ----------
    graph : Graph
    base : str
        What arrays are named like.
    operator : QuantizedProduct
    x : str
        Its input.
    numbers : array of integers, shape (K, C/groups, R, S), or (N, K) of a product of matrices
        The filters less their zero points, from -255 to 255.
    meaning : Quantization

    Returns
    -------
    tuple of str

    Raises
    ------
    ConfigError, LayerError
        When filters do not fit the input, or sums could overflow.
    ArrayError
        As `Quantization.operand` does.
    """
    terms: list[np.ndarray] = []
    left = numbers.astype(np.int32)
    while not terms or left.any():
        terms.append(np.clip(left, -128, 127).astype(np.int8))
        left = left - terms[-1]
    filters = np.concatenate(terms, axis=1)
    there = graph.types[x]
    shape = list(there.shape)
    axis = 1 if isinstance(operator, QuantizedConv) else len(shape) - 1
    shape[axis] *= len(terms)
    found = TensorType(tuple(shape), there.dtype)
    words = meaning.operand(operator.layer([found, TensorType(filters.shape, "int8")]))
    if len(terms) > 1:
        groups = operator.groups if isinstance(operator, QuantizedConv) else 1
        apart = (*there.shape[:axis], groups, there.shape[axis] // groups, *there.shape[axis + 1 :])
        split = graph.add(f"{base}.groups", Reshape(apart), x)
        joined = graph.add(f"{base}.terms", Concat(axis + 1), *[split] * len(terms))
        x = graph.add(f"{base}.channels", Reshape(found.shape), joined)
    return x, graph.add_constant(f"{base}.filters", filters), graph.add_constant(f"{base}.meaning", words)
