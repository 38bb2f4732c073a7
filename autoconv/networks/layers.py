"""Layer lists of networks: YAML in, checked `ConvLayer`s out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from autoconv.errors import ConfigError, LayerError
from autoconv.layer import ConvLayer
from autoconv.paths import shipped

LARGEST_FILE = 1 << 18  # bytes; the longest shipped list has 4 KiB
NETWORK_KEYS = ("name", "source", "batch", "defaults", "layers")
REQUIRED = ("C", "H", "K", "R")
SETTINGS = (*"CHWKRS", "stride", "padding", "dilation", "groups", "dtype", "layout", "bias", "residual", "activation")
LAYER_KEYS = ("name", "repeat", *SETTINGS)


@dataclass(frozen=True)
class NamedLayer:
    """A layer of a network, for one image; `repeat` equal ones stand in the network, `line` is in its file."""

    name: str
    layer: ConvLayer
    repeat: int
    line: int

    def at(self, batch: int = 1, direction: str = "fwd") -> ConvLayer:
        """The layer for a batch; a gradient has no fused tail."""
        tail = {} if direction == "fwd" else {"bias": False, "residual": False, "activation": None}
        return self.layer.replace(N=batch, direction=direction, **tail)


@dataclass(frozen=True)
class Network:
    """The convolutions of one network, in order; `source` is the paper or code they were taken from."""

    name: str
    source: str
    layers: tuple[NamedLayer, ...]
    batches: tuple[int, ...] = (1,)

    @property
    def macs(self) -> int:
        """Multiply-adds of all convolutions for one image, repeats counted."""
        return sum(named.layer.macs * named.repeat for named in self.layers)

    def find(self, name: str) -> NamedLayer:
        """The layer of that name.

        Raises
        ------
        ConfigError
            When the network has none; the message names the nearest.
        """
        for named in self.layers:
            if named.name == name:
                return named
        raise ConfigError(f"{self.name} has no layer {name!r}: {_nearest(name, [n.name for n in self.layers])}")


def names() -> list[str]:
    """Names of the networks that come with autoconv."""
    return sorted(path.stem for path in shipped("configs").glob("*.yaml"))


def load(path_or_name: str | Path) -> Network:
    """Read a network from a YAML file, or one that comes with autoconv by its name.

    The file has `layers`, a list of mappings with a `name` and the arguments of `ConvLayer` (without
    `N` and `direction`), and optionally `name`, `source`, `batch` (a number or a list) and `defaults`
    for all layers. In a layer, `W` is `H` and `S` is `R` unless given, and `repeat` counts how often
    it stands in the network. Only decimal integers are numbers and only `true` and `false` are truth values.

    Raises
    ------
    ConfigError
        When the file cannot be read, or is not such a list; the message names file, line and layer.
    """
    path = Path(path_or_name)
    own = shipped("configs") / f"{path_or_name}.yaml"
    if path.name == str(path_or_name) and not path.is_file() and own.is_file():
        path = own
    return _Reader(str(path)).network(_read(path), default_name=path.stem)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path}: no such file, and no network of that name; known are {', '.join(names())}"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; a YAML file is wanted") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > LARGEST_FILE:
        raise ConfigError(f"{path}: more than {LARGEST_FILE >> 10} KiB is no layer list")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x})") from None


def _nearest(given: str, allowed: list[str]) -> str:
    folded = {name.casefold(): name for name in allowed}
    (near,) = difflib.get_close_matches(given.casefold(), folded, n=1, cutoff=0.0)
    return f"did you mean {folded[near]!r}? Allowed are {', '.join(allowed)}"


class _Loader(yaml.SafeLoader):
    """YAML in which text stays text: `no`, `on`, `1:30`, `3_3`, `010` and dates are not made into anything else."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML declares it)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]{0,17})", list("-+0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)

_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "str": str,
}


