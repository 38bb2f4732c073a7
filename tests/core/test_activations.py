"""Activations: one text each, and what they compute."""

from __future__ import annotations

import numpy as np
import pytest
from layers import ACTIVATIONS, SLOPE

from autoconv.common.epilogue import activations, expressions
from autoconv.errors import LayerError


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_they_are_what_others_make_of_them(activation: str) -> None:
    y = np.concatenate([np.linspace(-30, 30, 2001), [1e30, -1e30, 1e-30]])
    np.testing.assert_allclose(
        activations.applied(activation, y, SLOPE), ACTIVATIONS[activation](y), rtol=1e-14, atol=1e-14
    )


def test_all_of_them_are_tested() -> None:
    assert {text.partition(":")[0] for text in ACTIVATIONS} == set(activations.NAMES)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_they_keep_the_type_and_nan(activation: str, dtype: type) -> None:
    found = activations.applied(activation, np.array([np.nan, 1], dtype), SLOPE)
    assert found.dtype == dtype
    assert list(np.isnan(found)) == [True, False]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, None), ("relu6", "clip:0:6"), ("clip:0.0:6.0", "clip:0:6"), ("clip:-1e-1:1e3", "clip:-0.1:1000"),
        ("clip:-0:1", "clip:0:1"), ("leaky_relu", "leaky_relu:0.01"), ("leaky_relu:0.20000000298", "leaky_relu:0.2"),
        ("silu", "silu"),
    ],
)  # fmt: skip
def test_one_spelling(given: str | None, text: str | None) -> None:
    assert activations.canonical(given) == text
    assert activations.canonical(text) == text


@pytest.mark.parametrize(
    "given",
    [
        "", "ReLU", "relu:1", "clip", "clip:1", "clip:1:1", "clip:2:1", "clip:0:nan", "clip:a:b", "leaky_relu:inf",
        "leaky_relu:1:2", "leaky_relu:1e39", 3, ["relu"],
    ],
)  # fmt: skip
def test_others_are_refused_by_name(given: object) -> None:
    with pytest.raises(LayerError, match=r"^activation=") as caught:
        activations.canonical(given)
    assert repr(given) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_an_expression_is_made_of() -> None:
    found = expressions.with_constants(("add", ("mul", 0, 2.0), ("neg", 1)))
    assert list(expressions.functions(found)) == ["add", "mul", "neg"]
    assert list(expressions.constants(found)) == [2.0]
