"""Nodes of operators that are not known here, as `ForeignOnnx` ones: whole, with what they need to run elsewhere."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from autoconv.common.text import one_line
from autoconv.errors import ConfigError
from autoconv.layer import DTYPES
from autoconv.networks.onnx_reader.call import Call
from autoconv.networks.operators.foreign import ForeignOnnx

LARGEST_INSIDE = 1 << 16  # bytes of a constant that goes into the model, so that shapes may depend on it
RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
IR_VERSION = 8  # which has all that a single node needs, and which older installations read


def schema_of(proto: Any, opset: int) -> Any:
    """What ONNX itself says of the operator of a node; None where it has no such operator."""
    import onnx

    try:
        return onnx.defs.get_schema(proto.op_type, opset, "")
    except (onnx.defs.SchemaError, TypeError):  # TypeError: a name that is no text
        return None


def contains_nodes(proto: Any) -> bool:
    """Whether a node has others within it, as a loop has."""
    return any(attribute.HasField("g") or attribute.graphs for attribute in proto.attribute)


def _described(name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """An array of a model."""
    from onnx import helper

    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES.get(dtype, dtype))), shape
    )


def foreign(call: Call, proto: Any) -> list[str]:
    """The outputs of such a node."""
    import onnx
    from onnx import helper, numpy_helper, shape_inference

    graph = call.graph
    if call.operator in RANDOM and all(value in graph.constants for value in call.inputs if value):
        call.fail("expected no random numbers, as those made of constants alone would be the same in every run")
    names = [f"i{n}" if value else "" for n, value in enumerate(call.inputs)]
    inside = {n for n, v in enumerate(call.inputs) if v in graph.constants and graph.types[v].nbytes <= LARGEST_INSIDE}
    given = [n for n, value in enumerate(call.inputs) if value and n not in inside]
    takes = tuple((graph.types[call.inputs[n]].shape, graph.types[call.inputs[n]].dtype) for n in given)
    results = [f"o{n}" for n in range(len(proto.output))]
    alone = helper.make_node(proto.op_type, names, results, name=call.name)
    alone.attribute.extend(proto.attribute)
    try:
        made = helper.make_graph(
            [alone],
            "node",
            [_described(names[n], *taken) for n, taken in zip(given, takes, strict=True)],
            [onnx.ValueInfoProto(name=name) for name, output in zip(results, proto.output, strict=True) if output],
            [numpy_helper.from_array(graph.constants[call.inputs[n]], names[n]) for n in sorted(inside)],
        )
        opsets = [helper.make_opsetid("", call.opset)]
        model = helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION)
        model = shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:  # of the package, for a node that it does not take
        call.fail(f"no kernel here, and ONNX does not take it: {one_line(error)}")
    text = base64.b64encode(model.SerializeToString()).decode()
    found = []
    for n, info in enumerate(model.graph.output):
        tensor = info.type.tensor_type
        if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            call.fail(f"no kernel here, and the shape of its output {n} is not known before it runs")
        shape = tuple(int(dim.dim_value) for dim in tensor.shape.dim)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        operator = ForeignOnnx(proto.op_type, n, takes, shape, dtype, text)
        try:
            found.append(call.add(operator, *(call.inputs[index] for index in given)))
        except ConfigError:
            raise
        except Exception as error:  # of the package that computes constants
            call.fail(f"no kernel here, and what else runs it fails: {one_line(error)}")
    outputs = iter(found)
    return [next(outputs) if output else "" for output in proto.output]
