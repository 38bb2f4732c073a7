"""Networks: lists of layers, and where they come from."""

from autoconv.networks.layers import NamedLayer, Network, load, names

__all__ = ["NamedLayer", "Network", "load", "names"]
