"""One node of an ONNX file while it is translated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autoconv.networks.graph import Graph
from autoconv.networks.operators.base import TensorType
from autoconv.networks.translation import Translation

Lowering = Callable[["Call"], "str | list[str] | None"]  # gives the outputs in the graph; None for a foreign operator

NO_REAL_NUMBERS = "cOSU"  # NumPy's kinds: complex ones, and text


class Call(Translation):
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

        super().__init__(graph, proto.output[0], proto.op_type)
        self.opset, self.inputs, self.outputs = opset, inputs, list(proto.output)
        self.attributes: dict[str, Any] = {}
        for attribute in proto.attribute:
            value = helper.get_attribute_value(attribute)
            self.attributes[attribute.name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value

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

    def axis(self, default: int, rank: int) -> int:
        """The attribute `axis`, counted from the front."""
        axis = self.attribute("axis", default)
        if not -rank <= axis < rank:
            self.fail(f"axis={axis}: expected {-rank} to {rank - 1}")
        return int(axis) % rank
