"""The former name of `autoconv.networks`."""

from autoconv.networks import NamedLayer, Network, load, names

__all__ = ["NamedLayer", "Network", "load", "names"]
