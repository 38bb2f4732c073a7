"""The oracle: convolution in float64, written to be read rather than to be fast."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.common.epilogue import activations
from autoconv.layer import ConvLayer


def _images(array: Array, layer: ConvLayer) -> Array:
    """A batch in the layer's layout as an array of shape N, groups, channels, height, width."""
    if layer.layout == "NHWC":
        array = array.transpose(CHANNELS_FIRST)
    N, channels, height, width = array.shape
    return array.reshape(N, layer.groups, channels // layer.groups, height, width)


def _filters(array: Array, layer: ConvLayer) -> Array:
    """Filters in the layer's layout as an array of shape groups, filters, channels, R, S."""
    if layer.layout == "NHWC":
        array = array.transpose(CHANNELS_FIRST)
    return array.reshape(layer.groups, layer.K // layer.groups, *array.shape[1:])


def _meetings(outputs: int, inputs: int, stride: int, offset: int) -> tuple[slice, slice]:
    """The outputs that one tap of the filter connects with an input inside the image, and those inputs."""
    first = max(0, -(offset // stride))
    count = max(0, min(outputs, (inputs - 1 - offset) // stride + 1) - first)
    start = first * stride + offset if count else 0
    return slice(first, first + count), slice(start, start + count * stride, stride)


@np.errstate(all="ignore")  # infinities in the data are the caller's
def convolve(
    layer: ConvLayer, a: Array, b: Array, bias: Array | None = None, residual: Array | None = None, xp: Any = np
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """What the layer computes, tap by tap: y from (x, w), dx from (dy, w) or dw from (x, dy).

    Parameters
    ----------
    a, b : arrays of `layer.input_shapes`, of any real dtype
    bias : `layer.channel_values` values, or None
    residual : array of `layer.output_shape`, or None
    xp : module
        NumPy, or CuPy for arrays on a GPU, which then computes.

    Returns
    -------
    float64 array of `layer.output_shape`. Padding is left out of the sums, so that it contributes
    nothing even where it would meet an infinity.
    """

    def wide(array: Array) -> Array:
        return xp.asarray(array).astype(np.float64, copy=False)

    out: Array = xp.zeros(layer.output_shape)
    forward, weights = layer.direction == "fwd", layer.direction == "wgrad"
    first = _images(wide(a), layer)
    second = _images(wide(b), layer) if weights else _filters(wide(b), layer)
    target = _filters(out, layer) if weights else _images(out, layer)
    for r in range(layer.R):
        p, h = _meetings(layer.P, layer.H, layer.stride[0], r * layer.dilation[0] - layer.padding[0][0])
        for s in range(layer.S):
            q, v = _meetings(layer.Q, layer.W, layer.stride[1], s * layer.dilation[1] - layer.padding[1][0])
            if forward:
                product = xp.einsum("gkc,ngcpq->ngkpq", second[..., r, s], first[..., h, v], optimize=True)
                target[..., p, q] += product
            elif weights:
                gradient, pixels = second[..., p, q], first[..., h, v]
                target[..., r, s] = xp.einsum("ngkpq,ngcpq->gkc", gradient, pixels, optimize=True)
            else:
                product = xp.einsum("gkc,ngkpq->ngcpq", second[..., r, s], first[..., p, q], optimize=True)
                target[..., h, v] += product
    channels_first = target.reshape(target.shape[0], -1, *target.shape[3:])
    if weights:
        channels_first = target.reshape(layer.K, *target.shape[2:])
    out = channels_first.transpose(CHANNELS_LAST) if layer.layout == "NHWC" else channels_first
    bias, slopes = (
        part if part is None or layer.layout == "NHWC" else part[:, None, None]
        for part in activations.parted(None if bias is None else wide(bias), layer.bias, layer.activation)
    )
    if bias is not None:
        out = out + bias
    if residual is not None:
        out = out + wide(residual)
    found: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    found = xp.ascontiguousarray(activations.applied(layer.activation, out, slopes))
    return found


def magnitude(
    layer: ConvLayer, a: Array, b: Array, bias: Array | None = None, residual: Array | None = None
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Sum of the terms' absolute values, `sum |a||b| + |bias| + |residual|`: what rounding errors scale with.

    Slopes above 1 enlarge it.
    """

    def size(array: Array | None) -> Array | None:
        return None if array is None else np.abs(np.asarray(array).astype(np.float64))

    bias, slopes = activations.parted(bias, layer.bias, layer.activation)
    sums = convolve(layer.replace(activation=None), size(a), size(b), size(bias), size(residual))
    return sums if slopes is None else sums * max(1.0, float(np.abs(slopes).max()))


def error(got: Array, want: Array, magnitude: Array) -> float:
    """`max|got - want| / max(magnitude)`, infinite where `got` is not finite and `want` is."""
    difference = np.abs(np.asarray(got).astype(np.float64) - want).max()
    if difference == 0:
        return 0.0
    scale = np.max(magnitude)
    return float(difference / scale) if np.isfinite(difference) and scale > 0 else float("inf")
