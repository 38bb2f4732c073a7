"""From an ONNX model to a graph: static shapes, and every node in terms of our operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoconv.common.text import one_line
from autoconv.errors import ConfigError
from autoconv.networks.graph import Graph, ordered
from autoconv.networks.onnx_reader import arithmetic, microsoft, normalisation, quantized, shapes, windows
from autoconv.networks.onnx_reader.call import NO_REAL_NUMBERS, Call, Lowering
from autoconv.networks.onnx_reader.foreign import contains_nodes, foreign, schema_of
from autoconv.networks.onnx_reader.model import load_model
from autoconv.networks.operators.base import TensorType
from autoconv.networks.translation import LARGEST_CONSTANTS

LOWERINGS: dict[str, Lowering] = {
    **arithmetic.LOWERINGS,
    **normalisation.LOWERINGS,
    **quantized.LOWERINGS,
    **shapes.LOWERINGS,
    **windows.LOWERINGS,
}
OLDEST = 7  # opset
VARIADIC = (1 << 31) - 1  # what ONNX gives as the largest number of inputs where any number is taken
DOMAINS = ("", "ai.onnx")  # of the standard
OTHERS = {microsoft.DOMAIN: microsoft.LOWERINGS}


def read(path: str | Path, batch: int | None = None, input_shapes: Mapping[str, Sequence[int]] | None = None) -> Graph:
    """The graph in an ONNX file.

    Parameters
    ----------
    path : str or Path
    batch : int, optional
        What the first dimension of the inputs is, where the file leaves it open.
    input_shapes : mapping of str to shape, optional
        Whole shapes of inputs by name, in place of what the file says.

    Returns
    -------
    Graph
        As it is in the file, before any pass.

    Raises
    ------
    ConfigError
        When the file is none, has open shapes that were not given, or an operator that is not known here; the message
        names file, node and operator.
    """
    return translated(load_model(Path(path)), str(path), batch, input_shapes)


def translated(
    model: Any,
    where: str,
    batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Graph:
    """The graph of an `onnx.ModelProto`, which messages call `where`; otherwise as `read`."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    opset = max((versions[domain] for domain in DOMAINS if domain in versions), default=0)
    if opset < OLDEST:
        raise ConfigError(f"{where}: opset {opset}: expected {OLDEST} or newer")
    reader = _Reader(Graph(where), opset)
    reader.constants(model.graph)
    if not isinstance(input_shapes, Mapping | None):
        raise ConfigError(f"{where}: input_shapes={input_shapes!r}: expected a mapping of names to shapes")
    reader.inputs(model.graph, batch, input_shapes or {})
    reader.nodes(model.graph)
    reader.outputs(model.graph)
    reader.graph.clean()
    return reader.graph


