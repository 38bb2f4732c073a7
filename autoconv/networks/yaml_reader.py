"""Layer lists in YAML: checked `ConvLayer`s out of a file that nobody trusts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import yaml

from autoconv.common.arguments import LARGEST
from autoconv.common.text import nearest
from autoconv.errors import ConfigError, LayerError
from autoconv.layer import DIRECTIONS, ConvLayer
from autoconv.networks.layers import NamedLayer, Network

LARGEST_FILE = 1 << 18  # bytes; the longest shipped list has 4 KiB
LONGEST = 200  # characters of a value
NETWORK_KEYS = ("name", "source", "batch", "defaults", "layers")
REQUIRED = ("C", "H", "K", "R")
SETTINGS = (
    *("C", "H", "W", "K", "R", "S", "stride", "padding", "dilation", "groups", "dtype", "layout"),
    *("bias", "residual", "activation", "output_dtype"),
)
LAYER_KEYS = ("name", "repeat", "batch", "direction", *SETTINGS)
ELSEWHERE = {
    "N": "the batch size is the network's 'batch', or chosen when tuning",
    "direction": "the direction is a layer's own, or chosen when tuning",
}


def network(data: bytes, where: str, default_name: str) -> Network:
    """The network that a file describes, as `autoconv.networks.load` tells.

    Parameters
    ----------
    data : bytes
        The file's content, or more than `LARGEST_FILE` of it.
    where : str
        What messages call the file.
    default_name : str
        The network's name, where the file gives none.

    Raises
    ------
    ConfigError
        When it is not a layer list; the message names file, line and layer.
    """
    if len(data) > LARGEST_FILE:
        raise ConfigError(f"{where}: expected a layer list of at most {LARGEST_FILE >> 10} KiB, got a larger file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{where}:{line}: expected UTF-8 text, got the byte 0x{data[error.start]:02x}") from None
    return _Reader(where).network(text, default_name)


class _Loader(yaml.SafeLoader):
    """YAML in which text stays text: `no`, `on`, `1:30`, `3_3`, `010` and dates are not made into anything else."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML declares it)


