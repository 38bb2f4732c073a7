"""ONNX Runtime's own operators on integers in terms of ours: what its quantiser writes in its QOperator format.

All but products are operators on floats that the integers stand for, whose result is rounded to integers again. So they
become those operators, between what brings integers to floats and back, as passes know it from the QDQ format.

Source: ONNX Runtime, "Contrib operators", docs/ContribOperators.md, domain com.microsoft.
"""

from __future__ import annotations

import copy
import functools

import numpy as np

from autoconv.algorithm import Array
from autoconv.common.epilogue.quantization import Quantization
from autoconv.networks.onnx_reader import arithmetic, normalisation, shapes, windows
from autoconv.networks.onnx_reader.call import Call, Lowering
from autoconv.networks.onnx_reader.quantized import known, operands, product, rows, scales, typed, zero_points
from autoconv.networks.operators.quantized import DEQUANTIZE, QuantizedMatMul, quantize
from autoconv.networks.operators.shapes import Transpose

DOMAIN = "com.microsoft"


def _check(call: Call, arrays: tuple[int, ...], meanings: tuple[int, ...]) -> None:
    """Refuse what is not computed here: `meanings` are the places of scales, each followed by its zero point."""
    there = tuple(n for n in meanings if call.has(n))
    if not typed(call, arrays, there):
        given = ", ".join(str(call.type(n)) for n in (*arrays, *there))
        call.fail(f"expected arrays of uint8 or int8 and scales of float32, got {given}")
    if not known(call, *(place for n in meanings for place in (n, n + 1))):
        call.fail("expected scales and zero points that are constants")


def _float(call: Call, array: int) -> str:
    """What an array stands for, whose scale and zero point follow it."""
    found = operands(call, (array + 1, array + 2), "x", call.type(array).dtype)
    return call.add(DEQUANTIZE, call.value(array), *found)


def _with(call: Call, *inputs: str) -> Call:
    """The same node with other inputs."""
    other = copy.copy(call)
    other.inputs = list(inputs)
    return other


def _rounded(call: Call, value: str, scale: int, dtype: str) -> str:
    """Integers of floats, by a scale and the zero point that follows it."""
    return call.add(quantize(dtype), value, *operands(call, (scale, scale + 1), "y", dtype))


def _of_floats(lowering: Lowering, arrays: int, call: Call) -> str:
    """An operator on so many arrays, each with its scale and zero point, before those of the result."""
    places, last = tuple(range(0, 3 * arrays, 3)), 3 * arrays
    _check(call, places, (*(n + 1 for n in places), last))
    if call.attribute("channels_last", 0):
        call.fail("channels_last=1: expected images with channels first")
    value = lowering(_with(call, *(_float(call, n) for n in places)))
    if not isinstance(value, str):
        call.fail(f"expected images of one or two dimensions (N, C, [H,] W), got {call.type(0)}")
    return _rounded(call, value, last, call.type(0).dtype)


def _concat(call: Call) -> str:
    """Each is brought to the scale of the result by itself, so that only integers are moved."""
    places = tuple(range(2, len(call.inputs), 3))
    _check(call, places, (0, *(n + 1 for n in places)))
    dtype = call.type(2).dtype
    parts = [_rounded(call, _float(call, n), 0, dtype) for n in places]
    return shapes.concat(_with(call, *parts))


def _softmax(call: Call) -> str:
    other = copy.copy(call)
    other.opset = int(call.required("opset"))
    return _of_floats(normalisation.LOWERINGS["Softmax"], 1, other)


def _gemm(call: Call) -> str:
    """`alpha * a b + c`, where `c` are sums as those of the product."""
    _check(call, (0, 3), (1, 4, 7))
    if len(call.type(0).shape) != 2 or len(call.type(3).shape) != 2 or not known(call, 3, 6):
        call.fail(f"expected two matrices, the second a constant, got {call.type(0)} and {call.type(3)}")
    numbers = rows(call, 3, 5, bool(call.attribute("transB", 0)))
    scale: Array = scales(call, 1, "a_scale") * scales(call, 4, "b_scale", len(numbers))
    scale = scale * np.float32(call.attribute("alpha", 1.0))
    dtype, y_zero = "float32", 0
    if call.has(7):
        dtype = call.type(8).dtype if call.has(8) else call.type(0).dtype
        scale = scale / scales(call, 7, "y_scale")
        y_zero = int(zero_points(call, 8, "y_zero_point", dtype)[0])
    bias = None
    if call.has(6):
        sums = call.graph.constants[call.value(6)]
        if sums.size not in (1, len(numbers)) or sums.shape[:-1] not in ((), (1,)):
            call.fail(f"C: expected one row of {len(numbers)}, got {call.type(6)}")
        bias = np.broadcast_to(sums.reshape(-1), (len(numbers),))
    a = call.value(0)
    if call.attribute("transA", 0):
        a = call.add(Transpose((1, 0)), a)
    a_zero = zero_points(call, 2, "a_zero_point", call.type(0).dtype)
    meaning = Quantization(scale.astype(np.float32), int(a_zero[0]), y_zero, bias)
    return product(call, QuantizedMatMul(output_dtype=dtype), a, numbers, meaning)


LOWERINGS: dict[str, Lowering] = {
    "QGemm": _gemm,
    "QLinearConcat": _concat,
    "QLinearSoftmax": _softmax,
    **{
        f"QLinear{name}": functools.partial(_of_floats, table[name], arrays)
        for table, name, arrays in (
            (arithmetic.LOWERINGS, "Add", 2),
            (arithmetic.LOWERINGS, "LeakyRelu", 1),
            (arithmetic.LOWERINGS, "Mul", 2),
            (arithmetic.LOWERINGS, "Sigmoid", 1),
            (windows.LOWERINGS, "AveragePool", 1),
            (normalisation.LOWERINGS, "GlobalAveragePool", 1),
        )
    },
}
