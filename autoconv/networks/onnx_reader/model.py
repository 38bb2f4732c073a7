"""An ONNX file as a checked model: nothing in it is trusted, and nothing of it is executed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autoconv.common.text import one_line, reason
from autoconv.errors import ConfigError
from autoconv.networks.translation import LARGEST_CONSTANTS


def load_model(path: Path) -> Any:
    """The `onnx.ModelProto` in a file, its external data included.

    Parameters
    ----------
    path : Path

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    ConfigError
        When the package is not there, or the file is no complete ONNX model.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError:
        raise ConfigError(f"{path}: reading ONNX files takes the package onnx: pip install 'autoconv[onnx]'") from None
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= LARGEST_CONSTANTS else b""
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from None
    if size > LARGEST_CONSTANTS:
        raise ConfigError(f"{path}: expected at most {LARGEST_CONSTANTS >> 20} MiB, got {size >> 20}")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ConfigError(f"{path}: not an ONNX file, or truncated: {one_line(error)}") from None
    if not model.opset_import or not model.graph.node:
        raise ConfigError(f"{path}: not an ONNX file: it has no graph, or names no opset")
    _fetch_external_data(model, path)
    return model


def _fetch_external_data(model: Any, path: Path) -> None:
    """Read what initializers keep in other files, which have to lie in the model's folder."""
    from onnx import TensorProto, external_data_helper

    folder = path.resolve().parent
    total = 0
    tensors = [*model.graph.initializer]
    tensors += [a.t for node in model.graph.node for a in node.attribute if a.HasField("t")]
    for tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        what = f"{path}: external data of {tensor.name!r}"
        fields = {entry.key: entry.value for entry in tensor.external_data}
        location = fields.get("location", "")
        file = _file_within(folder, location, what)
        try:
            start, length = (int(fields.get(key, default)) for key, default in (("offset", "0"), ("length", "-1")))
        except ValueError:
            raise ConfigError(f"{what}: expected offset and length as numbers, got {fields}") from None
        there = file.stat().st_size
        length = there - start if length < 0 else length
        if start < 0 or start + length > there:
            raise ConfigError(f"{what}: expected bytes {start} to {start + length} of {file}, which has {there}")
        total += length
        if total > LARGEST_CONSTANTS:
            raise ConfigError(f"{what}: expected at most {LARGEST_CONSTANTS >> 20} MiB of constants in all")
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        except Exception as error:  # what the package raises for a link, for one, is its own
            raise ConfigError(f"{what}: {one_line(error)}") from None
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _file_within(folder: Path, location: str, what: str) -> Path:
    """The file of a folder that a model names, and never one elsewhere."""
    file = Path(os.path.normpath(folder / location))
    try:
        if not location or "\0" in location or not file.resolve().is_relative_to(folder):
            raise ConfigError(f"{what}: expected a file within {folder}, got {location!r}")
        if not file.is_file():
            raise ConfigError(f"{what}: {file}: no such file")
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        raise ConfigError(f"{what}: {location!r} cannot be read: {reason(error)}") from None
    return file
