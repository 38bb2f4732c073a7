"""The types of a layer's arrays, by their names."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from autoconv.errors import LayerError

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
INTEGERS: dict[str, np.dtype[Any]] = {"uint8": np.dtype(np.uint8), "int8": np.dtype(np.int8)}  # of quantised layers
SUMS: dict[str, np.dtype[Any]] = {"int32": np.dtype(np.int32)}  # of their products
OUTPUTS = (*SUMS, *INTEGERS, "float32")  # of a quantised layer
LARGEST_FACTORS = 255, 128  # of an input less its zero point, and of a filter
MOST_TERMS = (2**31 - 1) // (LARGEST_FACTORS[0] * LARGEST_FACTORS[1])  # of a sum that cannot overflow int32


def dtype_name(value: object) -> str:
    """The name of an array's type, given as that or as what NumPy knows by it."""
    name = _spelled(value)
    allowed = (*DTYPES, *INTEGERS)
    if name not in allowed:
        raise LayerError(f"dtype={name!r}: expected one of {', '.join(allowed)}")
    return name


def output_name(value: object, dtype: str) -> str:
    """The name of the output's type: that of the inputs unless those are quantised, when there is a choice."""
    if dtype in DTYPES:
        if value is not None and _spelled(value) != dtype:
            raise LayerError(f"output_dtype={value!r}: expected {dtype!r}, as the inputs are")
        return dtype
    name = "int32" if value is None else _spelled(value)
    if name not in OUTPUTS:
        raise LayerError(f"output_dtype={name!r}: expected one of {', '.join(OUTPUTS)} for {dtype}")
    return name


def _spelled(value: object) -> str:
    """The name of a type, given as that or as what NumPy knows by it; of anything else, how Python writes it."""
    if isinstance(value, str) or value is None:  # which NumPy takes for float64
        return str(value)
    try:
        return np.dtype(value).name  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        return repr(value)


# What storing a result of a narrow type rounds, relative to the value: half a unit in the last place.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
