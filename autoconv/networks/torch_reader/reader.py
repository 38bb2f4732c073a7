"""From a model of PyTorch to a graph: `torch.export` traces it, and every operator of ATen becomes ours."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils._pytree import tree_map_only

from autoconv.common.text import one_line
from autoconv.errors import ConfigError
from autoconv.networks.graph import Graph
from autoconv.networks.operators.foreign_torch import called
from autoconv.networks.torch_reader import arithmetic, normalisation, shapes, windows
from autoconv.networks.torch_reader.call import Call, Lowering, Value
from autoconv.networks.torch_reader.foreign import check_computes, foreign, type_of
from autoconv.vendors.torch import array, tensor

LOWERINGS: dict[str, Lowering] = {
    **arithmetic.LOWERINGS,
    **normalisation.LOWERINGS,
    **shapes.LOWERINGS,
    **windows.LOWERINGS,
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What stays whole beside: taken apart, these check their results by an effect that is no array.
CHECKED = tuple(f"aten::linalg_{name}" for name in ("cholesky", "inv", "ldl_factor", "lu_factor", "solve"))


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
    for target in [target for target in table if target.name() in LOWERINGS or target.name() in CHECKED]:
        table.pop(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, of its own code
        try:
            with torch.no_grad():
                # PyTorch would take what shares memory, with each other or with the model, for one and the same input.
                own = tree_map_only(torch.Tensor, lambda given: given.detach().clone(), tuple(args))
                return torch.export.export(model, own).run_decompositions(table)
        except Exception as error:  # of any kind: the model's own code runs, too
            raise ConfigError(f"{type(model).__name__}: torch.export cannot trace it: {one_line(error)}") from error


def translated(program: Any, where: str) -> Graph:
    """The graph of an exported program, whose parameters and buffers are constants from now on.

    PyTorch runs what is not known here, or not with such arguments.

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
        For an operator that gives no arrays, or some whose shapes are not known before it runs; the message names the
        module and the operator. For a model that changes its inputs or buffers.
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
            elif spec.kind is InputKind.TOKEN:
                raise self.fail("expected a model without other effects than its outputs, such as text that is printed")
            elif spec.kind is InputKind.USER_INPUT:
                self.values[name] = Value(self.graph.add_input(name, type_of(fakes[name])))
            else:
                known = self.program.state_dict.get(spec.target, self.program.constants.get(spec.target))
                if not isinstance(known, torch.Tensor):
                    raise self.fail(f"{spec.target}: expected a tensor, got {type(known).__name__}")
                try:
                    value = array(known).copy()
                except (RuntimeError, TypeError) as error:  # it lies elsewhere, or NumPy has no such kind
                    raise self.fail(f"{spec.target}: expected a dense tensor on the CPU: {one_line(error)}") from None
                self.values[name] = Value(self.graph.add_constant(spec.target, value))

    def node(self, node: Any) -> None:
        """One operator."""
        target, name = node.target, _module_of(node)
        if target is operator.getitem:
            if node.users:
                self.values[node.name] = self.values[node.args[0].name][node.args[1]]
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise self.fail(f"node {name!r}: {target}: expected an operator of ATen")
        arguments = {argument.name: argument.default_value for argument in target._schema.arguments}
        arguments |= dict(zip(arguments, map(self._argument, node.args), strict=False))
        arguments |= {key: self._argument(value) for key, value in node.kwargs.items()}
        call, fake = Call(self.graph, name, node, arguments), node.meta.get("val")
        fakes = [*fake] if isinstance(fake, list | tuple) else [fake]
        found = self._lowered(call, node, fakes)
        if found is None and all(value in self.graph.constants for value in _arrays(arguments)):
            found = self._computed(call, target, arguments) if node.users else []
        elif found is None:
            if torch.Tag.nondeterministic_seeded in target.tags and len(_used(node)) > 1:
                call.fail("expected one output of random numbers to be used, as each is computed by itself")
            found = foreign(call, target, arguments, fakes) if node.users else []  # unused: a check of the trace's, say
        self.values[node.name] = [*map(Value, found)] if isinstance(fake, list | tuple) else Value(*found)

    def _argument(self, value: Any) -> Any:
        """An argument with the values of nodes in their place."""
        if isinstance(value, torch.fx.Node):
            return self.values[value.name]
        return [*map(self._argument, value)] if isinstance(value, list | tuple) else value

    def _lowered(self, call: Call, node: Any, fakes: Sequence[Any]) -> list[str] | None:
        """An operator in terms of ours, as far as its outputs are used; None where it is not known, or not so."""
        name = node.target.name()
        if name not in LOWERINGS or any(isinstance(fake, torch.Tensor) and not _of_ours(fake) for fake in fakes):
            return None
        try:
            made = LOWERINGS[name](call)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # ConfigError among them
            return None
        found = [made] if isinstance(made, str) else made
        if max(_used(node), default=0) >= len(found):
            return None
        types = [self.graph.types[value] for value in found]
        return found if types == [type_of(fake) for fake in fakes[: len(found)]] else None

    def _computed(self, call: Call, target: Any, arguments: Mapping[str, Any]) -> list[str]:
        """What an operator makes of constants alone, by PyTorch."""

        def known(value: Any) -> Any:
            if isinstance(value, Value):
                return tensor(self.graph.constants[value])
            return [*map(known, value)] if isinstance(value, list) else value

        check_computes(call, target)
        if torch.Tag.nondeterministic_seeded in target.tags:
            call.fail("expected no random numbers, as those made of constants alone would be the same in every run")
        try:
            made = called(target, {name: known(value) for name, value in arguments.items()})
        except (LookupError, RuntimeError, ValueError) as error:  # PyTorch's, as for places that are not there
            call.fail(f"PyTorch did not compute it from constants: {one_line(error)}")
        if not all(isinstance(each, torch.Tensor) for each in made):
            call.fail(f"expected an operator that gives arrays, got {made}")
        return [call.add_constant(array(each)) for each in made]

    def outputs(self) -> None:
        """What the program gives."""
        for spec in self.program.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise self.fail(f"{spec.target}: expected a model that changes nothing, as in evaluation mode")
            if not isinstance(spec.arg, ConstantArgument):
                self.graph.outputs[str(len(self.graph.outputs))] = self.values[spec.arg.name]
        if not self.graph.outputs:
            raise self.fail("expected a model that gives arrays")


def _of_ours(fake: Any) -> bool:
    """Whether ours compute in a type as PyTorch does, which for floats of 8 bits has rules of its own for overflow."""
    return fake.dtype in FLOATS if fake.is_floating_point() else not fake.is_complex()


def _used(node: Any) -> list[int]:
    """Which of a node's several outputs others take."""
    return [user.args[1] for user in node.users if user.target is operator.getitem and user.users]


def _arrays(value: Any) -> Iterator[str]:
    """The arrays among arguments."""
    if isinstance(value, Value):
        yield value
    elif isinstance(value, list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays(each)


def _module_of(node: Any) -> str:
    """The path of the module that a node comes from; its own name at the top."""
    path = next((path for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values())), "")
    return str(path or node.name)
