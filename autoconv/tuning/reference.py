"""The oracle: convolution in float64, written to be read rather than to be fast."""

from __future__ import annotations

import numpy as np

from autoconv.algorithm import Array
from autoconv.layer import ConvLayer


def _images(array: Array, layer: ConvLayer) -> Array:
    """A batch in the layer's layout as a float64 array of shape N, groups, channels, height, width."""
    wide = np.asarray(array).astype(np.float64)
    if layer.layout == "NHWC":
        wide = wide.transpose(0, 3, 1, 2)
    N, channels, height, width = wide.shape
    return wide.reshape(N, layer.groups, channels // layer.groups, height, width)


def _filters(array: Array, layer: ConvLayer) -> Array:
    """Filters in the layer's layout as a float64 array of shape groups, filters, channels, R, S."""
    wide = np.asarray(array).astype(np.float64)
    if layer.layout == "NHWC":
        wide = wide.transpose(0, 3, 1, 2)
    return wide.reshape(layer.groups, layer.K // layer.groups, *wide.shape[1:])


def _meetings(outputs: int, inputs: int, stride: int, offset: int) -> tuple[Array, Array]:
    """The outputs that one tap of the filter connects with an input inside the image, and those inputs."""
    reached = np.arange(outputs) * stride + offset
    inside = (reached >= 0) & (reached < inputs)
    return np.flatnonzero(inside), reached[inside]


@np.errstate(all="ignore")  # infinities in the data are the caller's
def convolve(
    layer: ConvLayer, a: Array, b: Array, bias: Array | None = None, residual: Array | None = None
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """What the layer computes, tap by tap: y from (x, w), dx from (dy, w) or dw from (x, dy).

    Parameters
    ----------
    a, b : arrays of `layer.input_shapes`, of any real dtype
    bias : K values, or None
    residual : array of `layer.y_shape`, or None

    Returns
    -------
    float64 array of `layer.output_shape`. Padding is left out of the sums, so that it contributes
    nothing even where it would meet an infinity.
    """
    out: Array = np.zeros(layer.output_shape)
    forward, weights = layer.direction == "fwd", layer.direction == "wgrad"
    first = _images(a, layer)
    second = _images(b, layer) if weights else _filters(b, layer)
    target = _filters(out, layer) if weights else _images(out, layer)
    for r in range(layer.R):
        p, h = _meetings(layer.P, layer.H, layer.stride[0], r * layer.dilation[0] - layer.padding[0][0])
        for s in range(layer.S):
            q, v = _meetings(layer.Q, layer.W, layer.stride[1], s * layer.dilation[1] - layer.padding[1][0])
            image, output = np.ix_(h, v), np.ix_(p, q)
            if forward:
                pixels = first[:, :, :, *image]
                target[:, :, :, *output] += np.einsum("gkc,ngcpq->ngkpq", second[..., r, s], pixels, optimize=True)
            elif weights:
                pixels = first[:, :, :, *image]
                gradient = second[:, :, :, *output]
                target[..., r, s] = np.einsum("ngkpq,ngcpq->gkc", gradient, pixels, optimize=True)
            else:
                gradient = first[:, :, :, *output]
                target[:, :, :, *image] += np.einsum("gkc,ngkpq->ngcpq", second[..., r, s], gradient, optimize=True)
    channels_first = target.reshape(target.shape[0], -1, *target.shape[3:])
    if weights:
        channels_first = target.reshape(layer.K, *target.shape[2:])
    out = channels_first.transpose(0, 2, 3, 1) if layer.layout == "NHWC" else channels_first
    if bias is not None:
        per_filter = np.asarray(bias).astype(np.float64)
        out = out + (per_filter if layer.layout == "NHWC" else per_filter[:, None, None])
    if residual is not None:
        out = out + np.asarray(residual).astype(np.float64)
    return np.ascontiguousarray(np.maximum(out, 0) if layer.activation == "relu" else out)


def magnitude(
    layer: ConvLayer, a: Array, b: Array, bias: Array | None = None, residual: Array | None = None
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Sum of the terms' absolute values, `sum |a||b| + |bias| + |residual|`: what rounding errors scale with."""

    def size(array: Array | None) -> Array | None:
        return None if array is None else np.abs(np.asarray(array).astype(np.float64))

    return convolve(layer, size(a), size(b), size(bias), size(residual))


def error(got: Array, want: Array, magnitude: Array) -> float:
    """`max|got - want| / max(magnitude)`, infinite where `got` is not finite and `want` is."""
    difference = np.abs(np.asarray(got).astype(np.float64) - want).max()
    if difference == 0:
        return 0.0
    scale = np.max(magnitude)
    return float(difference / scale) if np.isfinite(difference) and scale > 0 else float("inf")
