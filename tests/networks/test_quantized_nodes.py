"""`conv2d_quantized` gives what ONNX's tests of QLinearConv and ConvInteger expect, and what its reference gives."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_cases import cases_of  # noqa: E402

import autoconv  # noqa: E402

NAMES = {
    "QLinearConv": ("x", "x_scale", "x_zero_point", "w", "w_scale", "w_zero_point", "y_scale", "y_zero_point", "bias"),
    "ConvInteger": ("x", "w", "x_zero_point", "w_zero_point"),
}


def answer(node: Any, inputs: list[Any], output_dtype: str) -> Any:
    """What `conv2d_quantized` makes of a node's inputs and attributes."""
    given = dict(zip(NAMES[node.op_type], inputs, strict=False))
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    top, left, bottom, right = attributes.get("pads", [0] * 4)
    return autoconv.conv2d_quantized(
        given.pop("x"), given.pop("w"), given.pop("bias", None), output_dtype=output_dtype, mode="heuristic",
        padding=((top, bottom), (left, right)), stride=list(attributes.get("strides", [1, 1])),
        dilation=list(attributes.get("dilations", [1, 1])), groups=attributes.get("group", 1), **given,
    )  # fmt: skip


@functools.cache
def cases() -> list[Any]:
    of_both = (*cases_of("convinteger"), *cases_of("qlinearconv"))
    return [case for case in of_both if case.model.graph.node[0].op_type in NAMES]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_tests_of_the_standard(case: Any) -> None:
    for inputs, (wanted,) in case.data_sets:
        y = answer(case.model.graph.node[0], list(inputs), wanted.dtype.name)
        np.testing.assert_array_equal(y, wanted)


def test_there_are_tests_of_both_operators() -> None:
    assert {case.model.graph.node[0].op_type for case in cases()} == set(NAMES)


TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}
MIDDLE = {"uint8": 128, "int8": 0}


@pytest.mark.parametrize(("x_type", "w_type"), list(itertools.product(TYPES, TYPES)))
@pytest.mark.parametrize("geometry", [{}, {"pads": [1, 0, 2, 1], "strides": [2, 1]}, {"group": 2, "dilations": [1, 2]}])
def test_the_reference_of_the_standard(x_type: str, w_type: str, geometry: dict[str, Any]) -> None:
    """Scales that are powers of 2: then nothing is lost in float32, and ties are rounded alike for even zero points."""
    rng = np.random.default_rng(5)

    def drawn(dtype: str, shape: tuple[int, ...]) -> Any:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)

    C, K = 6, 4
    x, w = drawn(x_type, (2, C, 9, 8)), drawn(w_type, (K, C // geometry.get("group", 1), 3, 3))
    x_zero, w_zero, y_zero = (np.array(MIDDLE[t] + 6, t) for t in (x_type, w_type, x_type))
    inputs = [x, np.float32(0.5), x_zero, w, np.float32(0.25), w_zero, np.float32(256), y_zero]
    inputs.append(rng.integers(-999, 999, K, np.int32))
    for op, arrays, dtype in (
        ("QLinearConv", inputs, x_type),
        ("ConvInteger", [x, w, x_zero, w_zero], "int32"),
    ):
        node = helper.make_node(op, list(NAMES[op]), ["y"], **geometry)
        (wanted,) = ReferenceEvaluator(node).run(None, dict(zip(NAMES[op], map(np.asarray, arrays), strict=True)))
        y = answer(node, arrays, dtype)
        assert len(np.unique(y)) > 20
        np.testing.assert_array_equal(y, wanted)
