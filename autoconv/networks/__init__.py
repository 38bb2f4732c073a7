"""Networks: lists of layers, and where they come from."""

from autoconv.networks.files import load, names
from autoconv.networks.layers import NamedLayer, Network

__all__ = ["NamedLayer", "Network", "load", "names"]
