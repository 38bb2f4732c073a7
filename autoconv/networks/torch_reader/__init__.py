"""Graphs from models of PyTorch."""

from autoconv.networks.torch_reader.reader import exported, translated

__all__ = ["exported", "translated"]
