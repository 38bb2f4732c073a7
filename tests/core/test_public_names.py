"""What users import today is there tomorrow."""

from __future__ import annotations

import autoconv
from autoconv import errors
from autoconv.records.cache import TuningCache

NAMES = {
    "CPU",
    "Algorithm",
    "ArrayError",
    "AutoconvError",
    "Candidate",
    "CompiledNetwork",
    "ConfigError",
    "ConvLayer",
    "Device",
    "Kernel",
    "LayerError",
    "PackedWeights",
    "Plan",
    "PlanError",
    "Quantization",
    "RecordError",
    "TuningCache",
    "collect",
    "conv2d",
    "conv2d_dgrad",
    "conv2d_quantized",
    "conv2d_wgrad",
    "conv_transpose2d",
    "forget_plans",
    "load",
    "plan",
}
ERRORS = {
    "ArrayError",
    "AutoconvError",
    "CacheWarning",
    "ConfigError",
    "DeviceLostError",
    "LayerError",
    "PlanError",
    "RecordError",
}


def test_the_names_at_the_top_are_these() -> None:
    assert set(autoconv.__all__) == NAMES
    assert all(hasattr(autoconv, name) for name in NAMES)


def test_the_errors_are_these() -> None:
    assert {name for name in vars(errors) if name.endswith(("Error", "Warning"))} == ERRORS


def test_the_cache_of_records_is_at_the_top() -> None:
    assert autoconv.TuningCache is TuningCache
