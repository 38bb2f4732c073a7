"""What a graph computes, in float64 and plain NumPy: what kernels and passes are tested by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autoconv.networks.graph import Graph
from autoconv.networks.operators.base import Operator, TensorType


def evaluate(graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The graph's outputs, with every floating-point array taken to float64.

    Parameters
    ----------
    graph : Graph
    inputs : mapping of str to array
        One for every input of the graph.

    Returns
    -------
    dict of str to array
        By the names of the graph's outputs.
    """
    left = dict.fromkeys(graph.types, 0)
    for name in [v for node in graph.nodes.values() for v in node.inputs] + list(graph.outputs.values()):
        left[name] += 1
    values = {name: _wide(value) for name, value in [*graph.constants.items(), *inputs.items()]}
    for node in graph.nodes.values():
        values[node.name] = _wide(node.operator.evaluate(*(values[name] for name in node.inputs)))
        for name in node.inputs:
            left[name] -= 1
            if not left[name]:
                values.pop(name, None)
    return {name: values[value] for name, value in graph.outputs.items()}


def constant_of(operator: Operator, arrays: Sequence[np.ndarray], found: TensorType) -> np.ndarray:
    """What an operator makes of constants, rounded once from float64 to the type that it has."""
    with np.errstate(all="ignore"):
        value = operator.evaluate(*map(_wide, arrays)).astype(found.dtype)
    return np.asarray(value.reshape(found.shape), order="C")  # which leaves a scalar one


def _wide(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.float64) if array.dtype.kind not in "iub" else array
