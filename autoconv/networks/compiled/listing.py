"""What a network's steps are and how long they took, as people read it: one line for a node, whatever its parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autoconv.cpu.common.algorithm import NativeKernel
from autoconv.networks.graph import Graph
from autoconv.networks.passes.batch_split import batch_of
from autoconv.networks.run.instance import Schedule
from autoconv.networks.run.planned import Planned
from autoconv.networks.run.steps import Step


@dataclass(frozen=True)
class StepTime:
    """How long a step of a network took.

    Attributes
    ----------
    name : str
        Of the node.
    operator : str
        What it computes; after it, "NHWC" where that is the layout it is computed in, and in how many parts the batch
        is where that is not one.
    by : str
        What computed it: a candidate, "kernel", or the name of another library.
    is_layer : bool
        Whether it is one of `CompiledNetwork.plans`, as convolutions and fully connected layers are.
    seconds : float
        For the whole batch.
    """

    name: str
    operator: str
    by: str
    is_layer: bool
    seconds: float


@dataclass(frozen=True)
class Line:
    """A node as it is listed: how it is computed, and the places of the steps that do."""

    name: str
    operator: str
    by: str
    places: tuple[int, ...]


def foreign(made: Planned, schedule: Schedule) -> list[str]:
    """The nodes that no kernel of ours computes, in the graph that was split."""
    nodes = dict.fromkeys(made.parts.origin(step.node.name) for step in schedule.steps if step.function is not None)
    return [n for n in nodes if n not in made.plans or not isinstance(made.plans[n].kernel, NativeKernel)]


def lines(made: Planned, steps: Sequence[Step]) -> list[Line]:
    """The steps by nodes of the graph that was split, in the order of their first parts.

    Images that are copied, as kernels could not read them where they lie, count with the node that first takes them.
    """
    parts = made.parts
    places: dict[str, list[int]] = {}
    by: dict[str, str] = {}
    for n, step in enumerate(steps):
        name = parts.origin(step.node.name)
        if name in parts.whole.nodes:
            by.setdefault(name, step.by)
        else:
            takers = (node.name for node in parts.graph.nodes.values() if step.node.name in node.inputs)
            name = parts.origin(next(takers))
        places.setdefault(name, []).append(n)
    batch, found = batch_of(parts.whole), []
    for name, of in places.items():
        operator = parts.whole.nodes[name].operator.kind + " NHWC" * (name in made.in_nhwc)
        if name in parts.images:
            operator += f" in {batch // parts.images[name]} parts"
        found.append(Line(name, operator, by.get(name, steps[of[0]].by), tuple(of)))
    return found


def times(found: Sequence[Line], seconds: Sequence[float], layers: Collection[str]) -> list[StepTime]:
    """How long each node took, of the seconds of every step."""
    return [
        StepTime(line.name, line.operator, line.by, line.name in layers, float(sum(seconds[n] for n in line.places)))
        for line in found
    ]


def table(found: Sequence[Line], graph: Graph) -> list[str]:
    """A line of text for every node, with the shape of its array."""
    width = max((len(line.name) for line in found), default=0)
    kind_width = max((len(line.operator) for line in found), default=0)
    shapes = ["x".join(map(str, graph.types[line.name].shape)) for line in found]
    return [
        f"  {line.name:<{width}}  {line.operator:<{kind_width}} {shape:<18} {line.by}"
        for line, shape in zip(found, shapes, strict=True)
    ]
