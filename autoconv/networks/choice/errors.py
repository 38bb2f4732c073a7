"""The error of a network's outputs, from what is recorded of its layers.

Errors of layers are as good as independent, so their squares add up. How much of one reaches the outputs follows from
the graph. A product passes on a relative error as it is: its filters cancel values no more than errors. So do
activations. A sum and a concatenation take the mean of the squares of their inputs. An average over the image cancels
errors, of which there is one for every pixel, where it does not cancel the values, which an activation has made
positive; the largest of some values errs as any of them does, and is larger than most. (Independent errors, and their
root of squares in place of a bound: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 2002,
section 2.8.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

from autoconv import registry
from autoconv.accuracy import RELATIVE, terms
from autoconv.algorithm import Candidate
from autoconv.device import Device
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import Concat, Elementwise, Pool, Product, Reduce
from autoconv.plans import Plan

STEP = 1 / 64  # of an integral
# Times the error of exact algorithms: the limit where none is given. What ONNX Runtime errs was 1.9 to 2.7 times that,
# and four times its error is to be kept, though what was measured is up to 1.7 times what was expected where the limit
# is reached: eight images through VGG-19 then err 2.6 times as much as by it, and 4.6 with a limit of 6.
EXACT = 4.5


def sensitivities(graph: Graph) -> dict[str, float]:
    """For every layer, by how much the square of its recorded error adds to the square of the network's.

    Parameters
    ----------
    graph : Graph
        After all passes.

    Returns
    -------
    dict of str to float
        By the names of nodes. The network's error is relative to its largest output.
    """
    reach = dict.fromkeys(graph.types, 0.0)  # of the square of each array's relative error
    for name in set(graph.outputs.values()):
        reach[name] = 1.0
    for node in reversed(graph.nodes.values()):
        for name, share in _shares(graph, node):
            reach[name] += share * reach[node.name]
    found = {}
    for node in graph.nodes.values():
        if (layer := layer_of(graph, node)) is not None:
            found[node.name] = reach[node.name] * RELATIVE**2 * terms(layer) / (2 if layer.residual else 1)
    return found


def _shares(graph: Graph, node: Node) -> Iterator[tuple[str, float]]:
    """Of the square of a node's relative error, the part that each input's is passed on with."""
    operator = node.operator
    places = list(range(len(node.inputs)))
    if isinstance(operator, Product):
        places = [0, 1, *places[-1:]] if operator.residual else [0, 1]
    varying = [node.inputs[place] for place in places if node.inputs[place] not in graph.constants]
    for name in varying:
        share = 1.0
        if isinstance(operator, Concat):
            share = graph.types[name].nbytes / max(graph.types[node.name].nbytes, 1)  # 0 of no elements
        elif isinstance(operator, Pool | Reduce):
            before = graph.types[name].shape
            extents = operator.window if isinstance(operator, Pool) else [before[axis] for axis in operator.axes]
            count = math.prod(extents)  # of independent values: after a ReLU, which were normally distributed before
            share = 0.5 / _largest(count) if operator.reduction == "max" else 1 / (1 + (count - 1) / math.pi)
        elif isinstance(operator, Elementwise) and operator.kind == "add":
            share = 1 / len(varying)
        elif isinstance(operator, Product) and operator.residual:
            share = 1 / 2
        yield name, share


@functools.cache
def _largest(count: int) -> float:
    """The mean square of the largest of some standard normal values, or of 0 where all are negative."""
    steps = (STEP * (n + 0.5) for n in range(round(10 / STEP)))
    return sum(2 * x * STEP * -math.expm1(count * math.log1p(-math.erfc(x / math.sqrt(2)) / 2)) for x in steps)


def error_by(made: Plan, candidate: str, device: Device) -> float:
    """What is recorded of a candidate, or what such a one usually errs.

    Parameters
    ----------
    made : Plan
        Of its layer.
    candidate : str
    device : Device

    Returns
    -------
    float
        By the measure of records.
    """
    facts = made.facts.get(candidate)
    if facts is not None and facts.timed:
        return facts.error
    parsed = Candidate.parse(candidate)
    (algorithm,) = (a for a in registry.algorithms(device) if a.name == parsed.algorithm)
    return algorithm.usual_error(made.layer, parsed.params)


def combined(errors: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The error of a network.

    Parameters
    ----------
    errors : mapping of str to float
        Of layers, by the measure of records, by the names of their nodes.
    weights : mapping of str to float
        What `sensitivities` gives.

    Returns
    -------
    float
        Relative to the largest output.
    """
    return math.sqrt(sum(weights[name] * error**2 for name, error in errors.items()))
