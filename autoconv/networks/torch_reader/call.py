"""One node of an exported program while it is translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autoconv.common.epilogue.expressions import Expression, substituted
from autoconv.networks.graph import Graph
from autoconv.networks.operators.base import TensorType
from autoconv.networks.operators.elementwise import Elementwise
from autoconv.networks.operators.sampling import Sampler
from autoconv.networks.translation import LARGEST_CONSTANTS, Translation

Lowering = Callable[["Call"], "str | list[str]"]  # gives the names of the outputs in the graph


class Call(Translation):
    """A node of an exported program.

    Parameters
    ----------
    graph : Graph
        What is being made.
    name : str
        The module that the node comes from.
    node : torch.fx.Node
    arguments : mapping of str to object
        By the names of the operator's schema; arrays are each a `Value`.
    """

    def __init__(self, graph: Graph, name: str, node: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__(graph, name, str(node.target))
        self.target = node.target
        self._node, self._arguments = node, arguments

    def check_room(self, found: TensorType) -> None:
        """Refuse one constant that is too large; parameters are here already, however much they take in all."""
        if found.nbytes > LARGEST_CONSTANTS:
            self.fail(f"expected constants of at most {LARGEST_CONSTANTS >> 20} MiB each, got {found}")

    def __getitem__(self, argument: str) -> Any:
        """An argument that is no array."""
        return self._arguments[argument]

    def has(self, argument: str) -> bool:
        """Whether an argument that may be None, or missing, is there."""
        return self._arguments.get(argument) is not None

    def value(self, argument: str) -> str:
        """The graph's name of an argument that is an array."""
        return self._named(self._arguments[argument])

    def values(self, argument: str) -> list[str]:
        """The graph's names of a list of arrays."""
        return [self._named(value) for value in self._arguments[argument]]

    def _named(self, value: Any) -> str:
        if not isinstance(value, Value):
            self.fail(f"expected an array, got {value!r}")
        return value

    def traced(self, argument: str) -> Any:
        """What the trace had in an array's place: a tensor of its type, and with strides as PyTorch expects them."""
        return self._node.args[[*self._arguments].index(argument)].meta["val"]

    def number(self, argument: str) -> float:
        """A number, which may also be an array of one that is known."""
        value = self._arguments[argument]
        if not isinstance(value, Value):
            return float(value)
        if value not in self.graph.constants:
            self.fail(f"{argument}: expected a number that is known, got the computed array {value!r}")
        return float(self.graph.constants[value].item())

    def scalar(self, argument: str) -> float:
        """The same as it is given: integers stay what they are, exactly."""
        value = self._arguments[argument]
        return value if type(value) is int else self.number(argument)

    def pair(self, argument: str, rank: int = 2, default: Sequence[int] | None = None) -> Any:
        """Integers for height and width, where a single one stands for both; 1-D images are of height 1."""
        given = self._arguments[argument]
        values = [given] if isinstance(given, int) else [*given]
        values = values or [*(default or ())]
        if len(values) not in (1, rank):
            self.fail(f"{argument}={given}: expected {rank} integers")
        full = values * rank if len(values) == 1 else values
        return tuple(full)

    def shape(self, argument: str) -> tuple[int, ...]:
        """The shape of an argument that is an array."""
        return self.shape_of(self.value(argument))

    def axis(self, argument: str, rank: int) -> int:
        """One axis, counted from the front."""
        return self.axes([self._arguments[argument]], rank)[0]

    def reduced_axes(self) -> tuple[int, ...]:
        """The axes that are reduced; all of them where none is given."""
        given = self._arguments.get("dim")
        given = [given] if isinstance(given, int) else given
        return self.axes(given or None, len(self.shape("self")))

    def without(self, name: str, axes: Sequence[int]) -> str:
        """An array without axes of extent 1 that were reduced, unless they are to be kept."""
        if self.has("keepdim") and self["keepdim"]:
            return name
        return self.reshape(name, [extent for n, extent in enumerate(self.shape_of(name)) if n not in axes])

    def elements(self, expression: Expression, *arguments: str) -> str:
        """A function of single elements of arguments, of which some may be numbers."""
        inputs: list[str] = []
        meaning: dict[int, Any] = {}
        for n, argument in enumerate(arguments):
            given = self._arguments[argument]
            if isinstance(given, int | float):
                meaning[n] = float(given)
            else:
                meaning[n] = len(inputs)
                inputs.append(self._named(given))
        if any(np.dtype(self.graph.types[name].dtype).kind in "iub" for name in inputs):
            self.fail("expected floats, as numbers in the function are")
        return self.apply(substituted(Elementwise(expression).expression, meaning), *inputs)

    def resample(self, sampler: Sampler, sizes: Sequence[int], scales: Sequence[float]) -> str:
        """The images of the first argument in another height and width."""
        (first, *_) = self._arguments
        shape = self.shape(first)
        rest = len(shape) - len(sizes)
        return self.resize(self.value(first), sampler, [*shape[:rest], *sizes], [1.0] * rest + [*scales])


class Value(str):
    """The name of an array of the graph, where an argument that is a text could stand as well."""

    __slots__ = ()