class _Reader:
    def __init__(self, graph: Graph, opset: int) -> None:
        self.graph, self.opset = graph, opset
        self.values: dict[str, str] = {}  # the graph's name of each of the file's
        self.left_out: dict[str, str] = {}  # further outputs, by the node that has them and is computed without

    def fail(self, message: str) -> ConfigError:
        return ConfigError(f"{self.graph.name}: {message}")

    def constants(self, proto: Any) -> None:
        from onnx import numpy_helper

        total = 0
        if proto.sparse_initializer:
            raise self.fail("expected dense constants, got a sparse one")
        for tensor in proto.initializer:
            if tensor.name in self.values:
                raise self.fail(f"constant {tensor.name!r}: expected a name of its own, got a second one")
            try:
                value = numpy_helper.to_array(tensor)
            except Exception as error:  # of the package, for a tensor that contradicts itself
                raise self.fail(f"constant {tensor.name!r}: {one_line(error)}") from None
            if value.dtype.kind in NO_REAL_NUMBERS:
                raise self.fail(f"constant {tensor.name!r}: expected real numbers, got {value.dtype}")
            total += value.nbytes
            if total > LARGEST_CONSTANTS:
                raise self.fail(f"constant {tensor.name!r}: expected at most {LARGEST_CONSTANTS >> 20} MiB in all")
            self.values[tensor.name] = self.graph.add_constant(tensor.name, value)

    def inputs(self, proto: Any, batch: int | None, given: Mapping[str, Sequence[int]]) -> None:
        names = [info.name for info in proto.input if info.name not in self.values]
        if unknown := sorted(set(given) - set(names)):
            raise self.fail(f"input_shapes: {unknown[0]!r}: expected one of the inputs {', '.join(names)}")
        for info in proto.input:
            if info.name not in self.values:
                self.values[info.name] = self.graph.add_input(info.name, self._input_type(info, batch, given))

    def _input_type(self, info: Any, batch: int | None, given: Mapping[str, Sequence[int]]) -> TensorType:
        from onnx import helper

        what, shapes = f"input {info.name!r}", f"input_shapes={{{info.name!r}: ...}} to autoconv.load"
        ranked = info.type.HasField("tensor_type") and info.type.tensor_type.HasField("shape")
        if not ranked and info.name not in given:
            raise self.fail(f"{what}: expected an array of a known rank: give {shapes}")
        try:
            found_type = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        except (KeyError, TypeError, ValueError):
            raise self.fail(f"{what}: expected an array of numbers") from None
        if found_type.kind in NO_REAL_NUMBERS:
            raise self.fail(f"{what}: expected an array of real numbers, got {found_type}")
        dtype = found_type.name
        if info.name in given:
            wanted = given[info.name]
            shape = tuple(wanted) if isinstance(wanted, Iterable) else (wanted,)
            whole = all(isinstance(extent, int | np.integer) and extent > 0 for extent in shape)
            if not whole or not isinstance(wanted, Iterable):
                raise self.fail(f"{what}: input_shapes={wanted!r}: expected a shape, of integers of at least 1")
            return TensorType(tuple(map(int, shape)), dtype)
        found: list[int] = []
        for n, dim in enumerate(info.type.tensor_type.shape.dim):
            extent = dim.dim_value
            if extent < 1:
                extent = batch or 0
                if n or not extent:
                    name = dim.dim_param or "open"
                    hint = "batch=..." if not n else shapes
                    raise self.fail(f"{what}: dimension {n} is {name!r}: expected a number: give {hint}")
            found.append(int(extent))
        return TensorType(tuple(found), dtype)

    def nodes(self, proto: Any) -> None:
        makers: dict[str, int] = {}
        for n, node in enumerate(proto.node):
            for output in node.output:
                if output and (output in makers or output in self.values):
                    raise self.fail(f"node {node.name or output!r} ({node.op_type}): {output!r} is already computed")
                if output:  # one that is left out is no array
                    makers[output] = n
            if not any(node.output):
                raise self.fail(f"node {node.name or n!r} ({node.op_type}): it has no output")
        labels = [next(filter(None, node.output)) for node in proto.node]
        needs = {
            labels[n]: [labels[makers[value]] for value in node.input if value in makers]
            for n, node in enumerate(proto.node)
        }
        places = {label: n for n, label in enumerate(labels)}
        for label in ordered(needs, self.graph.name):
            self._node(proto.node[places[label]], label)

    def _node(self, node: Any, label: str) -> None:
        what = f"node {label!r} ({node.op_type})"
        standard = node.domain in DOMAINS
        schema = schema_of(node, self.opset) if standard else None
        lowerings = LOWERINGS if standard else OTHERS.get(node.domain, {})
        if node.op_type not in lowerings and (schema is None or contains_nodes(node)):
            domain = "" if standard else f" of the domain {node.domain!r}"
            expected = ", ".join(sorted(lowerings or LOWERINGS))
            raise self.fail(f"{what}: no such operator here{domain}: expected one of {expected}")
        for value in node.input:
            if value and value not in self.values:
                raise self.fail(f"{what}: its input {value!r} {self._missing(value)}")
        try:
            call = Call(self.graph, node, self.opset, [self.values[value] if value else "" for value in node.input])
        except ValueError as error:  # of the package onnx, about an attribute
            raise self.fail(f"{what}: {one_line(error)}") from None
        call.name = label
        if schema is not None:
            _check_count(call, schema.min_input, schema.max_input)
        try:
            found = lowerings[node.op_type](call) if node.op_type in lowerings else None
            if found is None:
                found = foreign(call, node)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            call.fail(f"its attributes or inputs contradict each other: {one_line(error)}")
        values = [found] if isinstance(found, str) else found
        self.values.update(zip(node.output, values, strict=False))
        self.left_out.update(dict.fromkeys(node.output[len(values) :], what))

    def outputs(self, proto: Any) -> None:
        if not proto.output:
            raise self.fail("it has no outputs")
        for info in proto.output:
            if info.name not in self.values:
                raise self.fail(f"output {info.name!r} {self._missing(info.name)}")
            self.graph.outputs[info.name] = self.values[info.name]

    def _missing(self, value: str) -> str:
        """Why an array is not there."""
        if value in self.left_out:
            return f"is an output that {self.left_out[value]} does not give here"
        return "is computed by no node"


def _check_count(call: Call, least: int, most: int) -> None:
    """Hold the number of a node's inputs, up to the last one that is not left out, to what its operator takes."""
    given = max((n for n, value in enumerate(call.inputs, 1) if value), default=0)
    if not least <= given <= most:
        several = f"{least} to {most}" if most < VARIADIC else f"at least {least}"
        call.fail(f"inputs: expected {least if least == most else several}, got {given}")
