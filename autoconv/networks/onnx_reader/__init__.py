"""Graphs from ONNX files."""

from autoconv.networks.onnx_reader.reader import read, translated

__all__ = ["read", "translated"]
