"""Networks on disk: the graph after all passes, the candidates of layers, the arrays in NHWC, and the batch's parts.

The file is one of NumPy's archives of arrays (`.npz`), without pickles; one of them holds the rest as JSON. Nothing in
it is trusted: the graph is built and checked anew. Packed filters are not kept: they are larger than the filters they
are made of, and reading them takes longer than packing on all threads (ResNet-50 on two cores: 1.2 s against 0.7).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import ml_dtypes
import numpy as np

from autoconv.common.text import one_line
from autoconv.cpu.fused.geometry import FusedBlocking
from autoconv.device import Device
from autoconv.errors import ConfigError
from autoconv.networks import operators
from autoconv.networks.graph import Graph
from autoconv.networks.operators import ForeignTorch, Operator, TensorType
from autoconv.networks.passes.batch_split import split
from autoconv.networks.passes.layouts import channels_last, laid_out
from autoconv.networks.run.planned import Choices
from autoconv.paths import written_whole

FORMAT = 2
HEADER = "network"
OPERATORS: Mapping[str, type[Operator]] = {
    name: value for name, value in vars(operators).items() if isinstance(value, type) and issubclass(value, Operator)
}


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    Attributes
    ----------
    graph : Graph
    choices : Choices
    device : str
        The key of the device that all this was chosen for.
    """

    graph: Graph
    choices: Choices
    device: str


def write(path: Path, graph: Graph, choices: Choices, device: Device) -> None:
    """Write a graph after all passes, and what was chosen for it on a device: a file, whole or not at all.

    Raises
    ------
    ConfigError
        When PyTorch runs a node by an operator that a file may not ask for.
    """
    for node in graph.nodes.values():
        _check_stored(graph, node.name, node.operator)
    arrays: dict[str, Any] = {f"c{n}": _bytes_of(value) for n, value in enumerate(graph.constants.values())}
    header = {
        "format": FORMAT,
        "name": graph.name,
        "device": device.key,
        "inputs": [[name, list(t.shape), t.dtype] for name, t in graph.inputs.items()],
        "constants": list(graph.constants),
        "types": {name: value.dtype.name for name, value in graph.constants.items() if value.dtype.isbuiltin != 1},
        "nodes": [
            [
                node.name,
                type(node.operator).__name__,
                {field.name: getattr(node.operator, field.name) for field in fields(node.operator)},  # type: ignore[arg-type]
                list(node.inputs),
            ]
            for node in graph.nodes.values()
        ],
        "outputs": graph.outputs,
        "nhwc": sorted(choices.in_nhwc),
        "images": choices.images,
        "fused": choices.fused,
        "candidates": choices.candidates,
    }
    arrays[HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with written_whole(path) as file:
        np.savez(file, **arrays)


def is_saved(path: Path) -> bool:
    """Whether a file begins like one of these."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except (OSError, ValueError):  # ValueError: a name with a null byte
        return False


def read(path: Path) -> Saved:
    """What a file holds.

    Raises
    ------
    ConfigError
        When it is damaged, of another format, or no network.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            header = json.loads(archive[HEADER].tobytes())
            graph = _graph(header, archive, path)
            candidates = {str(name): str(candidate) for name, candidate in header["candidates"].items()}
            in_nhwc = _in_nhwc(header, graph)
            images, fused = _images(header, graph, in_nhwc), _fused(header, graph)
            return Saved(graph, Choices(candidates, in_nhwc, images, fused), str(header["device"]))
    except ConfigError:
        raise
    except Exception as error:  # whatever the archive's reader, NumPy's or JSON's makes of it
        raise ConfigError(f"{path}: not a saved network, or damaged: {one_line(error)}") from None


def _graph(header: Any, archive: Any, path: Path) -> Graph:
    if header["format"] != FORMAT:
        raise ConfigError(f"{path}: expected a network of format {FORMAT}, got {header['format']!r}")
    graph = Graph(str(header["name"]))
    for name, shape, dtype in header["inputs"]:
        if not all(type(extent) is int and extent >= 0 for extent in shape):
            raise ConfigError(f"{graph.name}: input {name!r}: expected extents of at least 0, got {shape}")
        if not _of_numbers(np.dtype(dtype)):
            raise ConfigError(f"{graph.name}: input {name!r}: expected a type of numbers, got {dtype}")
        graph.add_input(str(name), TensorType(tuple(shape), np.dtype(dtype).name))
    types = header.get("types", {})
    for n, name in enumerate(header["constants"]):
        value = archive[f"c{n}"]
        if value.dtype.kind == "V":
            value = value.view(types.get(name, "bfloat16"))
        if not _of_numbers(value.dtype) or graph.add_constant(str(name), value) != name:
            raise ConfigError(f"{graph.name}: constant {name!r}: expected numbers under a name of their own")
    for name, kind, values, inputs in header["nodes"]:
        operator = OPERATORS[kind](**{key: _tuples(value) for key, value in values.items()})
        _check_fields(graph, name, operator)
        _check_stored(graph, name, operator)
        if graph.add(str(name), operator, *map(str, inputs)) != name:
            raise ConfigError(f"{graph.name}: node {name!r}: expected a name of its own")
    graph.outputs = {str(name): str(value) for name, value in header["outputs"].items()}
    if not graph.outputs or not graph.types.keys() >= set(graph.outputs.values()):
        raise ConfigError(f"{graph.name}: expected outputs that are computed, got {graph.outputs}")
    return graph


def _bytes_of(value: np.ndarray) -> np.ndarray:
    """An array as NumPy's files keep it: numbers of a type that is not its own are bytes there."""
    return value if value.dtype.isbuiltin == 1 else value.view(f"V{value.itemsize}")


def _of_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether a type is one of numbers, in the one order of bytes that kernels know."""
    return dtype.isnative and (dtype.kind in "iubfc" or hasattr(ml_dtypes, dtype.name))


def _check_fields(graph: Graph, name: Any, operator: Operator) -> None:
    """Refuse an operator whose constants are of other types than they should be."""
    hints = _hints(type(operator))
    for field in fields(operator):  # type: ignore[arg-type]
        value = getattr(operator, field.name)
        if not _is_a(value, hints[field.name]):
            kind, got = type(operator).__name__, f"{field.name}={value!r:.80}"
            raise ConfigError(f"{graph.name}: node {name!r} ({kind}): {got}: expected {field.type}")


_hints = functools.cache(get_type_hints)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as annotations of operators state them."""
    if hint is Any:
        return True
    kind, of = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in of
    if kind in (Union, UnionType):
        return any(_is_a(value, each) for each in of)
    if kind is tuple:
        each = of[:1] * len(value) if of[-1] is ... and isinstance(value, tuple) else of
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_is_a, value, each))
    return type(value) is hint or (hint is float and type(value) is int)


