"""`conv2d` and its gradients on arrays, planned when a shape is first seen."""

from __future__ import annotations

import functools
import operator
from typing import Any

from autoconv.algorithm import Array
from autoconv.common import arguments
from autoconv.common.types import INTEGERS
from autoconv.errors import ArrayError, LayerError, PlanError
from autoconv.functional.operands import Padding, arrays_of, computed, extents_of, handed_back
from autoconv.layer import ConvLayer, Layout, Pair
from autoconv.tuning.choice import MODES
from autoconv.tuning.planner import REMEMBERED

Operands = tuple[Array, Array, Array | None, Array | None, Array | None]  # those of `Plan.run`, up to `out`


def conv2d(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    stride: int | Pair = 1,
    padding: Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Layout = "NCHW",
    residual: Array | None = None,
    activation: str | None = None,
    slope: Array | None = None,
    out: Array | None = None,
    **options: Any,
) -> Array:
    """2-D convolution of a batch of images: `activation(conv(x, w) + bias + residual)`.

    Parameters
    ----------
    x : array of shape (N, C, H, W) or (N, H, W, C)
        An NCHW array whose memory is channels last is computed as it lies, and gives its like.
    w : array of shape (K, C/groups, R, S) or (K, R, S, C/groups)
        The filters.
    bias : array of K values, optional
    stride : int or (height, width)
    padding : int, (height, width), ((top, bottom), (left, right)), "same" or "valid"
    dilation : int or (height, width)
    groups : int
    layout : "NCHW" or "NHWC"
        These five as for `ConvLayer`.
    residual : array of the output's shape, optional
    activation : str, optional, as for `ConvLayer`
    slope : array of K values, optional
        Exactly when the activation is "prelu": what negative values of each channel are multiplied by.
    out : array of the output's shape, optional
        Where the output goes; it is then also what is returned.
    **options
        As for `plan`; by default mode "hybrid" with a budget of 0.2 s, once per shape, on the
        device on which `x` lies.

    Returns
    -------
    array of shape (N, K, P, Q) or (N, P, Q, K)
        Of the same kind as `x`: NumPy, or another that speaks DLPack.

    Raises
    ------
    ArrayError
        For an array that `Plan.run` refuses, that has not four dimensions, or is one of bytes: before anything is
        planned.
    LayerError
        For what is no valid convolution, as `ConvLayer` says.
    PlanError
        For what `plan` refuses, and when no candidate satisfies the options.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.ones((1, 2, 5, 5), np.float32), np.ones((3, 2, 3, 3), np.float32)
    >>> conv2d(x, w, padding=1, mode="heuristic").shape
    (1, 3, 5, 5)
    """
    arrays, layout, back = arrays_of(layout, options, x=x, w=w, residual=residual, out=out)
    N, C, H, W = extents_of(arrays["x"], layout)
    K, _, R, S = extents_of(arrays["w"], layout)
    layer = _layer(
        (N, C, H, W, K, R, S),
        (stride, padding, dilation, groups),
        (arrays["x"].dtype, layout, "fwd"),
        (bias is not None, residual is not None, activation),
    )
    y = computed(layer, options, arrays["x"], arrays["w"], bias, arrays["residual"], arrays["out"], slope)
    return handed_back(back(y), x, out, options)


