"""ONNX models that tests make, and what the nine networks that come with the package onnx answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from graphs import compiled
from onnx import helper, numpy_helper

from autoconv.bench.networks.models import light_folder
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.onnx_reader import microsoft, translated

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
    given = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()]
    return _model(nodes, given, constants or {}, outputs, dtype, [helper.make_opsetid("", opset)])


def model_like(
    nodes: Sequence[Any],
    inputs: Mapping[str, np.ndarray],
    constants: Mapping[str, Any],
    outputs: Sequence[str] = ("y",),
) -> Any:
    """A model of nodes, ONNX Runtime's own among them, of inputs like these, constants, and outputs of any type."""
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in inputs.items()
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(microsoft.DOMAIN, 1)]
    return _model(nodes, given, constants, outputs, onnx.TensorProto.UNDEFINED, opsets)


def _model(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    constants: Mapping[str, Any],
    outputs: Sequence[str],
    output_type: int,
    opsets: Sequence[Any],
) -> Any:
    made = [helper.make_tensor_value_info(name, output_type, None) for name in outputs]
    known = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    return helper.make_model(helper.make_graph(list(nodes), "test", inputs, made, known), opset_imports=opsets)


def compiled_model(model: Any) -> CompiledNetwork:
    """A model, ready to run by kernels of ours."""
    return compiled(translated(model, "net"))


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
