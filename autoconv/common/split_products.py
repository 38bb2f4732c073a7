"""The environment variable that forbids to compute products from those of narrower parts, where that errs more."""

from __future__ import annotations

import os

from autoconv.errors import PlanError

SPLIT_PRODUCTS = "AUTOCONV_SPLIT_PRODUCTS"


def allowed() -> bool:
    """Whether they are: yes, unless it is set to 0.

    Raises
    ------
    PlanError
        When it is set to anything else than 0 or 1.
    """
    value = os.environ.get(SPLIT_PRODUCTS) or "1"
    if value not in ("0", "1"):
        raise PlanError(f"{SPLIT_PRODUCTS}={value!r}: expected 0 or 1")
    return value == "1"


def forbidden() -> list[str]:
    """The reason against products of parts that err more than sums in the type itself; none where they are allowed."""
    if allowed():
        return []
    return [f"{SPLIT_PRODUCTS}=0: expected no products of parts that err more than sums in float32"]