def conv2d_dgrad(
    dy: Array,
    w: Array,
    *,
    input_size: Pair,
    stride: int | Pair = 1,
    padding: Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Layout = "NCHW",
    out: Array | None = None,
    **options: Any,
) -> Array:
    """Gradient of `conv2d` with respect to its input, `dx`: the adjoint of `conv2d` for fixed filters.

    Parameters
    ----------
    dy : array of shape (N, K, P, Q) or (N, P, Q, K)
        The gradient with respect to the output of `conv2d`.
    w : array of shape (K, C/groups, R, S) or (K, R, S, C/groups)
        The filters that `conv2d` took.
    input_size : (H, W)
        Height and width of the input, which those of the output do not determine when strides skip pixels.
    stride : int or (height, width)
    padding : int, (height, width), ((top, bottom), (left, right)), "same" or "valid"
    dilation : int or (height, width)
    groups : int
    layout : "NCHW" or "NHWC"
        These five as for `ConvLayer`, as `conv2d` took them.
    out : array of the input's shape, optional
        Where the gradient goes; it is then also what is returned.
    **options
        As for `plan`; by default mode "hybrid" with a budget of 0.2 s, once per shape, on the
        device on which `dy` lies.

    Returns
    -------
    array of shape (N, C, H, W) or (N, H, W, C)
        `dx`, of the same kind as `dy`.

    Raises
    ------
    ArrayError, LayerError, PlanError
        As for `conv2d`, and for shapes that do not fit each other.

    Examples
    --------
    >>> import numpy as np
    >>> dy, w = np.ones((1, 3, 4, 4), np.float32), np.ones((3, 2, 3, 3), np.float32)
    >>> conv2d_dgrad(dy, w, input_size=(8, 8), stride=2, padding=1, mode="heuristic").shape
    (1, 2, 8, 8)
    """
    arrays, layout, back = arrays_of(layout, options, dy=dy, w=w, out=out)
    operands = arrays["dy"], arrays["w"], None, None, arrays["out"]
    groups = arguments.integer(groups, "groups", 1)
    dx = _dgrad(operands, _size(input_size, "input_size"), (stride, padding, dilation, groups), layout, options)
    return handed_back(back(dx), dy, out, options)


def conv2d_wgrad(
    x: Array,
    dy: Array,
    *,
    filter_size: Pair,
    stride: int | Pair = 1,
    padding: Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Layout = "NCHW",
    out: Array | None = None,
    **options: Any,
) -> Array:
    """Gradient of `conv2d` with respect to its filters, `dw`: the adjoint of `conv2d` for a fixed input.

    Parameters
    ----------
    x : array of shape (N, C, H, W) or (N, H, W, C)
        The input that `conv2d` took.
    dy : array of shape (N, K, P, Q) or (N, P, Q, K)
        The gradient with respect to its output.
    filter_size : (R, S)
        Height and width of a filter.
    stride : int or (height, width)
    padding : int, (height, width), ((top, bottom), (left, right)), "same" or "valid"
    dilation : int or (height, width)
    groups : int
    layout : "NCHW" or "NHWC"
        These five as for `ConvLayer`, as `conv2d` took them.
    out : array of the filters' shape, optional
        Where the gradient goes; it is then also what is returned.
    **options
        As for `plan`; by default mode "hybrid" with a budget of 0.2 s, once per shape, on the
        device on which `x` lies.

    Returns
    -------
    array of shape (K, C/groups, R, S) or (K, R, S, C/groups)
        `dw`, of the same kind as `x`.

    Raises
    ------
    ArrayError, LayerError, PlanError
        As for `conv2d`, and for shapes that do not fit each other.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.ones((1, 2, 8, 8), np.float32), np.ones((1, 3, 4, 4), np.float32)
    >>> conv2d_wgrad(x, dy, filter_size=(3, 3), stride=2, padding=1, mode="heuristic").shape
    (3, 2, 3, 3)
    """
    arrays, layout, back = arrays_of(layout, options, x=x, dy=dy, out=out)
    N, C, H, W = extents_of(arrays["x"], layout)
    _, K, P, Q = extents_of(arrays["dy"], layout)
    layer = _layer(
        (N, C, H, W, K, *_size(filter_size, "filter_size")),
        (stride, padding, dilation, groups),
        (arrays["x"].dtype, layout, "wgrad"),
        (False, False, None),
    )
    _agree((K, P, Q), layer)
    dw = computed(layer, options, arrays["x"], arrays["dy"], None, None, arrays["out"])
    return handed_back(back(dw), x, out, options)


