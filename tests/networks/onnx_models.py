"""ONNX models that tests make, and the nine networks that come with the package onnx, with weights drawn at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NETWORKS = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)


def model(
    nodes: Sequence[Any],
    inputs: Mapping[str, Sequence[int | str]],
    constants: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
) -> Any:
    """A model of nodes, of float32 inputs of shapes, and of constants."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def node(operator: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    """A node; inputs and outputs are names with blanks between them, `-` for one that is left out."""
    return helper.make_node(
        operator, [name.strip("-") for name in inputs.split()], outputs.split(), name=outputs, **attributes
    )


def light(name: str) -> Any:
    """One of the nine networks as it comes: every weight of an array is the same constant."""
    return onnx.load(LIGHT / f"light_{name}.onnx")


def stored_output(name: str) -> np.ndarray:
    """What the network answers, whatever it is asked."""
    proto = onnx.TensorProto()
    proto.ParseFromString((LIGHT / f"light_{name}_output_0.pb").read_bytes())
    return numpy_helper.to_array(proto)


def randomised(network: Any, seed: int = 0) -> Any:
    """The network with weights drawn at random: filters scaled by their fan-in, batch normalisation near identity."""
    rng = np.random.default_rng(seed)
    takers: dict[str, tuple[Any, int]] = {}
    for taker in network.graph.node:
        for place, name in enumerate(taker.input):
            takers.setdefault(name, (taker, place))
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in network.graph.initializer}
    found = onnx.ModelProto()
    found.CopyFrom(network)
    del found.graph.node[:]
    for maker in network.graph.node:
        if maker.op_type != "ConstantOfShape":
            found.graph.node.append(maker)
            continue
        shape, name = tuple(map(int, shapes[maker.input[0]])), maker.output[0]
        value = _drawn(rng, shape, *takers[name], takers) if name in takers else np.zeros(shape)
        found.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return found


def _drawn(
    rng: np.random.Generator, shape: tuple[int, ...], taker: Any, place: int, takers: Mapping[str, tuple[Any, int]]
) -> np.ndarray:
    while taker.op_type == "Unsqueeze":
        taker, place = takers[taker.output[0]]
    near_one = (taker.op_type, place) in (("BatchNormalization", 1), ("BatchNormalization", 4), ("Mul", 1))
    if taker.op_type in ("Conv", "Gemm") and place == 1:
        return rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
    return 0.1 * rng.standard_normal(shape) + near_one
