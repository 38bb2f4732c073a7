"""The oracle, checked against SciPy's correlation and against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from layers import ACTIVATIONS, EDGES, edge, layers, operands

from autoconv.layer import ConvLayer
from autoconv.tuning import reference


def correlate(layer: ConvLayer, x: Any, w: Any) -> Any:
    """The forward pass of an NCHW layer by `scipy.signal.correlate`, on zero-padded planes, group by group."""
    import scipy.signal  # which takes a second

    y = np.zeros(layer.y_shape)
    padded = np.pad(x, ((0, 0), (0, 0), *layer.padding))
    dilated = np.zeros((*w.shape[:2], *layer.filter_extent))
    dilated[:, :, :: layer.dilation[0], :: layer.dilation[1]] = w
    channels, filters = layer.C // layer.groups, layer.K // layer.groups
    for n in range(layer.N):
        for k in range(layer.K):
            first = k // filters * channels
            for c in range(channels):
                plane = scipy.signal.correlate(padded[n, first + c], dilated[k, c], mode="valid", method="direct")
                y[n, k] += plane[:: layer.stride[0], :: layer.stride[1]]
    return y


@pytest.mark.parametrize("name", EDGES)
def test_forward_is_scipys_correlation(name: str) -> None:
    layer = edge(name)
    x, w, *_ = operands(layer)
    x, w = x.astype(np.float64), w.astype(np.float64)
    np.testing.assert_allclose(reference.convolve(layer, x, w), correlate(layer, x, w), rtol=1e-12, atol=1e-11)


@given(layer=layers(direction="fwd", dtype="float64", layout="NCHW"))
def test_any_forward_layer_is_scipys_correlation_and_epilogue(layer: ConvLayer) -> None:
    x, w, values, residual = operands(layer)
    of_channels = [] if values is None else list(values.reshape(-1, 1, layer.K, 1, 1))
    want = correlate(layer, x, w)
    if layer.bias:
        want += of_channels[0]
    if residual is not None:
        want += residual
    if layer.activation == "prelu":
        want = np.maximum(want, 0) + of_channels[-1] * np.minimum(want, 0)
    elif layer.activation is not None:
        want = ACTIVATIONS[layer.activation](want)
    np.testing.assert_allclose(reference.convolve(layer, x, w, values, residual), want, rtol=1e-12, atol=1e-11)


@given(layer=layers(layout="NHWC", dtype="float64"))
def test_layouts_are_transposes(layer: ConvLayer) -> None:
    a, b, bias, residual = operands(layer)
    first = [None if array is None else array.transpose(0, 3, 1, 2) for array in (a, b, residual)]
    got = reference.convolve(layer.replace(layout="NCHW"), first[0], first[1], bias, first[2])
    np.testing.assert_array_equal(got.transpose(0, 2, 3, 1), reference.convolve(layer, a, b, bias, residual))


@given(layer=layers(direction="fwd", dtype="float64", bias=False, residual=False, activation=None))
def test_gradients_are_finite_differences(layer: ConvLayer) -> None:
    """Of `sum(y * dy)`, which is linear in x and in w, along a random direction: exact at any step."""
    generator = np.random.default_rng(0)
    x, w, *_ = operands(layer)
    dy, towards_x, towards_w = (generator.standard_normal(shape) for shape in (layer.y_shape, x.shape, w.shape))

    def loss(x: Any, w: Any) -> float:
        return float((reference.convolve(layer, x, w) * dy).sum())

    dx = reference.convolve(layer.replace(direction="dgrad"), dy, w)
    dw = reference.convolve(layer.replace(direction="wgrad"), x, dy)
    scale = 1e-9 * float((reference.magnitude(layer, x, w) * np.abs(dy)).sum() + 1)
    slope_x = (loss(x + towards_x, w) - loss(x - towards_x, w)) / 2
    slope_w = (loss(x, w + towards_w) - loss(x, w - towards_w)) / 2
    assert abs(slope_x - float((dx * towards_x).sum())) <= scale
    assert abs(slope_w - float((dw * towards_w).sum())) <= scale


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_every_element_of_a_gradient(direction: str) -> None:
    """One element at a time, on a layer that has everything."""
    layer = edge("dilated strided", N=1, H=11, W=9, groups=1, K=2, C=2)
    x, w, *_ = (array.astype(np.float64) for array in operands(layer)[:2])
    dy = np.random.default_rng(1).standard_normal(layer.y_shape)
    variable = x if direction == "dgrad" else w
    slopes = np.zeros_like(variable)
    for index in np.ndindex(*variable.shape):
        for step in (0.5, -0.5):
            moved = variable.copy()
            moved[index] += step
            pair = (moved, w) if direction == "dgrad" else (x, moved)
            slopes[index] += np.copysign(1, step) * (reference.convolve(layer, *pair) * dy).sum()
    pair = (dy, w) if direction == "dgrad" else (x, dy)
    got = reference.convolve(layer.replace(direction=direction), *pair)
    np.testing.assert_allclose(got, slopes, atol=1e-11)


def test_padding_contributes_nothing_even_to_an_infinite_filter() -> None:
    layer = ConvLayer(N=1, C=1, H=3, W=3, K=1, R=3, S=3, padding=1)
    w = np.ones(layer.w_shape)
    w[0, 0, 0, 0] = np.inf
    finite = np.isfinite(reference.convolve(layer, np.ones(layer.x_shape), w))
    assert finite[0, 0, 0].all()
    assert finite[0, 0, :, 0].all()
    assert not finite[0, 0, 1:, 1:].any()


def test_magnitude_and_error() -> None:
    layer = ConvLayer(N=1, C=2, H=1, W=1, K=1, R=1, S=1, bias=True, residual=True, activation="relu")
    x, w = np.array([3.0, -4.0]).reshape(layer.x_shape), np.array([-1.0, 2.0]).reshape(layer.w_shape)
    bias, residual = np.array([-5.0]), np.full(layer.y_shape, -6.0)
    assert reference.convolve(layer, x, w, bias, residual).item() == 0
    magnitude = reference.magnitude(layer, x, w, bias, residual)
    assert magnitude.item() == 3 + 8 + 5 + 6
    want = np.zeros(layer.y_shape)
    assert reference.error(want + 11, want, magnitude) == 0.5
    assert reference.error(want, want, 0 * magnitude) == 0
    assert reference.error(want + 1, want, 0 * magnitude) == float("inf")
    for value in (np.nan, np.inf):
        assert reference.error(want + value, want, magnitude) == float("inf")
