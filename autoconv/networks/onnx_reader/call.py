"""One node of an ONNX file while it is translated, and what translations of operators have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from autoconv.errors import ConfigError
from autoconv.networks.graph import Graph
from autoconv.networks.onnx_reader.model import LARGEST_CONSTANTS
from autoconv.networks.operators.base import Operator, TensorType
from autoconv.networks.operators.shapes import Reshape

Lowering = Callable[["Call"], "str | list[str]"]  # gives the names of the outputs in the graph


class Call:
    """A node of an ONNX file.

    Parameters
    ----------
    graph : Graph
        What is being made.
    proto : onnx.NodeProto
    opset : int
        The version of the operators that the file uses.
    inputs : list of str
        The node's inputs by their names in the graph; empty where one is left out.
    """

    def __init__(self, graph: Graph, proto: Any, opset: int, inputs: list[str]) -> None:
        from onnx import helper

        self.graph, self.opset, self.inputs = graph, opset, inputs
        self.operator = proto.op_type
        self.outputs = list(proto.output)
        self.name = self.outputs[0]
        self.attributes: dict[str, Any] = {}
        for attribute in proto.attribute:
            value = helper.get_attribute_value(attribute)
            self.attributes[attribute.name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def fail(self, message: str) -> NoReturn:
        """Refuse the node."""
        raise ConfigError(f"{self.graph.name}: node {self.name!r} ({self.operator}): {message}")

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute; lists as tuples."""
        value = self.attributes.get(name, default)
        return tuple(value) if isinstance(value, list) or type(value).__name__.startswith("Repeated") else value

    def required(self, name: str) -> Any:
        """An attribute that has to be there."""
        if name not in self.attributes:
            self.fail(f"the attribute {name!r} is missing")
        return self.attribute(name)

    def has(self, index: int) -> bool:
        """Whether an optional input is given."""
        return len(self.inputs) > index and self.inputs[index] != ""

    def value(self, index: int) -> str:
        """The graph's name of an input."""
        if not self.has(index):
            self.fail(f"input {index} is missing")
        return self.inputs[index]

    def type(self, index: int = 0) -> TensorType:
        """Shape and type of an input."""
        return self.graph.types[self.value(index)]

    def constant(self, index: int, what: str) -> np.ndarray:
        """An input whose value has to be known now, since shapes depend on it."""
        name = self.value(index)
        if name not in self.graph.constants:
            self.fail(f"{what}: expected a constant, as shapes are static, got the computed array {name!r}")
        return self.graph.constants[name]

    def integers(self, index: int, attribute: str) -> tuple[int, ...] | None:
        """What newer opsets take as an input and older ones as an attribute."""
        if self.has(index):
            return tuple(int(n) for n in self.constant(index, attribute).reshape(-1))
        given = self.attribute(attribute)
        return None if given is None else tuple(map(int, given))

    def add(self, operator: Operator, *inputs: str) -> str:
        """A node of the graph; where all its inputs are constants, what it gives, rounded once from float64."""
        graph = self.graph
        if not all(name in graph.constants for name in inputs):
            return graph.add(self.name, operator, *inputs)
        checked = graph.add(self.name, operator, *inputs)
        found = graph.types[checked]
        del graph.nodes[checked], graph.types[checked]
        self.check_room(found)
        arrays = [graph.constants[name] for name in inputs]
        wide = [a.astype(np.float64) if a.dtype.kind not in "iub" else a for a in arrays]
        with np.errstate(all="ignore"):
            value = operator.evaluate(*wide).astype(found.dtype)
        return graph.add_constant(self.name, np.ascontiguousarray(value.reshape(found.shape)))

    def add_constant(self, value: np.ndarray) -> str:
        """A constant of the graph."""
        self.check_room(TensorType(value.shape, value.dtype.name))
        return self.graph.add_constant(self.name, value)

    def check_room(self, found: TensorType) -> None:
        """Refuse constants that do not fit into what a network may have."""
        there = sum(value.nbytes for value in self.graph.constants.values() if value.nbytes > 1 << 16)
        if there + found.nbytes > LARGEST_CONSTANTS:
            self.fail(f"expected at most {LARGEST_CONSTANTS >> 20} MiB of constants in all, got one more of {found}")

    def reshape(self, name: str, shape: Sequence[int]) -> str:
        """An array in another shape; itself, where it has that."""
        shape = tuple(map(int, shape))
        return name if self.graph.types[name].shape == shape else self.add(Reshape(shape), name)

    def axes(self, given: Sequence[int] | None, rank: int) -> tuple[int, ...]:
        """Axes counted from the front, in order; all of them where none are given."""
        axes = tuple(range(rank)) if given is None else tuple(given)
        if not all(-rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
            self.fail(f"axes={axes}: expected different ones from {-rank} to {rank - 1}")
        return tuple(sorted(axis % rank for axis in axes))

    def axis(self, default: int, rank: int) -> int:
        """The attribute `axis`, counted from the front."""
        axis = self.attribute("axis", default)
        if not -rank <= axis < rank:
            self.fail(f"axis={axis}: expected {-rank} to {rank - 1}")
        return int(axis) % rank


def flattened(shape: Sequence[int], axis: int) -> tuple[int, int]:
    """The extents before an axis as one, and the others as one."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])
