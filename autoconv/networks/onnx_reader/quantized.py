"""ONNX's quantised operators in terms of ours.

What has to be known when a network is read are filters, scales and zero points. Where one of them is computed, and for
types other than uint8 and int8, the operator is a foreign one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autoconv.common.epilogue.quantization import Quantization
from autoconv.common.types import INTEGERS
from autoconv.errors import ArrayError, ConfigError, LayerError
from autoconv.networks.onnx_reader.call import Call, Lowering
from autoconv.networks.onnx_reader.windows import Window
from autoconv.networks.operators.quantized import (
    DEQUANTIZE,
    QuantizedConv,
    QuantizedMatMul,
    QuantizedProduct,
    quantize,
)
from autoconv.networks.quantization import add_operands

Array = np.ndarray[Any, Any]


def known(call: Call, *indices: int) -> bool:
    """Whether so many inputs are constants, where they are given."""
    return all(call.inputs[n] in call.graph.constants for n in indices if call.has(n))


def typed(call: Call, integers: tuple[int, ...], floats: tuple[int, ...] = ()) -> bool:
    """Whether inputs are of the types that are computed with here."""
    return all(call.type(n).dtype in INTEGERS for n in integers) and all(
        call.type(n).dtype == "float32" for n in floats
    )


def _of_size(call: Call, name: str, value: Array, count: int) -> Array:
    if value.ndim > 1 or value.size not in (1, count):
        expected = "one value" if count == 1 else f"one value or {count}"
        call.fail(f"{name}: expected {expected}, got shape {value.shape}")
    return value.reshape(-1) if value.size == count else np.broadcast_to(value.reshape(-1), (count,))


def scales(call: Call, index: int, name: str, count: int = 1) -> Array:
    """Positive numbers: one, or one for each of so many filters or channels."""
    value = _of_size(call, name, call.graph.constants[call.value(index)], count)
    wrong = ~((value >= np.finfo(np.float32).tiny) & np.isfinite(value))
    if wrong.any():
        at = int(wrong.argmax())
        call.fail(f"{name}[{at}]={value[at]}: expected a positive normal number of float32")
    return value


def zero_points(call: Call, index: int, name: str, dtype: str, count: int = 1) -> Array:
    """What stands for 0, as int32; 0 where that is left out."""
    if not call.has(index):
        return np.zeros(count, np.int32)
    value = call.graph.constants[call.value(index)]
    if value.dtype.name != dtype:
        call.fail(f"{name}: expected {dtype}, as what it belongs to, got {value.dtype}")
    return _of_size(call, name, value, count).astype(np.int32)


def product(call: Call, operator: QuantizedProduct, x: str, numbers: Array, meaning: Quantization) -> str:
    """The node of a product of integers; what does not fit is refused."""
    try:
        inputs = add_operands(call.graph, call.name, operator, x, numbers, meaning)
    except (ArrayError, ConfigError, LayerError) as error:
        call.fail(str(error))
    return call.add(operator, *inputs)


def _meaning(call: Call, columns: int, bias: Array | None) -> Quantization:
    """Of the inputs that QLinearConv and QLinearMatMul have in common, for so many filters or columns."""
    x, w, y = (scales(call, n, name, count) for n, name, count in zip((1, 4, 6), SCALES, (1, columns, 1), strict=True))
    x_zero = zero_points(call, 2, "x_zero_point", call.type(0).dtype)
    y_zero = zero_points(call, 7, "y_zero_point", call.type(7).dtype)
    return Quantization(x * w / y, int(x_zero[0]), int(y_zero[0]), bias)


SCALES = ("x_scale", "w_scale", "y_scale")


def _filters(call: Call, window: Window, w: int, w_zero: int) -> Array:
    """Those of a convolution, less their zero points."""
    shape = call.type(w).shape
    zero = zero_points(call, w_zero, "w_zero_point", call.type(w).dtype, shape[0])
    return call.graph.constants[window.wide(call.value(w))].astype(np.int32) - zero.reshape(-1, 1, 1, 1)


def _conv(window: Window, output_dtype: str) -> QuantizedConv:
    return QuantizedConv(
        stride=window.pair(window.stride), padding=window.pair(window.padding(), (0, 0)),
        dilation=window.pair(window.dilation), groups=window.call.attribute("group", 1), output_dtype=output_dtype,
    )  # fmt: skip


def _qlinear_conv(call: Call) -> str | None:
    if not known(call, *range(1, 9)) or not typed(call, (0, 3, 7), (1, 4, 6)):
        return None
    window = Window(call, call.type(3).shape[2:])
    if window.rank == 3:
        return None
    numbers = _filters(call, window, 3, 5)
    bias = call.graph.constants[call.value(8)] if call.has(8) else None
    meaning = _meaning(call, len(numbers), bias)
    return window.back(product(call, _conv(window, call.type(7).dtype), window.wide(call.value(0)), numbers, meaning))


def _conv_integer(call: Call) -> str | None:
    if not known(call, 1, 2, 3) or not typed(call, (0, 1)):
        return None
    window = Window(call, call.type(1).shape[2:])
    if window.rank == 3:
        return None
    x_zero = zero_points(call, 2, "x_zero_point", call.type(0).dtype)
    meaning = Quantization(x_zero_point=int(x_zero[0]))
    return window.back(
        product(call, _conv(window, "int32"), window.wide(call.value(0)), _filters(call, window, 1, 3), meaning)
    )


def _are_matrices(call: Call, a: int, b: int, *scalars: int) -> bool:
    """Whether one side is rows, the other a constant matrix, and others have single elements."""
    one = all(call.type(n).shape in ((), (1,)) for n in scalars if call.has(n))
    return one and len(call.type(a).shape) > 1 and len(call.type(b).shape) == 2


def rows(call: Call, b: int, b_zero: int, transposed: bool = False) -> Array:
    """The columns of a constant matrix as rows, less their zero points; it may have them as rows."""
    matrix = call.graph.constants[call.value(b)].astype(np.int32)
    columns = matrix if transposed else matrix.T
    zero = zero_points(call, b_zero, "b_zero_point", call.type(b).dtype, len(columns))
    return np.ascontiguousarray(columns - zero[:, None])


def _qlinear_matmul(call: Call) -> str | None:
    if (
        not known(call, *range(1, 8))
        or not typed(call, (0, 3, 7), (1, 4, 6))
        or not _are_matrices(call, 0, 3, 1, 2, 6, 7)
    ):
        return None
    numbers = rows(call, 3, 5)
    operator = QuantizedMatMul(output_dtype=call.type(7).dtype)
    return product(call, operator, call.value(0), numbers, _meaning(call, len(numbers), None))


def _matmul_integer(call: Call) -> str | None:
    if not known(call, 1, 2, 3) or not typed(call, (0, 1)) or not _are_matrices(call, 0, 1, 2):
        return None
    a_zero = zero_points(call, 2, "a_zero_point", call.type(0).dtype)
    meaning = Quantization(x_zero_point=int(a_zero[0]))
    return product(call, QuantizedMatMul(), call.value(0), rows(call, 1, 3), meaning)


def operands(
    call: Call, indices: tuple[int, int], prefix: str, dtype: str, shape: tuple[int, ...] = ()
) -> tuple[str, str]:
    """Scales, and zero points of a type, as what quantises takes them: in float32 and of a shape."""
    count = math.prod(shape)
    scale = scales(call, indices[0], f"{prefix}_scale", count)
    zero = zero_points(call, indices[1], f"{prefix}_zero_point", dtype, count)
    first, second = (call.add_constant(a.astype(np.float32).reshape(shape)) for a in (scale, zero))
    return first, second


def _linear(call: Call, dtype: str, prefix: str) -> tuple[str, str] | None:
    """Scales, and zero points of a type, in float32; for each channel of an axis where they are several."""
    if not known(call, 1, 2) or not typed(call, (), (1,)) or call.attribute("block_size", 0):
        return None
    shape, along = call.type(0).shape, call.type(1).shape
    axis = call.axis(1, len(shape)) if len(along) == 1 and along != (1,) else None
    count = 1 if axis is None else shape[axis]
    to = () if axis is None else (count, *[1] * (len(shape) - axis - 1))
    return operands(call, (1, 2), prefix, dtype, to)


def _quantize_linear(call: Call) -> str | None:
    from onnx import helper

    given = int(call.attribute("output_dtype", 0))
    named = helper.tensor_dtype_to_np_dtype(given).name if given else "uint8"
    dtype = call.type(2).dtype if call.has(2) else named
    if call.type(0).dtype != "float32" or dtype not in INTEGERS or call.attribute("precision", 0) not in (0, 1):
        return None
    found = _linear(call, dtype, "y")
    return None if found is None else call.add(quantize(dtype), call.value(0), *found)


def _dequantize_linear(call: Call) -> str | None:
    dtype = call.type(0).dtype
    if dtype not in (*INTEGERS, "int32") or int(call.attribute("output_dtype", 1)) not in (0, 1):
        return None
    if dtype == "int32" and call.has(2) and (not known(call, 2) or call.graph.constants[call.value(2)].any()):
        return None
    found = _linear(call, dtype, "x")
    return (
        None if found is None else call.graph.add(call.name, DEQUANTIZE, call.value(0), *found)
    )  # no constant: a pass folds


LOWERINGS: dict[str, Lowering] = {
    "ConvInteger": _conv_integer,
    "DequantizeLinear": _dequantize_linear,
    "MatMulInteger": _matmul_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "QuantizeLinear": _quantize_linear,
}
