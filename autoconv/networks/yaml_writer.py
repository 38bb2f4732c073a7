"""Layer lists as YAML, which `yaml_reader` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import yaml

from autoconv.common.types import output_name
from autoconv.errors import ConfigError
from autoconv.layer import ConvLayer
from autoconv.networks.layers import NamedLayer, Network
from autoconv.networks.yaml_reader import LONGEST, SETTINGS


def text_of(net: Network) -> str:
    """A network as the content of a file, a layer on every line.

    Parameters
    ----------
    net : Network

    Returns
    -------
    str
        What `autoconv.networks.load` makes the same layers of.

    Raises
    ------
    ConfigError
        When it has no layers, as no list may be empty.
    """
    if not net.layers:
        raise ConfigError(f"{net.source or net.name}: expected convolutions or fully connected layers, got none")
    name = writable(net.name)  # it may be that of a file
    head = {"name": name, "source": net.source} if net.source else {"name": name}
    batch = net.batches[0] if len(net.batches) == 1 else list(net.batches)
    lines = [f"{key}: {_flow(value)}" for key, value in (head | {"batch": batch}).items()]
    layers = [_settings(named, net.batches[0]) for named in net.layers]
    return "\n".join([*lines, "layers:", *(f"  - {_flow(settings)}" for settings in layers), ""])


def writable(name: str, taken: Collection[str] = ()) -> str:
    """A name as a file of layers may have it, printable and of no more characters; and none that is taken."""
    printable = "".join(character if character.isprintable() else "_" for character in name)
    found, count = printable[:LONGEST], 1
    while found in taken:
        count += 1
        found = f"{printable[: LONGEST - len(str(count)) - 1]}.{count}"
    return found


def _settings(named: NamedLayer, batch: int) -> dict[str, Any]:
    """A layer's keys, but for those that the reader would put there itself.

    A layer that is of another batch than the network, as where rows are pixels, has one of its own.
    """
    layer = named.at(batch, "dgrad" if named.transposed else "fwd")
    batches = named.batches or (() if batch == layer.N else (layer.N,))
    found: dict[str, Any] = {"name": named.name}
    defaults = {field.name: field.default for field in dataclasses.fields(ConvLayer)}
    defaults |= {"W": layer.H, "S": layer.R, "output_dtype": output_name(None, layer.dtype)}
    for key in SETTINGS:
        if (value := getattr(layer, key)) != defaults[key]:
            found[key] = _short(value)
    found |= {"batch": list(batches)} if batches else {}
    found |= {"direction": list(named.directions)} if named.directions else {}
    return found | ({"repeat": named.repeat} if named.repeat > 1 else {})


def _short(value: Any) -> Any:
    """One number in the place of a pair or a pair of pairs that are all the same."""
    if not isinstance(value, tuple):
        return value
    items = [_short(item) for item in value]
    return items[0] if not isinstance(items[0], list) and items[1:] == items[:-1] else items


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")
