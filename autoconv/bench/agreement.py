"""Whether two contestants computed the same: only times of the same answer are compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autoconv.bench.suites import OURS
from autoconv.networks.run.contest import AGREEMENT


def disagreement(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest value; infinite between shapes, and 0 where there are no values."""
    if got.shape != want.shape:
        return math.inf
    if not want.size:
        return 0.0
    if want.dtype.isbuiltin != 1:  # a type of ml_dtypes, in which NumPy does little
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    scale = max(float(want.max()), -float(want.min()), float(np.finfo(np.float32).tiny))
    difference = np.subtract(got, want, dtype=np.float64)  # integers of few bits would wrap
    return max(float(difference.max()), -float(difference.min())) / scale


def refused(error: float, most: float = AGREEMENT, whose: str = OURS) -> str | None:
    """Why an answer that differs so much from another is not the same; None where it is.

    Parameters
    ----------
    error : float
        As `disagreement` has it; NaN, where there is one anywhere, is too much.
    most : float
        That is allowed.
    whose : str
        Who gave the other answer.

    Examples
    --------
    >>> refused(0.5), refused(1e-5)
    ('its answer differs from that of autoconv by 5.0e-01 of the largest value', None)
    """
    return None if error <= most else f"its answer differs from that of {whose} by {error:.1e} of the largest value"
