"""`Graph`: a network as nodes with static shapes, each of which computes one array."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoconv.errors import ConfigError, LayerError
from autoconv.networks.operators.base import Operator, TensorType


@dataclass(frozen=True)
class Node:
    """An operator applied to arrays of a graph, and the name of the array that it computes."""

    name: str
    operator: Operator
    inputs: tuple[str, ...]


class Graph:
    """Arrays by name: inputs, constants, and what nodes compute from them.

    Nodes stand in an order in which each comes after those whose arrays it takes. Every array has one name and one
    type, known when it is added; `outputs` tells under which names the graph gives which of them.

    Parameters
    ----------
    name : str
        What messages call the network: the file it comes from.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inputs: dict[str, TensorType] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.nodes: dict[str, Node] = {}
        self.outputs: dict[str, str] = {}
        self.types: dict[str, TensorType] = {}

    def copy(self) -> Graph:
        """A graph that can be changed without changing this one; constants are shared."""
        other = Graph(self.name)
        for field in ("inputs", "constants", "nodes", "outputs", "types"):
            setattr(other, field, dict(getattr(self, field)))
        return other

    def fresh(self, base: str) -> str:
        """A name that is not taken: the given one, or one that begins like it."""
        name, count = base, 1
        while name in self.types:
            count += 1
            name = f"{base}.{count}"
        return name

    def add_input(self, name: str, type: TensorType) -> str:  # noqa: A002
        """An array that every run is given, under this very name."""
        if name in self.types:
            raise ConfigError(f"{self.name}: input {name!r}: expected a name of its own")
        self.inputs[name] = self.types[name] = type
        return name

    def add_constant(self, base: str, value: np.ndarray) -> str:
        """An array that is the same in every run, under a name like the given one."""
        name = self.fresh(base)
        self.constants[name] = value = np.asarray(value, order="C")
        self.types[name] = TensorType(value.shape, value.dtype.name)
        return name

    def add(self, base: str, operator: Operator, *inputs: str) -> str:
        """A node, whose array gets a name like the given one; an operator may refuse its inputs."""
        name = self.fresh(base)
        self.types[name] = self._inferred(name, operator, inputs)
        self.nodes[name] = Node(name, operator, inputs)
        return name

    def change(self, name: str, operator: Operator, *inputs: str) -> None:
        """Have a node compute its array in another way; inputs may come later in the order until `clean`."""
        found = self._inferred(name, operator, inputs)
        if found != self.types[name]:
            raise ValueError(f"{name}: {self.types[name]} would become {found}")
        self.nodes[name] = Node(name, operator, inputs)

    def _inferred(self, name: str, operator: Operator, inputs: Sequence[str]) -> TensorType:
        types = [self.types[value] for value in inputs]
        try:
            return operator.infer(types)
        except (ConfigError, LayerError) as error:
            given = ", ".join(map(str, types))
            raise ConfigError(f"{self.name}: node {name!r}, {operator.kind} of {given}: {error}") from None

    def replace(self, old: str, new: str) -> None:
        """Have everybody who took one array take another."""
        for node in list(self.nodes.values()):
            if old in node.inputs:
                self.nodes[node.name] = replace(
                    node, inputs=tuple(new if value == old else value for value in node.inputs)
                )
        self.outputs = {name: new if value == old else value for name, value in self.outputs.items()}

    def only_user(self, name: str) -> Node | None:
        """The one node that takes an array, where it takes it once, and the array is no output of the graph."""
        taking = [node for node in self.nodes.values() for value in node.inputs if value == name]
        return taking[0] if len(taking) == 1 and name not in self.outputs.values() else None

    def clean(self) -> None:
        """Put nodes in order, and drop what no output needs."""
        order = ordered({name: node.inputs for name, node in self.nodes.items()}, self.name)
        needed = set(self.outputs.values())
        for name in reversed(order):
            if name in needed:
                needed.update(self.nodes[name].inputs)
        self.nodes = {name: self.nodes[name] for name in order if name in needed}
        self.constants = {name: value for name, value in self.constants.items() if name in needed}
        kept = {*self.inputs, *self.constants, *self.nodes}
        self.types = {name: found for name, found in self.types.items() if name in kept}


def ordered(inputs: Mapping[str, Iterable[str]], where: str) -> list[str]:
    """Names in an order in which each comes after those that it needs, and otherwise as they were.

    Parameters
    ----------
    inputs : mapping of str to names
        What each needs; names that are no keys need nothing.
    where : str
        What a message calls the whole.

    Raises
    ------
    ConfigError
        When some need each other; the message names them.
    """
    sorter = graphlib.TopologicalSorter({name: [v for v in needed if v in inputs] for name, needed in inputs.items()})
    place = {name: n for n, name in enumerate(inputs)}
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise ConfigError(f"{where}: nodes need each other: {' -> '.join(reversed(error.args[1]))}") from None
    found: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=place.__getitem__, reverse=True)
        first = ready.pop()
        found.append(first)
        sorter.done(first)
    return found
