"""What results may err, and usually do, by the measure of records: `max|y - ref| / max(sum |x||w|)`."""

from __future__ import annotations

import math

import numpy as np

from autoconv.common.types import ROUNDING
from autoconv.layer import ConvLayer

# A record states the largest error over the largest `sum |x||w|`. Of operands that are drawn evenly from [-1, 1), that
# sum is n / 4 for n terms, and the root of the mean square (RMS) of an output sqrt(n) / 3; the largest error is about
# ten times their RMS, as errors differ from place to place (docs/pages/accuracy.md has both).
RELATIVE = 3 / 4 / 10
SUMMED = 512  # products at most that are added one after the other; longer sums are added in parts
USUAL = 0.1  # of a bound: what errors usually are


def terms(layer: ConvLayer) -> float:
    """Products in an element of the output, of those that are not of padding: a mean."""
    return layer.macs / math.prod(layer.output_shape)


def exact_error(layer: ConvLayer) -> float:
    """What an algorithm in float32 usually errs that adds up products as the convolution is defined.

    Of all records of `direct` and `gemm`, from 32 terms to 32768: the RMS error of a sum over its RMS is 0.12 of the
    unit roundoff (0.10 to 0.13 in the median) for every root of the number of products that are added one after the
    other, which are no more than `SUMMED`.
    """
    number = max(1.0, terms(layer))
    return 0.12 * 2.0**-24 / RELATIVE * math.sqrt(min(number, SUMMED) / number)


def bound_for(layer: ConvLayer, float32_cap: float) -> float:
    """An error cap stated for float32, carried over to the layer's dtype: integers are exact.

    Narrow types round the output once more, of a value that may be as large as the largest sum; float64 scales with the
    unit roundoff.
    """
    if layer.dtype == "float64" or layer.quantized:
        return 0.0 if layer.quantized else float32_cap * 2.0**-29
    return float32_cap + ROUNDING.get(layer.dtype, 0.0)


def absolute_bound_for(layer: ConvLayer, bound: float, largest: float) -> float:
    """What an algorithm may err on top of its bound for sums in the layer's accumulator, a float: see `Algorithm`."""
    taps = layer.R * layer.S
    number = {"fwd": layer.C * taps, "dgrad": layer.K * taps, "wgrad": layer.N * layer.P * layer.Q * layer.groups}
    limits = np.finfo(layer.accumulator)
    sums = number[layer.direction] // layer.groups
    growth = bound / float(limits.epsneg)
    return sums * (1 + 2 * largest) * growth * float(limits.tiny) + 2.0**-25 * (layer.dtype == "float16")