class _Reader:
    """Walks the YAML nodes of one file, never deeper or wider than a layer list is: aliases cannot blow it up."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, line: int, message: str, layer: str | None = None) -> NoReturn:
        raise ConfigError(f"{self.where}:{line}: " + (f"layer {layer!r}: " if layer else "") + message) from None

    def network(self, text: str, default_name: str) -> Network:
        try:
            root = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.fail(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}")
        except yaml.reader.ReaderError as error:
            self.fail(text[: error.position].count("\n") + 1, f"not YAML: character {error.character!r} is not allowed")
        except RecursionError:
            self.fail(1, "not a layer list: nested too deeply")
        except (ValueError, OverflowError) as error:  # PyYAML makes a character of any number, such as "\UFFFFFFFF"
            self.fail(1, f"not YAML: an escape stands for no character: {error}")
        if root is None:
            raise ConfigError(f"{self.where}: the file is empty; a mapping with 'layers' is wanted")
        nodes = self.mapping(root, NETWORK_KEYS, "a network")
        defaults = self.mapping(nodes["defaults"], SETTINGS, "defaults") if "defaults" in nodes else {}
        if "layers" not in nodes:
            self.fail(_line(root), "'layers' is missing")
        layers: dict[str, NamedLayer] = {}
        for node in self.sequence(nodes["layers"], "layers"):
            named = self.layer(node, defaults)
            if named.name in layers:
                self.fail(named.line, f"the name is taken by line {layers[named.name].line}", named.name)
            layers[named.name] = named
        return Network(
            name=self.text(nodes["name"], "name") if "name" in nodes else default_name,
            source=self.text(nodes["source"], "source") if "source" in nodes else "",
            layers=tuple(layers.values()),
            batches=self.batches(nodes["batch"]) if "batch" in nodes else (1,),
        )

    def mapping(
        self, node: yaml.Node, allowed: tuple[str, ...], what: str, layer: str | None = None
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(_line(node), f"{what}: a mapping (key: value) is wanted, not {_kind(node)}", layer)
        found: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = self.text(key_node, f"a key of {what}")
            if key not in allowed:
                hint = {"N": "the batch is given by 'batch'", "direction": "the direction is chosen at tuning"}.get(key)
                self.fail(_line(key_node), f"unknown key {key!r}: {hint or _nearest(key, list(allowed))}", layer)
            if key in found:
                self.fail(_line(key_node), f"{key!r} is given twice, first on line {_line(found[key])}", layer)
            found[key] = value
        return found

    def sequence(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.fail(_line(node), f"{what}: a list is wanted, not {_kind(node)}")
        if not node.value:
            self.fail(_line(node), f"{what}: the list is empty")
        return list(node.value)

    def text(self, node: yaml.Node, what: str, layer: str | None = None) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self.fail(_line(node), f"{what}: text is wanted, not {_kind(node)}", layer)
        if not 0 < len(node.value) <= 200 or not node.value.isprintable():
            self.fail(_line(node), f"{what}={node.value[:40]!r}: 1 to 200 printable characters are wanted", layer)
        return str(node.value)

    def value(self, node: yaml.Node, what: str, layer: str | None, depth: int = 2) -> Any:
        """A scalar, or a short list of them (stride, dilation, padding), whose values `ConvLayer` then checks."""
        if isinstance(node, yaml.SequenceNode) and depth and len(node.value) <= 4:
            return [self.value(item, what, layer, depth - 1) for item in node.value]
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        if not isinstance(node, yaml.ScalarNode) or tag not in _SCALARS:
            self.fail(_line(node), f"{what}: a number, a word or a pair is wanted, not {_kind(node)}", layer)
        if len(node.value) > 200:
            self.fail(_line(node), f"{what}={node.value[:40]!r}...: too long", layer)
        try:
            return _SCALARS[tag](node.value)
        except ValueError:  # an explicit tag such as !!int on something else
            self.fail(_line(node), f"{what}={node.value!r}: not of the type {tag}", layer)

    def count(self, node: yaml.Node, what: str, layer: str | None = None) -> int:
        value = self.value(node, what, layer, depth=0)
        if type(value) is not int or not 1 <= value <= 1_000_000:
            self.fail(_line(node), f"{what}={value!r}: an integer from 1 to 1000000 is wanted", layer)
        return value

    def batches(self, node: yaml.Node) -> tuple[int, ...]:
        items = self.sequence(node, "batch") if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(dict.fromkeys(self.count(item, "batch") for item in items))

    def layer(self, node: yaml.Node, defaults: dict[str, yaml.Node]) -> NamedLayer:
        own = dict(self.mapping(node, LAYER_KEYS, "a layer", self.name_of(node)))
        if "name" not in own:
            self.fail(_line(node), "a layer without a 'name'")
        name = self.text(own.pop("name"), "name")
        repeat = self.count(own.pop("repeat"), "repeat", name) if "repeat" in own else 1
        nodes = defaults | own
        missing = [key for key in REQUIRED if key not in nodes]
        if missing:
            self.fail(_line(node), f"missing: {', '.join(missing)}", name)
        values = {key: self.value(value, key, name) for key, value in nodes.items()}
        values.setdefault("W", values["H"])
        values.setdefault("S", values["R"])
        if values.get("activation") == "none":
            values["activation"] = None
        try:
            layer = ConvLayer(N=1, **values)
        except LayerError as error:
            key = re.match(r"\w+", str(error))
            at = nodes.get(key[0]) if key else None
            self.fail(_line(at or node), str(error), name)
        return NamedLayer(name, layer, repeat, _line(node))

    @staticmethod
    def name_of(node: yaml.Node) -> str | None:
        """What a layer calls itself, for errors found before its keys are checked."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        return next((v.value[:40] for k, v in pairs if k.value == "name" and isinstance(v, yaml.ScalarNode)), None)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "nothing" if not node.value else repr(node.value[:40])
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
