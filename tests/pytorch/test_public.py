"""What `autoconv.torch` offers, and that it says what it takes, gives and raises."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
validate = pytest.importorskip("numpydoc.validate", reason="NOT CHECKED: numpydoc is not installed").validate

import autoconv.torch  # noqa: E402

CODES = {"PR01", "PR02", "PR03", "RT01", "YD01", "GL08"}  # as for everything else that is public


def test_the_names_are_these() -> None:
    assert set(autoconv.torch.__all__) == {
        "Conv2d",
        "ConvTranspose2d",
        "OptimizedModule",
        "conv2d",
        "conv_transpose2d",
        "optimize",
        "replace_convolutions",
        "share_threads",
    }


@pytest.mark.parametrize("name", autoconv.torch.__all__)
def test_parameters_and_returns_are_documented(name: str) -> None:
    ignored = {"PR01"} if name == "OptimizedModule" else set()  # made by a function
    found = validate(f"autoconv.torch.{name}")["errors"]
    assert [(code, text) for code, text in found if code in CODES - ignored] == []