def conv_transpose2d(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    output_padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Layout = "NCHW",
    out: Array | None = None,
    **options: Any,
) -> Array:
    """Transposed convolution, the adjoint of `conv2d`, with its size given as the frameworks do.

    Parameters
    ----------
    x : array of shape (N, C, H, W) or (N, H, W, C)
        The input, which is of the kind that `conv2d` gives.
    w : array of shape (C, K/groups, R, S) or (C, R, S, K/groups)
        The filters; the channels of `x` come first.
    bias : array of K values, optional
    stride : int or (height, width)
        Pixels of the result from one pixel of `x` to the next.
    padding : int or (height, width)
        Rows and columns cut from each side of the full result.
    output_padding : int or (height, width)
        Rows and columns added at the bottom and right; less than the stride or the dilation, each on its axis. Where
        it is less than the stride, `conv2d` of the result has the size of `x`.
    dilation : int or (height, width)
    groups : int
    layout : "NCHW" or "NHWC"
        These three as for `ConvLayer`.
    out : array of the result's shape, optional
        Where the result goes; it is then also what is returned.
    **options
        As for `plan`; by default mode "hybrid" with a budget of 0.2 s, once per shape, on the
        device on which `x` lies.

    Returns
    -------
    array of shape (N, K, P, Q) or (N, P, Q, K)
        With `P = (H - 1) * stride - 2 * padding + dilation * (R - 1) + output_padding + 1`, and Q
        likewise; of the same kind as `x`.

    Raises
    ------
    ArrayError, LayerError, PlanError
        As for `conv2d`, for shapes that do not fit each other, and for more `output_padding`.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.ones((1, 3, 4, 4), np.float32), np.ones((3, 2, 3, 3), np.float32)
    >>> conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, mode="heuristic").shape
    (1, 2, 8, 8)
    """
    arrays, layout, back = arrays_of(layout, options, x=x, w=w, out=out)
    device, a, b, target = options["device"], arrays["x"], arrays["w"], arrays["out"]
    _, C, H, W = extents_of(a, layout)
    C_w, K_group, R, S = extents_of(b, layout)
    if C_w != C:
        raise ArrayError(f"w has shape {tuple(w.shape)}: expected {C} in the first place, as x has channels")
    (sh, sw), (dh, dw) = arguments.pair(stride, "stride", 1), arguments.pair(dilation, "dilation", 1)
    (ph, pw), (oh, ow) = arguments.pair(padding, "padding", 0), arguments.pair(output_padding, "output_padding", 0)
    groups = arguments.integer(groups, "groups", 1)
    for name, extent in (("C", C), ("H", H), ("W", W), ("K", K_group * groups)):
        arguments.integer(extent, name, 1)
    if C % groups:
        raise LayerError(f"groups={groups}: it must divide C={C}")
    if oh >= max(sh, dh) or ow >= max(sw, dw):
        given = f"the stride {sh, sw} or the dilation {dh, dw}"
        raise ArrayError(f"output_padding={output_padding}: expected less than {given}")
    size = (H - 1) * sh - 2 * ph + dh * (R - 1) + oh + 1, (W - 1) * sw - 2 * pw + dw * (S - 1) + ow + 1
    if min(size) < 1:
        full = "x".join(str(n + 2 * p) for n, p in zip(size, (ph, pw), strict=True))
        raise LayerError(f"padding={ph, pw}: expected to leave something of {full} pixels")
    if bias is not None:
        bias = _bias(bias, K_group * groups, a.dtype, device)
    if oh >= sh or ow >= sw:  # `conv2d` of the result is larger than x, which zeros make up for
        more = (0, 0), (0, oh // sh), (0, ow // sw)
        with device.selected():
            a = device.xp.pad(a, ((0, 0), *(more if layout == "NCHW" else (*more[1:], more[0]))))
    geometry = (sh, sw), (ph, pw), (dh, dw), groups
    y = _biased((a, b, bias, None, target), size, geometry, layout, options)
    return handed_back(back(y), x, out, options)


def _biased(operands: Operands, size: Pair, geometry: Any, layout: str, options: dict[str, Any]) -> Array:
    """What `_dgrad` gives; a bias that no kernel adds is added afterwards."""
    a, b, bias, _, target = operands
    # Of the kernels for dgrad on a GPU one alone adds a bias, and it is the slowest.
    if bias is None or options["device"].kind == "cpu":
        try:
            return _dgrad(operands, size, geometry, layout, options)
        except PlanError:
            if bias is None or options.get("mode") in (None, *MODES):
                raise  # one that is named may add none
    if target is not None and options["device"].overlap(target, bias):
        raise ArrayError("out: expected memory of its own, got an array that overlaps bias")
    y = _dgrad((a, b, None, None, target), size, geometry, layout, options)
    with options["device"].selected():
        y += bias.reshape((-1, 1, 1)) if layout == "NCHW" else bias
    return y


def _dgrad(operands: Operands, size: Pair, geometry: Any, layout: str, options: dict[str, Any]) -> Array:
    """`conv2d_dgrad` of arrays as kernels take them, plus a bias for each channel where there is one."""
    dy, w, bias, _, _ = operands
    N, K, P, Q = extents_of(dy, layout)
    K_w, C_group, R, S = extents_of(w, layout)
    layer = _layer(
        (N, C_group * geometry[-1], *size, K_w, R, S),
        geometry,
        (dy.dtype, layout, "dgrad"),
        (bias is not None, False, None),
    )
    _agree((K, P, Q), layer)
    return computed(layer, options, *operands)


def _size(value: Any, name: str) -> Pair:
    """A pair of integers."""
    try:
        height, width = map(operator.index, value)
    except (TypeError, ValueError):
        raise ArrayError(f"{name}={value!r}: expected a pair of integers (height, width)") from None
    return height, width


def _bias(bias: Any, K: int, dtype: Any, device: Any) -> Any:
    """The bias as an array of the device, with its shape and type checked."""
    own = bias if device.owns(bias) else device.adopt(bias, "bias")
    if own.shape != (K,) or own.dtype != dtype:
        raise ArrayError(f"bias is {own.dtype} {tuple(own.shape)}: expected {dtype} {(K,)}")
    return own


def _agree(given: tuple[int, int, int], layer: ConvLayer) -> None:
    """Refuse a gradient of other extents than the layer's output."""
    expected = (layer.K, layer.P, layer.Q)
    if given != expected:
        raise ArrayError(f"dy has (K, P, Q) = {given}: expected {expected}, from the other arguments")


def _layer(extents: Any, geometry: Any, kind: Any, epilogue: Any) -> ConvLayer:
    types = _types(geometry)  # 1.0 and True are equal to 1, but refused
    try:
        return _remembered_layer(extents, *geometry, kind, epilogue, types)
    except TypeError:  # an unhashable spelling, such as a list
        return _remembered_layer.__wrapped__(extents, *geometry, kind, epilogue, types)


def _types(value: Any) -> Any:
    """The types of what tuples are made of."""
    return tuple(map(_types, value)) if type(value) is tuple else type(value)


@functools.lru_cache(maxsize=REMEMBERED)
def _remembered_layer(
    extents: Any, stride: Any, padding: Any, dilation: Any, groups: Any, kind: Any, epilogue: Any, types: Any
) -> ConvLayer:
    N, C, H, W, K, R, S = extents
    dtype, layout, direction = kind
    if dtype.name in INTEGERS:
        raise ArrayError(f"arrays of {dtype}: expected floating point; conv2d_quantized takes bytes")
    bias, residual, activation = epilogue
    return ConvLayer(
        N=N, C=C, H=H, W=W, K=K, R=R, S=S, stride=stride, padding=padding, dilation=dilation, groups=groups,
        dtype=dtype, layout=layout, direction=direction, bias=bias, residual=residual, activation=activation,
    )  # fmt: skip
