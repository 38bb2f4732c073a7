"""Activations in the store of every generated family, against the oracle; who does not know them says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from guards import check_guarded, run_guarded
from layers import ACTIVATIONS, edge, operands

from autoconv import registry
from autoconv.cpu import pool
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.device import CPU

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
DEVICE = CPU.current()
FAMILIES = [a for a in registry.algorithms(DEVICE) if isinstance(a, GeneratedAlgorithm) and "fwd" in a.directions]
PROBLEMS = ("remainders", "pointwise", "depthwise")
WITH = {"bias": True, "residual": True}
TAKE_NO_SMALL_ONES = ("gemm.strassen",)  # their own tests have epilogues, too


EMULATED = CPU(2, DEVICE.instruction_set, matrix_unit="emulated")
DEEP = {"C": 40, "K": 40}  # for families of a matrix unit, whose tiles want some channels


def check_each(family: Any, names: Sequence[str], **fields: Any) -> int:
    """Hold a candidate of a family against the oracle on each of these layers that it takes; how many those are."""
    found, device = 0, DEVICE if "matrix" not in family.name else EMULATED
    for name in names:
        layer = edge(name, **fields)
        able = (c for c in family.all(layer, device) if not family.why_not(layer, device, c.params))
        if (candidate := next(able, None)) is not None:
            found += check_guarded(family, layer, device, operands(layer), {str(candidate)})
    return found


def problems_for(family: Any) -> tuple[Sequence[str], dict[str, Any]]:
    """Layers some of which a family takes, and what is to be changed of them."""
    return (("remainders", "pointwise"), DEEP) if "matrix" in family.name else (PROBLEMS, {})


def takes_them(family: Any, layout: str) -> bool:
    """Whether it takes some in this layout, and in float32."""
    return layout in family.layouts and "float32" in family.dtypes and family.name not in TAKE_NO_SMALL_ONES


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_stores_with_every_activation(family: GeneratedAlgorithm, activation: str, layout: str) -> None:
    names, fields = problems_for(family)
    found = check_each(family, names, layout=layout, activation=activation, **fields, **WITH)
    assert (found > 0) == takes_them(family, layout)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_reads_the_slopes_of_its_channels(family: GeneratedAlgorithm) -> None:
    """They lie behind the biases, or where those would be."""
    names, fields = problems_for(family)
    for layout, bias in (("NCHW", True), ("NHWC", False)):
        changes = {"layout": layout, "bias": bias, "activation": "prelu"} | fields
        assert any(check_each(family, [name], **changes) for name in names) == takes_them(family, layout)


GRADIENTS = [a for a in registry.algorithms(DEVICE) if {"dgrad"} & set(a.directions) & set(a.epilogue)]
EVERY_GRADIENT = (
    "remainders", "pointwise", "grouped", "depthwise", "stem", "strided", "pointwise strided", "stride skips pixels",
    "depthwise strided", "dilated strided",
)  # fmt: skip


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("family", GRADIENTS, ids=lambda family: family.name)
def test_every_family_ends_a_transposed_convolution(family: Any, layout: str) -> None:
    names, fields = (("remainders", "strided", "pointwise"), DEEP) if "matrix" in family.name else (EVERY_GRADIENT, {})
    fields = {"direction": "dgrad", "layout": layout, "activation": "clip:-0.5:1.5"} | fields | WITH
    assert (check_each(family, names, **fields) > 0) == takes_them(family, layout)


@pytest.mark.parametrize("family", GRADIENTS, ids=lambda family: family.name)
def test_slopes_of_a_transposed_convolution(family: Any) -> None:
    names = ("strided", "pointwise", "depthwise", "pointwise strided", "depthwise strided")
    names, fields = (("strided", "pointwise", "remainders"), DEEP) if "matrix" in family.name else (names, {})
    for layout in ("NCHW", "NHWC"):
        changes = {"direction": "dgrad", "layout": layout, "activation": "prelu", "bias": True} | fields
        assert any(check_each(family, [name], **changes) for name in names) == takes_them(family, layout)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["direct", "direct.polyphase", "gemm.polyphase", "depthwise.polyphase", "numpy.gemm"])
def test_transposed_convolutions_of_other_types(name: str, dtype: str) -> None:
    """What is stored before the epilogue comes would be rounded to 16 bits: none has one there."""
    (family,) = (family for family in GRADIENTS if family.name == name)
    names = {"gemm.polyphase": "pointwise strided", "depthwise.polyphase": "depthwise strided"}
    fields = {"direction": "dgrad", "dtype": dtype, "activation": "relu", "bias": True}
    rounded = dtype != "float64" and name in ("direct.polyphase", "depthwise.polyphase")
    assert (check_each(family, (names.get(name, "strided"),), **fields) == 0) == rounded


@pytest.mark.parametrize("name", EVERY_GRADIENT)
def test_every_kind_of_transposed_convolution_has_a_kernel_that_ends_it(name: str) -> None:
    for layout in ("NCHW", "NHWC"):
        layer = edge(name, direction="dgrad", layout=layout, activation="silu", **WITH)
        assert check_guarded(direct(), layer, DEVICE, operands(layer), favourite(layer))


def test_most_families_are_among_those() -> None:
    layers = [edge(name, activation="silu") for name in PROBLEMS]
    able = {
        f.name
        for f in FAMILIES
        for layer in layers
        for c in f.all(layer, DEVICE)
        if not f.why_not(layer, DEVICE, c.params)
    }
    assert able >= {"direct", "winograd", "fft", "gemm", "gemm.packed", "depthwise"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types(dtype: str) -> None:
    for activation in ("leaky_relu:0.25", "hardswish", "prelu"):
        layer = edge("remainders", dtype=dtype, activation=activation, **WITH)
        assert check_guarded(direct(), layer, DEVICE, operands(layer), favourite(layer))


def direct() -> Any:
    return next(family for family in FAMILIES if family.name == "direct")


def favourite(layer: Any) -> set[str]:
    return {str(direct().all(layer, DEVICE)[0])}


def test_series_of_float32_are_not_for_float64() -> None:
    layer = edge("remainders", dtype="float64", activation="silu")
    assert direct().unsupported(layer) == ["dtype: expected float32 sums under sigmoid, got float64"]
    able = [a.name for a in registry.algorithms(DEVICE) if not a.unsupported(layer)]
    assert "numpy.direct" in able


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation: str) -> None:
    layer = edge("plain", N=1, activation=activation, bias=True)
    x, w, bias, _ = operands(layer)
    bias[0] = np.nan  # which makes all sums of the first channel one
    candidate = direct().all(layer, DEVICE)[0]
    y = run_guarded(direct(), layer, DEVICE, candidate, (x, w, bias, None), "after")
    assert np.isnan(y[:, 0]).all()
    assert np.isfinite(y[:, 1:]).all()


def test_a_vendor_that_does_not_know_one_says_so() -> None:
    layer = edge("plain", activation="silu")
    for algorithm in registry.algorithms(DEVICE):
        if algorithm.vendor is not None:
            assert algorithm.unsupported(layer) == ["activation: expected none or relu, got silu"]
