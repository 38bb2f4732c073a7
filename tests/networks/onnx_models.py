"""ONNX models that tests make, and what the nine networks that come with the package onnx answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from autoconv.bench.networks.models import light_folder

LIGHT = light_folder()


def model(
    nodes: Sequence[Any],
    inputs: Mapping[str, Sequence[int | str]],
    constants: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
    dtype: int = onnx.TensorProto.FLOAT,
) -> Any:
    """A model of nodes, of inputs of shapes and of one type, and of constants."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def node(operator: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    """A node; inputs and outputs are names with blanks between them, `-` for one that is left out."""
    return helper.make_node(
        operator, [name.strip("-") for name in inputs.split()], outputs.split(), name=outputs, **attributes
    )


def stored_output(name: str) -> np.ndarray:
    """What the network answers, whatever it is asked."""
    proto = onnx.TensorProto()
    proto.ParseFromString((LIGHT / f"light_{name}_output_0.pb").read_bytes())
    return numpy_helper.to_array(proto)
