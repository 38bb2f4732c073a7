"""From a model of PyTorch to a graph: `torch.export` traces it, and every operator of ATen becomes ours."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from autoconv.common.text import one_line
from autoconv.errors import ConfigError
from autoconv.networks.graph import Graph
from autoconv.networks.operators.base import TensorType
from autoconv.networks.torch_reader import arithmetic, normalisation, shapes, windows
from autoconv.networks.torch_reader.call import Call, Lowering, Value
from autoconv.vendors.torch import array, tensor

LOWERINGS: dict[str, Lowering] = {
    **arithmetic.LOWERINGS,
    **normalisation.LOWERINGS,
    **shapes.LOWERINGS,
    **windows.LOWERINGS,
}


def exported(model: Any, args: Sequence[Any]) -> Any:
    """A model as a program of ATen operators without side effects; those that are known here stay whole.

    Parameters
    ----------
    model : torch.nn.Module
    args : sequence
        Example inputs.

    Returns
    -------
    torch.export.ExportedProgram

    Raises
    ------
    ConfigError
        When `torch.export` cannot trace the model.
    """
    table = torch.export.default_decompositions()
    for target in [target for target in table if target.name() in LOWERINGS]:
        table.pop(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, of its own code
        try:
            with torch.no_grad():
                return torch.export.export(model, tuple(args)).run_decompositions(table)
        except Exception as error:  # of any kind: the model's own code runs, too
            raise ConfigError(f"{type(model).__name__}: torch.export cannot trace it: {one_line(error)}") from error


def translated(program: Any, where: str) -> Graph:
    """The graph of an exported program, whose parameters and buffers are constants from now on.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        As `exported` gives it.
    where : str
        What messages call the network.

    Returns
    -------
    Graph
        Before any pass. Its inputs have the names of the program's; its outputs are named by their numbers.

    Raises
    ------
    ConfigError
        For an operator that is not known here, or a model that changes its inputs or buffers; the message names the
        module and the operator.
    """
    reader = _Reader(Graph(where), program)
    reader.inputs()
    for node in program.graph.nodes:
        if node.op == "call_function":
            reader.node(node)
    reader.outputs()
    reader.graph.clean()
    return reader.graph


class _Reader:
    def __init__(self, graph: Graph, program: Any) -> None:
        self.graph, self.program = graph, program
        self.values: dict[str, Any] = {}  # of nodes by their names: a `Value`, several, or what is no array

    def fail(self, message: str) -> ConfigError:
        return ConfigError(f"{self.graph.name}: {message}")

    def inputs(self) -> None:
        """What the program is given: arrays of the user's, and constants."""
        fakes = {node.name: node.meta.get("val") for node in self.program.graph.nodes if node.op == "placeholder"}
        specs = self.program.graph_signature.input_specs
        for spec in sorted(specs, key=lambda spec: spec.kind is not InputKind.USER_INPUT):  # which keep their names
            name = spec.arg.name
            if isinstance(spec.arg, ConstantArgument):
                self.values[name] = spec.arg.value
            elif spec.kind is InputKind.USER_INPUT:
                self.values[name] = Value(self.graph.add_input(name, _type_of(fakes[name])))
            else:
                known = self.program.state_dict.get(spec.target, self.program.constants.get(spec.target))
                if not isinstance(known, torch.Tensor):
                    raise self.fail(f"{spec.target}: expected a tensor, got {type(known).__name__}")
                self.values[name] = Value(self.graph.add_constant(spec.target, array(known).copy()))

    def node(self, node: Any) -> None:
        """One operator."""
        target, name = node.target, _module_of(node)
        if target is operator.getitem:
            self._item(node, name)
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise self.fail(f"node {name!r}: {target}: expected an operator of ATen")
        arguments = {argument.name: argument.default_value for argument in target._schema.arguments}
        arguments |= dict(zip(arguments, map(self._argument, node.args), strict=False))
        arguments |= {key: self._argument(value) for key, value in node.kwargs.items()}
        call = Call(self.graph, name, target, arguments)
        if target.name() in LOWERINGS:
            found = self._lowered(call, target.name())
        elif node.users:
            found = self._computed(call, target, arguments)
        else:
            return  # a check of the trace's, say
        self._check(call, found, node.meta.get("val"))
        self.values[node.name] = Value(found) if isinstance(found, str) else [*map(Value, found)]

    def _item(self, node: Any, name: str) -> None:
        several, index = self.values[node.args[0].name], node.args[1]
        if index < len(several):
            self.values[node.name] = several[index]
        elif node.users:
            raise self.fail(f"node {name!r} ({node.args[0].target}): output {index} is not computed here")

    def _argument(self, value: Any) -> Any:
        """An argument with the values of nodes in their place."""
        if isinstance(value, torch.fx.Node):
            if value.name not in self.values:
                raise self.fail(f"node {value.name!r} ({value.target}): what it gives is not computed here")
            return self.values[value.name]
        return [*map(self._argument, value)] if isinstance(value, list | tuple) else value

    def _lowered(self, call: Call, name: str) -> str | list[str]:
        try:
            return LOWERINGS[name](call)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            call.fail(f"its arguments are not those that are known here: {one_line(error)}")

    def _computed(self, call: Call, target: Any, arguments: Mapping[str, Any]) -> str | list[str]:
        """What an operator makes of constants alone, by PyTorch."""
        constants = self.graph.constants

        def known(value: Any) -> Any:
            if isinstance(value, Value):
                if value not in constants:
                    kinds = sorted({name.removeprefix("aten::").partition(".")[0] for name in LOWERINGS})
                    call.fail(f"no such operator here: expected one of {', '.join(kinds)}")
                return tensor(constants[value])
            return [*map(known, value)] if isinstance(value, list) else value

        given = {name: known(value) for name, value in arguments.items()}
        if torch.Tag.nondeterministic_seeded in target.tags:
            call.fail("expected no random numbers")
        positional = [given[a.name] for a in target._schema.arguments if not a.kwarg_only]
        found = target(*positional, **{a.name: given[a.name] for a in target._schema.arguments if a.kwarg_only})
        if isinstance(found, torch.Tensor):
            return call.add_constant(array(found))
        return [call.add_constant(array(each)) for each in found]

    def _check(self, call: Call, found: str | list[str], fake: Any) -> None:
        """Hold the shapes of what was made to those that PyTorch expects."""
        names, fakes = ([found], [fake]) if isinstance(found, str) else (found, fake)
        for name, expected in zip(names, fakes, strict=False):
            if isinstance(expected, torch.Tensor) and self.graph.types[name] != _type_of(expected):
                call.fail(f"expected {_type_of(expected)}, as PyTorch gives, got {self.graph.types[name]}")

    def outputs(self) -> None:
        """What the program gives."""
        for spec in self.program.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise self.fail(f"{spec.target}: expected a model that changes nothing, as in evaluation mode")
            if not isinstance(spec.arg, ConstantArgument):
                self.graph.outputs[str(len(self.graph.outputs))] = self.values[spec.arg.name]
        if not self.graph.outputs:
            raise self.fail("expected a model that gives arrays")


def _type_of(fake: Any) -> TensorType:
    """Shape and type of a tensor."""
    return TensorType(tuple(map(int, fake.shape)), str(fake.dtype).removeprefix("torch."))


def _module_of(node: Any) -> str:
    """The path of the module that a node comes from; its own name at the top."""
    path = next((path for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values())), "")
    return str(path or node.name)