def _check_stored(graph: Graph, name: Any, operator: Operator) -> None:
    """Refuse what could do more than compute: files come from anywhere."""
    if isinstance(operator, ForeignTorch) and not operator.is_core:
        raise ConfigError(
            f"{graph.name}: node {name!r} ({operator.kind}): expected one of PyTorch's core operators, as a file may "
            f"ask for no other"
        )


def _in_nhwc(header: Any, graph: Graph) -> frozenset[str]:
    found = frozenset(map(str, header.get("nhwc", ())))
    if wrong := [n for n in sorted(found) if n not in graph.nodes or not channels_last(graph, graph.nodes[n])]:
        raise ConfigError(f"{graph.name}: nhwc: expected nodes that can be in NHWC, got {', '.join(wrong)}")
    return found


def _images(header: Any, graph: Graph, in_nhwc: Collection[str]) -> dict[str, int]:
    found = {str(name): count for name, count in header.get("images", {}).items()}
    if any(type(count) is not int for count in found.values()):
        raise ConfigError(f"{graph.name}: images: expected numbers of images, got {found}")
    split(laid_out(graph, in_nhwc), found)  # or it says what cannot be
    return found


def _fused(header: Any, graph: Graph) -> dict[str, FusedBlocking]:
    """As they are said to be cut; whether such layers can be fused is seen when they are."""
    found = {str(name): FusedBlocking(*cut) for name, cut in header.get("fused", {}).items()}
    if any(type(number) is not int for cut in found.values() for number in cut):
        raise ConfigError(f"{graph.name}: fused: expected numbers of rows and channels, got {header['fused']}")
    return found


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
