"""What is public says what it takes, what it gives, and what it raises."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numpydoc.docscrape import FunctionDoc
from numpydoc.validate import validate

import autoconv
import autoconv.networks
from autoconv import errors
from autoconv.errors import PlanError, RecordError

# undocumented, unknown, or in another order; no type; no returns, no yields; no docstring
CODES = {"PR01", "PR02", "PR03", "RT01", "YD01", "GL08"}
CLASSES = {name: value for name in autoconv.__all__ if inspect.isclass(value := getattr(autoconv, name))}
ERRORS = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
MADE_ELSEWHERE = {"autoconv.CompiledNetwork", "autoconv.Plan"}  # by a function: nobody calls the class itself


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and class, and every public method and property of the classes."""
    for name in autoconv.__all__:
        yield f"autoconv.{name}", getattr(autoconv, name)
    for name in autoconv.networks.__all__:
        yield f"autoconv.networks.{name}", getattr(autoconv.networks, name)
    for owner, cls in [*CLASSES.items(), ("networks.Network", autoconv.networks.Network)]:
        for name, member in vars(cls).items():
            kept = any(name in vars(base) for base in cls.__mro__[1:])  # a contract, documented where it is made
            documentable = callable(member) or isinstance(member, property | classmethod)
            if not name.startswith("_") and documentable and not kept:
                yield f"autoconv.{owner}.{name}", member


PUBLIC = dict(public())


def functions() -> dict[str, Callable[..., Any]]:
    found = {name: getattr(member, "__func__", member) for name, member in PUBLIC.items()}
    return {name: inspect.unwrap(f) for name, f in found.items() if inspect.isfunction(inspect.unwrap(f))}


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_and_returns_are_documented(name: str) -> None:
    found = validate(name)["errors"]
    if inspect.isclass(PUBLIC[name]) and issubclass(PUBLIC[name], Exception):
        assert "GL08" not in {code for code, _ in found}
        return
    ignored = {"PR01"} if name in MADE_ELSEWHERE else set()
    assert [(code, text) for code, text in found if code in CODES - ignored] == []


def raised(function: Callable[..., Any], seen: set[Any] | None = None) -> set[str]:
    """The library's exceptions that leave a function: its own, and those of its module's functions that it calls."""
    seen = set() if seen is None else seen
    function = inspect.unwrap(function)
    if function in seen:
        return set()
    seen.add(function)
    owner = inspect.getmodule(function)
    cls = getattr(owner, function.__qualname__.partition(".")[0], None)

    def leaving(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Try):
            inside = set().union(*map(leaving, node.body))
            kinds = tuple(_class(kind) for handler in node.handlers for kind in _kinds(handler))
            rest = [*node.handlers, *node.orelse, *node.finalbody]
            return {name for name in inside if not issubclass(ERRORS[name], kinds)}.union(*map(leaving, rest))
        found = set().union(*map(leaving, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found |= {node.exc.func.id} & ERRORS.keys()
        elif isinstance(node, ast.Call):
            called = None
            if isinstance(node.func, ast.Name):
                called = vars(owner).get(node.func.id)
            elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("self", "cls"):
                called = getattr(cls, node.func.attr, None)
            called = inspect.unwrap(getattr(called, "__func__", called))
            if inspect.isfunction(called) and inspect.getmodule(called) is owner:
                found |= raised(called, seen)
        return found

    return leaving(ast.parse(textwrap.dedent(inspect.getsource(function))))


def _kinds(handler: ast.ExceptHandler) -> list[str]:
    if handler.type is None:
        return ["BaseException"]
    return [
        ast.unparse(kind) for kind in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
    ]


def _class(name: str) -> type[BaseException]:
    found = ERRORS.get(name) or getattr(builtins, name, None)
    return found if inspect.isclass(found) else KeyboardInterrupt  # of another library: none of ours is one


@pytest.mark.parametrize("name", functions())
def test_what_is_raised_is_documented(name: str) -> None:
    """A subclass is covered by a class that is documented."""
    function = functions()[name]
    listed = [name for entry in FunctionDoc(function)["Raises"] for name in (entry.type or entry.name).split(", ")]
    documented = tuple(map(_class, listed))
    assert [error for error in raised(function) if not issubclass(ERRORS[error], documented)] == []


def test_the_check_sees_what_is_raised() -> None:
    assert raised(autoconv.conv_transpose2d) == {"ArrayError", "LayerError"}
    assert raised(autoconv.Plan.run) == {"ArrayError"}
    assert raised(autoconv.ConvLayer.parse) == {"LayerError"}
    assert raised(autoconv.ConvLayer.key) == set()

    def caught() -> None:
        try:
            raise RecordError("caught")
        except ValueError:
            raise PlanError("left") from None

    assert raised(caught) == {"PlanError"}


def test_gradients_and_other_entries_have_an_example() -> None:
    for name in (
        "conv2d",
        "conv2d_dgrad",
        "conv2d_wgrad",
        "conv_transpose2d",
        "ConvLayer",
        "Candidate",
        "networks.load",
    ):
        assert ">>> " in str(PUBLIC[f"autoconv.{name}"].__doc__), name


def test_the_operands_of_a_kernel_are_those_of_a_layer() -> None:
    """The table of `Kernel.run`, direction by direction."""
    rows = re.findall(
        r"\| `(\w+)` +\| `(\w+)`: ([\w, /]+?) +\| `(\w+)`: ([\w, /]+?) +\| `(\w+)`: ([\w, /]+?) +\|",
        str(autoconv.Kernel.run.__doc__),
    )
    assert [row[0] for row in rows] == ["fwd", "dgrad", "wgrad"]
    layer = autoconv.ConvLayer(N=2, C=6, H=11, W=13, K=9, R=3, S=5, groups=3)
    names = {name: getattr(layer, name) for name in "NCHWKRSPQ"} | {"C/groups": layer.C // layer.groups}
    for direction, _, a, _, b, _, out in rows:
        turned = layer.replace(direction=direction)
        shapes = [tuple(names[extent] for extent in text.split(", ")) for text in (a, b, out)]
        assert shapes == [*turned.input_shapes, turned.output_shape]