_WRITTEN = {  # how what is no text is written, and what that begins with
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"(?:[-+]?(0|[1-9][0-9]{0,17}))$"), list("-+0123456789")),
}
for _tag, (_pattern, _first) in _WRITTEN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)

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
        root = self.root(text)
        nodes = self.mapping(root, NETWORK_KEYS, "a network")
        defaults = self.mapping(nodes["defaults"], SETTINGS, "defaults") if "defaults" in nodes else {}
        if "layers" not in nodes:
            self.fail(_line(root), "a network: the key 'layers' is missing")
        layers: dict[str, NamedLayer] = {}
        for node in self.sequence(nodes["layers"], "layers"):
            named = self.layer(node, defaults)
            if named.name in layers:
                self.fail(named.line, f"the name is already used on line {layers[named.name].line}", named.name)
            layers[named.name] = named
        return Network(
            name=self.text(nodes["name"], "name") if "name" in nodes else default_name,
            source=self.text(nodes["source"], "source") if "source" in nodes else "",
            layers=tuple(layers.values()),
            batches=self.batches(nodes["batch"]) if "batch" in nodes else (1,),
        )

    def root(self, text: str) -> yaml.Node:
        loader = None
        try:
            loader = _Loader(text)
            root = loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.fail(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}")
        except yaml.reader.ReaderError as error:
            self.fail(text[: error.position].count("\n") + 1, f"not YAML: character {error.character!r} is not allowed")
        except (ValueError, OverflowError):  # PyYAML makes a character or a number of any digits: "\UFFFFFFFF"
            self.fail(
                loader.line + 1 if loader else 1, "not YAML: the number in an escape or a version is out of range"
            )
        except RecursionError:
            self.fail(1, "not a layer list: nested too deeply")
        if root is None:
            raise ConfigError(f"{self.where}: expected a mapping with 'layers', got an empty file")
        return root

    def mapping(
        self, node: yaml.Node, allowed: tuple[str, ...], what: str, layer: str | None = None
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(_line(node), f"{what}: expected a mapping (key: value), got {_kind(node)}", layer)
        found: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = self.text(key_node, f"a key of {what}")
            if key not in allowed:
                self.fail(_line(key_node), f"unknown key {key!r}: {ELSEWHERE.get(key) or nearest(key, allowed)}", layer)
            if key in found:
                self.fail(_line(key_node), f"{key!r} is given twice, first on line {_line(found[key])}", layer)
            found[key] = value
        return found

    def sequence(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.fail(_line(node), f"{what}: expected a list, got {_kind(node)}")
        if not node.value:
            self.fail(_line(node), f"{what}: expected a list of at least one, got an empty one")
        return list(node.value)

    def text(self, node: yaml.Node, what: str, layer: str | None = None) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self.fail(_line(node), f"{what}: expected text, got {_kind(node)}", layer)
        if not 0 < len(node.value) <= LONGEST or not node.value.isprintable():
            self.fail(_line(node), f"{what}={node.value[:40]!r}: expected 1 to {LONGEST} printable characters", layer)
        return str(node.value)

    def value(self, node: yaml.Node, what: str, layer: str | None, depth: int = 2) -> Any:
        """A scalar, or a short list of them (stride, dilation, padding), whose values `ConvLayer` then checks."""
        if isinstance(node, yaml.SequenceNode) and depth and len(node.value) <= 4:
            return [self.value(item, what, layer, depth - 1) for item in node.value]
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        if not isinstance(node, yaml.ScalarNode) or tag not in _SCALARS:
            self.fail(_line(node), f"{what}: expected a number, a word or a pair, got {_kind(node)}", layer)
        if (length := len(node.value)) > LONGEST:
            self.fail(_line(node), f"{what}: expected at most {LONGEST} characters, got {length}", layer)
        if tag in _WRITTEN and not _WRITTEN[tag][0].match(node.value):  # !!int on something else, say
            self.fail(_line(node), f"{what}={node.value!r}: expected a value of the type its tag names, {tag}", layer)
        return _SCALARS[tag](node.value)

    def count(self, node: yaml.Node, what: str, layer: str | None = None) -> int:
        value = self.value(node, what, layer, depth=0)
        if type(value) is not int or not 1 <= value <= LARGEST:
            self.fail(_line(node), f"{what}={value!r}: expected an integer from 1 to {LARGEST}", layer)
        return value

    def several(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        return self.sequence(node, what) if isinstance(node, yaml.SequenceNode) else [node]

    def batches(self, node: yaml.Node, layer: str | None = None) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.count(item, "batch", layer) for item in self.several(node, "batch")))

    def directions(self, node: yaml.Node, layer: str) -> tuple[str, ...]:
        items = self.several(node, "direction")
        found = [self.text(item, "direction", layer) for item in items]
        for item, direction in zip(items, found, strict=True):
            if direction not in DIRECTIONS:
                self.fail(_line(item), f"direction={direction!r}: expected one of {', '.join(DIRECTIONS)}", layer)
        return tuple(dict.fromkeys(found))

    def layer(self, node: yaml.Node, defaults: dict[str, yaml.Node]) -> NamedLayer:
        own = dict(self.mapping(node, LAYER_KEYS, "a layer", self.name_of(node)))
        if "name" not in own:
            self.fail(_line(node), "a layer: the key 'name' is missing")
        name = self.text(own.pop("name"), "name")
        repeat = self.count(own.pop("repeat"), "repeat", name) if "repeat" in own else 1
        batches = self.batches(own.pop("batch"), name) if "batch" in own else ()
        directions = self.directions(ways, name) if (ways := own.pop("direction", None)) else ()
        nodes = defaults | own
        missing = [key for key in REQUIRED if key not in nodes]
        if missing:
            self.fail(_line(node), f"the keys {', '.join(REQUIRED)} are required: {', '.join(missing)} missing", name)
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
        named = NamedLayer(name, layer, repeat, _line(node), batches, directions)
        for direction in directions:
            try:
                named.at(1, direction)
            except LayerError as error:
                self.fail(_line(ways or node), f"direction={direction!r}: {error}", name)
        return named

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
