"""Networks: lists of layers; graphs, where they come from, what rewrites them, chooses for them, and runs them."""

from autoconv.networks.files import load, names
from autoconv.networks.layers import NamedLayer, Network

__all__ = ["NamedLayer", "Network", "load", "names"]
