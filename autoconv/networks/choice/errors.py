"""The error of a network's outputs, from what is recorded of its layers.

Errors of layers are as good as independent, so their squares add up. How much of one reaches the outputs follows from
the graph. A product passes on a relative error as it is: its filters cancel values no more than errors. So do
activations. A sum and a concatenation take the mean of the squares of their inputs. An average over the image cancels
errors, of which there is one for every pixel, where it does not cancel the values, which an activation has made
positive; the largest of some neighbours errs as any of them does, and is as large, as they are much alike. (Independent
errors, and their root of squares in place of a bound: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd
edition, 2002, section 2.8.)

Records have the error of the place that errs most, which of a tile is a corner. Where all places of an image are added
up later, it is the root of their errors' mean square that counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autoconv import registry
from autoconv.accuracy import RELATIVE, terms
from autoconv.algorithm import Candidate
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import Concat, Elementwise, Pool, Product, Reduce
from autoconv.plans import Plan
from autoconv.tuning.candidates import DISCREDITED

# Times the error of exact algorithms: the limit where none is given. Four times what ONNX Runtime errs is to be kept:
# where a limit of 7 was reached, U-Net, VGG-19 and ResNet-18 erred up to 4.0, 2.8 and 1.6 times as much as by it.
EXACT = 6.0


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
            count = math.prod(extents)  # of values after a ReLU: for a mean independent, normally distributed before
            share = 1.0 if operator.reduction == "max" else 1 / (1 + (count - 1) / math.pi)
        elif isinstance(operator, Elementwise) and operator.kind == "add":
            share = 1 / len(varying)
        elif isinstance(operator, Product) and operator.residual:
            share = 1 / 2
        yield name, share


def unmixed(graph: Graph) -> frozenset[str]:
    """The nodes whose errors reach an output of several places: nothing behind them adds up all of an image.

    What adds up a few neighbours leaves a worst place, as corners of tiles are neighbours.

    Parameters
    ----------
    graph : Graph
        After all passes.

    Returns
    -------
    frozenset of str
    """
    found = set(graph.outputs.values())
    for node in reversed(graph.nodes.values()):
        if node.name in found and math.prod(graph.types[node.name].shape[2:]) > 1:
            found.update(node.inputs)
    return frozenset(found)


class Price(NamedTuple):
    """What a layer's error costs in a network.

    Attributes
    ----------
    seconds : float
        For the square of the error.
    mixed : bool
        Whether it is the error that counts where places are mixed, as for `error_by`.
    """

    seconds: float = 0.0
    mixed: bool = True

    def share(self, parts: float) -> Price:
        """The price of one of so many parts."""
        return self._replace(seconds=self.seconds / parts)

    def of(self, error: float) -> float:
        """Seconds that an error costs; none where the price is none, or the error."""
        return self.seconds * error**2 if self.seconds and error else 0.0


FREE = Price()


def error_by(made: Plan, candidate: str, device: Device, mixed: bool) -> float:
    """What is recorded of a candidate, or what such a one usually errs.

    Parameters
    ----------
    made : Plan
        Of its layer.
    candidate : str
    device : Device
    mixed : bool
        Whether what follows adds up all places: it is not `unmixed`.

    Returns
    -------
    float
        By the measure of records; where errors mix, as if all places erred alike.
    """
    usual, rms = _usual(made.layer, candidate, device)
    facts = made.facts.get(candidate)
    worst = facts.error if facts is not None and facts.timed else usual
    return worst * rms / usual if mixed and usual else worst


@functools.lru_cache(4096)  # asked at every price of error
def _usual(layer: ConvLayer, candidate: str, device: Device) -> tuple[float, float]:
    """What a candidate usually errs where it errs most, and in the root of the mean square over all places."""
    try:
        parsed = Candidate.parse(candidate)
        algorithm = registry.by_name(device)[parsed.algorithm]
        return algorithm.usual_error(layer, parsed.params), algorithm.usual_error(layer, parsed.params, rms=True)
    except DISCREDITED:
        return 1.0, 1.0


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
