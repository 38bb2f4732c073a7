"""ONNX's own tests of its operators, for those that are known here: the reference, and the same after all passes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import numpy_helper  # noqa: E402
from onnx_cases import cases_of  # noqa: E402

from autoconv.errors import ConfigError  # noqa: E402
from autoconv.networks.onnx_reader import translated  # noqa: E402
from autoconv.networks.onnx_reader.reader import LOWERINGS  # noqa: E402
from autoconv.networks.passes import optimized  # noqa: E402
from autoconv.networks.reference import evaluate  # noqa: E402

MODULES = (
    "abs", "add", "averagepool", "batch_normalization", "celu", "clip", "concat", "constant", "constantofshape",
    "conv", "convtranspose", "depthtospace", "div", "dropout", "einsum", "elu", "erf", "exp", "expand", "flatten",
    "gelu", "gemm", "globalaveragepool", "globalmaxpool", "groupnormalization", "hardsigmoid", "hardswish", "identity",
    "instance_normalization", "layernormalization", "leakyrelu", "log", "logsoftmax", "lrn", "matmul", "max",
    "maxpool", "mean", "meanvariancenormalization", "min", "mish", "mul", "neg", "pad", "pow", "prelu", "reciprocal",
    "reduce_log_sum", "reduce_log_sum_exp", "reducel1", "reducel2", "reducemax", "reducemean", "reducemin",
    "reducesum", "reducesumsquare", "relu", "reshape", "resize", "rmsnormalization", "selu", "shape", "sigmoid",
    "slice", "softmax", "softplus", "softsign", "spacetodepth", "split", "sqrt", "squeeze", "sub", "sum", "swish",
    "tanh", "tile", "transpose", "unsqueeze", "upsample",
)  # fmt: skip

# What is refused, by the name of a case, and what the message says.
REFUSED = {
    r"argmax": "expected one output",
    r"training_mode|training_dropout": "training|does not give here",
    r"dropout_default_mask": "does not give here",
    r"empty_set|zero_size|start_out_of_bounds": "expected|nothing is left",
    r"identity_(sequence|opt)": "known rank",
}
KNOWN_NOW = ("scales", "roi", "min", "max", "value", "t")  # inputs that shapes or expressions depend on


def cases(module: str) -> list[Any]:
    """The cases of one module of the package, for operators that are known here."""
    return [c for c in cases_of(module) if len(c.model.graph.node) == 1 and c.model.graph.node[0].op_type in LOWERINGS]


def with_constants(case: Any, inputs: list[Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """The model with those inputs as constants that have to be known when it is read, and the other inputs."""
    model, left = onnx.ModelProto(), {}
    model.CopyFrom(case.model)
    for info, given in zip(model.graph.input, inputs, strict=False):
        array = np.asarray(given) if not isinstance(given, list) else None
        if array is not None and (array.dtype.kind in "iub" or array.size == 0 or info.name in KNOWN_NOW):
            model.graph.initializer.append(numpy_helper.from_array(array, info.name))
        elif array is not None:
            left[info.name] = array
    return model, left


@pytest.mark.parametrize("module", MODULES)
def test_onnx_nodes(module: str) -> None:
    found = cases(module)
    assert found
    for case in found:
        refusal = next((why for name, why in REFUSED.items() if re.search(name, case.name)), None)
        for inputs, outputs in case.data_sets:
            model, left = with_constants(case, inputs)
            if refusal is not None:
                with pytest.raises(ConfigError, match=refusal):
                    translated(model, case.name)
                continue
            graph = translated(model, case.name)
            for again in (graph, optimized(graph)):
                got = evaluate(again, left)
                for info, expected in zip(model.graph.output, outputs, strict=True):
                    assert got[info.name].shape == np.shape(expected), case.name
                    rounded = np.asarray(expected).dtype.name == "bfloat16"
                    np.testing.assert_allclose(
                        np.asarray(got[info.name], np.float64), np.asarray(expected, np.float64),
                        rtol=2**-7 if rounded else case.rtol,
                        atol=1e-5, err_msg=case.name,
                    )  # fmt: skip
