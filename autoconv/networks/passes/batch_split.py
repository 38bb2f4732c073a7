"""A batch in parts: nodes that follow each other, computed for some images at a time instead of for all.

What lies between layers of a large batch does not stay in the caches; that of a few images may. Images are the
outermost extent of an array in NCHW and in NHWC alike; so the images that a part takes are a slice, and what parts
leave behind is a concatenation, both of which are memory that is shared (`Views`): no time goes into either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoconv.errors import ConfigError, LayerError
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import (
    LRN,
    Concat,
    Conv,
    ConvTranspose,
    Elementwise,
    MatMul,
    Normalization,
    Operator,
    Pad,
    Pool,
    QuantizedProduct,
    Reduce,
    Reshape,
    Resize,
    Slice,
    Softmax,
    Transpose,
)
from autoconv.networks.operators.base import TensorType

Images = Mapping[str, int]  # by the name of a node: how many images at a time it is computed for, where that is not all


@dataclass(frozen=True)
class Split:
    """A graph whose nodes are computed for some images at a time.

    Attributes
    ----------
    whole : Graph
        For the whole batch.
    graph : Graph
        The same, in which a node stands once for each part of the batch.
    origins : dict of str to str
        Of the name of each such node, the one that it has in `whole`.
    images : dict of str to int
        The nodes of `whole` that are in parts, and of how many images.
    """

    whole: Graph
    graph: Graph
    origins: dict[str, str]
    images: dict[str, int]

    def origin(self, name: str) -> str:
        """What a node of `graph` is called in `whole`."""
        return self.origins.get(name, name)


def batch_of(graph: Graph) -> int:
    """How many images a run takes; 1 where the inputs differ in their first extents."""
    found = {type_.shape[:1] for type_ in graph.inputs.values()}
    return found.pop()[0] if len(found) == 1 and found != {()} else 1


def divisors(number: int) -> list[int]:
    """From 1 up to itself."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def at_a_time(graph: Graph, count: int) -> dict[str, int]:
    """As many nodes as can be for so many images at a time."""
    return {} if count == batch_of(graph) else dict.fromkeys(for_images(graph, count).nodes, count)


def for_images(graph: Graph, count: int) -> Graph:
    """The nodes that compute image by image, for so many of them.

    Parameters
    ----------
    graph : Graph
        For a whole batch, in any layouts.
    count : int
        A divisor of the batch.

    Returns
    -------
    Graph
        Without those nodes that may mix images, and with types of so many images; without outputs.
    """
    found, batch = graph.copy(), batch_of(graph)
    found.nodes, found.outputs = {}, {}
    for name, whole in graph.types.items():
        if name not in graph.constants and whole.shape[:1] == (batch,):
            found.types[name] = _rows_of(whole, count)
    for node in graph.nodes.values():
        operator = _of_rows(graph, node, count)
        if operator is None:
            continue
        try:
            same = operator.infer([found.types[name] for name in node.inputs]) == found.types[node.name]
        except (ConfigError, LayerError):
            continue  # a constant has something else for each image
        if same:
            found.nodes[node.name] = replace(node, operator=operator)
    return found


def split(graph: Graph, images: Images) -> Split:
    """The same graph, in which nodes that follow each other are computed for as many images at a time as they should.

    Parameters
    ----------
    graph : Graph
        After all passes, in the layouts that were chosen.
    images : mapping of str to int
        For nodes that are not to be computed for the whole batch: divisors of it.

    Returns
    -------
    Split

    Raises
    ------
    ConfigError
        For a number that does not divide the batch, and a node that cannot be computed for so many.
    """
    if not images:
        return Split(graph, graph, {}, {})
    batch = batch_of(graph)
    parts = {count: for_images(graph, count) for count in sorted({*images.values()}) if 0 < count < batch}
    for name, count in images.items():
        if count not in parts or batch % count or name not in parts[count].nodes:
            raise ConfigError(
                f"{graph.name}: node {name!r}: cannot be computed for {count} of {batch} images at a time"
            )
    found, origins = graph.copy(), {}
    found.nodes = {}
    takers: dict[str, list[str]] = {}
    for node in graph.nodes.values():
        for value in node.inputs:
            takers.setdefault(value, []).append(node.name)
    for count, group in itertools.groupby(graph.nodes.values(), lambda node: images.get(node.name, batch)):
        nodes = list(group)
        if count == batch:
            found.nodes.update((node.name, node) for node in nodes)
            continue
        inside = {node.name for node in nodes}
        left = [n for n in inside if n in graph.outputs.values() or not inside.issuperset(takers.get(n, ()))]
        made: dict[str, list[str]] = {name: [] for name in left}
        for first in range(0, batch, count):
            here: dict[str, str] = {}
            which = f"{first}:{first + count}"
            for node in (parts[count].nodes[node.name] for node in nodes):
                for value in node.inputs:
                    if value not in here and value not in graph.constants:
                        rows = _rows(graph.types[value], first, count)
                        here[value] = found.add(f"{value} {which}", rows, value)
                inputs = (here.get(value, value) for value in node.inputs)
                here[node.name] = found.add(f"{node.name} {which}", node.operator, *inputs)
                origins[here[node.name]] = node.name
            for name in left:
                made[name].append(here[name])
        for name in (node.name for node in nodes if node.name in made):
            found.nodes[name] = Node(name, Concat(0), tuple(made[name]))
    kept = {*found.inputs, *found.constants, *found.nodes}
    found.types = {name: type_ for name, type_ in found.types.items() if name in kept}
    return Split(graph, found, origins, dict(images))


def _rows_of(whole: TensorType, count: int) -> TensorType:
    return TensorType((count, *whole.shape[1:]), whole.dtype)


def _rows(whole: TensorType, first: int, count: int) -> Slice:
    """The images from one on."""
    rest = whole.shape[1:]
    return Slice((first, *[0] * len(rest)), (count, *rest), (1,) * len(whole.shape))


def _of_rows(graph: Graph, node: Node, count: int) -> Operator | None:
    """What computes so many images of a node's array, of as many of each input; None where it may take others, too."""
    batch, operator, shape = batch_of(graph), node.operator, graph.types[node.name].shape
    computed = [name not in graph.constants for name in node.inputs]
    shapes = [graph.types[name].shape for name, ours in zip(node.inputs, computed, strict=True) if ours]
    if not shapes or any(s[:1] != (batch,) for s in (shape, *shapes)):
        return None
    apart: bool
    if isinstance(operator, Conv | ConvTranspose | MatMul | QuantizedProduct):
        apart = computed[0] and not computed[1]
    elif isinstance(operator, Elementwise):
        apart = {len(s) for s in shapes} == {len(shape)}  # broadcasting counts extents from the last
    elif isinstance(operator, Reduce):
        apart = 0 not in operator.axes
    elif isinstance(operator, Softmax | Concat | Resize | Normalization):
        apart = operator.axis != 0
    elif isinstance(operator, Transpose):
        apart = operator.order[0] == 0
    elif isinstance(operator, Pad):
        apart = operator.before[0] == operator.after[0] == 0
    elif isinstance(operator, Slice):
        apart = operator.steps[0] == 1  # all images, as their number stays
        operator = replace(operator, counts=(count, *operator.counts[1:]))
    elif isinstance(operator, Reshape):
        apart = True  # elements keep their order, and each image as many as before
        operator = Reshape((count, *operator.shape[1:]))
    else:
        apart = isinstance(operator, Pool | LRN)
    return operator if apart else None
