"""`conv2d_quantized`: the convolution of integers that stand for real numbers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from autoconv.algorithm import Array
from autoconv.common.arrays import like
from autoconv.common.epilogue.quantization import MOST, Quantization, finished, positive
from autoconv.common.types import INTEGERS
from autoconv.errors import ArrayError, LayerError
from autoconv.functional.operands import Padding, arrays_of, computed, extents_of
from autoconv.layer import ConvLayer, Layout, Pair


def conv2d_quantized(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    x_scale: float = 1.0,
    y_scale: float = 1.0,
    w_scale: Any = 1.0,
    x_zero_point: int = 0,
    y_zero_point: int = 0,
    w_zero_point: Any = 0,
    output_dtype: Any = "int32",
    stride: int | Pair = 1,
    padding: Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Layout = "NCHW",
    activation: Literal["relu"] | None = None,
    **options: Any,
) -> Array:
    """2-D convolution of integers that stand for `(integer - zero point) * scale`.

    With an output of uint8 or int8 it is ONNX's QLinearConv, with int32 its ConvInteger, and with float32 the former
    before it is quantised again. `Quantization` tells how it is rounded; the scales are combined in float32, as
    `x_scale * w_scale / y_scale`.

    Parameters
    ----------
    x : array of uint8 or int8, shape (N, C, H, W) or (N, H, W, C)
        An NCHW array whose memory is channels last is computed as it lies, and gives its like.
    w : array of int8 or uint8, shape (K, C/groups, R, S) or (K, R, S, C/groups)
        The filters.
    bias : array of K integers, optional
        In units of `x_scale * w_scale`, added to the sums.
    x_scale, y_scale : float
        Of the input and the output; an output of int32 has none.
    w_scale : float or array of K floats
        Of the filters, likewise.
    x_zero_point, y_zero_point : int
        What stands for 0; an output of int32 or float32 has none.
    w_zero_point : int or array of K integers
        What stands for 0 among the filters. Best 0 of int8 and 128 of uint8: any other costs a second convolution.
    output_dtype : "int32", "uint8", "int8" or "float32"
    stride, padding, dilation, groups, layout, activation
        As for `ConvLayer`.
    **options
        As for `conv2d`.

    Returns
    -------
    array of output_dtype, shape (N, K, P, Q) or (N, P, Q, K)
        Of the same kind as `x`.

    Raises
    ------
    ArrayError
        For arrays, scales or zero points that do not fit.
    LayerError
        For what is no valid convolution, or could overflow int32.
    PlanError
        For what `plan` refuses.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.full((1, 2, 5, 5), 130, np.uint8), np.ones((3, 2, 3, 3), np.int8)
    >>> y = conv2d_quantized(x, w, x_zero_point=128, w_scale=0.25, output_dtype="int8", mode="heuristic")
    >>> y.dtype.name, int(y[0, 0, 0, 0])
    ('int8', 9)
    """
    arrays, layout, back = arrays_of(layout, options, x=x, w=w)
    if (name := arrays["x"].dtype.name) not in INTEGERS:
        raise ArrayError(f"x is {name}: expected uint8 or int8")
    N, C, H, W = extents_of(arrays["x"], layout)
    K, _, R, S = extents_of(arrays["w"], layout)
    layer = ConvLayer(
        N=N, C=C, H=H, W=W, K=K, R=R, S=S, stride=stride, padding=padding, dilation=dilation,
        groups=groups, dtype=arrays["x"].dtype, layout=layout, activation=activation,
        output_dtype=output_dtype,
    )  # fmt: skip
    filters, zero = _signed(arrays["w"], w_zero_point, layer)
    x_factor, w_factor, y_factor = (
        positive(*given) for given in (("x_scale", x_scale), ("w_scale", w_scale, K), ("y_scale", y_scale))
    )
    scale: Any = 1.0
    if layer.output_dtype != "int32":
        with np.errstate(over="ignore", under="ignore"):  # what comes of it is checked
            scale = (x_factor * w_factor / y_factor).reshape(w_factor.shape)
    meaning = Quantization(scale, x_zero_point, y_zero_point, bias)
    if not zero.any():
        return like(x, back(computed(layer, options, arrays["x"], filters, meaning)))
    words = meaning.operand(layer)
    if 255 * 255 * (C // layer.groups * R * S) + int(np.abs(words[:K].astype(np.int64)).max()) > MOST:
        raise LayerError(f"w_zero_point={w_zero_point!r}: expected 0 (of uint8, 128), as sums could overflow int32")
    sums = _sums(layer, arrays["x"], filters, x_zero_point, options)
    seen = _sums(
        layer.replace(K=layer.groups), arrays["x"], np.ones((layer.groups, *filters.shape[1:]), np.int8),
        x_zero_point, options,
    )  # fmt: skip  # of the pixels alone, for every group
    channel = 1 if layout == "NCHW" else 3
    sums -= np.repeat(seen, K // layer.groups, axis=channel) * zero.reshape((-1, 1, 1) if channel == 1 else (-1,))
    return like(x, back(finished(layer, sums, words, channel)))


def _signed(w: Array, zero_point: Any, layer: ConvLayer) -> tuple[Array, np.ndarray]:
    """Filters as int8, and the zero points of each as int32 that these have."""
    try:
        zero = np.asarray(zero_point)
    except ValueError:  # lists of different lengths
        zero = np.array(None)
    if w.dtype not in (np.int8, np.uint8):
        raise ArrayError(f"w is {w.dtype}: expected int8 or uint8")
    limits = np.iinfo(w.dtype)
    if zero.dtype.kind not in "iu" or zero.shape not in ((), (1,), (layer.K,)):
        raise ArrayError(f"w_zero_point: expected one integer or K={layer.K}, got {zero.dtype} of shape {zero.shape}")
    zero = np.broadcast_to(zero.reshape(-1), (layer.K,))
    if (outside := (zero < limits.min) | (zero > limits.max)).any():
        at = int(outside.argmax())
        raise ArrayError(f"w_zero_point[{at}]={zero[at]}: expected {limits.min} to {limits.max}, as w is {w.dtype}")
    zero = zero.astype(np.int32)
    return (w, zero) if w.dtype == np.int8 else ((w ^ 128).view(np.int8), zero - 128)


def _sums(layer: ConvLayer, x: Array, w: Array, x_zero_point: int, options: dict[str, Any]) -> Array:
    """The sums of a layer, without bias."""
    plain = layer.replace(output_dtype="int32", activation=None)
    return computed(plain, options, x, w, Quantization(x_zero_point=x_zero_point))
